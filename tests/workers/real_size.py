"""Replicated states of many real digest blocks, on ranks that each write a share; for `tests.support.forked.Team`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ml_flashpoint import Flashpoint
from tests.support.dcp import Door
from tests.support.state_digest import digest
from tests.support.tensors import assert_same, blank
from tests.workers.distributed_training import base

Report = Callable[..., None]


def make(shapes: list[tuple[int, int]], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same on every rank with one seed; DDP broadcasts it anyway."""
    torch.manual_seed(seed)
    layers = [nn.Linear(before, after, bias=False) for before, after in shapes]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    return model, torch.optim.AdamW(model.parameters())


def train(report: Report, rank: int, shapes: list[tuple[int, int]], steps: int, seed: int) -> tuple[int, int, str, str]:
    """Resumes, takes some steps, each of them saved. Returns where it began, how many saves failed, and what was
    found and what is left, as digests."""
    torch.set_num_threads(1)
    model, optimizer = make(shapes, seed)
    with Flashpoint(base(), deadline_s=60) as fp:
        began = fp.track(model=model, optimizer=optimizer).resume()
        found = both(model, optimizer)
        for step in range(began + 1, began + steps + 1):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.01 * step + number)
            optimizer.step()
            fp.step()
            fp.wait()
        return began, fp.health.failures, found, both(model, optimizer)


def both(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest([model.state_dict(), optimizer.state_dict()])


STRUCTURES: list[tuple[int, ...]] = [(9, 9, 9), (20, 5, 17), (3, 8, 30, 4)]
BYTE_ITEMS = (100, 60_000, 2_000_000)
MIB = 1 << 20


def change_structures(report: Report, rank: int, mode: str, order: list[int]) -> int:
    """Saves replicated states of other structures each time, twice, with byte items of all sizes; loads each."""
    torch.set_num_threads(1)
    door = Door(base())

    def state(step: int, sizes: tuple[int, ...]) -> dict[str, Any]:
        made: dict[str, Any] = {
            f"w{i}": torch.arange(mib * MIB // 4, dtype=torch.float32) + step for i, mib in enumerate(sizes)
        }
        return made | {f"bytes{i}": bytes([step]) * n for i, n in enumerate(BYTE_ITEMS)} | {"rank": {str(rank): rank}}

    step = 0
    for number in order:
        for _ in range(2):
            step += 1
            saved = state(step, STRUCTURES[number])
            door.save_by(mode, saved, step)
            assert_same(door.load(blank(saved), step), saved)
            door.settle()
            dist.barrier()
    door.close()
    return step


STATE_BYTES = 8 * 512 * 512 * 4 * 3
"""Of eight layers of 512 × 512 with AdamW."""


def save_replicated(report: Report, rank: int) -> tuple[int, int, list[int], str | None]:
    """Five steps of DDP with `STATE_BYTES`. Returns saves, failures, bytes of this rank's parts, and what failed."""
    torch.set_num_threads(1)
    model, optimizer = make([(512, 512)] * 8, 0)
    sizes = []
    with Flashpoint(base(), deadline_s=60) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for step in range(1, 6):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(step))
            optimizer.step()
            fp.step()
            fp.wait()
            sizes.append(fp.health.bytes)
        return fp.health.saves, fp.health.failures, sizes, fp.health.last_error
