"""What a store keeps beside the newest verified version, and what of it gives way first.

Owns what this rank knows of that: the verified saves that training goes along, and the lineage. It drops
nothing itself: the store asks it what may go. Not thread-safe: the store's lock guards it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from ml_flashpoint.format.lineage import Lineage
from ml_flashpoint.ranks.retention import Keep, VerifiedSave, kept

_log = logging.getLogger(__name__)

NOTHING_GIVEN_UP = -(2**62)
"""Below every age."""


class Retained:
    """See the module.

    Attributes:
        keep: the rule.
        lineage: which saves count.
        given_up_to: age of the newest version that gave way on this rank for want of room. Other ranks learn of it, and
            let all up to it go, since it cannot be loaded any more.
        gave_way: how many gave way on this rank.
    """

    def __init__(self) -> None:
        self.keep = Keep()
        self.lineage = Lineage()
        self.given_up_to = NOTHING_GIVEN_UP
        self.gave_way = 0
        self._line: list[VerifiedSave] = []

    @property
    def newest(self) -> VerifiedSave | None:
        """The newest verified version: what a crash goes back to."""
        return self._line[-1] if self._line else None

    @property
    def line(self) -> tuple[VerifiedSave, ...]:
        """The verified saves that are retained, oldest first."""
        return tuple(self._line)

    def keeps(self, save_id: str) -> bool:
        """Whether a version stays although a newer one is verified."""
        return any(each.save_id == save_id for each in self._line)

    def is_beside(self, save_id: str) -> bool:
        """Whether a version is one that is kept beside the newest verified one."""
        newest = self.newest
        return self.keeps(save_id) and (newest is None or newest.save_id != save_id)

    def verify(self, save: VerifiedSave) -> bool:
        """Take note that a save is verified. Returns whether older ones may go therefore: not where the job has gone
        back behind it meanwhile."""
        if not self.lineage.counts(save.save_id):
            return False
        line = sorted({*(each for each in self._line if each.save_id != save.save_id), save})
        self._line = kept(line, self.keep)
        return True

    def follow(self, given_up_to: int) -> bool:
        """Let go of what another rank has given up; whether there was anything."""
        before = len(self._line)
        self._line = [each for each in self._line if each.age > given_up_to or each is self._line[-1]]
        return len(self._line) < before

    def restore(self, line: Iterable[VerifiedSave], lineage: Lineage) -> None:
        """Go on from the newest of these saves, oldest first."""
        self._line, self.lineage, self.given_up_to = kept(list(line), self.keep), lineage, NOTHING_GIVEN_UP

    def give_up_oldest(self, held: Collection[str]) -> list[str]:
        """Let the oldest version go that is kept beside the newest, for want of room.

        Args:
            held: saves of which there is something here, so that it makes room.

        Returns:
            Save ids of what may be dropped; none if nothing gives way any more.
        """
        free = self._line[:-1]
        last = next((index for index, each in enumerate(free) if each.save_id in held), None)
        if last is None:
            return []
        gone = free[: last + 1]
        self._line = [each for each in self._line if each not in gone]
        self.given_up_to = max(self.given_up_to, gone[-1].age)
        self.gave_way += 1
        if self.gave_way.bit_count() == 1:  # it may happen at every save
            text = "no room to keep step %s any longer beside the newest version (%d gave way so far); see keep="
            _log.warning(text, ", ".join(str(each.step) for each in gone), self.gave_way)
        return [each.save_id for each in gone]
