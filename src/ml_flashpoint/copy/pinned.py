"""Page-locked memory: which parts of a mapping devices may read and write by themselves.

Memory is locked by slices, cut at multiples of `SLICE` of the address. No transfer may span two of them, so transfers
are cut at the same places, and need not ask what was locked together.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ml_flashpoint.copy import cuda

_log = logging.getLogger(__name__)

SLICE = 64 << 20
"""Bytes that one call locks. The call holds the lock of the process's mappings meanwhile."""

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class Runtime:
    """The calls of CUDA's runtime library that torch has none for, or none in all its releases.

    They are looked up among the dependencies of torch's own library: errors are kept by each copy of the runtime that
    a process has loaded, and only the one that torch uses matters.

    Raises:
        AttributeError: torch was linked in another way, and they cannot be found.
    """

    def __init__(self) -> None:
        import torch

        library = ctypes.CDLL(torch._C.__file__)
        prefix = "hip" if torch.version.hip else "cuda"
        arguments = {
            "HostRegister": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
            "HostUnregister": [ctypes.c_void_p],
            "GetLastError": [],
            "ThreadExchangeStreamCaptureMode": [ctypes.POINTER(ctypes.c_int)],
        }
        self._calls: dict[str, Any] = {}
        for name, types in arguments.items():
            call = self._calls[name] = getattr(library, prefix + name)
            call.argtypes, call.restype = types, ctypes.c_int

    def register(self, address: int, size: int) -> int:
        """Lock pages, faulting them in. Return CUDA's status."""
        return int(self._calls["HostRegister"](address, size, _PORTABLE))

    def unregister(self, address: int) -> int:
        """Unlock what one call has locked. Return CUDA's status."""
        return int(self._calls["HostUnregister"](address))

    def last_error(self) -> int:
        """Take away the error that a call of this thread has left: a kernel of the user's would raise it."""
        return int(self._calls["GetLastError"]())

    @contextlib.contextmanager
    def guard(self, device: int) -> Iterator[None]:
        """Have calls be about this device, on any thread, and disturb no thread that is capturing a graph.

        They would make a context on the first device otherwise.
        """
        import torch

        mode = ctypes.c_int(_RELAXED)
        exchange = self._calls["ThreadExchangeStreamCaptureMode"]
        with torch.cuda.device(device):
            exchange(ctypes.byref(mode))
            try:
                yield
            finally:
                exchange(ctypes.byref(mode))


class _Process:
    """The page-locks of this process. Every access is one atomic step, and no lock is held: the garbage collector may
    end a mapping anywhere, which unlocks memory.

    Attributes:
        device: the index of a device that it has copied from or to; None before.
        locked: end of the locked memory of each mapping, by the begin of that.
        runtime: None before it is needed, and False if it cannot be found.
    """

    def __init__(self) -> None:
        self.device: int | None = None
        self.locked: dict[int, int] = {}
        self.runtime: Any = None
        self.warned: set[str] = set()


_process = _Process()


def _begin_anew() -> None:
    global _process
    _process = _Process()  # nothing is locked for a forked child


os.register_at_fork(after_in_child=_begin_anew)


def _runtime() -> Any:
    """Return the runtime library; None if it cannot be found, which is logged once."""
    if _process.runtime is None:
        try:
            _process.runtime = Runtime()
        except (AttributeError, OSError) as error:
            _process.runtime = False
            _warn(f"CUDA's runtime library cannot be found: {error}")
    return _process.runtime or None


def _warn(reason: str) -> None:
    """Log why memory is not locked; once for each reason."""
    if reason not in _process.warned:
        _process.warned.add(reason)
        _log.warning("checkpoint memory is not page-locked, so device copies are slower: %s", reason)


def note_device(device: int) -> None:
    """Lock memory from now on: this process works on a device."""
    _process.device = device


def is_locked(address: int, nbytes: int) -> bool:
    """Return True if this process has locked all of this memory, which lies within one slice."""
    return any(begin <= address and address + nbytes <= end for begin, end in _process.locked.copy().items())


def slices(begin: int, end: int, step: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut memory ``begin:end`` at multiples of ``step``, a divisor of `SLICE`, which is the default."""
    step = step or SLICE
    while begin < end:
        border = min(end, (begin // step + 1) * step)
        yield begin, border
        begin = border


class PageLock:
    """The page-lock of one mapping. For one thread at a time; :meth:`release` for any.

    After a refusal no more is tried. Memory that is not locked is never given to a device.

    Args:
        address, size: of the mapping. The lock must be released before the mapping ends.
    """

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        self._held: list[int] = []
        self._locked = 0
        self._refused = False
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @property
    def is_whole(self) -> bool:
        """True if the whole mapping is locked."""
        return self._locked == self._size

    @property
    def is_due(self) -> bool:
        """True if the process works on a device, and there is more to lock that CUDA has not refused."""
        return not self._refused and not self.is_whole and _process.device is not None and cuda.in_use()

    def extend(self) -> bool:
        """Lock the next slice. Return True if there is more to lock."""
        runtime = _runtime() if self.is_due else None
        if runtime is None:
            return False
        begin = self._address + self._locked
        _, end = next(slices(begin, self._address + self._size))
        reason = ""
        try:
            with self._lock, runtime.guard(_process.device):
                if status := int(runtime.register(begin, end - begin)):
                    runtime.last_error()
                    reason = f"CUDA error {status}"
                else:
                    self._held.append(begin)
                    self._locked += end - begin
                    _process.locked[self._address] = end
        except RuntimeError as error:
            reason = str(error)
        if reason:
            self._refused = True
            _warn(reason)
        return self.is_due

    def release(self) -> None:
        """Unlock the mapping. A forked child has locked nothing, and may not touch CUDA."""
        if not self._held or os.getpid() != self._owner or sys.is_finalizing():
            return
        runtime, usable = _runtime(), cuda.in_use()
        with self._lock, runtime.guard(_process.device) if usable else contextlib.nullcontext():
            held, self._held, self._locked = self._held, [], 0
            _process.locked.pop(self._address, None)
            for begin in held:
                if usable and runtime.unregister(begin):
                    runtime.last_error()
