"""CUDA that is played: its runtime, its streams, and a device for whole jobs. Memory of a device is the host's.

The runtime keeps CUDA's rules about locked memory, and its errors until they are asked for. Streams do their work when
somebody waits for it, or before: a copy that reads or reuses memory without having waited for it is found out.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy import cuda, transfers
from ml_flashpoint.copy.overlap import LateCopy

if TYPE_CHECKING:
    from ml_flashpoint.memory.pool import Pool

LAG_S = 30.0


class PlayedRuntime:
    """Stands in for `cuda.Runtime`.

    Args:
        room: bytes that may be locked.

    Attributes:
        locked: size of what is locked by each call, by address.
        error: the one that the next kernel of this process would raise.
        devices: what the calls were about, each in a guard.
    """

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.locked: dict[int, int] = {}
        self.error = 0
        self.calls: list[str] = []
        self.devices: list[int] = []
        self._guarded = 0

    @contextlib.contextmanager
    def guard(self, device: int) -> Iterator[None]:
        self._guarded += 1
        self.devices.append(device)
        yield
        self._guarded -= 1

    def register(self, address: int, size: int) -> int:
        self.calls.append("register")
        assert self._guarded, "it would be about the first device"
        if any(address < begin + length and begin < address + size for begin, length in self.locked.items()):
            return self._fail(712)
        if sum(self.locked.values()) + size > self.room:
            return self._fail(2)
        self.locked[address] = size
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append("unregister")
        assert self._guarded
        return 0 if self.locked.pop(address, None) else self._fail(713)

    def last_error(self) -> int:
        error, self.error = self.error, 0
        return error

    def _fail(self, status: int) -> int:
        self.error = status
        return status


def play(monkeypatch: pytest.MonkeyPatch, runtime: PlayedRuntime, device: int | None = 1) -> None:
    """Have this process use CUDA, as far as page-locking asks."""
    process = cuda._Process()
    process.runtime, process.device = runtime, device
    monkeypatch.setattr(cuda, "_process", process)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


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
        if self._stream.lags and not self._stream.held.wait(LAG_S):
            raise AssertionError("the program was never held for a late copy that is over only then")
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


class PlayedDevice(PlayedStreams):
    """Parameters, statistics and moments of a job are on it, but not the optimizer's steps.

    Args:
        monkeypatch: undoes it, with all that it patches.
        models, optimizers: of the job; those that are made later may be added.

    Attributes:
        late: copies from it that went on while training did.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(eagerness=0.2, seed=3)
        self._models, self._optimizers = models, optimizers
        self.late: list[LateCopy] = []
        play(monkeypatch, PlayedRuntime(), device=0)
        self.play(monkeypatch)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # torch itself would go on to use it
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(transfers, "SMALL", 1)
        note_late(monkeypatch, self.late)

    def lag(self, lags: bool = True) -> None:
        """Have a late copy be over only once the program is held for it, or also before. Its save fails if that never
        happens."""
        for (_, purpose), stream in self.streams.items():
            stream.lags = lags and purpose == "late"

    def is_on(self, tensor: torch.Tensor) -> bool:
        storage = _local(tensor).untyped_storage().data_ptr()
        return any(t.untyped_storage().data_ptr() == storage for t in map(_local, self._all()) if t.dim())

    def _all(self) -> Iterable[torch.Tensor]:
        for model in self._models:
            yield from (*model.parameters(), *model.buffers())
        for optimizer in self._optimizers:
            yield from (parameter for group in optimizer.param_groups for parameter in group["params"])
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def indices(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [0 if self.is_on(tensor) else -1 for tensor in tensors]


def note_late(monkeypatch: pytest.MonkeyPatch, late: list[LateCopy]) -> None:
    """Put each copy in the list that goes on while training does."""
    start = LateCopy.start

    def noted(copy: LateCopy, names: Sequence[str], *pairs: Any) -> None:
        start(copy, names, *pairs)
        if names:
            late.append(copy)

    monkeypatch.setattr(LateCopy, "start", noted)


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def lock_slots(pool: Pool) -> None:
    """Lock all slots that the rank's own saves take."""
    for slot in pool.slots:
        slot.prepare()
