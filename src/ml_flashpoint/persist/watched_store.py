"""A durable store that tells when something happens in it, for whoever has to know whether it hangs. Owns no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from ml_flashpoint.persist.store import DurableStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

_T = TypeVar("_T")


class WatchedStore(DurableStore):
    """See the module, and the base class.

    Args:
        store: which.
        moved: called after each call to it, and for each piece that it takes; what it raises is raised from there.
    """

    def __init__(self, store: DurableStore, moved: Callable[[], None]) -> None:
        self._store = store
        self._moved = moved

    def path_of(self, name: str) -> str:
        """See the base class."""
        return self._store.path_of(name)

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """See the base class."""

        def told() -> Iterator[Buffer]:
            for chunk in chunks:
                yield chunk
                self._moved()

        return self._told(self._store.write(name, told()))

    def size(self, name: str) -> int:
        """See the base class."""
        return self._told(self._store.size(name))

    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        """See the base class."""
        self._told(self._store.read_into(name, begin, into))

    def list(self, folder: str = "") -> list[str]:
        """See the base class."""
        return self._told(self._store.list(folder))

    def remove(self, name: str) -> None:
        """See the base class."""
        self._told(self._store.remove(name))

    def remove_folder(self, folder: str) -> None:
        """See the base class."""
        self._told(self._store.remove_folder(folder))

    def lock(self, name: str, timeout_s: float) -> AbstractContextManager[object] | None:
        """See the base class."""
        return self._told(self._store.lock(name, timeout_s))

    def _told(self, result: _T) -> _T:
        self._moved()
        return result
