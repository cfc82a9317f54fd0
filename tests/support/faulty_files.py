"""A filesystem of fsspec in this process's memory whose writes can be made to fail, hang, or find no room.

Usage: ``with faulty_files() as faults: Flashpoint(base, persist=faults.url)``; then ``faults.now = "raise"``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

PROTOCOL = "faulty"


class FaultyFileSystem(MemoryFileSystem):
    """See the module."""

    protocol: ClassVar[Any] = PROTOCOL
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[Faults | None] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace(f"{PROTOCOL}://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        assert self.faults is not None
        self.faults.meet("write" if "w" in mode else "read", path)
        return super()._open(path, mode, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        assert self.faults is not None
        self.faults.meet("list", path)
        return super().ls(path, detail, **kwargs)


class Faults:
    """What goes wrong now: ``raise``, ``hang``, ``full``, or None; for these operations, on paths with this text."""

    def __init__(self) -> None:
        self.url = f"{PROTOCOL}://{secrets.token_hex(4)}"
        self.now: str | None = None
        self.operations = {"write"}
        self.where = ".safetensors"
        self.met = threading.Event()
        self.go_on = threading.Event()

    def meet(self, operation: str, path: str) -> None:
        if self.now is None or operation not in self.operations or (operation == "write" and ".tmp" not in path):
            return
        self.met.set()
        if self.now == "hang":
            self.go_on.wait(60)
        elif self.now == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif self.now == "raise":
            raise ConnectionError("the store is away")


@contextlib.contextmanager
def faulty_files() -> Iterator[Faults]:
    fsspec.register_implementation(PROTOCOL, FaultyFileSystem, clobber=True)
    FaultyFileSystem.faults = faults = Faults()
    try:
        yield faults
    finally:
        faults.now = None
        faults.go_on.set()
        FaultyFileSystem.store.clear()
