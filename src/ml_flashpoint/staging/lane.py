"""The streams of one CUDA device that copies run on.

Owns all calls to CUDA that a copy makes, each of which works on any thread: none of them is about the current device or
stream of the thread. What is copied when is `device_copy`'s, whose tests put a lane in place of this that plays one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.staging import cuda

SLAB = 32 << 20
"""Bytes of a slab, in which small tensors are packed; there are two. Also the most that one transfer moves: those of
the training step, which come between ours, do not wait for more."""
PADDING = 64
_WORTH_LOCKING = 1 << 20


class Lane:
    """Two streams, of the lowest priority, and two slabs on a device. Made once a device; use `lock` to enqueue.

    Args:
        index: of the device.

    Attributes:
        move: the stream of the transfers. pack: the stream that packs what goes with them, and unpacks it.
        freed: for each slab, the event after which it may be used again; None if it is free.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.lock = threading.Lock()
        self.slabs: list[torch.Tensor] = []
        self.freed: list[Any] = [None, None]
        self._turn = 0
        with torch.cuda.device(self.device):
            # 0 is the lowest priority that CUDA has.
            self.move, self.pack = (torch.cuda.Stream(priority=0) for _ in range(2))  # type: ignore[no-untyped-call]

    def begin(self) -> Any:
        """Have both streams wait for what the current stream of this thread has been given so far. Returns the event
        of that, for :meth:`end`.

        Raises:
            SaveError: that stream is being captured.
        """
        cuda.note_device(self.device.index)
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise SaveError(
                    "a CUDA graph is being captured: nothing can be copied for a checkpoint meanwhile",
                    hint="save and load before or after the capture, and between replays",
                )
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().record_event(event)
            self.move.wait_event(event)
            self.pack.wait_event(event)
            return event

    def end(self, began: Any) -> float:
        """Wait until both streams have done what they were given. Returns the seconds from :meth:`begin` to then, for
        the device: without what it had to do before."""
        with torch.cuda.device(self.device):
            self.move.wait_event(self.pack.record_event())
            event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            self.move.record_event(event)
            event.synchronize()
            return float(began.elapsed_time(event)) / 1e3

    def hold(self) -> tuple[Any, Any]:
        """Have the current stream of this thread wait until both streams have done what they were given so far. The
        thread itself goes on, unless it is capturing a graph, of which that cannot become a part. Returns what
        :meth:`held` takes."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            if torch.cuda.is_current_stream_capturing():
                current = self.move
                for stream in (self.pack, self.move):
                    self.sync(self.record(stream))
            began, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
            current.record_event(began)
            for stream in (self.pack, self.move):
                current.wait_event(stream.record_event())
            current.record_event(ended)
            return began, ended

    def held(self, events: tuple[Any, Any]) -> float:
        """Seconds for which that stream was kept waiting. Returns once it is not any more."""
        began, ended = events
        self.sync(ended)
        return float(began.elapsed_time(ended)) / 1e3

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        # The device first: a stream of another device than the current one makes a context there when it is left.
        with torch.cuda.device(self.device), torch.cuda.stream(stream), torch.no_grad():
            yield

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy one tensor into another."""
        with self._on(stream):
            target.copy_(source, non_blocking=True)

    def copy_many(self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy between tensors of one dtype on the device, by few kernels."""
        with self._on(stream):
            torch._foreach_copy_(list(targets), list(sources))

    def plain(self, stream: Any, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the device with the same elements, contiguous. For use on this stream only."""
        with self._on(stream):
            return source.resolve_conj().resolve_neg().to(dtype).contiguous()

    def empty(self, stream: Any, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Room on the device for the elements of a tensor. For use on this stream only."""
        with self._on(stream):
            return torch.empty(like.shape, dtype=dtype, device=self.device)

    def record(self, stream: Any) -> Any:
        """An event that is over when all that the stream was given so far is done."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
            return event

    def wait(self, stream: Any, event: Any) -> None:
        """Have a stream wait for an event."""
        with torch.cuda.device(self.device):
            stream.wait_event(event)

    def sync(self, event: Any) -> None:
        """Wait for an event here, without using the processor."""
        event.synchronize()

    def ensure_slabs(self, nbytes: int) -> bool:
        """Have two slabs of so many bytes. Returns whether there are: not where the device's memory is full."""
        if not self.slabs or self.slabs[0].numel() < nbytes + PADDING:
            for event in self.freed:
                if event is not None:
                    self.sync(event)
            self.slabs, self.freed = [], [None, None]
            try:
                with self._on(self.pack), torch.inference_mode(False):  # they stay, and any thread writes to them
                    size = nbytes + PADDING
                    self.slabs = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
            except torch.cuda.OutOfMemoryError:
                return False
        return True

    def next_slab(self) -> tuple[int, torch.Tensor]:
        """The slabs in turn, and their numbers."""
        self._turn ^= 1
        return self._turn, self.slabs[self._turn]

    def slot(self, nbytes: int) -> torch.Tensor:
        """Host memory that transfers go through; locked if that is worth it, and allowed. If not, transfers are slower,
        and wait for themselves."""
        with torch.cuda.device(self.device), torch.inference_mode(False):
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=nbytes >= _WORTH_LOCKING)
            except RuntimeError:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class Lanes:
    """The lanes of this process, and the devices of tensors."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}
        self._lock = threading.Lock()

    def lane(self, index: int) -> Lane:
        """The lane of a device."""
        with self._lock:
            if index not in self._lanes:
                self._lanes[index] = Lane(index)
            return self._lanes[index]

    @staticmethod
    def indices(tensors: Sequence[torch.Tensor]) -> list[int]:
        """The device of each tensor, by its index; -1 for the CPU."""
        return list(map(torch.Tensor.get_device, tensors))
