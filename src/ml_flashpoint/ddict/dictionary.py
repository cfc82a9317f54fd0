"""`DDict`: the dictionary as its users have it."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import psutil

from ml_flashpoint.ddict.client import values
from ml_flashpoint.ddict.client.handle import Batch, Handle
from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.errors import (
    DDictError,
    DDictKeyError,
    DDictManagerLostError,
    DDictPersistError,
    DDictTimeoutError,
)
from ml_flashpoint.ddict.links import GRACE_S, Exchange
from ml_flashpoint.ddict.manager.shard import BROADCAST, PERSISTENT
from ml_flashpoint.ddict.native.ray import is_on_ray
from ml_flashpoint.ddict.options import Configuration, Options, check_checkpoint_id, checked_timeout
from ml_flashpoint.ddict.runtime.embedded import EmbeddedRuntime, Runtime
from ml_flashpoint.ddict.runtime.folder import runtime_root
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.keys import Unreadable, encode_key
from ml_flashpoint.ddict.wire.requests import Whose
from ml_flashpoint.format.arguments import checked_integer, ignored
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)
_STOP_S = 20.0
_MISSING: Any = object()

_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """Statistics of one manager, see `DDict.stats`.

    Attributes:
        manager, node: its number, and that of its node.
        keys: keys with any value in the working set.
        used_bytes, limit_bytes: of values, those of older checkpoints included, and the most that they may take.
        oldest: oldest checkpoint of the working set.
        sealed: checkpoints that it could be recovered at.
        copies: managers that are known to have verified copies of all of these.
        missing_copies: those that are to have them, and may not.
        copies_on_same_node: managers that are to have copies and are on its own node, whose loss would take both.
        frozen: whether it refuses writes.
        persisted: newest checkpoint of the whole dictionary that this run has persisted, or has begun with; -1: none.
        persist_error: why the last one that was due, or asked for, could not be; None: it could.
    """

    manager: int
    node: int
    keys: int
    used_bytes: int
    limit_bytes: int
    oldest: int
    sealed: tuple[int, ...]
    copies: tuple[int, ...]
    missing_copies: tuple[int, ...]
    copies_on_same_node: tuple[int, ...]
    frozen: bool
    persisted: int
    persist_error: str | None


def stats_of(answers: Sequence[Mapping[str, Any]], state: Mapping[str, Any], options: Options) -> list[ManagerStats]:
    """Return the statistics that all managers, by number, and the coordinator have told."""
    return [
        ManagerStats(
            manager=number,
            node=options.nodes[number],
            limit_bytes=options.limit_bytes,
            sealed=tuple(told["sealed"]),
            copies=tuple(each for each in told["holders"] if each in told["copies"]),
            missing_copies=tuple(each for each in told["holders"] if each not in told["copies"]),
            copies_on_same_node=tuple(each for each in told["holders"] if answers[each]["place"] == told["place"]),
            persisted=state["persisted"],
            persist_error=state["persist_error"],
            **{name: told[name] for name in ("frozen", "keys", "oldest", "used_bytes")},
        )
        for number, told in enumerate(answers)
    ]


def _with_arguments_of(
    options: Callable[_Arguments, Options],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Arguments], None]]:
    """Tell type checkers that an initializer takes the arguments that options have."""
    return lambda initialize: initialize


class DDict(MutableMapping[Any, Any]):
    """A dictionary whose values live in manager processes, in memory, and outlive the processes that write them.

    Every process that is given one, by pickle, has a *handle*: it begins at the checkpoint of the one that it was made
    from, and moves through checkpoints on its own. See docs/ddict.md.

    Args: see `Options`.

    Raises:
        InvalidArgumentError: an argument is out of range.
        DDictError: a manager did not start.
    """

    __signature__ = inspect.signature(Options)

    @_with_arguments_of(Options)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = Options(*args, **kwargs)
        if options.persists and not (options.persist_count or options.read_only or options.restore_from is not None):
            _log.warning(
                "persist_count is 0: only persist() persists checkpoints, and destroy() does not; pass persist_count=-1"
                " to keep all, or how many of the newest"
            )
        ignored("DDict", trace=options.trace or None)
        configuration, self._coordinator, started = _create(options)
        self._set_up(configuration, 0, 0, None)
        self._runtime: Runtime | None = started
        self._creator = os.getpid()
        if options.restore_from is not None:
            try:
                self.restore(options.restore_from)
            except BaseException:
                self._stop()
                raise

    def _set_up(self, configuration: Configuration, checkpoint_id: int, epoch: int, only: int | None) -> None:
        self._configuration = configuration
        self._access = Handle(configuration, checkpoint_id, epoch, only)
        self._batch: Batch | None = None

    def _begin(self) -> float:
        """Send what was collected. Return the deadline of the call that begins."""
        deadline = self._access.deadline()
        if self._batch is not None:
            self._batch.flush(deadline)
        return deadline

    # ---- one key ------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        return self._get(key)

    def get(self, key: Any, default: Any = None, *, copy: bool = False) -> Any:
        """Return the value of a key, or ``default``. Never waits for a key. ``copy``: arrays and tensors are the
        caller's own, instead of views of the dictionary's memory."""
        try:
            return self._get(key, copy=copy, wait=False)
        except DDictKeyError:
            return default

    def _get(self, key: Any, *, copy: bool = False, wait: bool = True) -> Any:
        at, deadline = self._access.located(key), self._access.deadline()
        with _naming(key):
            return self._access.get(*at, deadline=deadline, copy=copy, wait=wait).value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.put(key, value)

    def put(self, key: Any, value: Any) -> None:
        """Write a key, as ``d[key] = value`` does."""
        self._put(self._batch, key, value, self._access.deadline())

    def pput(self, key: Any, value: Any) -> None:
        """Write a key for all checkpoints from here on: it need not be written again at each (`wait_for_keys`), and
        does not make this a writing handle that others' checkpoints wait for."""
        self._put(self._batch, key, value, self._access.deadline(), PERSISTENT)

    def bput(self, key: Any, value: Any) -> None:
        """Write a key at every manager, for `bget` to read from the nearest. So each manager gets a key.

        Whatever else changes the key later (`put`, `update`, `fetch_add`, `pop`, `del`), does so at every manager, too.
        """
        deadline = self._begin()
        encoded_key, encoded = encode_key(key), values.encode(value)
        for manager in self._access.managers:
            self._access.write(manager, encoded_key, encoded, BROADCAST, deadline=deadline)

    def bget(self, key: Any, *, copy: bool = False) -> Any:
        """Read what `bput` wrote, from a manager on this node if there is one, and from another if that is away."""
        encoded, deadline, local = encode_key(key), self._access.deadline(), set(self._access.local)
        candidates = sorted(self._access.managers, key=lambda manager: (manager not in local, random.random()))
        for left, manager in zip(range(len(candidates), 0, -1), candidates, strict=True):
            # Each gets a fair part of what is left of the time, and what it may be late is part of that.
            share = (deadline - time.monotonic()) / left
            share -= min(GRACE_S, share / 2) if left > 1 else 0.0
            try:
                with _naming(key):
                    until = time.monotonic() + share
                    return self._access.get(manager, encoded, deadline=until, copy=copy, wait=True).value
            except (DDictManagerLostError, DDictTimeoutError):
                if left == 1:
                    raise
        raise AssertionError("there is a manager")

    def _put(self, batch: Batch | None, key: Any, value: Any, deadline: float, flags: int = 0) -> None:
        manager, encoded_key = self._access.located(key)
        encoded = values.encode(value)
        if batch is not None:
            if encoded.inline and not flags:
                self._access.check_writable()
                batch.add(manager, encoded_key, values.to_inline(encoded), deadline)
                return
            batch.discard(manager, encoded_key)
        self._access.write(manager, encoded_key, encoded, flags, deadline=deadline)

    def __delitem__(self, key: Any) -> None:
        deadline = self._begin()
        with _naming(key):
            self._access.delete(*self._access.located(key), -1, deadline)

    def __contains__(self, key: object) -> bool:
        try:
            manager, encoded = self._access.located(key)
        except InvalidArgumentError:
            return False
        answer = self._access.ask(manager, asked.Contains, encoded, deadline=self._access.deadline())
        return bool(answer.fields["found"])

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Delete a key and return its value, of which one caller only gets it; else ``default``."""
        return self._pop(key, default, self._begin())

    def _pop(self, key: Any, default: Any, deadline: float) -> Any:
        manager, encoded = self._access.located(key)
        try:
            with _naming(key):
                while True:
                    found = self._access.get(manager, encoded, copy=True, deadline=deadline)
                    if self._access.delete(manager, encoded, found.sequence, deadline)["ok"]:
                        return found.value
        except DDictKeyError:
            if default is _MISSING:
                raise
            return default

    def popitem(self) -> tuple[Any, Any]:
        """Delete some key and return it with its value. Raise `DDictKeyError` if there is none."""
        deadline = self._begin()
        for key in self._access.keys(self._access.managers, deadline):
            with contextlib.suppress(DDictKeyError):  # another handle was faster
                return key, self._pop(key, _MISSING, deadline)
        raise DDictKeyError("the dictionary is empty", checkpoint_id=self.checkpoint_id)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, which is ``default`` from now on if there was none. Of several callers one sets
        it."""
        manager, encoded_key = self._access.located(key)
        deadline = self._begin()
        while True:
            try:
                return self._access.get(manager, encoded_key, deadline=deadline).value
            except DDictKeyError:
                if self._access.write(manager, encoded_key, values.encode(default), expected=0, deadline=deadline):
                    return default

    def fetch_add(self, key: Any, amount: float = 1, default: float = 0) -> float:
        """Add to a number, and return what it was before, ``default`` if there was none. The manager does it, so that
        no addition of another handle is lost. Raises `DDictError` if the value is no number, and
        `DDictManagerLostError` if the manager died, perhaps after it had added."""
        for argument, number in (("amount", amount), ("default", default)):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise InvalidArgumentError("must be a number", argument=argument, value=number)
        deadline = self._begin()
        manager, encoded = self._access.located(key)

        def add(exchange: Exchange, whose: Whose, flags: int) -> dict[str, Any]:
            return exchange.request(asked.Add(whose, amount, default, flags), encoded).fields

        before: float = self._access.change(manager, add, deadline)["before"]
        return before

    def wait_for(self, key: Any, value: Any | Callable[[Any], bool] = _MISSING, timeout: float | None = None) -> Any:
        """Wait until a key has a value, and return it. ``value``: what it must be equal to, or a function that says
        whether it will do; nothing: anything. ``timeout``: seconds; None: the dictionary's. Raises `DDictTimeoutError`.
        """
        manager, encoded = self._access.located(key)
        # 0: only if it is there.
        deadline = self._access.deadline(checked_timeout(timeout) if timeout else timeout)
        seen = 0
        while True:
            waits = functools.partial(asked.WaitFor, seen=seen)
            if not self._access.ask(manager, waits, encoded, deadline=deadline).fields["ok"]:
                raise DDictTimeoutError(f"{key!a} did not get the value that was waited for", manager=manager)
            try:
                found = self._access.get(manager, encoded, deadline=deadline)
            except DDictKeyError:
                continue
            seen = found.sequence
            if value is _MISSING or (value(found.value) if callable(value) else found.value == value):
                return found.value

    # ---- many keys ----------------------------------------------------------------------------------------

    def update(self, other: Any = (), /, **named: Any) -> None:
        """Write many keys; small values travel together."""
        deadline = self._access.deadline()
        items = other.items() if isinstance(other, Mapping) else other
        batch = Batch(self._access) if self._batch is None else self._batch
        began = time.monotonic()
        for key, value in itertools.chain(items, named.items()):
            deadline += time.monotonic() - began  # how long the caller takes to give them is the caller's matter
            self._put(batch, key, value, deadline)
            began = time.monotonic()
        if batch is not self._batch:
            batch.flush(deadline)

    def start_batch_put(self) -> None:
        """Collect small values from now on, and send them together: when there are many, and at `end_batch_put`.

        Until then they cannot be read, not even by this handle. Moving to another checkpoint ends the batch, too.
        """
        if self._batch is None:
            self._batch = Batch(self._access)

    def end_batch_put(self) -> None:
        """Send what was collected. Raise a `FlashpointError` if some of it could not be written."""
        self._end_batch(self._access.deadline())

    def _end_batch(self, deadline: float) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.flush(deadline)

    def __iter__(self) -> Iterator[Any]:
        yield from self._access.keys(self._access.managers, self._access.deadline())

    def __len__(self) -> int:
        return self._access.count(self._access.managers, self._access.deadline())

    def keys(self) -> list[Any]:  # type: ignore[override]
        """Return the keys at the checkpoint of this handle; see `items`."""
        return list(iter(self))  # or `list` would ask for the length, too

    def values(self) -> list[Any]:  # type: ignore[override]
        """Return the values at the checkpoint of this handle; see `items`."""
        return [value for _, value in self.items()]

    def items(self) -> list[tuple[Any, Any]]:  # type: ignore[override]
        """Return the keys and values at the checkpoint of this handle; an `Unreadable` for each whose class cannot be
        imported here."""
        return self._access.items(self._access.managers, self._access.deadline())

    def filter(self, wanted: Callable[[Any, Any], bool]) -> Iterator[tuple[Any, Any]]:
        """Yield the items for which ``wanted(key, value)`` is true. It runs here, not in the managers, and is not asked
        about what is `Unreadable` here. Raises a retryable `DDictError` when an epoch has begun meanwhile."""
        for key, value in self._access.each_item(self._access.managers):
            if not isinstance(key, Unreadable) and not isinstance(value, Unreadable) and wanted(key, value):
                yield key, value

    def clear(self) -> None:
        """Delete all keys at the checkpoint of this handle."""
        if self._batch is not None:
            self._batch.drop()
        deadline = self._access.deadline()
        for manager in self._access.managers:
            self._access.change(
                manager, lambda exchange, whose, _: exchange.request(asked.Clear(whose)).fields, deadline, again=True
            )

    def local_keys(self) -> list[Any]:
        """Return the keys that managers on this node have."""
        return list(self._access.keys(self._access.local, self._access.deadline()))

    def local_values(self) -> list[Any]:
        """Return the values that managers on this node have."""
        return [value for _, value in self.local_items()]

    def local_items(self) -> list[tuple[Any, Any]]:
        """Return the keys and values that managers on this node have."""
        return self._access.items(self._access.local, self._access.deadline())

    def local_length(self) -> int:
        """Return the number of keys that managers on this node have."""
        return self._access.count(self._access.local, self._access.deadline())

    local_len = local_length

    # ---- checkpoints --------------------------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> int:
        """The checkpoint that this handle reads and writes at; set it to go to another one."""
        return self._access.standing.checkpoint_id

    @checkpoint_id.setter
    def checkpoint_id(self, checkpoint_id: int) -> None:
        self._access.move(check_checkpoint_id(checkpoint_id), self._begin())

    def checkpoint(self) -> int:
        """Go on to the next checkpoint; returns its id. What was written stays readable there. A handle that began to
        write behind the others goes on to the next one that they have not skipped.

        Raises:
            DDictTimeoutError: with `wait_for_keys` or `wait_for_writers`, an older one cannot retire yet; with
                `replication` or a persister, one that is older than the working set is still being committed.
            DDictWritesLostError: a manager came back without what this handle wrote since the last commit.
        """
        deadline = self._begin()
        self._access.move(self.checkpoint_id + 1, deadline, onwards=True)
        return self.checkpoint_id

    def rollback(self, to: int | None = None, *, discard: bool = True) -> int:
        """Go back, to the checkpoint before this one or to ``to``; returns its id. ``discard``: what this handle, and
        no other, wrote above is gone then.

        Raises:
            DDictCheckpointRetiredError: it has left the working set.
            DDictTimeoutError: a manager is away. The handle is back all the same; see docs/ddict.md.
            DDictPersistError: the handle is back, but the store still offers a persisted checkpoint above that.
        """
        to = max(0, self.checkpoint_id - 1) if to is None else check_checkpoint_id(to, "to")
        if to > self.checkpoint_id:
            raise InvalidArgumentError(
                f"is ahead of this handle, which is at {self.checkpoint_id}", argument="to", value=to
            )
        if self._batch is not None:
            self._batch.drop()
        self._access.rollback(to, discard=discard, deadline=self._access.deadline())
        return self.checkpoint_id

    def sync_to_newest_checkpoint(self) -> int:
        """Go to the newest committed checkpoint, waiting for what can be committed now; returns its id (0 if there is
        none). What this handle, and no other, wrote above is gone then."""
        if self._batch is not None and self._access.standing.lost is not None:
            self._batch.drop()  # with what was lost before it
        self._access.sync(self._begin())
        return self.checkpoint_id

    def wait_for_commit(self, checkpoint_id: int | None = None, timeout: float | None = None) -> int:
        """Wait until a checkpoint is committed, and what this handle wrote there after it was: with `replication`, no
        loss of one manager takes it away any more. Returns the newest committed one. Other threads cannot move this
        handle meanwhile.

        Args:
            checkpoint_id: None: the one before that of this handle, which `checkpoint` has left last; where no handle
                has written anything, there is nothing to wait for.
            timeout: seconds; None: the dictionary's.

        Raises:
            InvalidArgumentError: this handle still writes there.
            DDictWritesLostError: a manager came back without what this handle wrote, so it will not be.
            DDictTimeoutError: it was not in time: others have not moved past it, or have no copies of it.
        """
        wanted = self.checkpoint_id - 1 if checkpoint_id is None else check_checkpoint_id(checkpoint_id)
        deadline = self._access.deadline(None if timeout is None else checked_timeout(timeout))
        return self._access.await_commit(wanted, deadline, if_written=checkpoint_id is None)

    @property
    def committed_checkpoint_id(self) -> int:
        """The newest committed checkpoint; -1: none yet."""
        return int(self._access.state()["committed"])

    # ---- persistence --------------------------------------------------------------------------------------

    def persist(self) -> int:
        """Persist the newest committed checkpoint now; returns its id (-1 if there is none). Raises
        `DDictPersistError` if there is no persister, or it failed."""
        return int(self._access.ask_main(asked.PersistNewest(), self._begin())["checkpoint_id"])

    def persisted_ids(self) -> list[int]:
        """Return the ids of persisted checkpoints that are complete and valid on all managers, ascending."""
        return list(self._access.ask_main(asked.PersistedIds())["ids"])

    def restore(self, checkpoint_id: int) -> None:
        """Hold a persisted checkpoint instead of what is here, and go to it. If it cannot be read, everything is as
        before; if a manager dies at the last moment, nothing can be committed until a restore works.

        Other handles must not be writing, and go to it themselves (`sync_to_newest_checkpoint`).

        Raises:
            DDictPersistError: there is no such checkpoint; or it was of another number of managers, and values of one
                key would come together; or a manager died and could not take it up.
            DDictTimeoutError: not in time. If the message says that it is restored, only copies of it are missing.
            DamagedError: it is not what was written.
        """
        self._restore(check_checkpoint_id(checkpoint_id), self._access.deadline())

    def _restore(self, checkpoint_id: int, deadline: float) -> None:
        if self._batch is not None:
            self._batch.drop()
        state = self._access.order(lambda account: asked.Restore(account.whose, checkpoint_id), deadline)
        self._access.standing.went_back(checkpoint_id, state)

    def advance(self) -> int:
        """Restore the persisted checkpoint after this one, for all handles: for replaying. Returns its id. Raises
        `DDictPersistError` if this is the last."""
        deadline = self._access.deadline()
        persisted: list[int] = self._access.ask_main(asked.PersistedIds(), deadline)["ids"]
        later = [each for each in persisted if each > self.checkpoint_id]
        if not later:
            raise DDictPersistError("there is no later persisted checkpoint", checkpoint_id=self.checkpoint_id)
        self._restore(later[0], deadline)
        return later[0]

    # ---- managers -----------------------------------------------------------------------------------------

    def manager(self, manager: int) -> DDict:
        """Return a handle for the keys of one manager only: what it writes goes there, whatever the key."""
        return self._clone(checked_integer("manager", manager, 0, self._configuration.managers - 1))

    @property
    def local_managers(self) -> list[int]:
        """Numbers of the managers on this node."""
        return [each for each in range(self._configuration.managers) if self._access.client.is_local(each)]

    @property
    def local_manager(self) -> int | None:
        """Number of one manager on this node, if there is any."""
        return next(iter(self.local_managers), None)

    @property
    def main_manager(self) -> int:
        """Number of the first manager."""
        return 0

    def which_manager(self, key: Any) -> int:
        """Return the number of the manager that has a key, or would."""
        return self._access.located(key)[0]

    def stats(self) -> list[ManagerStats]:
        """Return what each manager has."""
        deadline = self._access.deadline()
        call = self._access.client.links.call
        answers = [call(each, asked.Stats(), deadline=deadline).fields for each in range(self._configuration.managers)]
        return stats_of(answers, self._access.ask_main(asked.State(), deadline), self._configuration.options)

    def get_name(self) -> str:
        """Return the name that the dictionary was made with, under which its persisted checkpoints are found again."""
        return self._configuration.options.name

    def freeze(self) -> None:
        """Refuse all writes, of all handles, until `unfreeze`."""
        self._freeze(True)

    def unfreeze(self) -> None:
        """Allow writes again."""
        self._freeze(False)

    def _freeze(self, frozen: bool) -> None:
        self._access.order(lambda account: asked.SetFrozen(account.whose, frozen), self._access.deadline())

    @property
    def is_frozen(self) -> bool:
        """True if writes are refused."""
        return bool(self._access.state()["frozen"])

    # ---- handles ------------------------------------------------------------------------------------------

    def _clone(self, only: int | None) -> DDict:
        return _made(self._configuration, self.checkpoint_id, self._access.standing.epoch, only)

    def __copy__(self) -> DDict:
        return self._clone(self._access.only)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, self._described()

    def _described(self) -> tuple[Any, ...]:
        """Return what another handle like this one is made from, as plain JSON: see `_made`."""
        return self._configuration.to_json(), self.checkpoint_id, self._access.standing.epoch, self._access.only

    def serialize(self) -> str:
        """Return a text from which `attach` makes a handle, in any process that can reach the managers. The secret of
        the dictionary is in it: whoever has it can read and write everything."""
        return base64.urlsafe_b64encode(json.dumps(self._described()).encode()).decode()

    @classmethod
    def attach(cls, serialized: str, *, timeout: float | None = None) -> DDict:
        """Return a handle from what `serialize` returned. ``timeout``: of its calls, in seconds; None: the
        dictionary's. Raises `InvalidArgumentError` for another text."""
        try:
            configuration, checkpoint_id, epoch, only = json.loads(base64.urlsafe_b64decode(serialized.encode()))
            for number in (checkpoint_id, epoch):
                check_checkpoint_id(number, "serialized")
            made = _made(configuration, checkpoint_id, epoch, only)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(
                f"is not what serialize() returned: {error}", argument="serialized", value=serialized
            ) from error
        if timeout is not None:
            made._access.timeout_s = checked_timeout(timeout)
        made._access.state()
        return made

    def detach(self) -> None:
        """Let this handle be of no more use; the dictionary stays. Idempotent."""
        if self._access.closed:
            return
        deadline = self._access.deadline()
        try:
            self._end_batch(deadline)
        finally:
            self._access.detach(deadline)

    def destroy(self) -> None:
        """End the dictionary, for all handles, after what can be committed is, and persisted if there is a persister.
        Only the process that made it can. Idempotent. Raises `DDictPersistError` if the last checkpoint could not be
        persisted; the dictionary has ended all the same."""
        if self._access.closed:
            return
        if not self._is_creator:
            raise DDictError("only the handle that made the dictionary can destroy it", hint="detach() this one")
        try:
            options = self._configuration.options
            if options.persists and options.persist_count:
                self.persist()
        finally:
            self._stop()

    @property
    def _is_creator(self) -> bool:
        """True if this is the handle that made the dictionary, and not a copy of it in a forked child."""
        return self._runtime is not None and self._creator == os.getpid()

    def _stop(self) -> None:
        runtime, self._runtime = self._runtime, None
        self._access.detach(time.monotonic() + 1.0)
        self._access.client.close()
        if runtime is not None:
            if self._coordinator is not None:
                self._coordinator.close()
            runtime.stop(_STOP_S)

    def __enter__(self) -> DDict:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_creator:
            self.destroy()
        else:
            self.detach()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        configuration = self._configuration
        name = configuration.options.name or configuration.dictionary
        return f"DDict({name!r}, managers={configuration.managers}, checkpoint_id={self.checkpoint_id})"


def _create(options: Options) -> tuple[Configuration, Coordinator | None, Runtime]:
    """Start the coordinator and the managers of a new dictionary. The coordinator is None where its runtime has it."""
    if options.replicated and options.n_nodes == 1:
        _log.warning("replication has no other node to copy to: with n_nodes=1 it survives managers, not the machine")
    configuration = Configuration("", options.named(), "", None, options.holders(), secrets.token_bytes(32))
    if (options.runtime or ("ray" if is_on_ray() else "embedded")) == "ray":
        from ml_flashpoint.ddict.runtime.ray_runtime import RayRuntime  # which imports Ray

        on_ray = RayRuntime(dataclasses.replace(configuration, dictionary=secrets.token_hex(6)))
        return on_ray.configuration, None, on_ray
    _check_memory(options.total_mem, runtime_root())
    runtime = EmbeddedRuntime()
    configuration = dataclasses.replace(configuration, base=str(runtime.base), dictionary=runtime.base.name)
    with contextlib.ExitStack() as undo:
        undo.callback(runtime.stop)
        coordinator = Coordinator(configuration)
        undo.callback(coordinator.close)
        its = configuration.to_json()
        runtime.start([{"configuration": its, "manager": number} for number in range(options.managers)])
        undo.pop_all()
    return configuration, coordinator, runtime


def _check_memory(total_mem: int, folder: Path) -> None:
    """Refuse what this machine cannot have; how much of it is free is seen when values come."""
    filesystem = os.statvfs(folder)
    most = max(psutil.virtual_memory().total, filesystem.f_blocks * filesystem.f_frsize)
    if total_mem > most:
        raise InvalidArgumentError(
            f"must not be more than this machine has, {most:,} bytes", argument="total_mem", value=total_mem
        )


def _made(configuration: Configuration | Mapping[str, Any], checkpoint_id: int, epoch: int, only: int | None) -> DDict:
    """Return a handle of a dictionary, which `DDict._described` has described."""
    if not isinstance(configuration, Configuration):
        configuration = Configuration.from_json(configuration)
    handle: DDict = DDict.__new__(DDict)
    handle._runtime = handle._coordinator = None
    handle._creator = 0
    handle._set_up(configuration, checkpoint_id, epoch, only)
    return handle


@contextlib.contextmanager
def _naming(key: Any) -> Iterator[None]:
    try:
        yield
    except DDictKeyError as error:
        its = {"manager": error.manager, "checkpoint_id": error.checkpoint_id}
        raise DDictKeyError(f"{key!a}: {error.message}", **its) from None
