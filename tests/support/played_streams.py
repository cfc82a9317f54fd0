"""CUDA streams that are played: device memory is the host's, and work is done when somebody waits for it, or before.

So a copy that reads or reuses memory without having waited for it is found out.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from ml_flashpoint.copy import cuda


class PlayedEvent:
    """Stands in for `cuda.Event`. The program's stream is the thread that calls :meth:`hold`."""

    def __init__(self, stream: PlayedStream, until: int) -> None:
        self._stream, self._until = stream, until

    def hold(self) -> None:
        self._stream.held.set()
        self._stream.run(self._until)

    def wait(self, deadline_s: float | None = None) -> bool:
        if self._stream.is_lost:
            raise RuntimeError("the device is lost")
        if deadline_s == 0:
            return self._stream.done >= self._until
        if self._stream.lags:
            self._stream.held.wait(30)
        self._stream.run(self._until)
        return True


class PlayedStream:
    """Stands in for `cuda.Stream`.

    Args:
        eagerness: probability that work is done as soon as it is given.

    Attributes:
        given: how much work it was given. fails_at: the number of that which fails to be given.
        lags: True if work is done only once a thread holds. has_room: False if it can make no scratch tensors.
    """

    device = torch.device("cpu")

    def __init__(self, eagerness: float, seed: int = 0) -> None:
        self.eagerness, self.lags, self.is_lost, self.has_room = eagerness, False, False, True
        self.given = self.done = 0
        self.fails_at = -1
        self.held = threading.Event()
        self._work: list[Callable[[], object]] = []
        self._random, self._lock = random.Random(seed), threading.RLock()

    def start(self) -> None:
        self.held.clear()

    def do(self, work: Callable[[], object]) -> None:
        if self.given == self.fails_at:
            raise RuntimeError("the device has had enough")
        self._work.append(work)
        self.given += 1
        if not self.lags and self._random.random() < self.eagerness:
            self.run(self.given)

    def run(self, until: int) -> None:
        with self._lock, torch.no_grad():
            while self.done < until:
                self.done += 1
                self._work[self.done - 1]()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not self.has_room:
            raise torch.OutOfMemoryError("no room")
        made = torch.empty(tuple(shape), dtype=dtype)
        made.view(-1).view(torch.uint8).fill_(0xEE)
        return made

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xDD, dtype=torch.uint8)

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def event(self) -> PlayedEvent:
        return PlayedEvent(self, self.given)

    @property
    def is_idle(self) -> bool:
        return self.done == self.given


class PlayedStreams:
    """Two devices. Tensors are on those that they were given to by :meth:`on`."""

    def __init__(self, eagerness: float = 0.5, seed: int = 0) -> None:
        self._index: dict[int, tuple[int, torch.Tensor]] = {}
        self.streams = {
            (index, purpose): PlayedStream(eagerness, seed + index) for index in range(2) for purpose in ("now", "late")
        }

    def on(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        self._index[id(tensor)] = (index, tensor)
        return tensor

    def indices(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [self._index.get(id(tensor), (-1, tensor))[0] for tensor in tensors]

    @property
    def is_idle(self) -> bool:
        return all(stream.is_idle for stream in self.streams.values())

    @contextlib.contextmanager
    def played(self) -> Iterator[PlayedStreams]:
        with pytest.MonkeyPatch.context() as patches:
            self.play(patches)
            yield self

    def play(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "in_use", lambda: True)
        monkeypatch.setattr(cuda, "settle", lambda: None)
        monkeypatch.setattr(cuda, "is_capturing", lambda: False)
        monkeypatch.setattr(cuda, "indices", self.indices)
        monkeypatch.setattr(cuda, "are_on_devices", lambda tensors: any(n >= 0 for n in self.indices(list(tensors))))
        monkeypatch.setattr(cuda, "stream", lambda index, purpose: self.streams[index, purpose])
