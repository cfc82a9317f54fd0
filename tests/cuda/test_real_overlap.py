"""Training on a real device goes on while it is copied from, and what is saved is what it was at the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.adapter.pytorch.memory_stager import HAS_FUTURES, MemoryStager
from ml_flashpoint.copy.overlap import LateCopy
from tests.support.dcp import RESULT_TIMEOUT_S, Door
from tests.support.played_cuda import lock_slots, note_late
from tests.support.tensors import assert_same, blank, clones

pytestmark = pytest.mark.cuda
WIDTH = 1024


class Job:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))]
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    @property
    def tracked(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tracked_state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.tracked.items()}

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{key}": value for key, value in values.items()}
        return {name: tensor.clone() for name, tensor in found.items()}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateCopy]:
    """The copies that went on beside the training."""
    found: list[LateCopy] = []
    note_late(monkeypatch, found)
    return found


def check_loaded(base: Path, saved: dict[str, torch.Tensor]) -> None:
    again = Job(2)
    with Flashpoint(base, strict=True) as fp:
        fp.track(**again.tracked).resume()
    found = again.state()
    assert found.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(found[name], saved[name])] == []


def test_each_version_is_the_state_of_its_step(tmpfs: Path, late: list[LateCopy]) -> None:
    job = Job(1)
    with Flashpoint(tmpfs / "job", strict=True, overlap=True) as fp:
        fp.track(**job.tracked).resume()
        for turn in range(12):
            job.step()
            saved = job.state()
            fp.step()
            for _ in range(turn % 4):
                job.step()
            if turn < 4:
                assert fp.wait()
                lock_slots(fp._checkpointer._pool)
        assert fp.wait()
        assert fp.health.failures == 0
    assert len(late) >= 6
    check_loaded(tmpfs / "job", saved)


def test_a_change_that_nobody_announced_fails_the_save_and_no_later_one(tmpfs: Path, late: list[LateCopy]) -> None:
    """The content says so: no counter sees a change through ``data``."""
    job = Job(1)
    with Flashpoint(tmpfs / "job", overlap=True) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(4):
            job.step()
            fp.step()
            assert fp.wait()
            lock_slots(fp._checkpointer._pool)
        late.clear()
        fp.step()
        for parameter in job.model.parameters():
            parameter.data.mul_(2)
        fp.wait()
        failures = fp.health.failures  # the copy may have been faster
        saved = job.state()
        fp.step()
        fp.before_update()
        assert fp.wait()
        assert fp.health.failures == failures
        assert len(late) == (1 if failures else 2)
    check_loaded(tmpfs / "job", saved)


def test_an_optimizer_that_is_replayed_is_not_copied_late(tmpfs: Path, late: list[LateCopy]) -> None:
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    x, side, graph = torch.randn(64, WIDTH, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    with Flashpoint(tmpfs / "job", strict=True, overlap=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(4):
            step()
            fp.step()
            assert fp.wait()
            lock_slots(fp._checkpointer._pool)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            step()
        late.clear()
        for _ in range(3):
            graph.replay()
            saved = model.weight.detach().clone()
            fp.step()
            graph.replay()
        assert fp.wait()
        assert not late
    again = nn.Linear(WIDTH, WIDTH).cuda()
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(model=again, optimizer=torch.optim.AdamW(again.parameters(), capturable=True)).resume()
    assert torch.equal(again.weight, saved)


@pytest.mark.parametrize(
    "waits",
    ["step", pytest.param("future", marks=pytest.mark.skipif(not HAS_FUTURES, reason="this torch knows none"))],
)
def test_dcp_saves_the_state_at_the_call(tmpfs: Path, late: list[LateCopy], waits: str) -> None:
    job, door = Job(1), Door(tmpfs / "job")
    options: dict[str, Any] = {}
    if waits == "step":
        door.writer.watch(job.optimizer)
    else:
        options["async_stager"] = MemoryStager(door.writer)
    for step in range(1, 11):
        job.step()
        expected = clones(job.tracked_state())
        saving: Any = dcp.async_save(
            job.tracked_state(), checkpoint_id=door.version(step), storage_writer=door.writer, **options
        )
        if waits == "future":
            saving.staging_completion.result(RESULT_TIMEOUT_S)
        job.step()
        getattr(saving, "upload_completion", saving).result(RESULT_TIMEOUT_S)
        lock_slots(door.checkpointer._pool)
        assert_same(door.load(blank(expected), step), expected)
    assert len(late) >= 4
    assert all(each.over for each in late)
    door.close()
