"""A durable store that tells when something happens in it, for whoever has to know whether it hangs. Owns no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from ml_flashpoint.persist.store import DurableStore

if TYPE_CHECKING:
    from typing_extensions import Buffer


def watched_store(store: DurableStore, moved: Callable[[], None]) -> DurableStore:
    """Returns the same store, but ``moved`` is called after each call to it, and for each piece that it takes, and what
    that raises is raised from there."""
    return cast("DurableStore", _WatchedStore(store, moved))


class _WatchedStore:
    def __init__(self, store: DurableStore, moved: Callable[[], None]) -> None:
        self._store = store
        self._moved = moved

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            self._moved()
            return result

        return call

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        def told() -> Iterator[Buffer]:
            for chunk in chunks:
                yield chunk
                self._moved()

        written = self._store.write(name, told())
        self._moved()
        return written
