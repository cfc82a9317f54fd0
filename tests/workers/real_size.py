"""Jobs of 256 MiB a rank, in blocks of 16 MiB, through the façade, DCP and the local door; for
`tests.support.forked.Team`.

States are functions of the step, and of the rank, so that what is loaded can be compared bit for bit with what no
checkpoint has touched. Jobs that are to be killed wait for that with a save under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.local import AsyncCallsQueue, BasicTensorAwareStateDict, LocalCheckpointManager
from ml_flashpoint.local.replication import LazyCliqueReplicationStrategy
from tests.local.states import assert_equal
from tests.support.dcp import Door
from tests.support.state_digest import digest
from tests.support.tensors import assert_same, blank
from tests.support.worker import base_path

Report = Callable[..., None]

MIB = 1 << 20
# With two moments: 3 × 4 bytes × 5,593 × 4,096 = 262 MiB. Each of two ranks writes a share of it.
LARGE = [(4096, 2000), (4096, 2000), (4096, 1593)]
# Of eight layers with AdamW: 25 MiB.
SMALL = [(512, 512)] * 8
SMALL_BYTES = 3 * 4 * 512 * 512 * 8


class Job:
    """DDP and AdamW. Gradients are a function of the step, so two runs of the same steps are the same."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(3)
        layers = [nn.Linear(before, after, bias=False) for before, after in shapes]
        self.model = nn.parallel.DistributedDataParallel(nn.ModuleList(layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, step: int) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            row = torch.linspace(-1, 1, parameter.shape[1]) * step + number
            parameter.grad = row.expand_as(parameter)
        self.optimizer.step()

    def digest(self) -> str:
        return digest([self.model.module.state_dict(), self.optimizer.state_dict()])


def undisturbed(report: Report, rank: int, shapes: list[tuple[int, int]], steps: int) -> str:
    """What a run without checkpoints ends with."""
    job = Job(shapes)
    for step in range(1, steps + 1):
        job.step(step)
    return job.digest()


def train(report: Report, rank: int, shapes: list[tuple[int, int]], steps: int, hangs: bool) -> dict[str, Any]:
    """Resume, and train up to a step."""
    job = Job(shapes)
    with Flashpoint(base_path(), deadline_s=120) as fp:
        began = fp.track(model=job.model, optimizer=job.optimizer).resume()
        recovery, found, sizes = fp.last_recovery, job.digest(), []
        assert recovery is not None
        for step in range(began + 1, steps + 1):
            job.step(step)
            fp.step()
            fp.wait()
            if not (hangs and step == steps):
                assert fp.wait()
            report("replicated", fp.last_replicated)
            sizes.append(fp.health.bytes)
        if hangs:
            threading.Event().wait()
        return {
            "began": began,
            "fetched": recovery.fetched_bytes,
            "failures": fp.health.failures,
            "error": fp.health.last_error,
            "found": found,
            "final": job.digest(),
            "sizes": sizes,
        }


# Replicated tensors that end in the midst of blocks, in MiB.
STRUCTURES: list[tuple[int, ...]] = [(90, 47, 120), (9, 9, 9), (20, 5, 17), (3, 8, 30, 4)]


def dcp_state(step: int, sizes: tuple[int, ...], rank: int) -> dict[str, Any]:
    """Of one structure, with byte items of all sizes."""
    tensors = {f"w{i}": torch.arange(mib * MIB // 4 + i, dtype=torch.int32) * step for i, mib in enumerate(sizes)}
    objects = {f"bytes{count}": bytes([step]) * count for count in (100, 60_000, 2_000_001)}
    return {**tensors, **objects, "step": step, "rank": {str(rank): rank}}


def save_by_dcp(report: Report, rank: int, first: int, last: int, hangs: bool) -> None:
    """Save from one step to another."""
    torch.set_num_threads(1)
    door = Door(base_path())
    assert door.latest() == (first - 1 or None)
    for step in range(first, last + 1):
        future = door.async_save(dcp_state(step, STRUCTURES[0], rank), step)
        if not (hangs and step == last):
            future.result(120)
            door.settle()
        report("verified", door.saver.status.verified)
    if hangs:
        threading.Event().wait()
    door.close()


def load_by_dcp(report: Report, rank: int) -> int:
    """Load and check the newest version. Return its step."""
    torch.set_num_threads(1)
    door = Door(base_path())
    step = door.latest()
    assert step is not None, "nothing was found"
    expected = dcp_state(step, STRUCTURES[0], rank)
    assert_same(door.load(blank(expected), step), expected)
    door.close()
    return step


def change_structures(report: Report, rank: int, mode: str) -> None:
    """Save states of other structures each time, twice, and load each."""
    torch.set_num_threads(1)
    door, step = Door(base_path()), 0
    for number in (1, 2, 3, 1):
        for _ in range(2):
            step += 1
            saved = dcp_state(step, STRUCTURES[number], rank)
            door.save_by(mode, saved, step)
            assert_same(door.load(blank(saved), step), saved)
            door.settle()
            dist.barrier()
    door.close()


def local_state(rank: int, step: int) -> dict[str, Any]:
    """Tensors that end in the midst of blocks, and as large values of other kinds beside them."""
    torch.set_num_threads(1)
    first = torch.arange(90 * MIB // 4 + rank, dtype=torch.int32) * step
    return {
        "model": {"first": first, "second": torch.arange(47 * MIB // 4 + 3, dtype=torch.float32) + step},
        "tied": first.view(-1),
        "moments": [torch.full((30 * MIB // 2 + 1,), step, dtype=torch.bfloat16), torch.empty(0, 3)],
        "complex": torch.complex(torch.arange(MIB // 4).float(), torch.full((MIB // 4,), -1.0 * step)).conj(),
        "array": (np.arange(60 * MIB // 8) * step).astype(">f8"),
        "bytes": bytes([step]) * (30 * MIB + 1),
        "rank, step": (rank, step),
    }


def save_locally(report: Report, rank: int, first: int, last: int, hangs: bool) -> None:
    """Save from one iteration to another."""
    manager = LocalCheckpointManager(base_path(), "job", LazyCliqueReplicationStrategy(1, 2))
    manager.find_latest()
    queue = AsyncCallsQueue()
    for step in range(first, last + 1):
        request = manager.save(BasicTensorAwareStateDict(local_state(rank, step)), step, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)
        if not (hangs and step == last):
            queue.maybe_finalize_async_calls(blocking=True)
        report("verified", manager.latest_iteration)
    if hangs:
        threading.Event().wait()
    queue.close()
    manager.close()


def load_locally(report: Report, rank: int) -> int:
    """Load and check the newest iteration. Return its number."""
    manager = LocalCheckpointManager(base_path(), "job", LazyCliqueReplicationStrategy(1, 2))
    state, found = manager.load()
    assert isinstance(state, BasicTensorAwareStateDict)
    assert_equal(state.state_dict, local_state(rank, found.iteration))
    assert found.rank == rank
    manager.close()
    return found.iteration
