"""Small writes that are collected and sent together.

Owns what is collected, and when it goes. The order of writes to one key is kept; writes that are not small do not
wait here.
"""

from __future__ import annotations

from ml_flashpoint.ddict.handle import Handle

_MOST = 1024
_MOST_BYTES = 4 << 20


class Batch:
    """Writes of one handle, by manager. Not thread-safe."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._items: dict[int, dict[bytes, bytes]] = {}
        self._bytes: dict[int, int] = {}

    def add(self, manager: int, key: bytes, inline: bytes, until: float) -> None:
        """Collect a write; sends what there is for this manager if that is much.

        Args:
            inline: the value, by `values.to_inline`.

        Raises:
            FlashpointError: what was sent could not be written.
        """
        items = self._items.setdefault(manager, {})
        items[key] = inline
        self._bytes[manager] = self._bytes.get(manager, 0) + len(key) + len(inline)
        if len(items) >= _MOST or self._bytes[manager] >= _MOST_BYTES:
            self._send(manager, until)

    def discard(self, manager: int, key: bytes) -> None:
        """Forget a write that a later one, which does not wait, has overtaken."""
        self._items.get(manager, {}).pop(key, None)

    def flush(self, until: float) -> None:
        """Send everything.

        Raises:
            FlashpointError: some of it could not be written. That stays, to be sent again.
        """
        for manager in list(self._items):
            self._send(manager, until)

    def drop(self) -> None:
        """Forget what was collected."""
        self._items.clear()
        self._bytes.clear()

    def _send(self, manager: int, until: float) -> None:
        items = list(self._items.get(manager, {}).items())
        if not items:
            return
        handle = self._handle

        def send(epoch: int) -> None:
            fields = {"c": handle.checkpoint_id, "w": handle.id, "e": epoch}
            handle.client.put_many(manager, items, fields, until=until)

        handle.write(send, until)
        # Only now: what was refused, or found nobody, must not be left out of the next checkpoint without a word.
        self._items.pop(manager, None)
        self._bytes.pop(manager, None)
