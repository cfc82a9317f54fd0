"""Which parameters are trained comes back with the state, however the module is wrapped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ml_flashpoint import Flashpoint
from tests.support.forked import Report, call_team
from tests.support.loops import resumed, save

STEPS, UNFROZEN_AT = 6, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.backbone(x))
        return out


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "ddp": lambda module: DistributedDataParallel(module, find_unused_parameters=True),
    "fsdp": lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp2": lambda module: fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
}


def live(base: Path, seed: int, until: int, kind: str) -> list[bytes]:
    """One life of progressive unfreezing, as people write it: the program acts at a step, not after every resume."""
    torch.manual_seed(seed)
    net = Net()
    model = WRAPS[kind](net)
    net.backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with Flashpoint(base, handle_sigterm=False, strict=True) as fp:
        step = fp.track(model=model, optimizer=optimizer).resume()
        while step < until:
            if step == UNFROZEN_AT:
                net.backbone[2].requires_grad_(True)
            model(torch.linspace(-1, 1, 12).view(3, 4) + step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step = fp.step()
            fp.wait()
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in net.parameters())
    return [each.detach().numpy().tobytes() for each in whole]


def check_lives(report: Report, rank: int, kind: str, crashes: list[int]) -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ["FLASHPOINT_TEST_BASE"])
    undisturbed = live(folder / "undisturbed", 1, STEPS, kind)
    for crash_at in crashes:
        live(folder / f"job-{crash_at}", 1, crash_at, kind)
        assert live(folder / f"job-{crash_at}", 2, STEPS, kind) == undisturbed


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)])
def test_unfreezing_survives_a_crash(tmpfs: Path, kind: str, ranks: int) -> None:
    call_team(check_lives, tmpfs, ranks, kind, [1, UNFROZEN_AT, 4] if kind == "plain" else [4])


@pytest.mark.usefixtures("process_group")
def test_parameters_that_ddp_does_not_know_are_told_of(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(base, model=DistributedDataParallel(Net()))
    net = Net()
    net.backbone.requires_grad_(False)
    assert resumed(base, model=DistributedDataParallel(net)) == 1
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert "4 parameters are trained that were frozen when" in caplog.text
