"""Which parameters are trained comes back with the state, however the module is wrapped."""

from __future__ import annotations

import logging
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
from tests.support.forked import call_team

STEPS, UNFROZEN_AT = 6, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.backbone(x))
        return out


def live(base: Path, seed: int, until: int, wrap: Callable[[nn.Module], nn.Module]) -> list[bytes]:
    """One life of progressive unfreezing, as people write it: the program acts at a step, not after every resume."""
    torch.manual_seed(seed)
    net = Net()
    model = wrap(net)
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


def plain(module: nn.Module) -> nn.Module:
    return module


@pytest.mark.parametrize("crash_at", [1, 2, 4])
def test_unfreezing_survives_a_crash(tmpfs: Path, crash_at: int) -> None:
    undisturbed = live(tmpfs / "undisturbed", 1, STEPS, plain)
    live(tmpfs / "job", 1, crash_at, plain)
    assert live(tmpfs / "job", 2, STEPS, plain) == undisturbed


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": lambda module: DistributedDataParallel(module, find_unused_parameters=True),
    "fsdp": lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp2": lambda module: fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
}


def lives(report: Callable[..., None], rank: int, kind: str) -> tuple[list[bytes], list[bytes]]:
    torch.set_num_threads(1)
    base = Path(os.environ["FLASHPOINT_TEST_BASE"])
    undisturbed = live(base / "undisturbed", 1, STEPS, WRAPS[kind])
    live(base / "job", 1, 4, WRAPS[kind])
    return undisturbed, live(base / "job", 2, STEPS, WRAPS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRAPS)
def test_unfreezing_survives_a_crash_of_several_ranks(tmpfs: Path, kind: str) -> None:
    for undisturbed, together in call_team(lives, tmpfs, 2, kind):
        assert together == undisturbed


def test_parameters_that_ddp_does_not_know_are_told_of(tmpfs: Path) -> None:
    call_team(frozen_before_ddp, tmpfs, 1)


def frozen_before_ddp(report: Callable[..., None], rank: int) -> None:
    base, messages = Path(os.environ["FLASHPOINT_TEST_BASE"]), list[str]()
    logging.getLogger("ml_flashpoint").addHandler(handler := Collector(messages))
    for trained in (True, False):
        net = Net()
        net.backbone.requires_grad_(trained)
        with Flashpoint(base, handle_sigterm=False, strict=True) as fp:
            fp.track(model=DistributedDataParallel(net)).resume()
            fp.save(1)
            fp.wait()
        assert all(parameter.requires_grad for parameter in net.parameters())
    logging.getLogger("ml_flashpoint").removeHandler(handler)
    assert [each for each in messages if each.startswith("4 parameters are trained that were frozen when")]


class Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
