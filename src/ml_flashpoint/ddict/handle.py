"""What a handle of a dictionary knows, and keeps in step with the coordinator.

Owns the checkpoint that a handle is at, whether it counts as writing, and which of its writes may not be committed
yet, so that it is told when a manager comes back without them. `DDict` is a mapping on top of this.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ml_flashpoint.ddict.accounts import writes_lost
from ml_flashpoint.ddict.client import Client, client_of
from ml_flashpoint.ddict.configuration import Configuration
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictDestroyedError,
    DDictReadOnlyError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from ml_flashpoint.ddict.links import ManagerChangedError
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError

_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Unsure:
    """Writes to one incarnation of a manager that may not be committed.

    Attributes:
        needs: by the checkpoint that they were written at, the one whose commit covers them; None: to be asked at the
            next move.
    """

    incarnation: str
    needs: dict[int, int | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Standing:
    """What the main manager is told of a handle, also by others than the handle: when it is gone, or is held up.

    Attributes:
        checkpoint_id: that it is at.
        unsure: its writes that may not be committed, by manager.
        run: that they belong to; None: not known yet. Another one after a restore.
        joined: whether it counts as writing: only then does it matter where it is, and that it leaves.
    """

    checkpoint_id: int
    unsure: dict[int, _Unsure] = field(default_factory=dict)
    run: str | None = None
    joined: bool = False

    def fields(self, handle_id: str, lease_id: str, checkpoint_id: int | None = None) -> dict[str, Any]:
        """The fields of its requests. Without the lock, for the thread of the lease: it is asked while another thread
        that has the lock waits for it."""
        return {
            "w": handle_id,
            "lease": lease_id,
            "c": self.checkpoint_id if checkpoint_id is None else checkpoint_id,
            "wrote": _listed(self.unsure),
            "run": self.run,
        }


class Handle:
    """See the module. Thread-safe, but a handle moves through its checkpoints for all threads that use it.

    Args:
        configuration: of the dictionary.
        checkpoint_id: to begin at.
        read_only: refuse to write.
    """

    def __init__(self, configuration: Configuration, checkpoint_id: int, *, read_only: bool) -> None:
        self.configuration = configuration
        self._standing = _Standing(checkpoint_id)
        self.read_only = read_only or configuration.read_only
        self.timeout_s = configuration.timeout_s
        self._begin()
        _handles.add(self)

    @property
    def checkpoint_id(self) -> int:
        """The checkpoint that this handle is at."""
        return self._standing.checkpoint_id

    def _begin(self) -> None:
        self.id = secrets.token_hex(8)
        self._standing = _Standing(self._standing.checkpoint_id)
        self.client: Client = client_of(self.configuration)
        self._moving = threading.Lock()  # for as long as a move takes
        self._lock = threading.RLock()  # for what follows, and only for a moment
        self._closed = False
        self._lost: dict[int, int] = {}  # managers that came back without writes, and the checkpoint they came back at
        self._wrote_to: set[int] = set()
        self._going_back: tuple[int, bool] | None = None  # the main manager may have heard of this rollback, or not
        self._to_discard: dict[int, int] = {}  # managers that have not heard yet what was rolled back, and to where
        self._finalizer = weakref.finalize(self, _forget_handle, self.client, self.id, os.getpid(), self._standing)
        self._finalizer.atexit = False

    def until(self, timeout_s: float | None = None) -> float:
        """When a call that begins now must end.

        Raises:
            DDictDestroyedError: the handle is of no more use.
        """
        if self._closed:
            raise DDictDestroyedError("the dictionary was destroyed, or this handle detached")
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    # ---- writing ------------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Raise if this handle may not write.

        Raises:
            DDictReadOnlyError: it may not.
        """
        if self.read_only:
            raise DDictReadOnlyError("this handle was made with read_only=True")

    def write(
        self, manager: int, send: Callable[[str | None], tuple[_Result, str]], until: float, *, lasting: bool = False
    ) -> _Result:
        """Write at one manager.

        Args:
            send: given the incarnation that the manager must be (None: any), makes the request, and returns its result
                and the incarnation that carried it out.
            lasting: the write does not belong to a checkpoint, and does not make this a writing handle.

        Raises:
            DDictWritesLostError: the manager came back without what was written before.
        """
        self.check_writable()
        if not lasting and not self._joined:
            self._join(until)
        if self._going_back is not None or self._to_discard:
            with self._turn(until):
                self._finish_rollback(until)
        with self._lock:
            checkpoint_id = self.checkpoint_id
            self._wrote_to.add(manager)  # also if no answer comes: a rollback must find it there
        while True:
            unsure = self._unsure.get(manager)
            try:
                result, incarnation = send(None if unsure is None else unsure.incarnation)
                break
            except ManagerChangedError:
                self._check_loss(manager, until)
        with self._lock:
            # Another thread may have written to the incarnation before: then that is the one to ask after.
            unsure = self._unsure.setdefault(manager, _Unsure(incarnation))
            unsure.needs[checkpoint_id] = None
        if not self._joined:
            self._note(self.client.links.call(0, "note", self._fields(), until=until).fields)
        return result

    def _check_loss(self, manager: int, until: float) -> None:
        """A manager is another process than the one that was written to: raise, unless all of that was committed."""
        # Only when it has recovered is it settled what it recovered at.
        self.client.links.call(manager, "ready", {}, until=until)
        state = self.client.links.call(0, "state", {}, until=until).fields
        committed = int(state["committed"])
        with self._lock:
            self._note_run(state)
            self._forget_committed(committed)
            if manager in self._unsure:
                error = writes_lost(manager, int(state["safe"]))
                self._note_loss(error)
                raise error

    def _note_loss(self, error: DDictWritesLostError) -> None:
        if error.manager is not None and error.checkpoint_id is not None:
            self._lost[error.manager] = error.checkpoint_id

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except DDictWritesLostError as error:
            with self._lock:
                self._note_loss(error)
            raise

    def _join(self, until: float) -> None:
        with self._turn(until):
            if self._joined:
                return
            # The lease must not keep the handle: when it is forgotten, it has left.
            standing, own_id, lease_id = self._standing, self.id, self.client.lease.id
            state = self.client.lease.add(own_id, lambda: standing.fields(own_id, lease_id), until)
            with self._lock:
                self._note_run(state)
            standing.joined = True

    # ---- checkpoints --------------------------------------------------------------------------------------

    def move(self, checkpoint_id: int, until: float) -> None:
        """Go to another checkpoint.

        Raises:
            DDictWritesLostError: a manager came back without what this handle wrote.
            DDictTimeoutError: an older checkpoint cannot retire, as others have not done their part in time.
        """
        with self._turn(until):
            self._finish_rollback(until)
            if self._joined:
                fields = self._fields(checkpoint_id)
                with self._noting_loss():
                    self._note(self.client.links.call(0, "move", fields, until=until).fields)
            self._standing.checkpoint_id = checkpoint_id

    def rollback(self, to: int, *, discard: bool, until: float) -> None:
        """Go back to a checkpoint, and discard what this handle wrote above it.

        If a manager cannot be reached, whatever the handle does next begins with finishing this.
        """
        with self._turn(until):
            self._finish_rollback(until)
            if to <= self.checkpoint_id:
                self._go_back(to, discard, until)

    def _finish_rollback(self, until: float) -> None:
        if self._going_back is not None:
            self._go_back(*self._going_back, until)
        self._discard(until)

    def _go_back(self, to: int, discard: bool, until: float) -> None:
        with self._lock:
            left = {manager: self._left_of(manager, to, discard) for manager in self._unsure}
            left = {manager: unsure for manager, unsure in left.items() if unsure.needs}
            lost = [manager for manager, at in self._lost.items() if to <= at]
        if self._wrote_to:
            fields = {**self._fields(to), "wrote": _listed(left), "lost": lost}
            if not self._joined:
                fields["lease"] = None
            self._going_back = to, discard
            try:
                self.client.links.call(0, "go_back", fields, until=until)
            except (DDictCheckpointRetiredError, DDictDestroyedError):
                self._going_back = None
                raise
        with self._lock:
            if discard:
                self._to_discard = {
                    manager: min(to, self._to_discard.get(manager, to)) for manager in sorted(self._wrote_to)
                }
            # Before managers discard anything, so that a main manager that takes over meanwhile hears of it.
            self._standing.checkpoint_id = to
            # In place, and never empty meanwhile: others look at it without the lock.
            for manager in list(self._unsure):
                if manager in left:
                    self._unsure[manager] = left[manager]
                else:
                    del self._unsure[manager]
            self._lost = {manager: at for manager, at in self._lost.items() if to > at}
            self._going_back = None
        self._discard(until)

    def _discard(self, until: float) -> None:
        """Have managers discard what was rolled back, those that could not be reached before; in turn."""
        for manager, to in list(self._to_discard.items()):
            self.client.links.call(manager, "rollback", {"w": self.id, "to": to}, until=until)
            self._to_discard.pop(manager, None)

    def _left_of(self, manager: int, to: int, discard: bool) -> _Unsure:
        """What is left of the writes to a manager, and can still be lost, after a rollback."""
        unsure = self._unsure[manager]
        if manager in self._lost and to <= self._lost[manager]:
            return _Unsure(unsure.incarnation)  # the loss was told, and this is the answer to it
        kept = {each: need for each, need in unsure.needs.items() if each <= to or not discard}
        return _Unsure(unsure.incarnation, kept)

    def await_commit(self, checkpoint_id: int, until: float, *, if_written: bool = False) -> int:
        """Wait until a checkpoint is committed. Returns the newest that is.

        Args:
            if_written: do not wait where nobody writes.

        Raises:
            InvalidArgumentError: this handle writes there, or below, so it would wait for itself.
            DDictWritesLostError: a manager came back without what this handle wrote.
            DDictTimeoutError: it was not in time.
        """
        with self._turn(until):  # to the end: what is heard is of where the handle is now
            self._finish_rollback(until)
            wanted = self._covers(checkpoint_id)
            if self._joined and wanted >= self.checkpoint_id:
                late = f": what it wrote there late is committed with {wanted}" if wanted > checkpoint_id else ""
                raise InvalidArgumentError(
                    f"is not behind this handle, which is at {self.checkpoint_id}{late}",
                    argument="checkpoint_id",
                    value=checkpoint_id,
                    hint="checkpoint() first",
                )
            fields = {"w": self.id, "checkpoint_id": wanted, "if_written": if_written}
            with self._noting_loss():
                state = self.client.links.call(0, "await_commit", fields, until=until).fields
            with self._lock:
                self._note_run(state)
                self._forget_committed(int(state["committed"]))
            return int(state["committed"])

    def _covers(self, checkpoint_id: int) -> int:
        """The checkpoint with whose commit all is committed that this handle wrote at ``checkpoint_id`` and below: a
        later one for what was written when that was committed already."""
        with self._lock:
            written = [each for unsure in self._unsure.values() for each in unsure.needs.items()]
        return max([checkpoint_id, *(need for at, need in written if need is not None and at <= checkpoint_id)])

    def sync(self, until: float) -> None:
        """Go to the newest committed checkpoint."""
        state = self.client.links.call(0, "newest", {}, until=until).fields
        with self._lock:
            self._note_run(state)
        self.move(max(0, int(state["committed"])), until)

    def restored(self, checkpoint_id: int) -> None:
        """All managers hold what was persisted as this checkpoint, and nothing else."""
        with self._lock:
            self._unsure.clear()
            self._lost.clear()
            self._to_discard.clear()
            self._going_back = None
            self._standing.run = None
            self._standing.checkpoint_id = checkpoint_id

    def _note_run(self, state: dict[str, Any]) -> None:
        """Another handle has restored a checkpoint, if the run is another: what was written before is of no account."""
        if self._standing.run is not None and self._standing.run != state["run"]:
            self._unsure.clear()
            self._lost.clear()
            self._to_discard.clear()
            self._going_back = None
        self._standing.run = str(state["run"])

    def _note(self, state: dict[str, Any]) -> None:
        """Learn from the coordinator, having moved, what is committed."""
        fixed = int(state["fixed"])
        with self._lock:
            self._note_run(state)
            for unsure in self._unsure.values():
                for written_at, need in unsure.needs.items():
                    if need is None:
                        # What is written at an id whose commit has begun is covered by the next commit only.
                        unsure.needs[written_at] = max(written_at, fixed + 1)
            self._forget_committed(int(state["committed"]))

    def _forget_committed(self, committed: int) -> None:
        for manager, unsure in list(self._unsure.items()):
            unsure.needs = {at: need for at, need in unsure.needs.items() if need is None or need > committed}
            if not unsure.needs:
                del self._unsure[manager]

    @property
    def _joined(self) -> bool:
        return self._standing.joined

    @property
    def _unsure(self) -> dict[int, _Unsure]:
        return self._standing.unsure

    def _fields(self, checkpoint_id: int | None = None) -> dict[str, Any]:
        return self._standing.fields(self.id, self.client.lease.id, checkpoint_id)

    @contextlib.contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        """One thread moves this handle at a time."""
        if not self._moving.acquire(timeout=max(0.0, until - time.monotonic())):
            raise DDictTimeoutError("another thread is moving this handle")
        try:
            yield
        finally:
            self._moving.release()

    @property
    def closed(self) -> bool:
        """Whether this handle was detached."""
        return self._closed

    # ---- life ---------------------------------------------------------------------------------------------

    def detach(self, until: float) -> None:
        """Be of no more use. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._finalizer.detach()
        with contextlib.suppress(FlashpointError):
            now = time.monotonic()
            self._finish_rollback(now + max(0.0, until - now) / 2)  # and the other half for what follows
        if self._joined:
            try:
                self.client.links.call(0, "leave", self._fields(), until=until)
                self.client.lease.remove(self.id)
            except FlashpointError:
                self.client.lease.forget(self.id, self._fields)


def _listed(unsure: Mapping[int, _Unsure]) -> list[list[Any]]:
    """Writes that may not be committed, see `accounts.Write`."""
    found: list[list[Any]] = []
    for manager, each in list(unsure.items()):
        for written_at, need in list(each.needs.items()):
            found.append([manager, each.incarnation, written_at if need is None else need, need is None])
    return found


def _forget_handle(client: Client, handle_id: str, pid: int, standing: _Standing) -> None:
    """A handle was garbage collected: it holds up no commits any more."""
    if pid != os.getpid() or not standing.joined:
        return
    client.lease.forget(handle_id, lambda: standing.fields(handle_id, client.lease.id))


def checked_checkpoint_id(argument: str, value: object) -> int:
    """A checkpoint id.

    Raises:
        InvalidArgumentError: it is none.
    """
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise InvalidArgumentError("must be an integer from 0", argument=argument, value=value)
    return value


_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def _handles_here() -> Iterator[Handle]:
    yield from list(_handles)


def _after_fork() -> None:
    # A handle that a child has inherited is another one there: two processes must not move it against each other.
    for handle in _handles_here():
        handle._finalizer.detach()
        closed = handle._closed
        handle._begin()
        handle._closed = closed


os.register_at_fork(after_in_child=_after_fork)
