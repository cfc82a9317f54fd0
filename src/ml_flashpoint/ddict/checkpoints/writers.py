"""The writer registry, and the epochs: which handles write, up to where all of them are done, and what an epoch's begin
means for a handle.

Owns the handles that write, the keepalive sessions that say that their processes live, the rule for what is whole (a
checkpoint that every one of them has moved past), and the account of epochs. Pure bookkeeping, under the coordinator's
lock; what is committed, when an epoch begins and what a handle is told is `coordinator`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from ml_flashpoint.ddict.errors import DDictWritesLostError, writes_lost
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ddict.wire.written import Written
from ml_flashpoint.net.server import Peer


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of an epoch."""

    base: int  # the checkpoint that it began at; -1: empty
    kept: int  # the newest checkpoint whose cut is still there; -1: none
    cut: int  # the number of that cut
    why: str  # for those who lost something
    taken: int = -1  # up to here the epoch before had committed; what lies between that and `base` was taken back
    manager: int | None = None  # that was lost
    by: str = ""  # handle whose doing it was, which need not be told

    @property
    def error(self) -> DDictWritesLostError:
        """Return the error for those who lost something."""
        return writes_lost(self.why, self.base, self.manager)


class Epochs:
    """See the module. Not thread-safe."""

    def __init__(self, managers: int) -> None:
        self._managers = managers
        self._beginnings = [Beginning(-1, -1, 0, "")]
        self.behind: set[int] = set()  # managers that have not begun the present one
        self.is_open = True  # whether handles may be told of it: all managers that are there have begun it

    @property
    def present(self) -> int:
        """The number of the present one."""
        return len(self._beginnings) - 1

    @property
    def base(self) -> int:
        """The checkpoint that it began at."""
        return self._beginnings[-1].base

    @property
    def cut(self) -> int:
        """The number of the cut that is left in it."""
        return self._beginnings[-1].cut

    def begin(self, beginning: Beginning) -> None:
        """The next one begins."""
        self._beginnings.append(beginning)
        self.behind, self.is_open = set(range(self._managers)), False

    def account(
        self, epoch: int, handle: str, position: int, written: Written, *, writes: bool
    ) -> tuple[Beginning | None, bool]:
        """Return, of the epochs since ``epoch``, the latest that a handle at ``position`` lost something by, if any,
        and whether what was committed below where it stands was taken back. ``writes``: whether it counts as
        writing."""
        since = [each for each in self._beginnings[epoch + 1 :] if each.by != handle]
        taken = [each for each in since if each.base < min(position, each.taken)]  # who stands above is sent back
        lost = [each for each in since if written.is_above(each.kept, each.cut) or (writes and each in taken)]
        return lost[-1] if lost else None, bool(taken)


@dataclass(slots=True)
class Writer:
    """A handle that writes."""

    position: int  # the checkpoint that it is at, and may write to
    session: str  # that keeps it alive
    epoch: int  # the one that it was last heard of in
    began: int  # it has written nothing below
    moving_to: int = -1  # where it will be as soon as it may; it writes nothing more where it is


@dataclass(eq=False, slots=True)
class Session:
    """A connection of a client or a manager."""

    peer: Peer
    id: str = ""  # of the handles' session that it keeps attached, if any


class Writers:
    """See the module. Not thread-safe."""

    def __init__(self, rules: Options) -> None:
        self._rules = rules
        self.live: dict[str, Writer] = {}
        self.sessions: dict[str, Session] = {}
        self.newest = 0  # the highest checkpoint that any handle is, or was, at
        self.killed: dict[str, int] = {}
        """Handles whose process was killed, and the checkpoint that each had open, which is not whole; -1: none. They
        come back with a rollback, as a connection can break without its process."""
        self._left: set[str] = set()  # handles that write no more: what they had under way does not bring them back
        self._departed = 0  # what those that are gone have moved past is whole
        self.left = Written()  # what handles wrote that have left
        self.departed = Written()  # and all that are gone: killed ones, but for what they had open

    # ---- coming and going ---------------------------------------------------------------------------------

    def has_left(self, handle: str) -> bool:
        """Return whether a handle has said that it writes no more."""
        return handle in self._left

    def was_killed(self, handle: str) -> bool:
        """Return whether the connection of its process broke, and it has not gone back since."""
        return handle in self.killed

    def place(self, handle: str, session: str, position: int, epoch: int) -> Writer:
        """A handle is there now."""
        writer = self.live.setdefault(handle, Writer(position, session, epoch, position))
        writer.position, writer.session, writer.epoch, writer.moving_to = position, session, epoch, -1
        writer.began = min(writer.began, position)
        self.newest = max(self.newest, position)
        self.killed.pop(handle, None)
        return writer

    def leave(self, handle: str, written: Written) -> None:
        """A handle writes no more, and has said so: what it wrote counts."""
        self._go(handle)
        self.killed.pop(handle, None)
        self._left.add(handle)
        self.left = self.left.and_also(written)
        self.departed = self.departed.and_also(written)

    def kill(self, session: Session, fixed: int, cut: int) -> dict[str, int]:
        """Take the process of a session for killed, unless it has another connection by now. Return its handles, and
        the checkpoint that each had open.

        Args:
            session: that has ended.
            fixed: up to here it is settled what is committed.
            cut: the newest that is. Who had a committed checkpoint open may have come late for it, unheard.
        """
        if self.sessions.get(session.id) is not session:
            return {}
        del self.sessions[session.id]
        killed = {handle: writer for handle, writer in self.live.items() if writer.session == session.id}
        for handle, writer in killed.items():
            self._go(handle)
            self.killed[handle] = writer.position if writer.position > fixed else -1
            if writer.position > writer.began:
                self.departed = self.departed.and_also(Written(writer.position - 1))
            if writer.position <= fixed:
                self.departed = self.departed.and_also(Written(late=cut))
        return {handle: writer.position for handle, writer in killed.items()}

    def _go(self, handle: str) -> None:
        writer = self.live.pop(handle, None)
        if writer is not None:
            self._departed = max(self._departed, writer.position)

    # ---- what is whole ------------------------------------------------------------------------------------

    def window(self) -> int:
        """The oldest of the newest `working_set_size` checkpoints."""
        return self.newest - self._rules.working_set_size + 1

    def whole(self) -> int:
        """The newest checkpoint that every handle has moved past; -1: none."""
        positions = [*self.open(), *(self._held_up_at(writer) for writer in self.live.values())]
        return min(positions, default=self._departed) - 1

    def open(self) -> list[int]:
        """The checkpoints that killed processes had open: not whole, until the others have left them behind."""
        return [at for at in self.killed.values() if at >= max(0, self.window())]

    def _held_up_at(self, writer: Writer) -> int:
        """Return where a handle holds commits up. It is left behind only where commits are nothing but a number."""
        return writer.position if self._rules.whole_steps else max(writer.position, self.window())

    def lowest(self) -> int:
        """The lowest checkpoint that a handle is at, or the newest if there is none."""
        return min((writer.position for writer in self.live.values()), default=self.newest)

    def unheard(self, epoch: int) -> bool:
        """Return whether a handle has not been heard of since the present epoch began."""
        return any(writer.epoch < epoch for writer in self.live.values())

    def behind(self, checkpoint_id: int, but: str = "") -> list[str]:
        """Handles that have not moved past a checkpoint, as errors name them."""
        return [
            f"handle {handle} of {its.peer.text if (its := self.sessions.get(writer.session)) else 'a process'} "
            f"is at {writer.position}"
            for handle, writer in self.live.items()
            if handle != but and max(writer.position, writer.moving_to) <= checkpoint_id
        ]

    # ---- epochs -------------------------------------------------------------------------------------------

    def send_back(self, base: int) -> None:
        """Drop everything above a checkpoint. Handles say where they are when they hear of it."""
        for writer in self.live.values():
            writer.position = min(writer.position, max(base, 0))
            writer.moving_to = -1
        self.killed = {handle: at if at <= base else -1 for handle, at in self.killed.items()}
        self._departed = min(self._departed, base + 1)
        self.departed = self.left = Written()

    def begin_at(self, base: int) -> None:
        """A checkpoint was restored: everybody begins there."""
        self.send_back(base)
        for writer in self.live.values():
            writer.position = base
        self.newest, self._departed, self.killed = base, base + 1, dict.fromkeys(self.killed, -1)
