"""The rules of a dictionary: which checkpoints are committed and persisted, who writes, and in which epoch it is.

Pure: events in, decisions out, without locks, clocks, processes or a network. The coordinator tells it all that
happens, one thing at a time, and carries out `next` and `next_to_persist`. Tests drive the same rules by a simulation.

A checkpoint is committed when every handle that writes has moved past it and, with replication, every manager has
sealed it with verified copies. One is committed at a time, always the newest that can be, except that those due to be
persisted are not skipped. It lasts: what is written at or below a committed id later is part of the next commit, which
may be of the same checkpoint again. Each commit has a number of its own, its *cut*; see `Written`.

A dictionary is always in an *epoch*. What is committed is the same for everybody, as long as the epoch lasts. When a
manager was lost, somebody goes back below what is committed, or a persisted checkpoint is restored, the next epoch
begins at a checkpoint, its base: all managers drop what lies above that, and answer requests of the new epoch only.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ml_flashpoint.ddict.errors import DDictPersistError, DDictWritesLostError, StaleEpochError, retired, writes_lost
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.fence import Fence
from ml_flashpoint.ddict.wire.requests import Account, Back, Request, Whose, Written
from ml_flashpoint.format.errors import FlashpointError, ProtocolError
from ml_flashpoint.net.messages import Fields

_log = logging.getLogger(__name__)

_NEVER_LATE: Final = 1 << 60  # the cut where no manager makes any: what is there is all there is
_RETRIES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


class Step(enum.Enum):
    """The next thing that managers are to be asked."""

    BEGIN = "begin the epoch"
    DISCARD = "discard what a killed handle had open"
    PREPARE = "prepare a cut"
    SEAL = "seal the cut that is prepared"
    SETTLE = "let go of what no one needs"


@dataclass(frozen=True, slots=True)
class Ask:
    """The requests of one step, by managers. ``heard`` is to be called with each manager that has answered, and
    ``done`` with all answers."""

    step: Step
    epoch: int
    requests: dict[int, Request]
    done: Callable[[list[Fields]], None]
    heard: Callable[[int], None] = lambda manager: None


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


@dataclass(slots=True)
class _Writer:
    """A handle that writes."""

    position: int  # the checkpoint that it is at, and may write to
    session: str  # that keeps it alive
    epoch: int  # the one that it was last heard of in
    began: int  # it has written nothing below
    moving_to: int = -1  # where it will be as soon as it may; it writes nothing more where it is


class _Sealed(NamedTuple):
    """A cut that is committed: its number, and run and step of each manager's part; none without replication."""

    cut: int
    parts: Sequence[tuple[int, int]]


@dataclass(eq=False, slots=True)
class Wanted:
    """A checkpoint that is to be persisted."""

    checkpoint_id: int
    due: bool  # tried again where that fails, until it works or a later one was tried
    cut: int = -1  # the one that is written
    tries: int = 0
    again_at: float = 0.0  # the time of the next try, if one has failed


class Rules:
    """See the module. Requests of a handle that come too late raise `StaleRequestError`; those of another epoch, or of
    a handle whose process was killed, `StaleEpochError`: it is to `catch_up`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.fence = Fence()  # of all handles that there ever were
        self._beginnings = [Beginning(-1, -1, 0, "")]
        self._behind: set[int] = set()  # managers that have not begun the present epoch
        self.is_open = True  # handles may be told of it: all managers that are there have begun it
        self.processes: dict[str, str] = {}  # sessions, and the names of their processes
        self.writers: dict[str, _Writer] = {}
        self.newest = 0  # the highest checkpoint that any handle is, or was, at
        self._killed: dict[str, int] = {}  # handles, and the checkpoint that each had open; -1: none
        self._departed = 0  # what those that are gone have moved past is whole
        self._left = Written()  # what handles wrote that have left
        self._gone = Written()  # and all that are gone: killed ones, but for what they had open
        self._orphaned: DDictWritesLostError | None = None  # what was lost of them: somebody is to be told
        self._discards: dict[str, int] = {}  # killed handles, and what is left of what they wrote
        self._discard_number = 0
        self._returned: dict[int, str] = {}  # managers that were lost, and which process of each has said so last
        self.committed = -1
        self.committing = -1
        self._called_off = False  # somebody went back meanwhile, or writes there again, or another epoch has begun
        self._prepared: asked.Prepare | None = None  # the cut that is to be sealed
        self._settles_first = False  # before anything more is committed
        self._cut = 0  # number of the newest cut that managers were asked for
        self._late = -1  # newest cut that a write came late for of a handle that has moved on
        self._sealed: dict[int, _Sealed] = {}  # cuts that are committed, by checkpoint
        self._restored: tuple[int, Fields, int] | None = None  # as good as committed, without copies; a cut
        self._oldest_told = 0  # some managers at least
        self._settled = (0, -1, 0)  # what all of them have heard last: the oldest, the committed one and its cut
        self.frozen, self._freezes = False, 0  # how often that was said
        self._waiting: list[Wanted] = []  # to be persisted
        self._persisting: Wanted | None = None
        self._persisted: set[int] = set()
        self._persist_error: FlashpointError | None = None

    # ---- decisions ----------------------------------------------------------------------------------------

    def next(self, *, is_held_up: bool = False) -> Step | None:
        """Return what managers are to be asked next, if anything. ``is_held_up``: nothing may be committed now."""
        if self._behind:
            return Step.BEGIN
        if self._discards:
            return Step.DISCARD
        if is_held_up:
            return None
        if self._prepared is not None and not self._called_off:
            return Step.SEAL
        self._prepared, self.committing = None, -1
        target = self.target()
        # What is committed is committed again, with what was written there late.
        is_late = target == self._whole() >= 0 and self._late >= self.cut_of(target)
        if not self._settles_first and self.options.snapshots and (target > self.committed or is_late):
            return Step.PREPARE
        return Step.SETTLE if self._to_settle() != self._settled else None

    def ask(self, step: Step) -> Ask:
        """Begin a step. `ended` is to be called when it is over."""
        begin = {Step.BEGIN: self._begin, Step.DISCARD: self._drop, Step.PREPARE: self._prepare, Step.SEAL: self._seal}
        return begin.get(step, self._settle)()

    def _ask_all(self, step: Step, request: Request, done: Callable[[list[Fields]], None]) -> Ask:
        return Ask(step, self.epoch, dict.fromkeys(range(self.options.managers), request), done)

    def ended(self, ask: Ask, *, is_done: bool) -> None:
        """A step is over. One that is not done is begun anew, with a new cut."""
        if ask.step is Step.BEGIN:  # all managers that can be reached have begun; others must before any commit
            self.is_open = self.is_open or ask.epoch == self.epoch
        if not is_done:
            self._prepared, self._settles_first = None, False
        if self._prepared is None:
            self.committing = -1

    def begins(self) -> dict[int, asked.Begin]:
        """Return what managers are told that are to begin the epoch."""
        base = self._beginnings[-1].base
        keep, pinned, restored = [its.cut for its in self._keep().values()], tuple(self._pinned(base)), None
        if self._restored is not None:
            _, restored, cut = self._restored
            keep = [cut]
        head, frozen = (self.epoch, base, self._cut, tuple(keep), pinned), (self.frozen, self._freezes)
        return {each: asked.Begin(*head, tuple(self.sealed_by(each)), restored, *frozen) for each in self._behind}

    def _begin(self) -> Ask:
        epoch = self.epoch

        def heard(manager: int) -> None:
            if epoch == self.epoch:
                self._behind.discard(manager)

        return Ask(Step.BEGIN, epoch, dict(self.begins()), lambda _: None, heard)

    def _drop(self) -> Ask:
        handle, to = next(iter(self._discards.items()))

        def done(_: list[Fields]) -> None:
            if self._discards.get(handle) == to:
                del self._discards[handle]

        return self._ask_all(Step.DISCARD, self._discard(Whose(handle, to, self.epoch), dead=True), done)

    def _discard(self, whose: Whose, *, dead: bool) -> asked.Discard:
        self._discard_number += 1
        return asked.Discard(whose, self._discard_number, dead)

    def _prepare(self) -> Ask:
        due = self.options.next_due(max(self.committed, -1 if self._restored is None else self._restored[0] - 1))
        self.committing = self.target() if due is None else min(self.target(), due)
        self._called_off, self._cut = False, self._cut + 1
        prepared = asked.Prepare(self.epoch, self.committing, self._cut, self.cut_of(self.committed))

        def done(_: list[Fields]) -> None:
            if self.options.replicated:
                self._prepared = prepared
            else:
                self._commit(prepared, ())

        return self._ask_all(Step.PREPARE, prepared, done)

    def _seal(self) -> Ask:
        prepared = self._prepared
        assert prepared is not None

        def done(told: list[Fields]) -> None:
            self._commit(prepared, [tuple(its["part"]) for its in told])

        return self._ask_all(Step.SEAL, asked.Seal(prepared.epoch, prepared.cut), done)

    def _commit(self, prepared: asked.Prepare, parts: Sequence[tuple[int, int]]) -> None:
        """All managers have a cut, and copies."""
        self._prepared = None
        if self._called_off:
            return
        checkpoint_id = self.committed = prepared.checkpoint_id
        if self._restored is None:
            self._persisted.discard(checkpoint_id)  # what is there lacks late writes
        self._restored, self._settles_first = None, True
        self._sealed[checkpoint_id] = _Sealed(prepared.cut, parts)
        if self.options.next_due(checkpoint_id - 1) == checkpoint_id:
            self.persist(checkpoint_id, due=True)

    def _settle(self) -> Ask:
        oldest, committed, cut = self._to_settle()
        keep, pinned = [its.cut for its in self._keep().values()], self._pinned()
        # Before they are asked: nobody may go back to what one of them may have forgotten.
        self._oldest_told = oldest
        self._sealed = {
            at: its for at, its in self._sealed.items() if its.cut in (*keep, *pinned) or at > self.committed
        }
        epoch = self.epoch

        def done(_: list[Fields]) -> None:
            self._settles_first = False
            if epoch == self.epoch:
                self._settled = oldest, committed, cut

        told = asked.Settle(epoch, oldest, tuple(keep), tuple(pinned), committed, cut)
        return self._ask_all(Step.SETTLE, told, done)

    # ---- what is there ------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return len(self._beginnings) - 1

    def state(self) -> Fields:
        """Return the ``epoch``, ``committed``, ``newest``, ``oldest``, ``writers``; whether it is ``frozen``; the
        newest checkpoint that is ``persisted`` (-1: none), and the ``persist_error`` of the last that could not be,
        unless a later one was."""
        return {
            "epoch": self.epoch,
            "committed": self.committed,
            "newest": self.newest,
            "oldest": self.oldest(),
            "writers": len(self.writers),
            "frozen": self.frozen,
            "persisted": max(self._persisted, default=-1),
            "persist_error": None if self._persist_error is None else str(self._persist_error),
        }

    def cut_of(self, checkpoint_id: int) -> int:
        """The number of the cut that a committed checkpoint is."""
        if not self.options.snapshots:
            return _NEVER_LATE
        return self._sealed[checkpoint_id].cut if checkpoint_id in self._sealed else 0

    def _keep(self) -> dict[int, _Sealed]:
        """The cuts that can be gone back to, by their checkpoints."""
        oldest = self.oldest()
        return {at: its for at, its in self._sealed.items() if at >= oldest or at == self.committed}

    def _pinned(self, base: int | None = None) -> list[int]:
        """The cuts that are yet to be persisted; those up to ``base``."""
        waiting = [each.checkpoint_id for each in self._waiting]
        return [self._sealed[at].cut for at in waiting if at in self._sealed and (base is None or at <= base)]

    def _to_settle(self) -> tuple[int, int, int]:
        committed = self.committed if self.options.snapshots else -1
        return self.oldest(), committed, self.cut_of(committed) if committed >= 0 else 0

    def window(self) -> int:
        """The oldest of the newest `working_set_size` checkpoints."""
        return self.newest - self.options.working_set_size + 1

    def oldest(self) -> int:
        """The oldest checkpoint of the working set. What is committed stays in it, or nothing could be gone back to."""
        oldest = max(0, self.window())
        if self.options.snapshots:
            lowest = min((writer.position for writer in self.writers.values()), default=self.newest)
            oldest = min(oldest, max(self.committed, 0), lowest)
        return max(self._oldest_told, oldest)

    def _whole(self) -> int:
        """The newest checkpoint that every handle has moved past; -1: none. A handle is left behind only where commits
        are nothing but a number."""
        positions = [writer.position for writer in self.writers.values()]
        if not self.options.whole_steps:
            positions = [max(each, self.window()) for each in positions]
        return min([*self._open(), *positions], default=self._departed) - 1

    def _open(self) -> list[int]:
        """The checkpoints that killed processes had open: not whole, until the others have left them behind."""
        return [at for at in self._killed.values() if at >= max(0, self.window())]

    def target(self) -> int:
        """The newest checkpoint that can be committed now."""
        return max(self.committed, -1 if self._restored is None else self._restored[0], self._whole())

    def _behind_of(self, checkpoint_id: int, but: str = "") -> list[str]:
        """Handles that have not moved past a checkpoint, as errors name them."""
        return [
            f"handle {handle} of {self.processes.get(writer.session, 'a process')} is at {writer.position}"
            for handle, writer in self.writers.items()
            if handle != but and max(writer.position, writer.moving_to) <= checkpoint_id
        ]

    def why_not(self, checkpoint_id: int) -> str:
        """Return why a checkpoint is not committed yet."""
        reasons = self._behind_of(checkpoint_id)
        died = sum(at <= checkpoint_id for at in self._open())
        reasons += [f"{died} process(es) were killed there, and others have not left that behind yet"] if died else []
        return "; ".join([f"checkpoint {checkpoint_id} is not committed yet", *reasons])

    def check_there(self, checkpoint_id: int) -> None:
        """Raise `DDictCheckpointRetiredError` unless a checkpoint can be gone back to, read and written at."""
        if not self._is_there(checkpoint_id):
            raise retired(checkpoint_id, self.oldest(), self.committed, self._sealed)

    def _is_there(self, checkpoint_id: int) -> bool:
        is_skipped = self.options.snapshots and checkpoint_id < self.committed and checkpoint_id not in self._sealed
        return checkpoint_id >= self.oldest() and not is_skipped  # managers may be about to hear of the oldest

    def check_manager(self, manager: int) -> None:
        """Raise a `ProtocolError` if there is no such manager."""
        if not 0 <= manager < self.options.managers:
            raise ProtocolError(f"there is no manager {manager}")

    def sealed_by(self, manager: int) -> list[asked.SealedPart]:
        """Return the snapshots that a manager has of what is committed."""
        self.check_manager(manager)
        sealed = [(at, its) for at, its in self._keep().items() if its.parts]
        return [asked.SealedPart(*its.parts[manager], its.cut, at) for at, its in sealed]

    # ---- epochs -------------------------------------------------------------------------------------------

    def _begin_epoch(self, beginning: Beginning, written: Written | None = None) -> None:
        """Begin an epoch. ``written``: by handles whose end others are told of."""
        _log.warning("epoch %d begins at checkpoint %d: %s", self.epoch + 1, beginning.base, beginning.why)
        self._beginnings.append(beginning)
        self._behind, self.is_open, self._called_off = set(range(self.options.managers)), False, True
        if (written or self._gone).is_above(beginning.kept, beginning.cut):
            self._orphaned = self._orphaned or beginning.error
        base, self._late = beginning.base, -1
        self._settles_first = False  # managers hear what to keep when they begin
        self._send_back(base)
        self._discards.clear()  # it lies above
        self.committed = min(self.committed, base)
        self._sealed = {at: its for at, its in self._sealed.items() if at <= base}

    def _send_back(self, base: int) -> None:
        """Drop everything above a checkpoint. Handles say where they are when they hear of it."""
        for writer in self.writers.values():
            writer.position, writer.moving_to = min(writer.position, max(base, 0)), -1
        self._killed = {handle: at if at <= base else -1 for handle, at in self._killed.items()}
        self._departed = min(self._departed, base + 1)
        self._gone = self._left = Written()

    def returned(self, manager: int, incarnation: str) -> None:
        """A manager was lost, is back, and has found what it can go on from: an epoch begins, once."""
        self.check_manager(manager)
        if self._returned.get(manager) == incarnation:
            return
        self._returned[manager] = incarnation
        base, cut = self.committed, self.cut_of(self.committed)
        if self._restored is not None:  # which it has, or can read
            base, _, cut = self._restored
        at = f"checkpoint {base}" if base >= 0 else "the beginning, as nothing was committed yet"
        why = f"manager {manager} was lost, and all go on from {at}"
        self._begin_epoch(Beginning(base, base, cut, why, manager=manager))

    def check_epoch(self, epoch: int, handle: str = "") -> None:
        """Raise `StaleEpochError` for what is of another epoch, or of a handle whose process was killed."""
        if epoch != self.epoch or not self.is_open or handle in self._killed:
            raise StaleEpochError("this request is of another epoch")

    def _lost_since(
        self, whose: Whose, position: int, written: Written, *, writes: bool
    ) -> tuple[Beginning | None, bool]:
        """Return the latest epoch since that of a handle that it lost something by, if any, and whether what was
        committed below where it stands was taken back. ``writes``: it counts as writing."""
        since = [each for each in self._beginnings[whose.epoch + 1 :] if each.by != whose.handle]
        taken = [each for each in since if each.base < min(position, each.taken)]  # who stands above is sent back
        lost = [each for each in since if written.is_above(each.kept, each.cut) or (writes and each in taken)]
        return lost[-1] if lost else None, bool(taken)

    def catch_up(self, account: Account) -> Fields:
        """Tell a handle, whose epoch is over or will be, what that means for it. Return the state, and ``lost``: why
        what it wrote is lost, or null; ``manager``: that was lost; ``base``: what to go on from, and ``cut``: its
        number; ``taken``: what was committed below where it stands was taken back."""
        handle, position, epoch, _ = account.whose
        writer, present = self.writers.get(handle), self._beginnings[-1]
        lost, taken = self._lost_since(account.whose, position, account.written, writes=writer is not None)
        base, why = present.base, "" if lost is None else lost.why
        if handle in self._killed:
            why, base = "the connection of its process broke: what it had open was taken for lost", self.committed
        if writer is not None and writer.epoch < self.epoch:
            if not why and epoch >= writer.epoch:  # else this was sent before it went elsewhere
                writer.position = position
            writer.epoch = self.epoch
        if why:
            self._orphaned = None  # one is enough
        manager = None if lost is None else lost.manager
        return {
            **self.state(),
            **{"lost": why or None, "manager": manager, "base": base, "cut": present.cut, "taken": taken},
        }

    def raise_orphaned(self) -> None:
        """Raise, once, what handles that are gone have lost."""
        if self._orphaned is not None:
            orphaned, self._orphaned = self._orphaned, None
            raise orphaned

    # ---- handles that come, move and go -------------------------------------------------------------------

    def _place(self, handle: str, session: str, position: int, epoch: int) -> None:
        """A handle is there now."""
        writer = self.writers.setdefault(handle, _Writer(position, session, epoch, position))
        writer.position, writer.session, writer.epoch, writer.moving_to = position, session, epoch, -1
        writer.began, self.newest = min(writer.began, position), max(self.newest, position)
        self._killed.pop(handle, None)

    def _follow(self) -> None:
        """Take note that writers or their places have changed. Without snapshots, what is whole is committed."""
        if not self.options.snapshots:
            self.committed = self.target()

    def _reachable(self, position: int, *, onwards: bool = False) -> int:
        """Return the checkpoint that a writer comes to who wants to be at one. Commits that it is too late for are
        called off."""
        if self.options.snapshots:
            if onwards:
                usable = [each for each in self._sealed if each >= max(position, self.oldest())]
                position = min([*usable, max(position, self.committed)])
            self.check_there(position)
            self._called_off = self._called_off or position <= self.committing
        return position

    def _hear(self, whose: Whose) -> bool:
        """Refuse a request of another epoch, or one that comes too late. Return True for the first of a generation."""
        self.check_epoch(whose.epoch, whose.handle)
        return self.fence.hear(whose.handle, whose.generation)

    def join(self, account: Account) -> Fields:
        """Count a handle as writing, which is about to for the first time, or comes back. One that is known stays
        where it is, as it has moved since this was sent; except where this is the first that is heard of it since a
        request of it was lost. Raises `DDictCheckpointRetiredError`: nobody can write where it is."""
        handle, position, epoch, _ = account.whose
        is_first = self._hear(account.whose)
        if handle not in self.writers or is_first:
            self._reachable(position)
            self._place(handle, account.session, position, epoch)
        self.writers[handle].session = account.session
        return self.state()

    def begin_move(self, account: Account, to: int, *, onwards: bool) -> int:
        """Let a handle want to be at another checkpoint; with ``onwards``, or at the next one that nobody has skipped.
        Return which. Raises `DDictWritesLostError`, told once: what a handle had written that is gone was lost."""
        handle = account.whose.handle
        self._hear(account.whose)
        position = self._reachable(to, onwards=onwards)
        self.raise_orphaned()
        if handle not in self.writers:
            self._place(handle, account.session, position, account.whose.epoch)
        self.writers[handle].moving_to = position
        return position

    def keeps_from_moving(self, handle: str, position: int) -> tuple[int, str] | None:
        """Return the checkpoint, and why, that a handle must wait for that begins to move; None: it may."""
        retires = position - self.options.working_set_size
        if position <= self.newest or retires < 0:
            return None
        if self.options.whole_steps and (behind := self._behind_of(retires, but=handle)):
            return retires, f"checkpoint {retires} cannot retire: {'; '.join(behind)}"
        # What is not committed stays in memory, which would fill up with it.
        if self.options.snapshots and self.committed < min(self.target(), retires - 2):
            return self.committed + 1, self.why_not(self.committed + 1)
        return None

    def stay(self, handle: str) -> None:
        """A handle gives its move up."""
        if handle in self.writers:
            self.writers[handle].moving_to = -1

    def move(self, account: Account, to: int, *, onwards: bool) -> Fields:
        """Let a handle move that was not kept from it. Return the state, and where it is now, ``position``."""
        self._hear(account.whose)
        position = self._reachable(to, onwards=onwards)
        self._place(account.whose.handle, account.session, position, account.whose.epoch)
        self._late = max(self._late, account.written.late)
        self._follow()
        return {**self.state(), "position": position}

    def leave(self, account: Account) -> int | None:
        """Count a handle no more. What it wrote counts, and can be lost like all the rest. A rollback that it has not
        finished is finished now. Return the checkpoint that all are taken back to by that, if they are."""
        handle, written, back = account.whose.handle, account.written, account.back
        if not self.fence.end(handle, account.whose.generation):
            return None  # it has said so before
        lost, _ = self._lost_since(account.whose, 0, written, writes=False)
        if lost is not None:
            self._orphaned, written = self._orphaned or lost.error, Written()
        self._discards.pop(handle, None)
        to = max(back.to, self.committed) if back.onwards else back.to
        taken_to = to if 0 <= to < self.committed and self._is_there(to) else None
        if taken_to is not None:
            self._take_back(to, handle)
            written = Written()
        self._go(handle)
        self._killed.pop(handle, None)
        self._left, self._gone = self._left.and_also(written), self._gone.and_also(written)
        self._late = max(self._late, written.late)
        if back.to >= 0:
            self._called_off = self._called_off or self.committing >= to
            self._discards[handle] = max(to, self.committed)
        self._follow()
        return taken_to

    def _go(self, handle: str) -> None:
        if (writer := self.writers.pop(handle, None)) is not None:
            self._departed = max(self._departed, writer.position)

    def killed(self, session: str) -> None:
        """The process of a session is gone, and so are those of its handles that have not said that they leave: what
        they had open is dropped."""
        del self.processes[session]
        cut = self.cut_of(self.committed) if self.options.snapshots else -1
        # Up to here it is settled what is committed: a write there comes too late for it.
        fixed = self.committed if self._called_off else max(self.committed, self.committing)
        for handle, writer in [each for each in self.writers.items() if each[1].session == session]:
            self._go(handle)
            position = writer.position
            self._killed[handle] = position if position > fixed else -1
            self._discards[handle] = max(position - 1, fixed)
            if position > writer.began:
                self._gone = self._gone.and_also(Written(position - 1))
            if position <= fixed:  # it may have come late for what is committed, unheard
                self._gone, self._late = self._gone.and_also(Written(late=cut)), max(self._late, cut)
        self._follow()

    def go_back(self, whose: Whose, session: str, back: Back) -> tuple[int, asked.Discard | None]:
        """Take a handle back to a checkpoint, and have what it wrote above discarded. Below what is committed, all go
        back: an epoch begins there. ``session``: that keeps the handle attached; "": it is not. Return the checkpoint,
        and what managers are told; None: all are taken back. A handle that was killed comes back by this.
        Raises `DDictCheckpointRetiredError`: nobody can go back there."""
        handle, _, epoch, generation = whose
        self.check_epoch(epoch)
        self.fence.hear(handle, generation)
        to = max(back.to, self.committed) if back.onwards else back.to
        self.check_there(to)
        self._discards.pop(handle, None)
        told = None
        if to < self.committed:
            self._take_back(to, handle)
        else:
            told = self._discard(Whose(handle, to, epoch, generation), dead=False)
            # Also at `to` itself: what it writes there now must not be in it by halves.
            self._called_off = self._called_off or self.committing >= to
        if session:
            self._place(handle, session, to, self.epoch)
        return to, told

    def _take_back(self, to: int, handle: str) -> None:
        """Have all go back below what is committed."""
        taken = self.committed
        why = f"a handle went back to checkpoint {to}, below {taken}, which was committed"
        self._begin_epoch(Beginning(to, to, self.cut_of(to), why, taken, by=handle))
        self._persisted = {each for each in self._persisted if each <= to}
        self._waiting = [each for each in self._waiting if each.checkpoint_id <= to]
        self._persist_error = None

    def unheard(self) -> bool:
        """Return True if a handle has not been heard of since the present epoch began."""
        return any(writer.epoch < self.epoch for writer in self.writers.values())

    def go_on(self, *, tells: bool) -> None:
        """All that can be is committed. Where nobody writes, all go on from that, whatever was begun by those now
        gone. ``tells``: this is one of the calls that losses of handles now gone are told by."""
        if self.writers:
            return
        if self._open():
            why = f"processes were killed, and all go on from checkpoint {self.committed}"
            # That processes were killed is known; but what handles have left counted so far.
            at, cut = self.committed, self.cut_of(self.committed)
            self._begin_epoch(Beginning(at, at, cut, why), self._left)
            self._killed = dict.fromkeys(self._killed, -1)
            if tells:
                self.raise_orphaned()
        self.newest = self.committed + 1

    def keeps_from_commit(self, account: Account, checkpoint_id: int, *, if_written: bool) -> tuple[int, str] | None:
        """Return what a handle must wait for; None: a checkpoint is committed, and what it wrote late unless it is
        still there. ``if_written``: do not wait where nobody writes, for somebody who may begin to."""
        handle = account.whose.handle
        self.check_epoch(account.whose.epoch, handle)
        self._late = max(self._late, account.written.late)
        at = self.writers[handle].position if handle in self.writers else self.committed + 1
        is_late = self.options.snapshots and self.cut_of(self.committed) <= account.written.late and at > self.committed
        if self.committed >= checkpoint_id and not is_late:
            return None
        if handle in self.writers or not self.writers:  # else it is for those who write
            self.raise_orphaned()
        if if_written and not self.writers and self.committed >= self.target():
            return None
        return checkpoint_id, self.why_not(checkpoint_id)

    def freeze(self, whose: Whose, frozen: bool) -> asked.Freeze:
        """Have writes refused, or taken again. Return what managers are told."""
        self.fence.hear(whose.handle, whose.generation)
        self.frozen, self._freezes = frozen, self._freezes + 1
        return asked.Freeze(frozen, self._freezes)

    def restore(self, handle: str, checkpoint_id: int, version: Fields) -> None:
        """All managers hold a persisted checkpoint, and are to hold nothing else: an epoch begins with it. It was
        committed before it was persisted, so it is again: at once, which makes the copies there are none of."""
        kept, self._cut = self.committed, self._cut + 1
        why = f"checkpoint {checkpoint_id} was restored"
        self._begin_epoch(Beginning(checkpoint_id, kept, self.cut_of(kept), why, by=handle))
        for writer in self.writers.values():
            writer.position = checkpoint_id
        self.newest, self._departed = checkpoint_id, checkpoint_id + 1
        self._killed = dict.fromkeys(self._killed, -1)
        if handle in self.writers:  # it goes there: what its process says of where it stood is too late
            self.writers[handle].epoch = self.epoch
        self.committed = -1 if self.options.snapshots else checkpoint_id
        self._restored = checkpoint_id, version, self._cut
        self._sealed, self._oldest_told, self._orphaned = {}, checkpoint_id, None
        self._persisted = {checkpoint_id}

    # ---- persisting ---------------------------------------------------------------------------------------

    def persist(self, checkpoint_id: int, *, due: bool = False) -> None:
        """Have a committed checkpoint persisted, unless it is; at once, as somebody waits."""
        found = next((each for each in self._waiting if each.checkpoint_id == checkpoint_id), None)
        if found is not None:
            found.due, found.again_at = found.due or due, 0.0
        elif checkpoint_id not in self._persisted:
            self._waiting.append(Wanted(checkpoint_id, due))

    def next_to_persist(self, now: float) -> Wanted | None:
        """Return what is to be persisted now, if anything."""
        self._persisting = next((each for each in self._waiting if each.again_at <= now), None)
        if self._persisting is not None:
            self._persisting.cut = self.cut_of(self._persisting.checkpoint_id)
        return self._persisting

    def counts(self, wanted: Wanted) -> bool:
        """Return True unless a checkpoint was taken back, or committed again, since an attempt to persist it began."""
        return self.cut_of(wanted.checkpoint_id) == wanted.cut

    def tried_to_persist(self, wanted: Wanted, failure: FlashpointError | None, now: float) -> None:
        """An attempt is over. One that does not count is made again, unless the checkpoint was taken back."""
        self._persisting = None
        if not self.counts(wanted):
            return
        is_wanted = wanted in self._waiting  # nobody has given it up meanwhile
        self._persist_error = failure
        self._waiting = [each for each in self._waiting if each is not wanted and not each.again_at]
        if failure is None:
            self._persisted.add(wanted.checkpoint_id)
            return
        _log.error("checkpoint %d was not persisted: %s", wanted.checkpoint_id, failure)
        if wanted.due and is_wanted:
            wanted.again_at = now + _RETRIES_S[min(wanted.tries, len(_RETRIES_S) - 1)]
            wanted.tries += 1
            self._waiting.append(wanted)  # after those that are new: one of them takes its place

    def is_to_be_persisted(self, checkpoint_id: int) -> bool:
        """Return True while a checkpoint waits for an attempt. Raise why it could not be persisted."""
        if any(each.checkpoint_id == checkpoint_id and not each.again_at for each in self._waiting):
            return True
        if checkpoint_id not in self._persisted:
            raise self._persist_error or DDictPersistError("it was rolled back", checkpoint_id=checkpoint_id)
        return False

    def is_persisting(self) -> bool:
        """Return True while anything is to be persisted. What could not be is given up."""
        self._waiting = [each for each in self._waiting if not each.again_at]
        return bool(self._waiting or self._persisting)
