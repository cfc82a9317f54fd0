"""A device that is played: its memory is the host's, and its streams do their work when they like, within the rules.

What a stream was given is done when somebody waits for it, or before, at random. So a copy that reads or reuses memory
without having waited for it is found out.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ml_flashpoint.staging.lane import PADDING


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.work: list[Callable[[], object]] = []
        self.done = 0


class PlayedLane:
    """Stands in for `lane.Lane`.

    Args:
        eagerness: how likely it is that work is done as soon as it is given.
        room: whether there is room for slabs.

    Attributes:
        transfers: bytes of each copy on the stream ``move``. fails_at: the number of the one that fails.
    """

    def __init__(self, index: int, seed: int, eagerness: float, room: bool = True) -> None:
        self.index = index
        self.lock = threading.Lock()
        self.slabs: list[torch.Tensor] = []
        self.freed: list[object] = [None, None]
        self.move, self.pack = Stream("move"), Stream("pack")
        self.transfers: list[int] = []
        self.fails_at = -1
        self.kernels = self.begun = 0
        self.behind_s = 0.0
        self.holding: list[tuple[Stream, int]] = []
        self.fails_to_end = False
        self._room, self._eagerness = room, eagerness
        self._random = random.Random(seed)
        self._turn = 0
        self._at_work = threading.RLock()

    def begin(self) -> float:
        """The device comes to it :attr:`behind_s` later."""
        self.begun += 1
        return time.perf_counter() + self.behind_s

    def hold(self) -> float:
        self.holding = [self.record(self.pack), self.record(self.move)]
        return 0.25

    def held(self, events: float) -> float:
        return events

    def update(self, tensors: Sequence[torch.Tensor]) -> None:
        """What an optimizer does on the stream of the training, once that need not wait any more."""
        for event in self.holding:
            self.sync(event)
        for tensor in tensors:
            tensor.zero_()

    def end(self, began: float) -> float:
        self.sync(self.record(self.pack))
        self.sync(self.record(self.move))
        if self.fails_to_end:
            raise RuntimeError("the device is lost")
        time.sleep(max(0.0, began - time.perf_counter()))
        return time.perf_counter() - began

    def _give(self, stream: Stream, work: Callable[[], object]) -> None:
        with self._at_work:
            stream.work.append(work)
            if self._random.random() < self._eagerness:
                self._do(stream, len(stream.work))

    def _do(self, stream: Stream, until: int) -> None:
        with torch.no_grad():  # as the real one: parameters are copied as they are
            while stream.done < until:
                stream.done += 1
                stream.work[stream.done - 1]()

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.nbytes == source.nbytes or target.dtype != source.dtype
        if stream is self.move:
            if len(self.transfers) == self.fails_at:
                raise RuntimeError("the device has had enough")
            self.transfers.append(source.nbytes)
        self._give(stream, lambda: target.copy_(source))

    def copy_many(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        tensors = [*targets, *sources]
        assert len({tensor.dtype for tensor in tensors}) == 1, "it would be a kernel a tensor"
        assert tensors[0].dtype not in (torch.float16, torch.bfloat16), "it would change what is no number"
        assert all(map(torch.Tensor.is_contiguous, tensors))
        self.kernels += 1
        self._give(stream, lambda: torch._foreach_copy_(list(targets), list(sources)))

    def plain(self, stream: Stream, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made = (
            torch.full(source.shape, 77).to(dtype)
            if dtype.is_floating_point
            else torch.zeros(source.shape, dtype=dtype)
        )
        self._give(stream, lambda: made.copy_(source.resolve_conj().resolve_neg()))
        return made

    def empty(self, stream: Stream, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(like.shape, dtype=dtype)

    def record(self, stream: Stream) -> tuple[Stream, int]:
        return stream, len(stream.work)

    def wait(self, stream: Stream, event: tuple[Stream, int]) -> None:
        self._give(stream, lambda: self._do(*event))

    def sync(self, event: tuple[Stream, int]) -> None:
        with self._at_work:
            self._do(*event)

    def ensure_slabs(self, nbytes: int) -> bool:
        if self._room and (not self.slabs or self.slabs[0].numel() < nbytes + PADDING):
            self.slabs = [torch.full((nbytes + PADDING,), 0xEE, dtype=torch.uint8) for _ in range(2)]
        return self._room

    def next_slab(self) -> tuple[int, torch.Tensor]:
        self._turn ^= 1
        return self._turn, self.slabs[self._turn]

    def slot(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xDD, dtype=torch.uint8)

    @property
    def is_idle(self) -> bool:
        return all(stream.done == len(stream.work) for stream in (self.move, self.pack))


class PlayedLanes:
    """Stands in for `lane.Lanes`: tensors are on the devices that they were given to by :meth:`on`."""

    def __init__(self, seed: int = 0, eagerness: float = 0.5, room: bool = True) -> None:
        self._lanes = {index: PlayedLane(index, seed + index, eagerness, room) for index in range(2)}
        self._index: dict[int, tuple[int, torch.Tensor]] = {}

    def on(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        self._index[id(tensor)] = (index, tensor)
        return tensor

    def indices(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [self._index.get(id(tensor), (-1, tensor))[0] for tensor in tensors]

    def lane(self, index: int) -> PlayedLane:
        return self._lanes[index]
