"""Reading and writing keys through one handle: what `DDict` is made of.

Owns which manager a key goes to, how values get to managers and back, how single keys, all keys and many keys at once
are asked for, and the small writes that are collected and sent together. What a user may say is `DDict`'s.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ml_flashpoint.ddict.client import codec, shared_memory
from ml_flashpoint.ddict.client.handle import Handle
from ml_flashpoint.ddict.client.keepalive import Client
from ml_flashpoint.ddict.client.keys import decode_key, place, split_joined
from ml_flashpoint.ddict.client.links import Exchange
from ml_flashpoint.ddict.errors import REQUESTS, DDictError, DDictKeyError, DDictTimeoutError, StaleValueError
from ml_flashpoint.ddict.manager.requests import PERSISTENT
from ml_flashpoint.ddict.options import COORDINATOR
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.client import Reply

_AT_ONCE = 256
_MOST = 1024
_MOST_BYTES = 4 << 20


class Found(NamedTuple):
    """A value that was read, and the sequence number of its entry."""

    value: Any
    sequence: int


class Access:
    """See the module. As thread-safe as its handle. ``only``: the one manager to use, whatever the key, if any."""

    def __init__(self, handle: Handle, only: int | None) -> None:
        self.handle = handle
        self.only = only
        self._count = handle.configuration.managers

    @property
    def client(self) -> Client:
        """That of the handle, another one after a fork."""
        return self.handle.client

    @property
    def managers(self) -> list[int]:
        """Managers that have this handle's keys."""
        return list(range(self._count)) if self.only is None else [self.only]

    @property
    def local(self) -> list[int]:
        """Those of them on this node."""
        return [manager for manager in self.managers if self.client.is_local(manager)]

    def manager_of(self, key: bytes) -> int:
        """Which manager has an encoded key, or would."""
        return place(key, self._count) if self.only is None else self.only

    # ---- one key ------------------------------------------------------------------------------------------

    def get(
        self, manager: int, key: bytes, *, deadline: float | None = None, copy: bool = False, wait: bool = False
    ) -> Found:
        """Read a key at one manager; ``wait``: for the key to be written, if the dictionary does."""
        deadline = self.handle.deadline() if deadline is None else deadline
        while True:
            answer = self.ask(manager, "get", key, deadline=deadline, wait=wait)
            try:
                return _found(answer.fields, answer.blobs, copy)
            except StaleValueError:
                # It was written anew between the answer and the look at it.
                if time.monotonic() >= deadline:
                    raise DDictTimeoutError("the value changes faster than it can be read", manager=manager) from None

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
        told: dict[str, Any] = {"f": flags} if flags else {}
        if sequence is not None:
            told["x"] = sequence
        again = sequence is None  # a conditional write that was done would fail the second time
        lasting = bool(flags & PERSISTENT)
        if encoded.inline:
            blobs = key, codec.to_inline(encoded)
            answer = self.change(manager, "put", *blobs, again=again, lasting=lasting, deadline=deadline, **told)
            return bool(answer["ok"])
        handle = self.handle

        def send(epoch: int) -> bool:
            fields = {**told, "c": handle.checkpoint_id, "w": handle.id, "e": epoch}

            def put(exchange: Exchange) -> bool:
                return self._put_large(exchange, key, encoded, fields)

            while True:
                try:
                    return self.client.links.attempt(manager, put, deadline=deadline, again=again)
                except StaleValueError:
                    # The manager was replaced after it had given the reservation.
                    if time.monotonic() >= deadline:
                        raise DDictTimeoutError("the manager changes all the time", manager=manager) from None

        return handle.write(send, deadline, lasting=lasting)

    def _put_large(self, exchange: Exchange, key: bytes, encoded: codec.Encoded, fields: dict[str, Any]) -> bool:
        with _reserved(exchange, encoded, fields) as reservation:
            value_id = reservation["v"]
            told = {**fields, "v": value_id}
            if not exchange.local:
                blobs = shared_memory.object_blobs(encoded, reservation["size"], value_id)
                return bool(exchange.request("put", told, (key, *blobs)).fields["ok"])
            with self.client.writer.writing(reservation["path"], value_id) as write:
                write(encoded)
                return bool(exchange.request("put", told, (key,)).fields["ok"])

    def change(
        self,
        manager: int,
        operation: str,
        *blobs: bytes,
        again: bool = False,
        lasting: bool = False,
        deadline: float,
        **fields: Any,
    ) -> dict[str, Any]:
        """Have one manager change a key, or all of its keys; ``again``: twice, where nobody knows whether it was done.
        A key that was deleted would not be there the second time. ``lasting``: see `Handle.write`."""
        handle = self.handle

        def send(epoch: int) -> dict[str, Any]:
            told = {**fields, "c": handle.checkpoint_id, "w": handle.id, "e": epoch}
            return self.client.links.call(manager, operation, told, blobs, deadline=deadline, again=again).fields

        return handle.write(send, deadline, lasting=lasting)

    def ask(self, manager: int, operation: str, *blobs: bytes, deadline: float, **fields: Any) -> Reply:
        """Ask one manager something about a key, or some or all of its keys."""
        handle = self.handle

        def send(epoch: int) -> Reply:
            told = {**fields, "c": handle.checkpoint_id, "e": epoch}

            def request(exchange: Exchange) -> Reply:
                # A manager elsewhere, which it may be since a moment ago, sends large values along.
                return exchange.request(operation, told if exchange.local else {**told, "remote": True}, blobs)

            return self.client.links.attempt(manager, request, deadline=deadline)

        return handle.in_epoch(send, deadline)

    def ask_main(self, operation: str, *, deadline: float | None = None, **fields: Any) -> dict[str, Any]:
        """Ask the coordinator something, in whichever epoch."""
        deadline = self.handle.deadline() if deadline is None else deadline
        return self.client.links.call(COORDINATOR, operation, fields, deadline=deadline).fields

    # ---- many keys ----------------------------------------------------------------------------------------

    def keys(self, managers: Iterable[int], deadline: float) -> Iterator[Any]:
        """Keys of these managers, decoded. They are asked at the first one."""
        for key in [
            key for _, keys in self.handle.in_one_epoch(self._keys_of(managers, deadline), deadline) for key in keys
        ]:
            yield decode_key(key)

    def _keys_of(self, managers: Iterable[int], deadline: float) -> Callable[[], list[tuple[int, list[bytes]]]]:
        return lambda: [(manager, self._encoded_keys(manager, deadline)) for manager in managers]

    def _encoded_keys(self, manager: int, deadline: float) -> list[bytes]:
        data = self.ask(manager, "keys", deadline=deadline, once=self.only is None).blobs[0]
        return list(split_joined(data))

    def count(self, managers: Iterable[int], deadline: float) -> int:
        """Number of keys of these managers."""
        once = self.only is None

        def ask() -> int:
            return sum(
                int(self.ask(each, "keys", deadline=deadline, once=once, count=True).fields["n"]) for each in managers
            )

        return self.handle.in_one_epoch(ask, deadline)

    def items(self, managers: Iterable[int], deadline: float) -> list[tuple[Any, Any]]:
        """Keys and values of these managers, all of one epoch."""

        def ask() -> list[tuple[Any, Any]]:
            keys = self._keys_of(managers, deadline)()
            return [item for some in self._items(keys, lambda: deadline) for item in some]

        return self.handle.in_one_epoch(ask, deadline)

    def each_item(self, managers: Iterable[int]) -> Iterator[tuple[Any, Any]]:
        """The same, some hundred at a time. Raises `DDictError`: another epoch has begun meanwhile."""
        handle, deadline = self.handle, self.handle.deadline()
        epoch, keys = handle.in_one_epoch(lambda: (handle.epoch, self._keys_of(managers, deadline)()), deadline)
        for some in self._items(keys, handle.deadline):
            if handle.epoch != epoch:
                error = DDictError("an epoch has begun meanwhile: what is left is not of one cut", hint="begin anew")
                error.retryable = True
                raise error
            yield from some

    def _items(
        self, keys: list[tuple[int, list[bytes]]], deadline: Callable[[], float]
    ) -> Iterator[list[tuple[Any, Any]]]:
        for manager, its in keys:
            for at in range(0, len(its), _AT_ONCE):
                some = its[at : at + _AT_ONCE]
                items = []
                for key, found in zip(some, self._get_many(manager, some, deadline()), strict=True):
                    if isinstance(found, DDictKeyError):
                        continue  # deleted in between
                    if isinstance(found, FlashpointError):
                        raise found
                    items.append((decode_key(key), found.value))
                yield items

    def _get_many(self, manager: int, keys: list[bytes], deadline: float) -> list[Found | FlashpointError]:
        """Each with its own outcome."""
        answer = self.ask(manager, "many", *keys, deadline=deadline, ops=[["get", {}, 1]] * len(keys))
        found: list[Found | FlashpointError] = []
        at = 0
        for key, (error, own, count) in zip(keys, answer.fields["outcomes"], strict=True):
            blobs = answer.blobs[at : at + count]
            at += count
            if error is not None:
                found.append(REQUESTS.rebuild(error))
                continue
            try:
                found.append(_found(own, blobs, copy=False))
            except StaleValueError:
                found.append(self.get(manager, key, deadline=deadline))
        return found


@contextlib.contextmanager
def _reserved(exchange: Exchange, encoded: codec.Encoded, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A reservation for a large value, which the manager gets back if it is not put."""
    size = shared_memory.object_size(encoded)
    reservation = exchange.request("allocate", {"n": size, "c": fields["c"], "e": fields["e"]}).fields
    try:
        yield reservation
    except BaseException:
        with contextlib.suppress(FlashpointError):  # when the connection is gone, the manager knows
            exchange.request("abandon", {"v": reservation["v"]})
        raise


def _found(fields: dict[str, Any], blobs: Sequence[bytes], copy: bool) -> Found:
    if "path" in fields:
        value = shared_memory.read_value(fields["path"], fields["v"], copy=copy)
    elif "v" in fields:
        value = shared_memory.read_object(blobs[0], fields["v"], copy=copy, file_size=fields["size"])
    else:
        value = codec.from_inline(blobs[0], copy=copy)
    return Found(value, fields["s"])


class Batch:
    """Writes of one handle, by manager. Not thread-safe."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._items: dict[int, dict[bytes, bytes]] = {}
        self._bytes: dict[int, int] = {}

    def add(self, manager: int, key: bytes, inline: bytes, deadline: float) -> None:
        """Collect a write; sends what there is for this manager if that is much. ``inline``: the value, by
        `codec.to_inline`. Raises `FlashpointError`: what was sent could not be written."""
        items = self._items.setdefault(manager, {})
        items[key] = inline
        self._bytes[manager] = self._bytes.get(manager, 0) + len(key) + len(inline)
        if len(items) >= _MOST or self._bytes[manager] >= _MOST_BYTES:
            self._send(manager, deadline)

    def discard(self, manager: int, key: bytes) -> None:
        """Forget a write that a later one, which does not wait, has overtaken."""
        self._items.get(manager, {}).pop(key, None)

    def flush(self, deadline: float) -> None:
        """Send everything. Raises `FlashpointError`: some of it could not be written. That stays, to be sent again."""
        for manager in list(self._items):
            self._send(manager, deadline)

    def drop(self) -> None:
        """Forget what was collected."""
        self._items.clear()
        self._bytes.clear()

    def _send(self, manager: int, deadline: float) -> None:
        items = list(self._items.get(manager, {}).items())
        if not items:
            return
        blobs = [part for item in items for part in item]
        ops = [["put", {}, 2] for _ in items]
        answer = self._access.change(manager, "many", *blobs, ops=ops, again=True, deadline=deadline)
        for error, _, _ in answer["outcomes"]:
            if error is not None:
                raise REQUESTS.rebuild(error)
        # Only now: what was refused, or found nobody, must not be left out of the next checkpoint without a word.
        self._items.pop(manager, None)
        self._bytes.pop(manager, None)
