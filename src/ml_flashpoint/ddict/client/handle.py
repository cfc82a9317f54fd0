"""What a handle of a dictionary knows, and keeps in step with the coordinator.

Owns the checkpoint and the epoch that a handle is at, whether it counts as writing, and up to which commit its writes
can be lost, so that it is told when they are. `DDict` is a mapping on top of this.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ml_flashpoint.ddict.client.keepalive import Client, Standing, await_leaves, client_of
from ml_flashpoint.ddict.client.links import Exchange
from ml_flashpoint.ddict.errors import (
    DDictDestroyedError,
    DDictManagerLostError,
    DDictPersistError,
    DDictReadOnlyError,
    DDictTimeoutError,
    StaleEpochError,
    StaleRequestError,
)
from ml_flashpoint.ddict.options import COORDINATOR, Configuration, checked_timeout
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError

_Result = TypeVar("_Result")

_PAUSE_S = 0.02
_LEAVE_S = 5.0


class Handle:
    """See the module. Thread-safe, but a handle moves through its checkpoints for all threads that use it."""

    def __init__(self, configuration: Configuration, checkpoint_id: int, epoch: int) -> None:
        self.configuration = configuration
        self.timeout_s = checked_timeout(configuration.options.timeout)
        self._begin(checkpoint_id, epoch)
        _handles.add(self)

    def _begin(self, checkpoint_id: int, epoch: int) -> None:
        self.client: Client = client_of(self.configuration)
        self.standing = Standing(secrets.token_hex(8), self.client.keepalive.id, checkpoint_id, epoch)
        self._moving = threading.Lock()  # for as long as a move takes
        self.closed = False
        self._finalizer = weakref.finalize(self, _forget_handle, self.client, os.getpid(), self.standing)
        self._finalizer.atexit = False

    def deadline(self, timeout_s: float | None = None) -> float:
        """When a call that begins now must end. Raises `DDictDestroyedError`: the handle is of no more use."""
        if self.closed:
            raise DDictDestroyedError("the dictionary was destroyed, or this handle detached")
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    # ---- epochs -------------------------------------------------------------------------------------------

    def in_epoch(self, send: Callable[[int], _Result], deadline: float) -> _Result:
        """Make a request in the epoch of this handle, and again in the next one if that is over. Raises
        `DDictWritesLostError`: told once: what this handle wrote is lost; `DDictCheckpointRetiredError`: told once:
        where this handle stands was committed, and was taken back."""
        standing = self.standing
        while True:
            if standing.untold is not None:
                standing.tell()
            epoch = standing.epoch
            try:
                return send(epoch)
            except StaleEpochError as error:
                if standing.epoch != epoch:
                    continue  # another thread has heard of the next one
                standing.catch_up(self.client.links, deadline)
                if standing.epoch == epoch and standing.untold is None:
                    if time.monotonic() + _PAUSE_S > deadline:
                        raise DDictManagerLostError("it has not begun this epoch yet", manager=error.manager) from error
                    time.sleep(_PAUSE_S)  # there is no event for a manager that is behind

    def in_one_epoch(self, make: Callable[[], _Result], deadline: float) -> _Result:
        """Make several requests, all in one epoch: what they find is of one cut. ``make``: makes them; again, if an
        epoch began in their midst. Raises `DDictTimeoutError`: epochs began all the time."""
        while True:
            epoch = self.standing.epoch
            found = make()
            if self.standing.epoch == epoch:
                return found
            if time.monotonic() >= deadline:
                raise DDictTimeoutError("epochs begin faster than all managers can be asked")

    def ask_main(self, operation: str, *, deadline: float | None = None, **fields: Any) -> dict[str, Any]:
        """Ask the coordinator something, in whichever epoch."""
        deadline = self.deadline() if deadline is None else deadline
        return self.client.links.call(COORDINATOR, operation, fields, deadline=deadline).fields

    def order(self, operation: str, deadline: float, **fields: Any) -> dict[str, Any]:
        """Ask the coordinator for something that is not to happen after what this handle asks for later."""

        def request(exchange: Exchange, generation: int) -> dict[str, Any]:
            told = {**fields, "w": self.standing.handle, "g": generation}
            return exchange.request(operation, told).fields

        return _unless_overtaken(lambda: self._in_order(COORDINATOR, request, deadline), deadline)

    def _in_order(
        self, manager: int, request: Callable[[Exchange, int], _Result], deadline: float, *, again: bool = True
    ) -> _Result:
        """Make a request in the generation of this handle. Where it stays unanswered, the next one begins."""
        standing, generation = self.standing, 0

        def action(exchange: Exchange) -> _Result:
            nonlocal generation
            generation = standing.generation
            return request(exchange, generation)

        return self.client.links.attempt(
            manager, action, deadline=deadline, again=again, on_break=lambda: standing.give_up(generation)
        )

    def _ask_in_epoch(self, operation: str, fields: dict[str, Any], deadline: float) -> dict[str, Any]:
        return self.in_epoch(lambda epoch: self.order(operation, deadline, **{**fields, "e": epoch}), deadline)

    # ---- writing ------------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Raise `DDictReadOnlyError` if this handle may not write."""
        if self.configuration.options.read_only:
            raise DDictReadOnlyError("the dictionary was made with read_only=True")

    def in_writing(
        self,
        manager: int,
        request: Callable[[Exchange, dict[str, Any]], _Result],
        deadline: float,
        *,
        again: bool,
        lasting: bool = False,
    ) -> _Result:
        """Write at one manager.

        Args:
            manager: Its number.
            request: Makes the request over a connection, with the fields that say whose it is, and returns the result.
            deadline: When all of it must be done.
            again: Whether the request may be carried out twice.
            lasting: Whether the write belongs to no checkpoint, and does not make this a writing handle.

        Raises:
            DDictWritesLostError: What this handle wrote before is lost, and it has not gone back yet.
        """
        self.check_writable()
        return _unless_overtaken(
            lambda: self._write(manager, request, deadline, again=again, lasting=lasting), deadline
        )

    def _write(
        self,
        manager: int,
        request: Callable[[Exchange, dict[str, Any]], _Result],
        deadline: float,
        *,
        again: bool,
        lasting: bool,
    ) -> _Result:
        standing = self.standing
        standing.check_whole()
        if not lasting and (standing.astray or not standing.joined):
            self._join(deadline)
        rollbacks = standing.rollbacks  # before the look for one, and the checkpoint after it
        if standing.going_back is not None:
            with self._turn(deadline):
                self._finish_rollback(deadline)
        at = standing.checkpoint_id

        def write(epoch: int) -> _Result:
            def send(exchange: Exchange, generation: int) -> _Result:
                if standing.rollbacks != rollbacks:
                    raise StaleRequestError("this handle has begun to go back")
                return request(exchange, {"c": at, "w": standing.handle, "e": epoch, "g": generation})

            try:
                result = self._in_order(manager, send, deadline, again=again)
                if not standing.joined:  # no commit waits for it, so this may be too late for one already
                    state = self.ask_main("state", deadline=deadline)
                    if state["epoch"] != epoch:
                        raise StaleEpochError("another epoch has begun")
                    standing.note(state)
            except (StaleEpochError, StaleRequestError):
                raise
            except BaseException:
                standing.wrote(at, epoch)  # nobody knows
                raise
            standing.wrote(at, epoch)
            return result

        return self.in_epoch(write, deadline)

    def _join(self, deadline: float) -> None:
        with self._turn(deadline):
            if self.standing.astray or not self.standing.joined:
                # The session must not keep the handle: when it is forgotten, it has left.
                self.client.keepalive.begin(deadline)
                with self._going_astray():
                    self.standing.note(self._ask_in_epoch("join", self.standing.fields(), deadline))
                self.standing.joined = True
                self.client.keepalive.standings[self.standing.handle] = self.standing
                _leave_at_exit()

    # ---- checkpoints --------------------------------------------------------------------------------------

    def move(self, checkpoint_id: int, deadline: float, *, onwards: bool = False) -> None:
        """Go to another checkpoint; with ``onwards``, or to the next one that nobody has skipped. Raises
        `DDictWritesLostError`: what this handle wrote is lost, and it has not gone back yet; `DDictTimeoutError`: an
        older checkpoint cannot retire, as others have not done their part in time."""
        with self._turn(deadline):
            self.standing.check_whole()
            self._finish_rollback(deadline)
            self._move(checkpoint_id, deadline, onwards=onwards)

    def _move(self, checkpoint_id: int, deadline: float, *, onwards: bool = False) -> None:
        standing = self.standing
        if standing.joined:
            fields = {**standing.fields(), "c": checkpoint_id, "onwards": onwards}
            with self._going_astray():
                state = self._ask_in_epoch("move", fields, deadline)
            standing.note(state)
            checkpoint_id = int(state["position"])
        else:
            standing.tell()
        standing.checkpoint_id = checkpoint_id

    @contextlib.contextmanager
    def _going_astray(self) -> Iterator[None]:
        """Without an answer, nobody knows where the coordinator has this handle."""
        standing, generation = self.standing, self.standing.generation
        try:
            yield
        except BaseException:
            standing.astray = standing.astray or standing.generation != generation
            raise
        standing.astray = False

    def rollback(self, to: int, *, discard: bool, deadline: float) -> None:
        """Go back to a checkpoint, and discard what this handle wrote above it. If a manager cannot be reached,
        whatever the handle does next begins with finishing this."""
        with self._turn(deadline):
            if to <= self.standing.checkpoint_id:
                if discard or self.standing.lost is not None:
                    self._go_back(to, deadline)  # which takes the place of one that is not finished
                else:
                    self._finish_rollback(deadline)
                    self._move(to, deadline)

    def _finish_rollback(self, deadline: float) -> None:
        back = self.standing.going_back
        if back is not None:
            self._go_back(back.to, deadline, onwards=back.onwards)

    def _go_back(self, to: int, deadline: float, *, onwards: bool = False) -> None:
        standing = self.standing
        if not (standing.joined or standing.has_written):
            self._move(to, deadline)
            return
        standing.go_back(to, onwards=onwards)
        fields = {**standing.fields(), "c": to}
        if not standing.joined:
            fields["session"] = None
        try:
            state = self._ask_in_epoch("go_back", fields, deadline)
        except FlashpointError as error:
            if isinstance(error, (DDictTimeoutError, DDictManagerLostError)):
                standing.checkpoint_id = to  # it may be done but for a manager that is away
            else:
                standing.going_back = None
            raise
        standing.went_back(int(state["position"]), state)
        if state["stays"] is not None:
            raise DDictPersistError(
                f"this handle is back at {to}, but a persisted checkpoint above that stays in the store: "
                f"{state['stays']}",
                checkpoint_id=to,
                hint="remove it, or whoever restores it has again what was taken back; nothing is persisted before",
            )

    def await_commit(self, checkpoint_id: int, deadline: float, *, if_written: bool = False) -> int:
        """Wait until a checkpoint is committed. Returns the newest that is. ``if_written``: do not wait where nobody
        writes. Raises `InvalidArgumentError`: this handle writes there, or below, so it would wait for itself;
        `DDictWritesLostError`: what this handle wrote is lost, so it will not be; `DDictTimeoutError`: it was not in
        time."""
        with self._turn(deadline):  # to the end: what is heard is of where the handle is now
            self.standing.check_whole()
            self._finish_rollback(deadline)
            wanted = self.standing.covers(checkpoint_id)
            if self.standing.joined and wanted >= self.standing.checkpoint_id:
                late = f": what it wrote there late is committed with {wanted}" if wanted > checkpoint_id else ""
                raise InvalidArgumentError(
                    f"is not behind this handle, which is at {self.standing.checkpoint_id}{late}",
                    argument="checkpoint_id",
                    value=checkpoint_id,
                    hint="checkpoint() first",
                )
            fields = {"w": self.standing.handle, "checkpoint_id": wanted, "if_written": if_written}
            state = self._ask_in_epoch("await_commit", fields, deadline)
            self.standing.note(state)
            return int(state["committed"])

    def sync(self, deadline: float) -> None:
        """Go to the newest committed checkpoint, and discard what this handle wrote above it."""
        with self._turn(deadline):
            standing = self.standing
            is_answer = standing.lost is not None and standing.untold is None  # to what it was told
            state = self._ask_in_epoch("newest", {}, deadline)
            to = max(0, int(state["committed"]))
            if is_answer or standing.going_back is not None or standing.wrote_above(to):
                self._go_back(to, deadline, onwards=True)
            else:
                self._move(to, deadline)

    def restored(self, checkpoint_id: int, state: dict[str, Any]) -> None:
        """All managers hold what was persisted as this checkpoint, and nothing else."""
        self.standing.went_back(checkpoint_id, state, restored=True)

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """One thread moves this handle at a time."""
        if not self._moving.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DDictTimeoutError("another thread is moving this handle")
        try:
            yield
        finally:
            self._moving.release()

    # ---- life ---------------------------------------------------------------------------------------------

    def detach(self, deadline: float) -> None:
        """Be of no more use. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._finalizer.detach()
        with contextlib.suppress(FlashpointError):
            now = time.monotonic()
            self._finish_rollback(now + max(0.0, deadline - now) / 2)  # and the other half for what follows
        if self.standing.is_known:
            try:
                self.client.links.call(COORDINATOR, "leave", self.standing.fields(), deadline=deadline)
                self.client.keepalive.standings.pop(self.standing.handle, None)
            except FlashpointError:
                self.client.keepalive.forget(self.standing)


def _unless_overtaken(make: Callable[[], _Result], deadline: float) -> _Result:
    """What ``make`` returns, made again where another thread of the handle has overtaken it. Raises
    `DDictTimeoutError`: others did all the time."""
    while True:
        try:
            return make()
        except StaleRequestError as error:
            if time.monotonic() >= deadline:
                raise DDictTimeoutError("other threads of this handle were always first") from error


def _forget_handle(client: Client, pid: int, standing: Standing) -> None:
    """A handle was garbage collected: it holds up no commits any more."""
    if pid == os.getpid() and standing.is_known:
        client.keepalive.forget(standing)


_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
_leaves_at_exit = 0  # process that has said that it does


def _leave_at_exit() -> None:
    """Have the handles of this process say that they leave when it ends in an orderly way: what they wrote counts then.

    By `multiprocessing`, whose children run nothing else at their end; in other processes it is run by `atexit`.
    """
    global _leaves_at_exit
    if _leaves_at_exit != os.getpid():
        _leaves_at_exit = os.getpid()
        multiprocessing.util.Finalize(None, _leave_all, exitpriority=50)


def _leave_all() -> None:
    if sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None:
        return  # it ends by an error, in the middle of something
    deadline = time.monotonic() + _LEAVE_S
    for handle in list(_handles):
        if not handle.closed and (handle.standing.joined or handle.standing.going_back is not None):
            with contextlib.suppress(Exception):  # whatever it says, the process ends
                handle.detach(deadline)
    await_leaves(deadline)


def _after_fork() -> None:
    # A handle that a child has inherited is another one there: two processes must not move it against each other.
    for handle in list(_handles):
        handle._finalizer.detach()
        closed = handle.closed
        handle._begin(handle.standing.checkpoint_id, handle.standing.epoch)
        handle.closed = closed


os.register_at_fork(after_in_child=_after_fork)
