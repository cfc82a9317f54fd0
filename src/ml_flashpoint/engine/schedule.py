"""Steps at which a save is due."""

from __future__ import annotations

from ml_flashpoint.format.arguments import checked_integer


def checked_every(every: int) -> int:
    """Return the number of steps between two saves. Raise an `InvalidArgumentError` if it is not positive."""
    return checked_integer("every_n_steps", every, 1)


def checked_skip(skip: int | None) -> int:
    """Return the number of steps between two saves that are left out, for another checkpoint's sake; 0 for none."""
    return checked_integer("skip_every_n_steps", 0 if skip is None else skip, 0)


def passes_multiple(every: int, before: int, step: int) -> bool:
    """Return True if a multiple of ``every`` lies after ``before`` and not after ``step``; never if ``every`` is 0.

    Trainers with several optimizers count several steps at once.
    """
    return every > 0 and step // every > before // every
