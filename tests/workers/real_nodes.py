"""Jobs of 256 MiB a rank, in blocks of 16 MiB, whose node is killed; for `tests.support.forked.Team`.

Owns what one rank does, through the façade and through DCP. The states are functions of the step, so that what is
loaded can be compared bit for bit with what no checkpoint has touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ml_flashpoint import Flashpoint
from tests.support.dcp import Door
from tests.support.state_digest import digest
from tests.workers.distributed_training import base

Report = Callable[..., None]

# With two moments: 3 × 4 bytes × 5,593 × 4,096 = 262 MiB.
ROWS, COLUMNS = (2000, 2000, 1593), 4096
MIB = 1 << 20


class Job:
    """DDP and AdamW. Gradients are a function of the step, so two runs of the same steps are the same."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(3)
        layers = [nn.Linear(COLUMNS, rows, bias=False) for rows in ROWS]
        self.model = nn.parallel.DistributedDataParallel(nn.ModuleList(layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, step: int) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            row = torch.linspace(-1, 1, COLUMNS) * step + number
            parameter.grad = row.expand_as(parameter)
        self.optimizer.step()

    def digest(self) -> str:
        return digest([self.model.module.state_dict(), self.optimizer.state_dict()])


def undisturbed(report: Report, rank: int, steps: int) -> str:
    """What a run without checkpoints ends with."""
    job = Job()
    for step in range(1, steps + 1):
        job.step(step)
    return job.digest()


def train(report: Report, rank: int, steps: int, hangs: bool) -> tuple[int, int, int, str]:
    """Resumes and trains up to a step. Then it waits to be killed, with a save under way, or ends.

    Returns:
        Where it began, bytes that came from a peer, failed saves, and what it ends with.
    """
    job = Job()
    with Flashpoint(base(), deadline_s=120) as fp:
        began = fp.track(model=job.model, optimizer=job.optimizer).resume()
        recovery = fp.last_recovery
        assert recovery is not None
        for step in range(began + 1, steps + 1):
            job.step(step)
            fp.step()
            fp.wait()
            if not (hangs and step == steps):
                assert fp.wait()
            report("replicated", fp.last_replicated)
        if hangs:
            threading.Event().wait()
        return began, recovery.fetched_bytes, fp.health.failures, job.digest()


def dcp_state(step: int) -> dict[str, Any]:
    """Replicated tensors that end in the midst of blocks, and byte items."""
    sizes = (90, 47, 120)
    tensors = {f"w{i}": torch.arange(mib * MIB // 4 + i, dtype=torch.int32) * step for i, mib in enumerate(sizes)}
    return {**tensors, "bytes": bytes([step]) * 1_000_001, "step": step}


def save_by_dcp(report: Report, rank: int, first: int, last: int, hangs: bool) -> None:
    """Saves from one step to another; the last one is under way when it waits to be killed."""
    torch.set_num_threads(1)
    door = Door(base())
    assert door.latest() == (first - 1 or None)
    for step in range(first, last + 1):
        future = door.async_save(dcp_state(step), step)
        if not (hangs and step == last):
            future.result(120)
            door.settle()
        report("verified", door.saver.status.verified)
    if hangs:
        threading.Event().wait()
    door.close()


def load_by_dcp(report: Report, rank: int) -> int:
    """Loads and checks the newest version; its step."""
    torch.set_num_threads(1)
    door = Door(base())
    step = door.latest()
    assert step is not None, "nothing was found"
    blank = {
        key: torch.full_like(value, 77) if isinstance(value, torch.Tensor) else None
        for key, value in dcp_state(1).items()
    }
    found, expected = door.load(blank, step), dcp_state(step)
    for key, value in expected.items():
        same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        assert same, key
    door.close()
    return step
