"""A handle of a dictionary: its requests, its keys and values, its checkpoints, and the small writes that it collects.

`DDict` is a mapping on top of this. What of a handle's writes can be lost is `session.Standing`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.util
import os
import secrets
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ml_flashpoint.ddict.client import values
from ml_flashpoint.ddict.client.session import Client, Standing, client_of, end_sessions
from ml_flashpoint.ddict.errors import (
    REQUESTS,
    DDictDestroyedError,
    DDictError,
    DDictKeyError,
    DDictManagerLostError,
    DDictPersistError,
    DDictReadOnlyError,
    DDictTimeoutError,
    DDictWritesLostError,
    StaleEpochError,
    StaleRequestError,
    StaleValueError,
)
from ml_flashpoint.ddict.links import Exchange
from ml_flashpoint.ddict.manager.shard import BROADCAST, DIRECT, PERSISTENT
from ml_flashpoint.ddict.options import COORDINATOR, Configuration, checked_timeout
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.keys import Unreadable, encode_key, place, readable_key, split_joined
from ml_flashpoint.ddict.wire.requests import Account, Back, Request, Whose, Written
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError
from ml_flashpoint.net.client import Reply

_Result = TypeVar("_Result")

_PAUSE_S = 0.02
_LEAVE_S = 5.0
_AT_ONCE = 256
_MOST = 1024
_MOST_BYTES = 4 << 20


class Found(NamedTuple):
    """A value that was read, and the sequence number of its entry."""

    value: Any
    sequence: int


class Handle:
    """See the module. Thread-safe, but a handle moves through its checkpoints for all threads that use it. ``only``:
    the one manager to use, whatever the key, if any."""

    def __init__(self, configuration: Configuration, checkpoint_id: int, epoch: int, only: int | None) -> None:
        self.configuration = configuration
        self.only = only
        self.managers = list(range(configuration.managers)) if only is None else [only]  # that have its keys
        self.timeout_s = checked_timeout(configuration.options.timeout)
        self._begin(checkpoint_id, epoch)
        _handles.add(self)

    def _begin(self, checkpoint_id: int, epoch: int) -> None:
        self.client: Client = client_of(self.configuration)
        self.standing = Standing(secrets.token_hex(8), self.client.session.id, checkpoint_id, epoch)
        self._moving = threading.Lock()  # for as long as a move takes
        self.closed = False
        self._finalizer = weakref.finalize(self, _forget_handle, self.client, os.getpid(), self.standing)
        self._finalizer.atexit = False

    def deadline(self, timeout_s: float | None = None) -> float:
        """Return when a call that begins now must end. Raise `DDictDestroyedError` if the handle was detached."""
        if self.closed:
            raise DDictDestroyedError("the dictionary was destroyed, or this handle detached")
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    # ---- requests -----------------------------------------------------------------------------------------

    def call(
        self,
        manager: int,
        request: Callable[[Exchange, Whose], _Result],
        deadline: float,
        *,
        again: bool = True,
        prepare: Callable[[], None] | None = None,
    ) -> _Result:
        """Make a request, and make it again while its manager is away, where an epoch has begun, or where another
        thread of this handle has overtaken it. ``again``: it may be carried out twice. ``prepare``: for a write: called
        before each try.

        Raises:
            DDictWritesLostError: told once: what this handle wrote is lost.
            DDictCheckpointRetiredError: told once: where this handle stands was committed, and was taken back.
            DDictDestroyedError: the handle was detached meanwhile.
            DDictManagerLostError: the manager was away all the time.
            DDictTimeoutError: it did not answer in time, or something was always faster.
        """
        standing = self.standing

        def action(exchange: Exchange) -> _Result:
            whose = standing.whose(writes=prepare is not None)
            try:
                return request(exchange, whose)
            finally:
                if exchange.is_broken:
                    standing.give_up(whose.generation)

        while True:
            if prepare is not None:
                prepare()
            standing.tell()
            epoch = standing.epoch
            try:
                return self.client.links.attempt(manager, action, deadline=deadline, again=again)
            except StaleEpochError as error:
                self._catch_up(epoch, error, deadline)
            except (StaleRequestError, StaleValueError) as error:
                if self.closed:  # nothing comes after its leave
                    raise DDictDestroyedError("this handle was detached") from error
                if time.monotonic() >= deadline:
                    why = "the value, its manager, or other threads of this handle were always faster"
                    raise DDictTimeoutError(why, manager=manager) from error

    def _catch_up(self, epoch: int, error: StaleEpochError, deadline: float) -> None:
        standing = self.standing
        if standing.epoch != epoch:
            return  # another thread has heard of the next one
        standing.catch_up(self.client.links, deadline)
        if standing.epoch == epoch and standing.untold is None:
            if time.monotonic() + _PAUSE_S > deadline:
                raise DDictManagerLostError("it has not begun this epoch yet", manager=error.manager) from error
            time.sleep(_PAUSE_S)  # there is no event for a manager that is behind

    def in_one_epoch(self, make: Callable[[], _Result], deadline: float) -> _Result:
        """Make several requests, all in one epoch: what they find is of one cut."""
        while True:
            epoch = self.standing.epoch
            found = make()
            if self.standing.epoch == epoch:
                return found
            if time.monotonic() >= deadline:
                raise DDictTimeoutError("epochs begin faster than all managers can be asked")

    def ask_main(self, request: Request, deadline: float | None = None) -> dict[str, Any]:
        """Ask the coordinator something, in whichever epoch."""
        deadline = self.deadline() if deadline is None else deadline
        return self.client.links.call(COORDINATOR, request, deadline=deadline).fields

    def state(self) -> dict[str, Any]:
        """Return the state of the dictionary; see `Rules.state`."""
        return self.ask_main(asked.State())

    def order(self, make: Callable[[Account], Request], deadline: float) -> dict[str, Any]:
        """Ask the coordinator for something that is not to happen after what this handle asks for later."""
        account = self.standing.account
        return self.call(
            COORDINATOR,
            lambda exchange, whose: exchange.request(make(account()._replace(whose=whose))).fields,
            deadline,
        )

    def ask(self, manager: int, make: Callable[[Whose], Request], *blobs: bytes, deadline: float) -> Reply:
        """Ask one manager something about a key, or some or all of its keys."""
        return self.call(manager, lambda exchange, whose: exchange.request(make(whose), *blobs), deadline)

    # ---- writing ------------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Raise `DDictReadOnlyError` if this handle may not write."""
        if self.configuration.options.read_only:
            raise DDictReadOnlyError("the dictionary was made with read_only=True")

    def change(
        self,
        manager: int,
        request: Callable[[Exchange, Whose, int], dict[str, Any]],
        deadline: float,
        *,
        again: bool = False,
        flags: int = 0,
    ) -> dict[str, Any]:
        """Have one manager change a key, or all of its keys; and all others, where `bput` wrote the key. ``request``:
        makes the change, given whose it is, and flags. ``again``: it may be made twice, where nobody knows whether it
        was done."""
        answer = self._change_at(manager, request, deadline, again=again, flags=flags)
        for other in self.others(manager, answer):
            with contextlib.suppress(DDictKeyError):
                self._change_at(other, request, deadline, again=again, flags=flags | BROADCAST)
        return answer

    def _change_at(
        self,
        manager: int,
        request: Callable[[Exchange, Whose, int], dict[str, Any]],
        deadline: float,
        *,
        again: bool,
        flags: int,
    ) -> dict[str, Any]:
        standing, flags = self.standing, flags | (0 if self.only is None else DIRECT)
        at, epoch = -1, standing.epoch
        self.check_writable()

        def prepare() -> None:
            standing.check_whole()
            if not flags & PERSISTENT and (standing.astray or not standing.joined):
                self._join(deadline)
            if standing.going_back is not None:
                with self._turn(deadline):
                    self._finish_rollback(deadline)

        def write(exchange: Exchange, whose: Whose) -> dict[str, Any]:
            nonlocal at, epoch
            at, epoch = whose.checkpoint_id, whose.epoch
            result = request(exchange, whose, flags)
            standing.wrote(Written(at, exchange.late), epoch)
            return result

        try:
            return self.call(manager, write, deadline, again=again, prepare=prepare)
        except BaseException:
            standing.wrote(Written(at), epoch)  # nobody knows
            raise

    def others(self, manager: int, answer: dict[str, Any]) -> list[int]:
        """Return the managers at which a change is to be made, too, since `bput` wrote the key that it was made to."""
        return [each for each in self.managers if each != manager] if answer.get("b") else []

    # ---- one key ------------------------------------------------------------------------------------------

    @property
    def local(self) -> list[int]:
        """The managers of this handle's keys that are on this node."""
        return [manager for manager in self.managers if self.client.is_local(manager)]

    def located(self, key: Hashable) -> tuple[int, bytes]:
        """Return the manager that has a key, or would, and the key as it knows it."""
        encoded = encode_key(key)
        return place(encoded, self.configuration.managers) if self.only is None else self.only, encoded

    def get(self, manager: int, key: bytes, *, deadline: float, copy: bool = False, wait: bool = False) -> Found:
        """Read a key at one manager; ``wait``: for the key to be written, if the dictionary does."""

        try:
            return self._get(manager, key, deadline=deadline, copy=copy, wait=wait)
        except FlashpointError:
            raise
        except Exception as error:  # whatever unpickling raises
            raise DDictError(
                f"a value that cannot be made here: {type(error).__name__}: {error}",
                manager=manager,
                hint="its class must be importable in this process, too",
            ) from error

    def _get(self, manager: int, key: bytes, *, deadline: float, copy: bool = False, wait: bool = False) -> Found:
        def request(exchange: Exchange, whose: Whose) -> Found:
            # A manager elsewhere, which it may be since a moment ago, sends large values along.
            answer = exchange.request(asked.Get(whose, wait, remote=not exchange.local), key)
            return _found(answer.fields, answer.blobs, copy)

        return self.call(manager, request, deadline)

    def write(
        self, manager: int, key: bytes, encoded: values.Encoded, flags: int = 0, *, expected: int = -1, deadline: float
    ) -> bool:
        """Write a key at one manager. Return False if ``expected`` is not the number of the key's entry (0: none)."""

        def put(exchange: Exchange, whose: Whose, flags: int) -> dict[str, Any]:
            told = asked.Put(whose, flags, "", -1 if flags & BROADCAST else expected)
            if encoded.inline:
                return exchange.request(told, key, values.to_inline(encoded)).fields
            return self._put_large(exchange, key, encoded, told)

        again = expected < 0  # a conditional write that was done would fail the second time
        return bool(self.change(manager, put, deadline, again=again, flags=flags)["ok"])

    def _put_large(self, exchange: Exchange, key: bytes, encoded: values.Encoded, told: asked.Put) -> dict[str, Any]:
        reserved = exchange.request(asked.Allocate(told.whose, values.object_size(encoded)), key).fields
        told = told._replace(value_id=reserved["v"])
        try:
            if not exchange.local:
                return exchange.request(told, key, *values.object_blobs(encoded, told.value_id)).fields
            with self.client.writer.writing(reserved["path"], told.value_id) as write:
                write(encoded)
                return exchange.request(told, key).fields
        except BaseException:
            with contextlib.suppress(FlashpointError):  # when the connection is gone, the manager knows
                exchange.request(asked.Abandon(told.value_id))
            raise

    def delete(self, manager: int, key: bytes, expected: int, deadline: float) -> dict[str, Any]:
        """Delete a key, if its entry has this number; -1: in any case. ``ok`` in the answer: it was."""

        def request(exchange: Exchange, whose: Whose, flags: int) -> dict[str, Any]:
            its = -1 if flags & BROADCAST else expected  # others have other numbers
            return exchange.request(asked.Delete(whose, flags, its), key).fields

        return self.change(manager, request, deadline)

    # ---- many keys ----------------------------------------------------------------------------------------

    def keys(self, managers: Iterable[int], deadline: float) -> Iterator[Any]:
        """Yield the keys of these managers, decoded. They are asked at the first one."""
        for _, keys in self.in_one_epoch(lambda: self._keys(managers, deadline), deadline):
            yield from map(readable_key, keys)

    def _ask_keys(self, manager: int, deadline: float, *, count: bool = False) -> Reply:
        return self.ask(manager, lambda whose: asked.Keys(whose, self.only is None, count), deadline=deadline)

    def _keys(self, managers: Iterable[int], deadline: float) -> list[tuple[int, list[bytes]]]:
        return [(each, list(split_joined(self._ask_keys(each, deadline).blobs[0]))) for each in managers]

    def count(self, managers: Iterable[int], deadline: float) -> int:
        """Return the number of keys of these managers."""
        counts = self.in_one_epoch(
            lambda: [int(self._ask_keys(each, deadline, count=True).fields["n"]) for each in managers], deadline
        )
        return sum(counts)

    def items(self, managers: Iterable[int], deadline: float) -> list[tuple[Any, Any]]:
        """Keys and values of these managers, all of one epoch."""
        parts = self.in_one_epoch(lambda: list(self._items(self._keys(managers, deadline), lambda: deadline)), deadline)
        return list(itertools.chain.from_iterable(parts))

    def each_item(self, managers: Iterable[int]) -> Iterator[tuple[Any, Any]]:
        """The same, some hundred at a time. Raise `DDictError` if another epoch has begun meanwhile."""
        deadline = self.deadline()
        epoch, keys = self.in_one_epoch(lambda: (self.standing.epoch, self._keys(managers, deadline)), deadline)
        for some in self._items(keys, self.deadline):
            if self.standing.epoch != epoch:
                error = DDictError("an epoch has begun meanwhile: what is left is not of one cut", hint="begin anew")
                error.retryable = True
                raise error
            yield from some

    def _items(
        self, keys: list[tuple[int, list[bytes]]], deadline: Callable[[], float]
    ) -> Iterator[list[tuple[Any, Any]]]:
        for manager, its in keys:
            for at in range(0, len(its), _AT_ONCE):
                yield self._get_many(manager, its[at : at + _AT_ONCE], deadline())

    def _get_many(self, manager: int, keys: list[bytes], deadline: float) -> list[tuple[Any, Any]]:
        """Return those that are there, with their values."""

        def ask(exchange: Exchange, whose: Whose) -> Reply:
            return exchange.request(asked.GetMany(whose, remote=not exchange.local), *keys)

        answer = self.call(manager, ask, deadline)
        items = []
        blobs = iter(answer.blobs)
        for key, (error, own, count) in zip(keys, answer.fields["outcomes"], strict=True):
            its = list(itertools.islice(blobs, count))
            try:
                if error is not None:
                    raise REQUESTS.rebuild(error)
                try:
                    value = _found(own, its, copy=False).value
                except StaleValueError:  # it was written anew between the answer and the look at it
                    value = self._get(manager, key, deadline=deadline).value
            except DDictKeyError:
                continue  # deleted in between
            except FlashpointError:
                raise
            except Exception as error:  # whatever unpickling raises
                value = Unreadable(error)
            items.append((readable_key(key), value))
        return items

    # ---- checkpoints --------------------------------------------------------------------------------------

    def _join(self, deadline: float) -> None:
        with self._turn(deadline):
            if self.standing.astray or not self.standing.joined:
                # The session must not keep the handle: when it is forgotten, it has left.
                self.client.session.begin(deadline)
                with self._going_astray():
                    self.order(asked.Join, deadline)
                self.standing.joined = True
                self.client.session.standings[self.standing.handle] = self.standing
                _leave_at_exit()

    def move(self, checkpoint_id: int, deadline: float, *, onwards: bool = False) -> None:
        """Go to another checkpoint; with ``onwards``, or to the next one that nobody has skipped."""
        with self._turn(deadline):
            self.standing.check_whole()
            self._finish_rollback(deadline)
            self._move(checkpoint_id, deadline, onwards=onwards)

    def _move(self, checkpoint_id: int, deadline: float, *, onwards: bool = False) -> None:
        standing = self.standing
        if standing.joined:
            with self._going_astray():
                moved = self.order(lambda account: asked.Move(account, checkpoint_id, onwards), deadline)
                checkpoint_id = int(moved["position"])
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
        """Go back to a checkpoint, and discard what this handle wrote above it."""
        with self._turn(deadline):
            if to <= self.standing.checkpoint_id:
                if discard or self.standing.lost is not None:
                    self._go_back(Back(to), deadline)  # which takes the place of one that is not finished
                else:
                    self._finish_rollback(deadline)
                    self._move(to, deadline)

    def _finish_rollback(self, deadline: float) -> None:
        back = self.standing.going_back
        if back is not None:
            self._go_back(back, deadline)

    def _go_back(self, back: Back, deadline: float) -> None:
        standing, to = self.standing, back.to
        if not (standing.joined or standing.written != Written()):
            self._move(to, deadline)
            return
        standing.go_back(back)
        session = standing.session if standing.joined else ""
        try:
            state = self.order(lambda account: asked.GoBack(account.whose, session, back), deadline)
        except FlashpointError as error:
            if isinstance(error, (DDictTimeoutError, DDictManagerLostError, DDictDestroyedError)):
                standing.checkpoint_id = to  # it may be done but for a manager that is away, and a leave finishes it
            else:
                standing.going_back = None
            raise
        standing.went_back(int(state["position"]), state)
        if state["stays"] is not None:
            raise DDictPersistError(
                f"this handle is back at {to}, but the store does not know, and offers what was persisted above: "
                f"{state['stays']}",
                checkpoint_id=to,
                hint="roll back to there again; until that works, nothing is persisted",
            )

    def await_commit(self, checkpoint_id: int, deadline: float, *, if_written: bool = False) -> int:
        """Wait until a checkpoint is committed. Returns the newest that is."""
        with self._turn(deadline):  # to the end: what is heard is of where the handle is now
            self.standing.check_whole()
            self._finish_rollback(deadline)
            if self.standing.joined and checkpoint_id >= self.standing.checkpoint_id:
                raise InvalidArgumentError(
                    f"is not behind this handle, which is at {self.standing.checkpoint_id}",
                    argument="checkpoint_id",
                    value=checkpoint_id,
                    hint="checkpoint() first",
                )
            state = self.order(lambda account: asked.AwaitCommit(account, checkpoint_id, if_written), deadline)
            return int(state["committed"])

    def sync(self, deadline: float) -> None:
        """Go to the newest committed checkpoint, and discard what this handle wrote above it."""
        with self._turn(deadline):
            standing = self.standing
            is_answer = standing.lost is not None and standing.untold is None  # to what it was told
            state = self.order(lambda account: asked.Newest(account.whose.epoch), deadline)
            to = max(0, int(state["committed"]))
            if is_answer or standing.going_back is not None or standing.written.checkpoint > to:
                self._go_back(Back(to, onwards=True), deadline)
            else:
                self._move(to, deadline)

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """Let one thread move this handle at a time."""
        if not self._moving.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DDictTimeoutError("another thread is moving this handle")
        try:
            yield
        finally:
            self._moving.release()

    # ---- life ---------------------------------------------------------------------------------------------

    def detach(self, deadline: float) -> None:
        """Detach from the dictionary. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self._finalizer.detach()
        with contextlib.suppress(FlashpointError):
            now = time.monotonic()
            self._finish_rollback(now + max(0.0, deadline - now) / 2)  # and the other half for what follows
        if self.standing.is_known:
            try:
                self.client.links.call(COORDINATOR, asked.Leave(self.standing.account()), deadline=deadline)
                self.client.session.standings.pop(self.standing.handle, None)
            except FlashpointError:
                self.client.session.forget(self.standing)


def _found(fields: dict[str, Any], blobs: Sequence[bytes], copy: bool) -> Found:
    if "path" in fields:
        value = values.read_value(fields["path"], fields["v"], copy=copy)
    elif "v" in fields:
        whole = blobs[0] if len(blobs) == 1 else bytearray().join(blobs)
        value = values.read_object(whole, fields["v"], copy=copy)
    else:
        value = values.from_inline(blobs[0], copy=copy)
    return Found(value, fields["s"])


class Batch:
    """Collected writes of one handle, by manager. Not thread-safe."""

    def __init__(self, access: Handle) -> None:
        self._access = access
        self.drop()

    def drop(self) -> None:
        """Forget what was collected."""
        self._items: defaultdict[int, dict[bytes, bytes]] = defaultdict(dict)
        self._bytes: Counter[int] = Counter()

    def add(self, manager: int, key: bytes, inline: bytes, deadline: float) -> None:
        """Collect a write; sends what there is for this manager if that is much."""
        self._items[manager][key] = inline
        self._bytes[manager] += len(key) + len(inline)
        if len(self._items[manager]) >= _MOST or self._bytes[manager] >= _MOST_BYTES:
            self._send(manager, deadline)

    def discard(self, manager: int, key: bytes) -> None:
        """Forget a write that a later one, which does not wait, has overtaken."""
        self._items[manager].pop(key, None)

    def flush(self, deadline: float) -> None:
        """Send everything."""
        try:
            for manager in list(self._items):
                self._send(manager, deadline)
        except DDictWritesLostError:
            self.drop()
            raise

    def _send(self, manager: int, deadline: float) -> None:
        if not (items := list(self._items[manager].items())):
            return
        outcomes = self._put(manager, items, deadline)
        everywhere = [item for item, (_, own, _) in zip(items, outcomes, strict=True) if own.get("b")]
        for other in self._access.others(manager, {"b": bool(everywhere)}):
            self._put(other, everywhere, deadline, BROADCAST)
        # Only now: what was refused, or found nobody, must not be left out of the next checkpoint without a word.
        self._items.pop(manager, None)
        self._bytes.pop(manager, None)

    def _put(self, manager: int, items: list[tuple[bytes, bytes]], deadline: float, flags: int = 0) -> list[Any]:
        blobs = [part for item in items for part in item]

        def request(exchange: Exchange, whose: Whose, flags: int) -> dict[str, Any]:
            return exchange.request(asked.PutMany(whose, flags), *blobs).fields

        answer = self._access.change(manager, request, deadline, again=True, flags=flags)
        outcomes: list[Any] = answer["outcomes"]
        for error, _, _ in outcomes:
            if error is not None:
                raise REQUESTS.rebuild(error)
        return outcomes


def _forget_handle(client: Client, pid: int, standing: Standing) -> None:
    """A handle was garbage collected: it holds up no commits any more."""
    if pid == os.getpid() and standing.is_known:
        client.session.forget(standing)


_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
_leaves_at_exit = 0  # process that has said that it does


def _leave_at_exit() -> None:
    """Have the handles of this process say that they leave when it ends in an orderly way: what they wrote counts
    then."""
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
    end_sessions(deadline)


def _after_fork() -> None:
    # A handle that a child has inherited is another one there: two processes must not move it against each other.
    for handle in list(_handles):
        handle._finalizer.detach()
        closed = handle.closed
        handle._begin(handle.standing.checkpoint_id, handle.standing.epoch)
        handle.closed = closed


os.register_at_fork(after_in_child=_after_fork)
