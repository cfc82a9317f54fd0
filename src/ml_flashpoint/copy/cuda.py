"""CUDA as this package uses it: devices, and streams beside the program's. Tests play the latter.

No question initialises CUDA in a process that does not use it: such a process could not fork children that do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ml_flashpoint.format.errors import SaveError

if TYPE_CHECKING:  # where it is not imported, there is no CUDA either: managers of dictionaries do without
    import torch

_POLL_S = 1e-3

# ---- questions --------------------------------------------------------------------------------------------------


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
        saved: the device's name. Its index means nothing today, unless this process works on several devices.
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
    """A stream of the lowest priority beside the program's. Works on any thread, whatever its current device.

    Args:
        index: of the device.

    Attributes:
        device: the one to make scratch tensors on.
    """

    def __init__(self, index: int) -> None:
        import torch

        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream(priority=0)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Have the stream wait for what the current stream of this thread has been given so far.

        Raises:
            SaveError: that stream is being captured.
        """
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
