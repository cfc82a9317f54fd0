"""Reading and writing keys through one handle: what `DDict` is made of.

Owns which manager a key goes to, how values get to managers and back, how single keys, all keys and many keys at once
are asked for, and the small writes that are collected and sent together. What a user may say is `DDict`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ml_flashpoint.ddict.client import codec, shared_memory
from ml_flashpoint.ddict.client.handle import Handle
from ml_flashpoint.ddict.client.keys import Unreadable, encode_key, place, readable_key, split_joined
from ml_flashpoint.ddict.client.links import Exchange
from ml_flashpoint.ddict.errors import (
    REQUESTS,
    DDictError,
    DDictKeyError,
    DDictTimeoutError,
    DDictWritesLostError,
    StaleValueError,
)
from ml_flashpoint.ddict.manager.shard import BROADCAST, DIRECT, PERSISTENT
from ml_flashpoint.ddict.options import Configuration
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.client import Reply

_Result = TypeVar("_Result")

_AT_ONCE = 256
_MOST = 1024
_MOST_BYTES = 4 << 20


class Found(NamedTuple):
    """A value that was read, and the sequence number of its entry."""

    value: Any
    sequence: int


class Access(Handle):
    """See the module. As thread-safe as any handle. ``only``: the one manager to use, whatever the key, if any."""

    def __init__(self, configuration: Configuration, checkpoint_id: int, epoch: int, only: int | None) -> None:
        super().__init__(configuration, checkpoint_id, epoch)
        self.only = only

    @property
    def managers(self) -> list[int]:
        """Managers that have this handle's keys."""
        return list(range(self.configuration.managers)) if self.only is None else [self.only]

    @property
    def local(self) -> list[int]:
        """Those of them on this node."""
        return [manager for manager in self.managers if self.client.is_local(manager)]

    def located(self, key: Hashable) -> tuple[int, bytes]:
        """Which manager has a key, or would, and the key as it knows it."""
        encoded = encode_key(key)
        return place(encoded, self.configuration.managers) if self.only is None else self.only, encoded

    # ---- one key ------------------------------------------------------------------------------------------

    def get(self, manager: int, key: bytes, *, deadline: float, copy: bool = False, wait: bool = False) -> Found:
        """Read a key at one manager; ``wait``: for the key to be written, if the dictionary does."""

        def get() -> Found:
            answer = self.ask(manager, "get", key, deadline=deadline, wait=wait)
            return _found(answer.fields, answer.blobs, copy)

        # It can be written anew between the answer and the look at it.
        return _until_there(get, manager, deadline)

    def write(
        self,
        manager: int,
        key: bytes,
        encoded: codec.Encoded,
        flags: int = 0,
        *,
        sequence: int | None = None,
        deadline: float,
    ) -> bool:
        """Write a key at one manager. Returns false if ``sequence`` is not that of the key's entry (0: none)."""
        fields: dict[str, Any] = {"f": flags} if flags else {}
        if sequence is not None:
            fields["x"] = sequence

        def put(exchange: Exchange, told: dict[str, Any]) -> dict[str, Any]:
            if encoded.inline:
                return exchange.request("put", told, (key, codec.to_inline(encoded))).fields
            return self._put_large(exchange, key, encoded, told)

        again = sequence is None  # a conditional write that was done would fail the second time
        lasting = bool(flags & PERSISTENT)
        # The manager can be replaced after it has given the reservation for a large one.
        done = _until_there(
            lambda: self._change(manager, put, fields, again=again, lasting=lasting, deadline=deadline),
            manager,
            deadline,
        )
        for other in self.others(manager, done):
            self.write(other, key, encoded, flags | BROADCAST, deadline=deadline)
        return bool(done["ok"])

    def others(self, manager: int, answer: dict[str, Any]) -> list[int]:
        """Managers at which a change is to be made, too, since `bput` wrote the key that it was made to at this one."""
        return [each for each in self.managers if each != manager] if answer.get("b") else []

    def _put_large(
        self, exchange: Exchange, key: bytes, encoded: codec.Encoded, told: dict[str, Any]
    ) -> dict[str, Any]:
        size = shared_memory.object_size(encoded)
        its = {"n": size, "c": told["c"], "e": told["e"], "w": told["w"]}
        reserved = exchange.request("allocate", its, (key,)).fields
        value_id = reserved["v"]
        told = {**told, "v": value_id}
        try:
            if not exchange.local:
                blobs = shared_memory.object_blobs(encoded, reserved["size"], value_id)
                return exchange.request("put", told, (key, *blobs)).fields
            with self.client.writer.writing(reserved["path"], value_id) as write:
                write(encoded)
                return exchange.request("put", told, (key,)).fields
        except BaseException:
            with contextlib.suppress(FlashpointError):  # when the connection is gone, the manager knows
                exchange.request("abandon", {"v": value_id})
            raise

    def change(
        self,
        manager: int,
        operation: str,
        *blobs: bytes,
        again: bool = False,
        deadline: float,
        **fields: Any,
    ) -> dict[str, Any]:
        """Have one manager change a key, or all of its keys; ``again``: twice, where nobody knows whether it was done.
        A key that was deleted would not be there the second time."""

        def request(exchange: Exchange, told: dict[str, Any]) -> dict[str, Any]:
            return exchange.request(operation, told, blobs).fields

        answer = self._change(manager, request, fields, again=again, deadline=deadline)
        for other in self.others(manager, answer):
            with contextlib.suppress(DDictKeyError):
                everywhere = {**fields, "f": BROADCAST}
                everywhere.pop("x", None)  # which is of the entry at the first one
                self._change(other, request, everywhere, again=again, deadline=deadline)
        return answer

    def _change(
        self,
        manager: int,
        request: Callable[[Exchange, dict[str, Any]], _Result],
        fields: dict[str, Any],
        *,
        again: bool,
        deadline: float,
        lasting: bool = False,
    ) -> _Result:
        if self.only is not None:
            fields = {**fields, "f": fields.get("f", 0) | DIRECT}
        return self.in_writing(
            manager,
            lambda exchange, whose: request(exchange, {**fields, **whose}),
            deadline,
            again=again,
            lasting=lasting,
        )

    def ask(self, manager: int, operation: str, *blobs: bytes, deadline: float, **fields: Any) -> Reply:
        """Ask one manager something about a key, or some or all of its keys."""

        def send(epoch: int) -> Reply:
            told = {**fields, "c": self.standing.checkpoint_id, "e": epoch}

            def request(exchange: Exchange) -> Reply:
                # A manager elsewhere, which it may be since a moment ago, sends large values along.
                return exchange.request(operation, told if exchange.local else {**told, "remote": True}, blobs)

            return self.client.links.attempt(manager, request, deadline=deadline)

        return self.in_epoch(send, deadline)

    # ---- many keys ----------------------------------------------------------------------------------------

    def keys(self, managers: Iterable[int], deadline: float) -> Iterator[Any]:
        """Keys of these managers, decoded. They are asked at the first one."""
        for _, keys in self.in_one_epoch(lambda: self._keys(managers, deadline), deadline):
            yield from map(readable_key, keys)

    def _keys(self, managers: Iterable[int], deadline: float) -> list[tuple[int, list[bytes]]]:
        once = self.only is None
        answers = [(each, self.ask(each, "keys", deadline=deadline, once=once)) for each in managers]
        return [(manager, list(split_joined(answer.blobs[0]))) for manager, answer in answers]

    def count(self, managers: Iterable[int], deadline: float) -> int:
        """Number of keys of these managers."""
        once = self.only is None

        def ask() -> int:
            return sum(
                int(self.ask(each, "keys", deadline=deadline, once=once, count=True).fields["n"]) for each in managers
            )

        return self.in_one_epoch(ask, deadline)

    def items(self, managers: Iterable[int], deadline: float) -> list[tuple[Any, Any]]:
        """Keys and values of these managers, all of one epoch."""

        def ask() -> list[tuple[Any, Any]]:
            return [item for some in self._items(self._keys(managers, deadline), lambda: deadline) for item in some]

        return self.in_one_epoch(ask, deadline)

    def each_item(self, managers: Iterable[int]) -> Iterator[tuple[Any, Any]]:
        """The same, some hundred at a time. Raises `DDictError`: another epoch has begun meanwhile."""
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
        """Those that are there, with their values."""
        answer = self.ask(manager, "many", *keys, deadline=deadline, ops=[["get", {}, 1]] * len(keys))
        items = []
        blobs = iter(answer.blobs)
        for key, (error, own, count) in zip(keys, answer.fields["outcomes"], strict=True):
            its = list(itertools.islice(blobs, count))
            try:
                if error is not None:
                    raise REQUESTS.rebuild(error)
                try:
                    value = _found(own, its, copy=False).value
                except StaleValueError:
                    value = self.get(manager, key, deadline=deadline).value
            except DDictKeyError:
                continue  # deleted in between
            except FlashpointError:
                raise
            except Exception as error:  # whatever unpickling raises
                value = Unreadable(error)
            items.append((readable_key(key), value))
        return items


def _until_there(make: Callable[[], _Result], manager: int, deadline: float) -> _Result:
    """What this returns, once a large value is where the manager said."""
    while True:
        try:
            return make()
        except StaleValueError:
            if time.monotonic() >= deadline:
                raise DDictTimeoutError("the value, or its manager, changes all the time", manager=manager) from None


def _found(fields: dict[str, Any], blobs: Sequence[bytes], copy: bool) -> Found:
    if "path" in fields:
        value = shared_memory.read_value(fields["path"], fields["v"], copy=copy)
    elif "v" in fields:
        whole = blobs[0] if len(blobs) == 1 else bytearray().join(blobs)
        value = shared_memory.read_object(whole, fields["v"], copy=copy, file_size=fields["size"])
    else:
        value = codec.from_inline(blobs[0], copy=copy)
    return Found(value, fields["s"])


class Batch:
    """Writes of one handle, by manager. Not thread-safe."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.drop()

    def drop(self) -> None:
        """Forget what was collected."""
        self._items: defaultdict[int, dict[bytes, bytes]] = defaultdict(dict)
        self._bytes: Counter[int] = Counter()

    def add(self, manager: int, key: bytes, inline: bytes, deadline: float) -> None:
        """Collect a write; sends what there is for this manager if that is much. ``inline``: the value, by
        `codec.to_inline`. Raises `FlashpointError`: what was sent could not be written."""
        self._items[manager][key] = inline
        self._bytes[manager] += len(key) + len(inline)
        if len(self._items[manager]) >= _MOST or self._bytes[manager] >= _MOST_BYTES:
            self._send(manager, deadline)

    def discard(self, manager: int, key: bytes) -> None:
        """Forget a write that a later one, which does not wait, has overtaken."""
        self._items[manager].pop(key, None)

    def flush(self, deadline: float) -> None:
        """Send everything. Raises `FlashpointError`: some of it could not be written. That stays, to be sent again,
        unless it is `DDictWritesLostError`: then all is lost with what the handle has written before."""
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
            self._put(other, everywhere, deadline, f=BROADCAST)
        # Only now: what was refused, or found nobody, must not be left out of the next checkpoint without a word.
        self._items.pop(manager, None)
        self._bytes.pop(manager, None)

    def _put(self, manager: int, items: list[tuple[bytes, bytes]], deadline: float, **fields: Any) -> list[Any]:
        blobs = [part for item in items for part in item]
        ops = [["put", {}, 2] for _ in items]
        answer = self._access.change(manager, "many", *blobs, ops=ops, again=True, deadline=deadline, **fields)
        for error, _, _ in answer["outcomes"]:
            if error is not None:
                raise REQUESTS.rebuild(error)
        outcomes: list[Any] = answer["outcomes"]
        return outcomes
