"""Steps of `Flashpoint.resume` that all ranks take together: each ends in the same way on all of them.

Owns the votes, so that what fails on one rank is an error on every one and not a wait of the others.
"""

from __future__ import annotations

from collections.abc import Callable

from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.checkpoint_id_types import MAX_STEP
from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.ranks.rank_group import RankGroup


def fall_back(ranks: RankGroup, fallback: Callable[[], int | None]) -> int:
    """Call a program's fallback; returns the step that it has loaded.

    Raises:
        LoadError: it failed on another rank, or ranks loaded different steps.
        Exception: what it raised.
    """

    def call() -> int:
        returned = fallback()
        return checked_integer("fallback", 0 if returned is None else returned, 0, MAX_STEP)

    step = ranks.together(call, LoadError("the fallback failed on another rank; its log says why", rank=ranks.rank))
    steps = [int(blob) for blob in ranks.gather(str(step).encode())]
    if len(set(steps)) > 1:
        raise LoadError(f"the fallback returned different steps on different ranks: {steps}", rank=ranks.rank)
    return step
