"""CUDA as this package uses it, beside the copies themselves, which are `device_copy`'s.

Owns the questions that may be asked without initialising CUDA in a process that does not use it (after which a process
cannot fork children that do), which device takes the place of the one that something was saved from, and page-locking:
which host memory devices may read and write by themselves.

Page-locking goes by slices, cut at multiples of `SLICE` of the address. No transfer may span two of them, so copies are
cut at the same places, and need not ask what was locked together.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # where it is not imported, there is no CUDA either: managers of dictionaries do without
    import torch

_log = logging.getLogger(__name__)

SLICE = 64 << 20
"""Bytes that are locked by one call. It holds the lock of the process's mappings for as long as that takes."""

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_ALREADY_LOCKED = 712  # cudaErrorHostMemoryAlreadyRegistered


def in_use() -> bool:
    """Whether this process has CUDA initialised; False in its forked children, which cannot use it.

    ``torch.cuda.is_available()`` would initialise the driver to find out.
    """
    found = sys.modules.get("torch")
    return found is not None and bool(found.cuda.is_initialized())


def device_count() -> int:
    """Devices that this process may use. Asks NVML where it can, so nothing is initialised."""
    import torch

    return torch.cuda.device_count()


def are_on_devices(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of these is on a CUDA device. Costs nothing where there is none."""
    return in_use() and any(tensor.is_cuda for tensor in tensors)


def is_capturing() -> bool:
    """Whether this thread is capturing a CUDA graph."""
    return in_use() and bool(sys.modules["torch"].cuda.is_current_stream_capturing())


def settle() -> None:
    """Have this thread's work on its device done before other threads read the outcome: on the default stream, as they
    do, which this one may not be using."""
    if not in_use():
        return
    import torch

    if (stream := torch.cuda.current_stream()) != torch.cuda.default_stream():
        stream.synchronize()


def device_today(saved: str, ours: Collection[torch.device] = ()) -> torch.device:
    """Where a tensor is loaded to that was on ``saved`` when it was saved, maybe by another rank or on another node.

    Args:
        saved: the device's name. Its index means nothing today, but where this process works on several devices.
        ours: the devices that this process works on, as far as they are known.

    Returns:
        The only CUDA device in ``ours``, or of several the one of that name, else the current one. The CPU where there
        is no CUDA device, or the tensor was on none.
    """
    import torch

    if not saved.startswith("cuda") or not device_count():
        return torch.device("cpu")
    mine = {device for device in ours if device.type == "cuda"}
    if len(mine) == 1:
        return mine.pop()
    if (same := torch.device(saved)) in mine:
        return same
    return torch.device("cuda", torch.cuda.current_device())


# ---- page-locking ---------------------------------------------------------------------------------------------


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
        """Lock pages, faulting them in. Returns CUDA's status."""
        return int(self._calls["HostRegister"](address, size, _PORTABLE))

    def unregister(self, address: int) -> int:
        """Unlock what was locked by one call. Returns CUDA's status."""
        return int(self._calls["HostUnregister"](address))

    def last_error(self) -> int:
        """The error that a call of this thread has left, and takes it away: a kernel of the user's would raise it."""
        return int(self._calls["GetLastError"]())

    @contextlib.contextmanager
    def guard(self, device: int) -> Iterator[None]:
        """For calls on any thread: they are about this device, not the first one, on which they would make a context,
        and do not disturb another thread that is capturing a graph."""
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
    """What this process knows of page-locking. Every access is one atomic step, and no lock is held: the garbage
    collector may end a mapping anywhere, and then memory is unlocked.

    Attributes:
        device: the index of a device that it has copied from or to; None before.
        locked: the ranges that are locked, by the number of the slice that they are in: where each begins and ends.
    """

    def __init__(self) -> None:
        self.device: int | None = None
        self.locked: dict[int, dict[int, int]] = {}
        self._runtime: Any = None
        self._said: set[str] = set()

    def runtime(self) -> Any:
        """The runtime library; None if it cannot be found, which is said once."""
        if self._runtime is None:
            try:
                self._runtime = Runtime()
            except (AttributeError, OSError) as error:
                self._runtime = False
                self.say(f"CUDA's runtime library cannot be found: {error}")
        return self._runtime or None

    def say(self, reason: str) -> None:
        """Say why memory is not locked; once for each reason."""
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("checkpoint memory is not page-locked, so device copies are slower: %s", reason)


_process = _Process()


def _begin_anew() -> None:
    global _process
    _process = _Process()  # nothing is locked for a forked child


os.register_at_fork(after_in_child=_begin_anew)


def note_device(device: int) -> None:
    """Take note of a device that this process works on: from now on memory is locked."""
    _process.device = device


def works_on_devices() -> bool:
    """Whether this process has copied from a device, or to one."""
    return _process.device is not None


def is_locked(address: int, nbytes: int) -> bool:
    """Whether this process has locked all of this memory, which lies within one slice."""
    ranges = _process.locked.get(address // SLICE)
    return ranges is not None and any(
        begin <= address and address + nbytes <= end for begin, end in ranges.copy().items()
    )


def slices(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Memory ``begin:end``, cut where transfers must be."""
    while begin < end:
        border = min(end, (begin // SLICE + 1) * SLICE)
        yield begin, border
        begin = border


class PageLock:
    """What of one mapping is locked. For one thread at a time, but for :meth:`release`.

    A refusal is remembered: what is left is not tried again. Memory that is not locked is never given to a device, so
    that it does no harm if CUDA takes it for something that was there before.

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
        """Whether the whole mapping is locked."""
        return self._locked == self._size

    @property
    def is_due(self) -> bool:
        """Whether there is something left to lock in a process that works on a device, and it may be."""
        return not self._refused and not self.is_whole and _process.device is not None and in_use()

    def extend(self) -> bool:
        """Lock the next slice. Returns whether there is more to lock."""
        runtime = _process.runtime() if self.is_due else None
        if runtime is None:
            return False
        begin = self._address + self._locked
        _, end = next(slices(begin, self._address + self._size))
        try:
            with self._lock, runtime.guard(_process.device):
                status = self._register(runtime, begin, end - begin)
                if status == 0:
                    self._held.append(begin)
                    self._locked += end - begin
                    _process.locked.setdefault(begin // SLICE, {})[begin] = end
            reason = f"CUDA error {status}"
        except RuntimeError as error:
            status, reason = -1, str(error)
        if status:
            self._refused = True
            _process.say(reason)
        return self.is_due

    def _register(self, runtime: Any, begin: int, size: int) -> int:
        status = int(runtime.register(begin, size))
        if status == _ALREADY_LOCKED:
            # Memory that was here before went without being unlocked: CUDA still means its pages, not ours.
            runtime.last_error()
            if runtime.unregister(begin) == 0:
                status = int(runtime.register(begin, size))
        if status:
            runtime.last_error()
        return status

    def release(self) -> None:
        """Unlock it. A forked child has locked nothing, and may not touch CUDA."""
        if not self._held or os.getpid() != self._owner or sys.is_finalizing():
            return
        runtime, usable = _process.runtime(), in_use()
        with self._lock, runtime.guard(_process.device) if usable else contextlib.nullcontext():
            held, self._held, self._locked = self._held, [], 0
            for begin in held:
                _process.locked.get(begin // SLICE, {}).pop(begin, None)
                if usable and runtime.unregister(begin):
                    runtime.last_error()
