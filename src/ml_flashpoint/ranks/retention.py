"""Which versions stay in memory beside the newest verified one: the rule, as a pure function.

Owns what ranks decide alike from what all of them know: which saves were verified, in which order.
How much room that takes is the store's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ml_flashpoint.format.errors import InvalidArgumentError

_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Keep:
    """Which verified versions are kept in memory.

    Args:
        newest: so many of the newest ones. 1, the least, is the one that a crash goes back to.
        every_n_steps: of the older ones, also those whose step is a multiple of this ("milestones").
        milestones: so many of these, the newest.

    Raises:
        InvalidArgumentError: one of them is not a positive number.
    """

    newest: int = 1
    every_n_steps: int | None = None
    milestones: int = 1

    def __post_init__(self) -> None:
        _check("newest", self.newest, _MOST)
        if self.every_n_steps is not None:
            _check("every_n_steps", self.every_n_steps, 2**53)
        _check("milestones", self.milestones, _MOST)

    @property
    def beside_newest(self) -> int:
        """Versions at most that are kept beside the newest verified one."""
        return self.newest - 1 + (self.milestones if self.every_n_steps is not None else 0)


def checked_keep(value: int | Keep, argument: str = "keep") -> Keep:
    """A rule, from what users pass: a rule, or how many of the newest verified versions are kept.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if isinstance(value, Keep):
        return value
    if type(value) is not int or not 1 <= value <= _MOST:
        raise InvalidArgumentError(
            "must be a number of versions, the newest included, or a Keep(...)", argument=argument, value=value
        )
    return Keep(newest=value)


@dataclass(frozen=True, slots=True, order=True)
class VerifiedSave:
    """A save that all ranks know to be verified.

    Attributes:
        save_id: which one; later ones compare greater.
        step: of its version.
    """

    save_id: str
    step: int


def kept(line: Sequence[VerifiedSave], keep: Keep) -> list[VerifiedSave]:
    """Those of some verified saves that stay.

    Args:
        line: oldest first. The last one, which a crash goes back to, always stays.

    Returns:
        What stays, oldest first.
    """
    older, newest = line[: -keep.newest], line[-keep.newest :]
    milestones: list[VerifiedSave] = []
    if keep.every_n_steps is not None:
        milestones = [each for each in older if each.step % keep.every_n_steps == 0][-keep.milestones :]
    return [*milestones, *newest]


def _check(argument: str, value: object, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidArgumentError(f"must be an integer from 1 to {most}", argument=argument, value=value)
