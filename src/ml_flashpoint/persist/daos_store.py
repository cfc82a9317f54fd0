"""A durable store in a DAOS container, through `pydaos`.

Owns how files lie in two key-value objects of the container: one says what files there are, the other holds their
bytes in chunks. The container itself is the user's: it must be there, is of type ``PYTHON``, and is neither made nor
destroyed here; other objects in it are not touched. `pydaos` comes with DAOS and is imported when first needed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    LoadError,
    ObjectNotFoundError,
    SaveError,
)
from ml_flashpoint.persist.store import DurableStore, as_octets, split_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FILES: Final = "mlflashpoint-files"
_CHUNKS: Final = "mlflashpoint-chunks"
_CHUNK_BYTES: Final = 2**20
_BATCH: Final = 16  # chunks in one call, which pydaos moves in parallel
_UPLOAD: Final = re.compile(r"[0-9a-f]{16}")
_MAX_SIZE: Final = 2**63 - 1


def has_pydaos() -> bool:
    """Whether `pydaos` is installed."""
    return importlib.util.find_spec("pydaos") is not None


class DaosStore(DurableStore):
    """Files in a container. Thread-safe: one call into `pydaos` at a time.

    Args:
        pool: label or UUID of the pool.
        container: label or UUID of the container.
    """

    def __init__(self, pool: str, container: str) -> None:
        self._pool = pool
        self._container = container
        self._lock = threading.RLock()
        self._objects: tuple[Any, Any] | None = None

    @classmethod
    def from_path(cls, path: str) -> DaosStore:
        """Returns the store of ``<pool>/<container>``, with or without ``daos://`` before it.

        Raises:
            InvalidArgumentError: `path` is not of this form.
        """
        pool, _, container = path.removeprefix("daos://").partition("/")
        if not pool or not container or "/" in container:
            raise InvalidArgumentError("must be <pool>/<container>", argument="path", value=path)
        return cls(pool, container)

    def _open(self) -> tuple[Any, Any]:
        if self._objects is None:
            if not has_pydaos():
                raise FlashpointError(
                    "pydaos is not installed", hint="it comes with DAOS; without DAOS, persist to a directory or URL"
                )
            try:
                pydaos = importlib.import_module("pydaos")
                container = pydaos.DCont(self._pool, self._container)
                self._objects = tuple(_object(pydaos, container, name) for name in (_FILES, _CHUNKS))
            except Exception as error:
                raise FlashpointError(
                    f"the DAOS container cannot be opened: {type(error).__name__}: {error}",
                    path=self.path_of(""),
                    hint=f"make it with: daos cont create {self._pool} {self._container} --type PYTHON",
                ) from error
        return self._objects

    def path_of(self, name: str) -> str:
        """Returns what looks like a URL."""
        return "/".join([f"daos://{self._pool}/{self._container}", *split_name(name, allow_root=True)])

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """See `DurableStore.write`: the chunks first, then what says that there is the file."""
        split_name(name)
        upload, pieces, count, size = secrets.token_hex(8), _pieces(chunks), 0, 0
        with self._lock, self._calling(name, SaveError):
            files, store = self._open()
            before = self._replaceable(name)
            try:
                while batch := list(itertools.islice(pieces, _BATCH)):
                    keys = range(count, count + len(batch))
                    count += len(batch)  # they may be there from here on
                    size += sum(map(len, batch))
                    store.bput({f"{upload}.{key}": piece for key, piece in zip(keys, batch, strict=True)})
            except BaseException:
                with contextlib.suppress(Exception):  # as far as the container lets us
                    _drop_chunks(store, upload, count * _CHUNK_BYTES)
                raise
            # From here on they stay, whatever happens: a put that fails may be done all the same, even later, and the
            # file would be one without its chunks.
            files.put(name, json.dumps({"upload": upload, "size": size}).encode())
            _drop_chunks(store, *before)
        return size

    def size(self, name: str) -> int:
        """See `DurableStore.size`."""
        return self._find(name)[1]

    def _find(self, name: str, kind: type[FlashpointError] = LoadError) -> tuple[str, int]:
        split_name(name)
        with self._lock, self._calling(name, kind):
            try:
                head = self._open()[0].get(name)
            except KeyError:
                raise ObjectNotFoundError("there is no such file", path=self.path_of(name)) from None
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                content = json.loads(head)
                upload, size = content["upload"], content["size"]
                if _UPLOAD.fullmatch(upload) and type(size) is int and 0 <= size <= _MAX_SIZE:
                    return upload, size
            raise DamagedError("the record of the file is not valid", path=self.path_of(name))

    def _replaceable(self, name: str) -> tuple[str, int]:
        """What is known of the chunks of a file that is there no more in a moment."""
        try:
            return self._find(name, SaveError)
        except (ObjectNotFoundError, DamagedError):
            return "", 0

    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        """See `DurableStore.read_into`."""
        octets = as_octets(into)
        upload, size = self._find(name)
        end = begin + len(octets)
        path = self.path_of(name)
        if end > size:
            raise DamagedError(f"the file ends at byte {size}, before byte {end}", path=path)
        last = -(-end // _CHUNK_BYTES)
        for first in range(begin // _CHUNK_BYTES, last, _BATCH):
            batch: dict[str, Any] = {f"{upload}.{i}": None for i in range(first, min(first + _BATCH, last))}
            with self._lock, self._calling(name, LoadError):
                self._open()[1].bget(batch)
            for index, piece in enumerate(batch.values(), first):
                start = index * _CHUNK_BYTES
                if piece is None or len(piece) != min(_CHUNK_BYTES, size - start):
                    raise DamagedError(f"chunk {index} of the file is missing or cut short", path=path)
                low, high = max(begin, start), min(end, start + len(piece))
                octets[low - begin : high - begin] = memoryview(piece)[low - start : high - start]

    def list(self, folder: str = "") -> list[str]:
        """See `DurableStore.list`. Takes time proportional to the files of the whole store."""
        depth = len(split_name(folder, allow_root=True))
        prefix = folder + "/" if folder else ""
        with self._lock, self._calling(folder, LoadError):
            return sorted({key.split("/")[depth] for key in self._open()[0] if key.startswith(prefix)})

    def remove(self, name: str) -> None:
        """See `DurableStore.remove`."""
        split_name(name)
        with self._lock, self._calling(name, SaveError):
            files, store = self._open()
            before = self._replaceable(name)
            files.put(name, None)
            _drop_chunks(store, *before)

    def remove_folder(self, folder: str) -> None:
        """See `DurableStore.remove_folder`. Chunks of a writer that was killed, or whose last call failed,
        may belong to no file, and stay."""
        split_name(folder)
        with self._lock, self._calling(folder, SaveError):
            found = [key for key in self._open()[0] if key.startswith(folder + "/")]
        for name in found:
            self.remove(name)

    @contextlib.contextmanager
    def _calling(self, name: str, kind: type[FlashpointError]) -> Iterator[None]:
        try:
            yield
        except FlashpointError:
            raise
        except Exception as error:  # pydaos raises an error of its own, without a documented place
            raise kind(f"DAOS: {type(error).__name__}: {error}", path=self.path_of(name)) from error


def _drop_chunks(store: Any, upload: str, size: int) -> None:
    count = -(-size // _CHUNK_BYTES)
    for first in range(0, count, _BATCH):
        store.bput({f"{upload}.{i}": None for i in range(first, min(first + _BATCH, count))})


def _object(pydaos: Any, container: Any, name: str) -> Any:
    try:
        return container.get(name)
    except pydaos.DObjNotFound:
        return container.dict(name)


def _pieces(chunks: Iterable[Buffer]) -> Iterator[bytes]:
    """The same bytes in pieces of the size of a chunk, all but the last."""
    piece = bytearray()
    for chunk in chunks:
        view = as_octets(chunk)
        while len(view):
            taken = min(len(view), _CHUNK_BYTES - len(piece))
            piece += view[:taken]
            view = view[taken:]
            if len(piece) == _CHUNK_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)
