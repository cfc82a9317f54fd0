"""CUDA as this package uses it: devices, streams beside the program's, page-locked memory. Tests play the latter two.

No question initialises CUDA in a process that does not use it: such a process could not fork children that do.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ml_flashpoint.format.errors import SaveError

if TYPE_CHECKING:  # where it is not imported, there is no CUDA either: managers of dictionaries do without
    import torch

_log = logging.getLogger(__name__)
_POLL_S = 1e-3


def in_use() -> bool:
    """Return True if this process has CUDA initialised, without initialising the driver to find out."""
    found = sys.modules.get("torch")
    return found is not None and bool(found.cuda.is_initialized())


def device_count() -> int:
    """Return the number of devices that this process may use. torch asks NVML where it can."""
    import torch

    return torch.cuda.device_count()


def are_on_devices(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if any of these is on a CUDA device. Costs nothing where there is none."""
    return in_use() and any(tensor.is_cuda for tensor in tensors)


def indices(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the index of each tensor's device; -1 for the CPU."""
    import torch

    return list(map(torch.Tensor.get_device, tensors))


def is_capturing() -> bool:
    """Return True if this thread is capturing a CUDA graph."""
    return in_use() and bool(sys.modules["torch"].cuda.is_current_stream_capturing())


def settle() -> None:
    """Wait until the device of this thread has done what the thread has given it.

    Other threads read the outcome on the default stream, and a clock that starts here measures a copy alone.
    """
    if in_use() and not is_capturing():
        sys.modules["torch"].cuda.current_stream().synchronize()


def device_today(saved: str, ours: Collection[torch.device] = ()) -> torch.device:
    """Return the device to load a tensor to that was on ``saved`` at its save, maybe by another rank or node.

    Args:
        ours: the devices that this process works on, if the caller knows them.

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


def views_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return views of a 1-D tensor, one behind the other, with the shapes of these; by one call."""
    import torch

    return torch._C._nn.unflatten_dense_tensors(flat, list(tensors))


# ---- streams ----------------------------------------------------------------------------------------------------


class Event:
    """A point in a stream."""

    def __init__(self, device: torch.device, event: Any) -> None:
        self._device, self._event = device, event

    def hold(self) -> None:
        """Have what this thread gives its current stream from now on wait for the event. The thread itself goes on."""
        import torch

        with torch.cuda.device(self._device):
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait for the event, without using the processor. Return False if ``deadline_s`` seconds were not enough."""
        if deadline_s is None:
            self._event.synchronize()
            return True
        give_up = time.monotonic() + deadline_s
        while not self._event.query():
            if time.monotonic() >= give_up:
                return False
            time.sleep(_POLL_S)
        return True


class Stream:
    """A stream of the lowest priority beside the program's. Works on any thread, whatever its current device."""

    def __init__(self, index: int) -> None:
        import torch

        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream(priority=0)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Have the stream wait for what the current stream of this thread has been given so far. Raise a `SaveError` if
        that is being captured."""
        import torch

        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise SaveError(
                    "a CUDA graph is being captured: nothing can be copied for a checkpoint meanwhile",
                    hint="save and load before or after the capture, and between replays",
                )
            self._stream.wait_stream(torch.cuda.current_stream())

    def do(self, work: Callable[[], object]) -> None:
        """Call a function that gives the stream something to do."""
        import torch

        # The device first: a stream of another device than the current one makes a context there when it is left.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.no_grad():
            work()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return new memory of the device, for use on this stream only."""
        import torch

        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return new page-locked memory of the host; ordinary memory, which is slower, if CUDA refuses."""
        import torch

        with torch.cuda.device(self.device):
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep memory of the program from being used again before the stream has done what it was given so far."""
        tensor.record_stream(self._stream)

    def event(self) -> Event:
        """Return the event that the stream has done what it was given so far."""
        import torch

        with torch.cuda.device(self.device):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            return Event(self.device, event)


_streams: dict[tuple[int, str], Stream] = {}


def stream(index: int, purpose: str) -> Stream:
    """Return this process's stream of a device for a purpose."""
    found = _streams.get((index, purpose))
    return found if found is not None else _streams.setdefault((index, purpose), Stream(index))


os.register_at_fork(after_in_child=_streams.clear)


# ---- page-locked memory -----------------------------------------------------------------------------------------
#
# Memory is locked by slices, cut at multiples of `SLICE` of the address. No transfer may span two of them, so transfers
# are cut at the same places, and need not ask what was locked together.

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
    """The page-locks of this process, without a lock: garbage collection ends mappings, and so unlocks, anywhere."""

    def __init__(self) -> None:  # every access is one atomic step
        self.device: int | None = None  # index of one that this process has copied from or to
        self.locked: dict[int, int] = {}  # end of the locked memory of each mapping, by its begin
        self.runtime: Any = None  # until it is needed; False if it cannot be found
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
        _log.warning("slots cannot be page-locked, so copies from the device are slower: %s", reason)


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

    Attributes:
        is_whole: True if the whole mapping is locked.
    """

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        self._held: list[int] = []
        self._locked = 0
        self.is_whole = size == 0
        self._refused = False
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @property
    def is_due(self) -> bool:
        """True if the process works on a device, and there is more to lock that CUDA has not refused."""
        return not self._refused and not self.is_whole and _process.device is not None and in_use()

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
                    self.is_whole = self._locked == self._size
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
        runtime, usable = _runtime(), in_use()
        with self._lock, runtime.guard(_process.device) if usable else contextlib.nullcontext():
            held, self._held, self._locked, self.is_whole = self._held, [], 0, False
            _process.locked.pop(self._address, None)
            for begin in held:
                if usable and runtime.unregister(begin):
                    runtime.last_error()
