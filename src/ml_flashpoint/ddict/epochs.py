"""The epochs of a dictionary: how each began, who has begun the present one, and what that means for a handle.

Owns the account of them. Pure bookkeeping, under the coordinator's lock; when one begins is `coordinator`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from ml_flashpoint.ddict.errors import DDictWritesLostError, writes_lost


@dataclass(frozen=True, slots=True)
class Beginning:
    """How an epoch began.

    Attributes:
        base: the checkpoint that it began at; -1: empty.
        kept: writes that a commit up to this one covers are still there.
        why: for those who lost something.
        taken: up to here the epoch before had committed; what lies between that and `base` was taken back.
        manager: that was lost.
        by: handle whose doing it was, which need not be told.
    """

    base: int
    kept: int
    why: str
    taken: int = -1
    manager: int | None = None
    by: str = ""

    @property
    def error(self) -> DDictWritesLostError:
        """What those are told who lost something."""
        return writes_lost(self.why, self.base, self.manager)


class Epochs:
    """See the module. Not thread-safe."""

    def __init__(self, managers: int) -> None:
        self._managers = managers
        self._beginnings = [Beginning(-1, -1, "")]
        self._incarnations: dict[int, str] = {}
        self.behind: set[int] = set()
        """Managers that have not begun the present one."""
        self.is_open = True
        """Whether handles may be told of it: all managers that are there have begun it."""

    @property
    def present(self) -> int:
        """The number of the present one."""
        return len(self._beginnings) - 1

    @property
    def base(self) -> int:
        """The checkpoint that it began at."""
        return self._beginnings[-1].base

    def begin(self, beginning: Beginning) -> None:
        """The next one begins."""
        self._beginnings.append(beginning)
        self.behind, self.is_open = set(range(self._managers)), False

    def begun(self, manager: int, incarnation: str) -> None:
        """A manager has begun the present one."""
        self.behind.discard(manager)
        self._incarnations[manager] = incarnation

    def has_begun(self, manager: int, incarnation: str) -> bool:
        """Whether this process of a manager has begun any."""
        return self._incarnations.get(manager) == incarnation

    def account(
        self, epoch: int, handle: str, position: int, need: int, *, writes: bool
    ) -> tuple[Beginning | None, bool]:
        """What has come since ``epoch`` means for a handle at ``position``: the latest that it lost something by, if
        any, and whether what was committed below where it stands was taken back.

        Args:
            need: the checkpoint whose commit covers all that it wrote; -1: nothing that it does not know committed.
            writes: whether it counts as writing.
        """
        since = [each for each in self._beginnings[epoch + 1 :] if each.by != handle]
        taken = [each for each in since if each.base < min(position, each.taken)]  # who stands above is sent back
        lost = [each for each in since if need > each.kept or (writes and each in taken)]
        return lost[-1] if lost else None, bool(taken)
