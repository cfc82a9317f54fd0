"""Reading and writing keys through one handle: what `DDict` is made of.

Owns which manager a key goes to, how single keys, all keys and many keys at once are asked for, and the small writes
that are collected and sent together. Keys are encoded here; what a user may say and gets to hear is `DDict`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ml_flashpoint.ddict.client import codec
from ml_flashpoint.ddict.client.handle import Handle
from ml_flashpoint.ddict.client.keys import decode_key, place
from ml_flashpoint.ddict.client.session import Client, Found
from ml_flashpoint.ddict.errors import DDictError, DDictKeyError
from ml_flashpoint.ddict.manager.requests import PERSISTENT
from ml_flashpoint.ddict.options import COORDINATOR
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.client import Reply

_AT_ONCE = 256


_MOST = 1024
_MOST_BYTES = 4 << 20


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
        handle = self.handle
        deadline = handle.deadline() if deadline is None else deadline

        def send(epoch: int) -> Found:
            fields: dict[str, Any] = {"c": handle.checkpoint_id, "e": epoch}
            if wait:
                fields["wait"] = True
            return self.client.get(manager, key, fields, deadline=deadline, copy=copy)

        return handle.in_epoch(send, deadline)

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
        handle = self.handle

        def send(epoch: int) -> bool:
            fields: dict[str, Any] = {"c": handle.checkpoint_id, "w": handle.id, "e": epoch}
            if flags:
                fields["f"] = flags
            if sequence is not None:
                fields["x"] = sequence
            return self.client.put(manager, key, encoded, fields, deadline=deadline)

        return handle.write(send, deadline, lasting=bool(flags & PERSISTENT))

    def change(
        self, manager: int, operation: str, *key: bytes, again: bool = False, deadline: float, **fields: Any
    ) -> dict[str, Any]:
        """Have one manager change a key, or all of its keys; ``again``: twice, where nobody knows whether it was done.
        A key that was deleted would not be there the second time."""
        handle = self.handle

        def send(epoch: int) -> dict[str, Any]:
            told = {**fields, "c": handle.checkpoint_id, "w": handle.id, "e": epoch}
            return self.client.links.call(manager, operation, told, key, deadline=deadline, again=again).fields

        return handle.write(send, deadline)

    def ask(self, manager: int, operation: str, *key: bytes, deadline: float, **fields: Any) -> Reply:
        """Ask one manager something about a key, or all of its keys."""
        handle = self.handle

        def send(epoch: int) -> Reply:
            told = {**fields, "c": handle.checkpoint_id, "e": epoch}
            return self.client.links.call(manager, operation, told, key, deadline=deadline)

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
        found, at = [], 0
        while at < len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            found.append(data[at + 4 : end])
            at = end
        return found

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
        """The same, some hundred at a time.

        Raises:
            DDictError: another epoch has begun meanwhile.
        """
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
        def send(epoch: int) -> list[Found | FlashpointError]:
            fields = {"c": self.handle.checkpoint_id, "e": epoch}
            return self.client.get_many(manager, keys, fields, deadline=deadline, copy=False)

        return self.handle.in_epoch(send, deadline)


class Batch:
    """Writes of one handle, by manager. Not thread-safe."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._items: dict[int, dict[bytes, bytes]] = {}
        self._bytes: dict[int, int] = {}

    def add(self, manager: int, key: bytes, inline: bytes, deadline: float) -> None:
        """Collect a write; sends what there is for this manager if that is much.

        Args:
            inline: the value, by `codec.to_inline`.

        Raises:
            FlashpointError: what was sent could not be written.
        """
        items = self._items.setdefault(manager, {})
        items[key] = inline
        self._bytes[manager] = self._bytes.get(manager, 0) + len(key) + len(inline)
        if len(items) >= _MOST or self._bytes[manager] >= _MOST_BYTES:
            self._send(manager, deadline)

    def discard(self, manager: int, key: bytes) -> None:
        """Forget a write that a later one, which does not wait, has overtaken."""
        self._items.get(manager, {}).pop(key, None)

    def flush(self, deadline: float) -> None:
        """Send everything.

        Raises:
            FlashpointError: some of it could not be written. That stays, to be sent again.
        """
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
        handle = self._handle

        def send(epoch: int) -> None:
            fields = {"c": handle.checkpoint_id, "w": handle.id, "e": epoch}
            handle.client.put_many(manager, items, fields, deadline=deadline)

        handle.write(send, deadline)
        # Only now: what was refused, or found nobody, must not be left out of the next checkpoint without a word.
        self._items.pop(manager, None)
        self._bytes.pop(manager, None)
