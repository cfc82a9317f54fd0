"""Files behind any URL that fsspec knows: object stores, HDFS, SFTP.

Owns how a file gets its name there, whole or not at all. Deadlines, retries and credentials are those of the filesystem
that fsspec gives.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from ml_flashpoint.format.errors import DamagedError, FlashpointError, InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.format.files import as_octets, writing
from ml_flashpoint.stores.files import PIECE_BYTES, Files, reading, split_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PUBLISHED_WHEN_COMPLETE: Final = frozenset(
    ("abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "oci", "ocilake", "oss", "s3", "s3a", "tos")
)
"""Protocols of object stores: a name appears there when its upload is complete, and renaming would be a copy."""

_ONE_REQUEST_BYTES: Final = 4 * 2**20
"""Up to this size, a file goes to an object store in one request, which replaces at once."""


class UrlFiles(Files):
    """Files below a URL. Thread-safe if the filesystem is.

    On an object store, a file larger than 4 MiB is uploaded under its own name: choose a name that nothing refers to
    yet. Elsewhere, a file gets its name when it is complete. A folder of this machine is better kept in a
    `directory.Directory`, which also makes names durable, and has locks.

    Args:
        url: such as ``s3://bucket/folder`` or ``memory://folder``.

    Raises:
        InvalidArgumentError: `url` is empty; or, on first use, fsspec does not know this kind of URL or lacks a package
            for it.
    """

    def __init__(self, url: str) -> None:
        if not url:
            raise InvalidArgumentError("a URL is needed", argument="url", value=url)
        self._url = url
        self._filesystem: Any = None
        self._root = ""
        self._renames = True
        self._opening = threading.Lock()

    def _open(self) -> Any:
        with self._opening:
            if self._filesystem is None:
                try:
                    from fsspec.core import url_to_fs
                except ImportError as error:
                    raise FlashpointError("fsspec is not installed", hint="pip install fsspec") from error
                try:
                    filesystem, root = url_to_fs(self._url)
                except (ValueError, ImportError) as error:
                    raise InvalidArgumentError(f"fsspec: {error}", argument="url", value=self._url) from error
                protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
                self._renames = protocols.isdisjoint(_PUBLISHED_WHEN_COMPLETE)
                self._root = root.rstrip("/")
                self._filesystem = filesystem
        return self._filesystem

    def path_of(self, name: str) -> str:
        """Return the URL."""
        return "/".join([self._url.rstrip("/"), *split_name(name, allow_root=True)])

    def _inner(self, name: str, *, allow_root: bool = False) -> str:
        return "/".join([self._root, *split_name(name, allow_root=allow_root)])

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """See `Files.write`."""
        filesystem, target = self._open(), self._inner(name)
        folder = target.rpartition("/")[0]
        with writing(self.path_of(name), Exception):
            if self._renames:
                path = f"{folder}/.{secrets.token_hex(8)}.tmp"
                filesystem.makedirs(folder, exist_ok=True)
            else:
                content, rest = _of_one_request(chunks)
                if rest is None:
                    filesystem.pipe_file(target, content)
                    return len(content)
                path, chunks = target, rest
            try:
                written = _write_stream(filesystem, path, chunks)
                if path != target:
                    filesystem.mv(path, target)
            except BaseException:
                with contextlib.suppress(Exception):
                    filesystem.rm_file(path)
                raise
            return written

    def size(self, name: str) -> int:
        """See `Files.size`."""
        filesystem = self._open()
        with reading(self.path_of(name), Exception):
            filesystem.invalidate_cache()
            found = filesystem.info(self._inner(name))
            if found.get("type") != "file":
                raise DamagedError("this is not a file", path=self.path_of(name))
            return int(found["size"])

    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        """See `Files.read_into`."""
        filesystem = self._open()
        with reading(self.path_of(name), Exception):
            for done in range(0, len(into), PIECE_BYTES):
                piece = into[done : done + PIECE_BYTES]
                end = begin + done + len(piece)
                data = filesystem.cat_file(self._inner(name), begin + done, end)
                if len(data) != len(piece):
                    raise DamagedError(f"the file ends before byte {end}", path=self.path_of(name))
                piece[:] = data

    def list(self, folder: str = "") -> list[str]:
        """See `Files.list`."""
        filesystem = self._open()
        try:
            with reading(self.path_of(folder), Exception):
                filesystem.invalidate_cache()
                inner = self._inner(folder, allow_root=True)
                paths = {path.rstrip("/") for path in filesystem.ls(inner, detail=False)}
                # Some object stores list a folder in itself.
                return sorted(path.rpartition("/")[2] for path in paths - {inner})
        except ObjectNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """See `Files.remove`."""
        filesystem = self._open()
        with writing(self.path_of(name), Exception), contextlib.suppress(FileNotFoundError):
            filesystem.rm_file(self._inner(name))

    def remove_folder(self, folder: str) -> None:
        """See `Files.remove_folder`."""
        filesystem = self._open()
        with writing(self.path_of(folder), Exception), contextlib.suppress(FileNotFoundError):
            filesystem.invalidate_cache()
            filesystem.rm(self._inner(folder), recursive=True)


def _of_one_request(chunks: Iterable[Buffer]) -> tuple[bytes, Iterator[Buffer] | None]:
    """Return all bytes, and None; or, if they are too many for one request, all chunks."""
    start = bytearray()
    rest = iter(chunks)
    for chunk in rest:
        view = as_octets(chunk)
        if len(start) + len(view) > _ONE_REQUEST_BYTES:
            return b"", itertools.chain([start, view], rest)
        start += view
    return bytes(start), None


def _write_stream(filesystem: Any, path: str, chunks: Iterable[Buffer]) -> int:
    written = 0
    # Leaving it on an error completes the upload, of half a file: the caller removes that.
    with filesystem.open(path, "wb") as file:
        for chunk in chunks:
            view = as_octets(chunk)
            if len(view):
                file.write(view)
            written += len(view)
        file.flush()
        with contextlib.suppress(AttributeError, OSError):
            os.fsync(file.fileno())
    return written
