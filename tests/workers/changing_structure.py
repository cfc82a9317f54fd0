"""Replicated states whose structure changes between saves, with little room; for `tests.support.forked.Team`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

from ml_flashpoint import Checkpointer, Config, Flashpoint
from tests.support.state_digest import digest
from tests.workers.distributed_training import base

Report = Callable[..., None]


def used(folder: Path) -> int:
    """Bytes used on a filesystem."""
    stats = os.statvfs(folder)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def reshape(model: nn.Module, sizes: list[int]) -> None:
    """Give a model parameters of so many bytes each, and no others."""
    for name in [name for name, _ in model.named_parameters()]:
        delattr(model, name)
    for number, size in enumerate(sizes):
        setattr(model, f"p{number}", nn.Parameter(torch.zeros(size // 4), requires_grad=False))


def save_structures(
    report: Report, rank: int, phases: list[list[int]], saves: int, hurry: bool = False
) -> dict[str, Any]:
    """So many saves of each structure. Returns, of each save, the error if it failed; what of it was found again.

    Args:
        hurry: do not wait for copies after each save.
    """
    torch.set_num_threads(1)
    model, errors, behind, most = nn.Module(), [], [], 0
    reshape(model, phases[0])
    step = 0
    with Flashpoint(base(), deadline_s=60) as fp:
        fp.track(model=model).resume()
        for sizes in phases:
            reshape(model, sizes)
            for _ in range(saves):
                step += 1
                for number, parameter in enumerate(model.parameters()):
                    parameter.fill_(step * 100 + number)
                failures = fp.health.failures
                dist.barrier()
                if hurry and step == saves * len(phases):
                    fp.save(step)  # a save of a loop in a hurry may be skipped
                else:
                    fp.step()
                if not hurry:
                    fp.wait()
                errors.append(fp.health.last_error if fp.health.failures > failures else None)
                behind.append(step - (fp.last_replicated or 0))
                most = max(most, used(base().parent))
        fp.wait()
        left = used(base().parent)
    saved = digest([model.state_dict()])
    for parameter in model.parameters():
        parameter.zero_()
    dist.barrier()
    with Flashpoint(base(), deadline_s=60) as fp:
        found = fp.track(model=model).resume()
    same = digest([model.state_dict()]) == saved
    return {"errors": errors, "behind": behind, "used": most, "left": left, "found": found, "same": same}


def save_structures_by_dcp(report: Report, rank: int, phases: list[list[int]], saves: int) -> dict[str, Any]:
    """The same with ``dcp.async_save``, which copies before it plans."""
    torch.set_num_threads(1)
    errors: list[str | None] = []
    most, step, state = 0, 0, dict[str, torch.Tensor]()
    with Checkpointer(base(), Config(replication="pairwise")) as engine:
        for sizes in phases:
            for _ in range(saves):
                step += 1
                state = {f"p{n}": torch.full((size // 4,), float(step * 100 + n)) for n, size in enumerate(sizes)}
                dist.barrier()
                future: Any = dcp.async_save(state, checkpoint_id=engine.id(step), storage_writer=engine.writer())
                try:
                    getattr(future, "upload_completion", future).result(60)
                    errors.append(None)
                except dcp.CheckpointException as error:
                    errors.append(str(error))
                engine.wait()
                most = max(most, used(base().parent))
        left = used(base().parent)
        latest = engine.latest()
        assert latest is not None
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(loaded, checkpoint_id=latest, storage_reader=engine.reader(latest))
        same = digest([loaded]) == digest([state])
        found = latest.step
    return {"errors": errors, "used": most, "left": left, "found": found, "same": same}
