"""A small training job whose versions are persisted, through every door. For `tests.support.forked.Team`.

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

from ml_flashpoint import Checkpointer, Config, Flashpoint, Persist
from tests.workers.distributed_training import base

Report = Callable[..., None]


class Toy:
    """A model and its optimizer, sharded by FSDP2, or the same on all ranks."""

    def __init__(self, *, sharded: bool) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.sharded = sharded
        self.model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        if sharded:
            fully_shard(self.model[0])
            fully_shard(self.model[2])
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        self.optimizer.zero_grad()
        self.model(torch.rand(4, 12, generator=generator)).square().mean().backward()
        if not self.sharded:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of the model and the moments of the optimizer, which are made if there are none yet."""
        if not self.optimizer.state:
            for parameter in self.model.parameters():
                self.optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        found = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            found |= {name: parameter.detach(), **{f"{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}}
        return found

    @torch.no_grad()
    def take_over(self, tensors: dict[str, torch.Tensor], steps: int) -> None:
        """Have what :meth:`tensors` was, after so many steps."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        for state in self.optimizer.state.values():
            state["step"].fill_(steps)

    def digest(self) -> str:
        """Of all tensors, in full. Collective."""
        found = hashlib.sha256()
        for name, tensor in self.tensors().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(name.encode() + whole.contiguous().view(torch.uint8).numpy().tobytes())
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


def undisturbed(report: Report, rank: int, door: str, steps: int) -> str:
    """What a run without checkpoints ends with."""
    toy = Toy(sharded=door in ("facade", "dcp"))
    for step in range(1, steps + 1):
        toy.step(step)
    return toy.digest()


def train(report: Report, rank: int, door: str, url: str, steps: int, options: dict[str, Any], leaves: bool) -> Life:
    """Goes on from whatever there is, up to ``steps``, saving every step; then closes what it has opened, or ``leaves``
    as a program does that just ends."""
    life: Life = _DOORS[door](report, url, steps, {"persist_every": 3, **options}, leaves)
    return life


def _config(url: str, options: dict[str, Any]) -> Config:
    return Config(persist=Persist(url, options["persist_every"]), sigterm_grace_s=options.get("grace_s", 20.0))


def _train_by_facade(report: Report, url: str, steps: int, options: dict[str, Any], leaves: bool) -> Life:
    toy = Toy(sharded=True)
    fp = Flashpoint(
        base(),
        deadline_s=60,
        on_world_size_change="keep",
        persist=url if options.get("persists", True) else None,
        persist_every=options["persist_every"],
        grace_s=options.get("grace_s", 20.0),
    )
    began = fp.track(model=toy.model, optimizer=toy.optimizer).resume()
    assert fp.last_recovery is not None
    source, then = fp.last_recovery.source, toy.digest() if began else ""
    report("resumed", began, source)
    for step in range(began + 1, steps + 1):
        toy.step(step)
        assert fp.step() == step
        fp.wait()
        report("step", step, fp.health.persisted)
    now = toy.digest()
    _end(fp, leaves)
    return Life(began, source, then, now, fp.health.persisted)


def _train_by_dcp(report: Report, url: str, steps: int, options: dict[str, Any], leaves: bool) -> Life:
    toy, began, then = Toy(sharded=True), 0, ""

    def state() -> dict[str, Any]:
        model, optimizer = get_state_dict(toy.model, toy.optimizer)
        return {"model": model, "optimizer": optimizer, "step": 0}

    engine = Checkpointer(base(), _config(url, options))
    if (latest := engine.latest()) is not None:
        loaded = state()
        dcp.load(loaded, checkpoint_id=latest, storage_reader=engine.reader(latest))
        set_state_dict(toy.model, toy.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        began, then = loaded["step"], toy.digest()
        assert began == latest.step
    source = engine.last_recovery.tier if engine.last_recovery is not None and latest is not None else "nothing"
    report("resumed", began, source)
    for step in range(began + 1, steps + 1):
        toy.step(step)
        dcp.save(state() | {"step": step}, checkpoint_id=engine.id(step), storage_writer=engine.writer())
        report("step", step, engine.status.persisted)
    now = toy.digest()
    _end(engine, leaves)
    return Life(began, source, then, now, engine.status.persisted)


def _train_by_megatron(report: Report, url: str, steps: int, options: dict[str, Any], leaves: bool) -> Life:
    """All ranks have everything, and save a share of it each."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
    from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
    from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
    from tests.support.megatron import load_from, without_cuda

    without_cuda()
    toy, began, then = Toy(sharded=False), 0, ""
    rank, size = dist.get_rank(), dist.get_world_size()

    def state(step: int) -> dict[str, Any]:
        shares = {name: tensor.chunk(size)[rank].clone() for name, tensor in toy.tensors().items()}
        sharded = {
            name: ShardedTensor.from_rank_offsets(name, share, (0, rank, size)) for name, share in shares.items()
        }
        return {"state": sharded, "step": step}

    def whole(share: torch.Tensor) -> torch.Tensor:
        shares = [torch.empty_like(share) for _ in range(size)]
        dist.all_gather(shares, share)
        return torch.cat(shares)

    engine = Checkpointer(base(), _config(url, options))
    save_strategy = MLFlashpointMegatronAsyncSaveStrategy(engine.writer(), child=False)
    load_strategy = MLFlashpointMegatronLoadStrategy(checkpoint_loader=engine)
    queue = AsyncCallsQueue()
    if (latest := engine.latest()) is not None:
        loaded = load_from(str(latest), state(0), load_strategy)
        toy.take_over({name: whole(share) for name, share in loaded["state"].items()}, loaded["step"])
        began, then = loaded["step"], toy.digest()
        assert began == latest.step
    source = engine.last_recovery.tier if engine.last_recovery is not None and latest is not None else "nothing"
    report("resumed", began, source)
    for step in range(began + 1, steps + 1):
        toy.step(step)
        request = save_local_aware_megatron_checkpoint(state(step), engine.id(step), save_strategy, True)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        assert save_strategy.last_error is None
        report("step", step, engine.status.persisted)
    now = toy.digest()
    _end(engine, leaves)
    return Life(began, source, then, now, engine.status.persisted)


def _train_locally(report: Report, url: str, steps: int, options: dict[str, Any], leaves: bool) -> Life:
    from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

    toy, began, then, source = Toy(sharded=False), 0, "", "nothing"
    manager = LocalCheckpointManager(base(), "session", "pairwise", persist=url, **options)
    if manager.find_latest() != -1:
        state, checkpoint = manager.load()
        toy.take_over(state.state_dict["tensors"], checkpoint.iteration)  # type: ignore[attr-defined]
        assert state.state_dict["rank"] == dist.get_rank()  # type: ignore[attr-defined]
        began, then = checkpoint.iteration, toy.digest()
        assert manager._engine.last_recovery is not None
        source = manager._engine.last_recovery.tier
    report("resumed", began, source)
    for step in range(began + 1, steps + 1):
        toy.step(step)
        saved = BasicTensorAwareStateDict({"tensors": toy.tensors(), "rank": dist.get_rank()})
        if (request := manager.save(saved, step, is_async=step % 2 == 0)) is not None:
            request.execute_sync()
        report("step", step, manager.status.persisted)
    now = toy.digest()
    if leaves:
        atexit._run_exitfuncs()
    else:
        manager.close()
    return Life(began, source, then, now, manager.status.persisted)


def refuse_another_number_of_ranks(report: Report, rank: int, url: str) -> str:
    """What local checkpoints say that another number of ranks has persisted."""
    from ml_flashpoint.local import LocalCheckpointManager, WorldSizeChangedError

    manager = LocalCheckpointManager(base(), "session", "pairwise", persist=url)
    try:
        manager.find_latest()
    except WorldSizeChangedError as error:
        return str(error)
    finally:
        manager.close()
    return "nothing"


def _end(engine: Checkpointer | Flashpoint, leaves: bool) -> None:
    if leaves:
        atexit._run_exitfuncs()  # which a child of multiprocessing does not
    else:
        engine.close()


_DOORS: dict[str, Callable[..., Life]] = {
    "facade": _train_by_facade,
    "dcp": _train_by_dcp,
    "megatron": _train_by_megatron,
    "local": _train_locally,
}
