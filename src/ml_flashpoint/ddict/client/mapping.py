"""The mapping that a `DDict` is: its keys and values at the checkpoint of its handle.

Owns the words of a dictionary, and the batch of writes that wait to be sent. How keys get to managers is `access`'s,
checkpoints are `handle`'s; making, persisting and ending a dictionary is `dictionary`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from ml_flashpoint.ddict.client import codec
from ml_flashpoint.ddict.client.access import Access, Batch
from ml_flashpoint.ddict.client.keys import Unreadable, encode_key
from ml_flashpoint.ddict.client.links import GRACE_S
from ml_flashpoint.ddict.errors import DDictKeyError, DDictManagerLostError, DDictTimeoutError
from ml_flashpoint.ddict.manager.shard import BROADCAST, PERSISTENT
from ml_flashpoint.ddict.options import Configuration, checked_timeout
from ml_flashpoint.format.errors import InvalidArgumentError

_MISSING: Any = object()


class Mapped(MutableMapping[Any, Any]):
    """See the module; the base of `DDict` and of nothing else."""

    def _set_up(self, configuration: Configuration, checkpoint_id: int, epoch: int, only: int | None) -> None:
        self._configuration = configuration
        self._access = Access(configuration, checkpoint_id, epoch, only)
        self._batch: Batch | None = None

    # ---- one key ------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        return self._get(key)

    def get(self, key: Any, default: Any = None, *, copy: bool = False) -> Any:
        """The value of a key, or ``default``. Never waits for one.

        Args:
            copy: arrays and tensors are the caller's own, instead of views of the dictionary's memory.
        """
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
        """As ``d[key] = value``."""
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
        encoded_key, encoded = encode_key(key), codec.encode(value)
        for manager in self._access.managers:
            self._access.write(manager, encoded_key, encoded, BROADCAST, deadline=deadline)

    def bget(self, key: Any, *, copy: bool = False) -> Any:
        """Read what `bput` wrote, from a manager on this node if there is one, and from another if that is away."""
        encoded = encode_key(key)
        deadline = self._access.deadline()
        local = set(self._access.local)
        candidates = sorted(self._access.managers, key=lambda manager: (manager not in local, random.random()))
        for left, manager in zip(range(len(candidates), 0, -1), candidates, strict=True):
            try:
                # Each gets a fair part of what is left of the time, and what it may be late is part of that.
                share = (deadline - time.monotonic()) / left
                share -= min(GRACE_S, share / 2) if left > 1 else 0.0
                with _naming(key):
                    got = self._access.get(manager, encoded, deadline=time.monotonic() + share, copy=copy, wait=True)
                    return got.value
            except (DDictManagerLostError, DDictTimeoutError):
                if left == 1:
                    raise
        raise AssertionError("there is a manager")

    def _put(self, batch: Batch | None, key: Any, value: Any, deadline: float, flags: int = 0) -> None:
        manager, encoded_key = self._access.located(key)
        encoded = codec.encode(value)
        if batch is not None:
            if encoded.inline and not flags:
                self._access.check_writable()
                batch.add(manager, encoded_key, codec.to_inline(encoded), deadline)
                return
            batch.discard(manager, encoded_key)
        self._access.write(manager, encoded_key, encoded, flags, deadline=deadline)

    def __delitem__(self, key: Any) -> None:
        deadline = self._begin()
        manager, encoded = self._access.located(key)
        with _naming(key):
            self._access.change(manager, "delete", encoded, deadline=deadline)

    def __contains__(self, key: object) -> bool:
        try:
            manager, encoded = self._access.located(key)
        except InvalidArgumentError:
            return False
        return bool(self._access.ask(manager, "contains", encoded, deadline=self._access.deadline()).fields["found"])

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Delete a key and return its value, of which one caller only gets it; else ``default``."""
        return self._pop(key, default, self._begin())

    def _pop(self, key: Any, default: Any, deadline: float) -> Any:
        manager, encoded = self._access.located(key)
        try:
            with _naming(key):
                while True:
                    found = self._access.get(manager, encoded, copy=True, deadline=deadline)
                    if self._access.change(manager, "delete", encoded, deadline=deadline, x=found.sequence)["ok"]:
                        return found.value
        except DDictKeyError:
            if default is _MISSING:
                raise
            return default

    def popitem(self) -> tuple[Any, Any]:
        """Delete some key and return it with its value.

        Raises:
            DDictKeyError: there is none.
        """
        deadline = self._begin()
        while keys := list(self._access.keys(self._access.managers, deadline)):
            for key in keys:
                with contextlib.suppress(DDictKeyError):
                    return key, self._pop(key, _MISSING, deadline)
                if time.monotonic() >= deadline:
                    raise DDictTimeoutError("others were always faster")
        raise DDictKeyError("the dictionary is empty", checkpoint_id=self._access.standing.checkpoint_id)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The value of a key, which is ``default`` from now on if there was none. Of several callers one sets it."""
        manager, encoded_key = self._access.located(key)
        deadline = self._begin()
        while True:
            try:
                return self._access.get(manager, encoded_key, deadline=deadline).value
            except DDictKeyError:
                if self._access.write(manager, encoded_key, codec.encode(default), sequence=0, deadline=deadline):
                    return default

    def fetch_add(self, key: Any, amount: float = 1, default: float = 0) -> float:
        """Add to a number; returns what it was before, ``default`` if there was none. The manager does it, so that no
        addition of another handle is lost.

        Raises:
            DDictError: the value is no number.
            DDictManagerLostError: the manager died, perhaps after it had added.
        """
        for argument, number in (("amount", amount), ("default", default)):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise InvalidArgumentError("must be a number", argument=argument, value=number)
        deadline = self._begin()
        manager, encoded = self._access.located(key)
        added = self._access.change(manager, "add", encoded, deadline=deadline, amount=amount, default=default)
        before: float = added["before"]
        return before

    def wait_for(self, key: Any, value: Any | Callable[[Any], bool] = _MISSING, timeout: float | None = None) -> Any:
        """Wait until a key has a value, and return it.

        Args:
            value: what it must be equal to, or a function that says whether it will do; nothing: anything.
            timeout: seconds; None: the dictionary's.

        Raises:
            DDictTimeoutError: it did not come in time.
        """
        manager, encoded = self._access.located(key)
        # 0: only if it is there.
        deadline = self._access.deadline(checked_timeout(timeout) if timeout else timeout)
        seen = 0
        while True:
            if not self._access.ask(manager, "wait_for", encoded, deadline=deadline, s=seen).fields["ok"]:
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
        """Send what was collected.

        Raises:
            FlashpointError: some of it could not be written.
        """
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
        """All keys at the checkpoint of this handle; an `Unreadable` for one whose class cannot be imported here."""
        return list(iter(self))  # or `list` would ask for the length, too

    def values(self) -> list[Any]:  # type: ignore[override]
        """All values at the checkpoint of this handle; see `items`."""
        return [value for _, value in self.items()]

    def items(self) -> list[tuple[Any, Any]]:  # type: ignore[override]
        """All keys with their values at the checkpoint of this handle; an `Unreadable` for each whose class cannot be
        imported here."""
        return self._access.items(self._access.managers, self._access.deadline())

    def filter(self, wanted: Callable[[Any, Any], bool]) -> Iterator[tuple[Any, Any]]:
        """The items for which ``wanted(key, value)`` is true. It runs here, not in the managers, and is not asked about
        what is `Unreadable` here.

        Raises:
            DDictError: (while it is gone through) an epoch has begun since it began; retryable.
        """
        for key, value in self._access.each_item(self._access.managers):
            if not isinstance(key, Unreadable) and not isinstance(value, Unreadable) and wanted(key, value):
                yield key, value

    def clear(self) -> None:
        """Delete all keys at the checkpoint of this handle."""
        if self._batch is not None:
            self._batch.drop()
        deadline = self._access.deadline()
        for manager in self._access.managers:
            self._access.change(manager, "clear", deadline=deadline, again=True)

    def local_keys(self) -> list[Any]:
        """Keys that managers on this node have."""
        return list(self._access.keys(self._access.local, self._access.deadline()))

    def local_values(self) -> list[Any]:
        """Values that managers on this node have."""
        return [value for _, value in self.local_items()]

    def local_items(self) -> list[tuple[Any, Any]]:
        """Keys and values that managers on this node have."""
        return self._access.items(self._access.local, self._access.deadline())

    def local_length(self) -> int:
        """Number of keys that managers on this node have."""
        return self._access.count(self._access.local, self._access.deadline())

    local_len = local_length
    """The same, as Dragon's dictionary calls it."""

    def _begin(self) -> float:
        """A call begins before which is sent what was collected: its deadline."""
        deadline = self._access.deadline()
        if self._batch is not None:
            self._batch.flush(deadline)
        return deadline


@contextlib.contextmanager
def _naming(key: Any) -> Iterator[None]:
    try:
        yield
    except DDictKeyError as error:
        its = {"manager": error.manager, "checkpoint_id": error.checkpoint_id}
        raise DDictKeyError(f"{key!a}: {error.message}", **its) from None
