"""A save on the CPU copies before it returns: what a program then does to its tensors is in no version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.adapter.pytorch.memory_stager import HAS_FUTURES, MemoryStager
from ml_flashpoint.local import AsyncCallsQueue, BasicTensorAwareStateDict, LocalCheckpointManager
from tests.support.dcp import RESULT_TIMEOUT_S
from tests.support.dcp import Door as DcpDoor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
WIDTH = 640  # the allocator returns memory of this size to the system as soon as it is free


class Training:
    """A model with its optimizer, and a buffer."""

    def __init__(self) -> None:
        self.model = nn.Linear(WIDTH, WIDTH)
        self.model.register_buffer("average", torch.zeros(WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """All that is saved and has a shape."""
        moments = [self.optimizer.state[p][name] for p in self.model.parameters() for name in ("exp_avg", "exp_avg_sq")]
        return [*self.model.parameters(), *self.model.buffers(), *moments]

    def fill(self) -> None:
        """Numbers that were nowhere before."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.uniform_(0.1, 1.0)


def _in_place(training: Training) -> None:
    for tensor in training.tensors():
        tensor.normal_()


def _by_a_fused_step(training: Training) -> None:
    training.optimizer.step()
    training.model.average.zero_()  # type: ignore[operator,union-attr]


def _memory_given_back_and_taken_again(training: Training) -> None:
    for tensor in training.tensors():
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes)


def _through_numpy(training: Training) -> None:
    for tensor in training.tensors():
        tensor.detach().numpy()[...] = 0


WRITES: list[Callable[[Training], None]] = [
    _in_place,
    _by_a_fused_step,
    _memory_given_back_and_taken_again,
    _through_numpy,  # the last one: torch resizes no storage that NumPy has seen
]


class Way(ABC):
    """One way to save a training, asynchronously. ``begin`` returns what waits until the version is committed."""

    def __init__(self, base: Path, training: Training) -> None:
        self.base, self.training = base, training

    @abstractmethod
    def begin(self, step: int) -> Callable[[], object]: ...

    @abstractmethod
    def close(self) -> None: ...


class Facade(Way):
    overlap = False

    def __init__(self, base: Path, training: Training) -> None:
        super().__init__(base, training)
        self.fp = Flashpoint(base, strict=True, overlap=self.overlap)
        self.fp.track(model=training.model, optimizer=training.optimizer).resume()

    def begin(self, step: int) -> Callable[[], object]:
        assert self.fp.step() == step
        return lambda: self.fp.before_update() or self.fp.wait(RESULT_TIMEOUT_S)  # type: ignore[func-returns-value]

    def close(self) -> None:
        self.fp.close()


class OverlappingFacade(Facade):
    overlap = True


class Dcp(Way):
    def __init__(self, base: Path, training: Training) -> None:
        super().__init__(base, training)
        self.door = DcpDoor(base)
        self.door.save(self._state(), 0)  # the base container is known from now on
        self.prepare()

    def prepare(self) -> None:
        self.door.writer.watch(self.training.optimizer)

    def _state(self) -> dict[str, Any]:
        return {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}

    def begin(self, step: int) -> Callable[[], object]:
        future = self.door.async_save(self._state(), step)
        return lambda: self.door.writer.before_update() or future.result(RESULT_TIMEOUT_S)  # type: ignore[func-returns-value]

    def close(self) -> None:
        self.door.close()


class DcpWithStager(Dcp):
    def prepare(self) -> None:
        pass

    def begin(self, step: int) -> Callable[[], object]:
        saving: Any = dcp.async_save(
            self._state(),
            checkpoint_id=self.door.version(step),
            storage_writer=self.door.writer,
            async_stager=MemoryStager(self.door.writer),
        )

        def wait() -> None:
            self.door.writer.before_update()
            getattr(saving, "upload_completion", saving).result(RESULT_TIMEOUT_S)

        return wait


class Local(Way):
    def __init__(self, base: Path, training: Training) -> None:
        super().__init__(base, training)
        self.manager, self.queue = LocalCheckpointManager(base), AsyncCallsQueue()
        self.manager.watch(training.optimizer)

    def begin(self, step: int) -> Callable[[], object]:
        tensors = {str(number): tensor.detach() for number, tensor in enumerate(self.training.tensors())}
        request = self.manager.save(BasicTensorAwareStateDict(tensors), step, is_async=True)
        assert request is not None
        self.queue.schedule_async_request(request)

        def wait() -> None:
            self.manager.before_update()
            self.queue.maybe_finalize_async_calls(blocking=True)

        return wait

    def close(self) -> None:
        self.manager.close()


WAYS: list[type[Way]] = [Facade, OverlappingFacade, Dcp, *([DcpWithStager] if HAS_FUTURES else []), Local]


@pytest.fixture
def way(request: pytest.FixtureRequest, tmpfs: Path) -> Iterator[Way]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made: Way = request.param(tmpfs / "job", Training())
    yield made
    made.close()
    dist.destroy_process_group()


def _content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().numpy().tobytes()


def _saved(base: Path, step: int) -> set[bytes]:
    """The bytes of all tensors of a version."""
    files = [*base.rglob(f"step-{step}_ckpt/rank-*.safetensors")]
    assert files
    return {_content(tensor) for file in files for tensor in safetensors.torch.load_file(file).values()}


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_version_is_the_state_at_the_call_whatever_comes_next(way: Way) -> None:
    for step, write in enumerate(WRITES, 1):
        way.training.fill()
        expected = [_content(tensor) for tensor in way.training.tensors()]
        wait = way.begin(step)
        with torch.no_grad():
            write(way.training)
        wait()
        lacking = [number for number, each in enumerate(expected) if each not in _saved(way.base, step)]
        assert not lacking, f"{write.__name__}: {lacking}"


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_save_leaves_no_mark_on_a_tensor(way: Way) -> None:
    training = way.training
    before = [tensor.data_ptr() for tensor in training.tensors()]
    for step in range(1, 4):
        training.fill()
        way.begin(step)()
    for tensor, address in zip(training.tensors(), before, strict=True):
        storage = tensor.untyped_storage()
        assert storage.data_ptr() == address
        assert storage.resizable()
        assert not tensor.is_pinned()
        assert not vars(tensor)
