"""The verified versions that a store retains: the newest one, which a crash goes back to, and those kept beside it.

Owns what this rank knows of that. It drops nothing itself: the store asks which may go. Not thread-safe: the store's
lock guards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ml_flashpoint.format.lineage import Lineage
from ml_flashpoint.ranks.retention import Keep


@dataclass(frozen=True, slots=True, order=True)
class VerifiedSave:
    """A save that all ranks know to be verified; later ones compare greater."""

    save_id: str
    step: int


def kept(line: Sequence[VerifiedSave], keep: Keep) -> list[VerifiedSave]:
    """Return those of some verified saves, oldest first, that stay."""
    older, newest = line[: -keep.newest], line[-keep.newest :]
    milestones: list[VerifiedSave] = []
    if keep.every_n_steps is not None:
        milestones = [each for each in older if each.step % keep.every_n_steps == 0][-keep.milestones :]
    return [*milestones, *newest]


class Retained:
    """See the module.

    Attributes:
        keep: the rule.
        lineage: which saves count.
        line: the verified saves that are retained, oldest first.
    """

    def __init__(self) -> None:
        self.keep = Keep()
        self.lineage = Lineage()
        self.line: tuple[VerifiedSave, ...] = ()

    def keeps(self, save_id: str) -> bool:
        """Return True if a version stays although a newer one is verified."""
        return any(each.save_id == save_id for each in self.line)

    def is_beside(self, save_id: str) -> bool:
        """Return True if a version is one that is kept beside the newest verified one."""
        return any(each.save_id == save_id for each in self.line[:-1])

    def verify(self, save: VerifiedSave) -> bool:
        """Take note that a save is verified. Return True if older ones may go therefore: not where the job has gone
        back behind it meanwhile."""
        if not self.lineage.counts(save.save_id):
            return False
        others = (each for each in self.line if each.save_id != save.save_id)
        self.line = tuple(kept(sorted((*others, save)), self.keep))
        return True

    def restore(self, line: Iterable[VerifiedSave], lineage: Lineage) -> None:
        """Go on from the newest of these saves, oldest first."""
        self.line, self.lineage = tuple(kept(list(line), self.keep)), lineage
