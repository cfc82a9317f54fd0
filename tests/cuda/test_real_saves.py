"""Jobs on a real device: every version is what the state was, whichever way it is loaded."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ml_flashpoint import Checkpointer, Flashpoint
from tests.support.played_cuda import lock_slots
from tests.support.tensors import assert_same

pytestmark = pytest.mark.cuda


class Net(nn.Module):
    def __init__(self, blocks: int = 40, width: int = 96) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(blocks))
        )
        self.wide = nn.Linear(width, 60_000).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.blocks(x).to(torch.bfloat16)).float().square().mean()


def made(seed: int, *, fused: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}


def train(parts: dict[str, Any]) -> None:
    parts["model"](torch.rand(16, 96, device="cuda")).backward()
    parts["optimizer"].step()
    parts["optimizer"].zero_grad()
    parts["scheduler"].step()


def state(parts: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "steps on the CPU"])
def test_every_step_is_saved_as_it_was(tmpfs: Path, fused: bool) -> None:
    parts, base = made(1, fused=fused), tmpfs / "job"
    with Flashpoint(base, strict=True) as fp:
        fp.track(**parts).resume()
        for _ in range(6):
            train(parts)
            fp.step()
            expected = state(parts)
        drawn = torch.rand(9, device="cuda")
        fp.wait()
    fresh = made(2, fused=fused)
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(**fresh).resume() == 6
        assert torch.equal(torch.rand(9, device="cuda"), drawn), "random numbers go on"
        assert_same(state(fresh), expected)


def test_slots_are_locked_for_the_saves_that_follow(tmpfs: Path) -> None:
    parts = made(1)
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(**parts).resume()
        for _ in range(4):
            train(parts)
            fp.step()
            fp.wait()
        lock_slots(fp._checkpointer._pool)
        train(parts)
        fp.step()
        fp.wait()
        expected = state(parts)
        assert all(slot.is_pinned for slot in fp._checkpointer._pool.slots)
    fresh = made(3)
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(**fresh).resume()
        assert_same(state(fresh), expected)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_dcp_with_tensors_of_every_kind(tmpfs: Path, asynchronous: bool) -> None:
    def make(factor: float) -> dict[str, Any]:
        return {
            "plain": torch.arange(100_000.0, device="cuda") * factor,
            "turned": (torch.arange(6.0, device="cuda").view(2, 3) * factor).t(),
            "sparse": (torch.eye(5, device="cuda") * factor).to_sparse(),
            "compressed": (torch.eye(5, device="cuda") * factor).to_sparse_csr(),
            "host": torch.ones(3) * factor,
        }

    engine = Checkpointer(str(tmpfs / "job"))
    for step in (1, 2):  # the first is copied before it is known where to
        source = make(step)
        version = engine.id(step)
        if asynchronous:
            done: Any = dcp.async_save(source, checkpoint_id=version, storage_writer=engine.writer())
            for name in ("plain", "host"):
                source[name].zero_()
            getattr(done, "upload_completion", done).result()
        else:
            dcp.save(source, checkpoint_id=version, storage_writer=engine.writer())
        target = make(0)
        dcp.load(target, checkpoint_id=version, storage_reader=engine.reader(version))
        expected = make(step)
        for name, tensor in expected.items():
            assert target[name].device == tensor.device
            assert torch.equal(target[name].to_dense(), tensor.to_dense()), name
    engine.close()


LOAD = """
import sys, torch
from torch import nn
from ml_flashpoint import Flashpoint
big = nn.Linear(4096, 2048, device="cuda")
with Flashpoint(sys.argv[1], strict=True) as fp:
    assert fp.track(model=big).resume() == 1
    print(float(big.weight.double().sum()), float(big.bias.double().sum()))
"""


def test_a_fresh_process_loads_to_the_device(tmpfs: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4096, 2048, device="cuda")
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(model=model).resume()
        fp.step()
        fp.wait()
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(tmpfs / "job")], capture_output=True, text=True, check=True
    )
    assert [float(word) for word in run.stdout.split()] == [
        float(model.weight.double().sum()),
        float(model.bias.double().sum()),
    ]


def test_time_held_is_not_that_of_the_work_before(tmpfs: Path) -> None:
    model = nn.Linear(64, 64, device="cuda")
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(model=model).resume()
        fp.step()
        fp.wait()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        torch.cuda._sleep(1_000_000_000)
        ended.record()
        fp.step()
        ended.synchronize()
        assert fp.health.blocked_s < began.elapsed_time(ended) / 1e3
