"""A small training job whose versions are persisted by doors other than the façade. For `tests.support.forked.Team`.

Owns the job, its way through each door, and what a rank tells: where it began, from which tier, and digests. A batch
depends on the step and the rank alone, so two runs of as many ranks are the same if their digests are.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ml_flashpoint import Engine
from ml_flashpoint.core.engine import CheckpointEngine
from tests.workers.distributed_training import base

Report = Callable[..., None]


class Toy:
    """A model and its optimizer, sharded by FSDP2."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5))
        fully_shard(self.model[0])
        fully_shard(self.model[2])
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        self.optimizer.zero_grad()
        self.model(torch.rand(4, 12, generator=generator)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": 0}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def digest(self) -> str:
        """Of all tensors, in full. Collective."""
        found = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            for tensor in (parameter, *(self.optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found.update(name.encode() + whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class Life:
    """What a life of a job on a rank comes to.

    Attributes:
        began: the step that it went on from. source: in which tier that was.
        then, now: digests, then and at the end. persisted: the newest persisted step that this rank has heard of.
    """

    began: int
    source: str
    then: str
    now: str
    persisted: int | None


def undisturbed(report: Report, rank: int, steps: int) -> str:
    """What a run without checkpoints ends with."""
    toy = Toy()
    for step in range(1, steps + 1):
        toy.step(step)
    return toy.digest()


def train(report: Report, rank: int, door: str, url: str, steps: int, options: dict[str, Any], leaves: bool) -> Life:
    """Goes on from whatever there is, up to ``steps``, saving every step; then closes what it has opened, or ``leaves``
    as a program does that just ends."""
    return _DOORS[door](report, url, steps, {"persist_every": 3, **options}, leaves)


def _train_by_dcp(report: Report, url: str, steps: int, options: dict[str, Any], leaves: bool) -> Life:
    toy, began, then = Toy(), 0, ""
    engine = Engine.open(base(), persist=url, **options)
    if (latest := engine.latest()) is not None:
        state = toy.state()
        dcp.load(state, checkpoint_id=latest, storage_reader=engine.reader(latest))
        toy.load(state)
        began, then = state["step"], toy.digest()
        assert began == latest.step
    source = engine.loader.tier if latest is not None else "nothing"
    report("resumed", began, source)
    for step in range(began + 1, steps + 1):
        toy.step(step)
        dcp.save(toy.state() | {"step": step}, checkpoint_id=engine.version(step), storage_writer=engine.writer)
        report("step", step, engine.persist_health.persisted)
    now = toy.digest()
    _end(engine, leaves)
    return Life(began, source, then, now, engine.persist_health.persisted)


def _end(engine: CheckpointEngine, leaves: bool) -> None:
    if leaves:
        atexit._run_exitfuncs()  # which a child of multiprocessing does not
    else:
        engine.close()


_DOORS: dict[str, Callable[..., Life]] = {"dcp": _train_by_dcp}
