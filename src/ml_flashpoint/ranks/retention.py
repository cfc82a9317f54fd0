"""Rules for the versions that are persisted and that stay in memory: pure functions with equal results on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.names import SaveId

_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Keep:
    """Rule for the verified versions that stay in memory.

    Args:
        newest: number of the newest versions that stay; at least 1.
        every_n_steps: older versions whose step is a multiple of this are milestones, and may stay, too.
        milestones: number of the newest milestones that stay.

    Raises:
        InvalidArgumentError: an argument is not a positive integer.
    """

    newest: int = 1
    every_n_steps: int | None = None
    milestones: int = 1

    def __post_init__(self) -> None:
        checked_integer("newest", self.newest, 1, _MOST)
        if self.every_n_steps is not None:
            checked_integer("every_n_steps", self.every_n_steps, 1)
        checked_integer("milestones", self.milestones, 1, _MOST)

    @property
    def versions(self) -> int:
        """The most verified versions that stay at once. A pool has one slot more: for the round's save."""
        return self.newest + (self.milestones if self.every_n_steps is not None else 0)


def checked_keep(value: int | Keep) -> Keep:
    """Return the rule that a user passes: a `Keep`, or a number of the newest verified versions."""
    if isinstance(value, Keep):
        return value
    if type(value) is not int or not 1 <= value <= _MOST:
        text = "must be a number of versions, at least 1, or a Keep(...)"
        raise InvalidArgumentError(text, argument="keep", value=value)
    return Keep(newest=value)


def kept(line: Sequence[SaveId], keep: Keep) -> list[SaveId]:
    """Return those of some verified saves, oldest first, that stay. The last one, which a crash goes back to, always
    stays."""
    older, newest = line[: -keep.newest], line[-keep.newest :]
    milestones: list[SaveId] = []
    if keep.every_n_steps is not None:
        milestones = [each for each in older if each.step % keep.every_n_steps == 0][-keep.milestones :]
    return [*milestones, *newest]


def passes_multiple(every: int, before: int, step: int) -> bool:
    """Return True if a multiple of ``every`` lies after ``before`` and not after ``step``; never if ``every`` is 0.

    Trainers with several optimizers count several steps at once.
    """
    return every > 0 and step // every > before // every
