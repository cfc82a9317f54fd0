"""Whether a save is due, for the callbacks of trainers. Owns nothing else."""

from __future__ import annotations


def passes_multiple(every: int | None, before: int, step: int) -> bool:
    """Whether a multiple of ``every`` lies after ``before`` and not after ``step``; never, if that is 0 or None.

    Trainers with several optimizers count several steps at once.
    """
    if not every:
        return False
    return step // every > before // every
