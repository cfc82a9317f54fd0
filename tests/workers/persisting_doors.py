"""A small training job whose versions are persisted, through every door. For `tests.support.forked.Team`.

Owns the job, its way through each door, and what a rank tells: where it began, from which tier, and digests. A batch
depends on the step and the rank alone, so two runs of as many ranks are the same if their digests are.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ml_flashpoint import Checkpointer, Config, Flashpoint, Persist
from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager, WorldSizeChangedError
from tests.support.sharded import gathered
from tests.support.state_digest import digest
from tests.support.worker import base_path

Report = Callable[..., None]
Way = tuple[Any, Callable[[], int], Callable[[int], None]]


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
        return digest(gathered(self.tensors()))


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
    toy = Toy(sharded=door in _SHARDED)
    for step in range(1, steps + 1):
        toy.step(step)
    return toy.digest()


def train(report: Report, rank: int, door: str, url: str, steps: int, options: dict[str, Any], leaves: bool) -> Life:
    """Goes on from whatever there is, up to ``steps``, saving every step; then closes what it has opened, or ``leaves``
    as a program does that just ends."""
    toy = Toy(sharded=door in _SHARDED)
    engine, resume, save = _DOORS[door](toy, url, {"persist_every": 3, **options})
    began = resume()
    source, then = (_source(engine), toy.digest()) if began else ("nothing", "")
    report("resumed", began, source)
    for step in range(began + 1, steps + 1):
        toy.step(step)
        save(step)
        report("step", step, _persisted(engine))
    now = toy.digest()
    if leaves:
        atexit._run_exitfuncs()  # which a child of multiprocessing does not
    else:
        engine.close()
    return Life(began, source, then, now, _persisted(engine))


def _source(engine: Any) -> str:
    if isinstance(engine, Flashpoint):
        assert engine.last_recovery is not None
        return engine.last_recovery.source
    recovery = (engine._engine if isinstance(engine, LocalCheckpointManager) else engine).last_recovery
    assert recovery is not None
    return str(recovery.tier)


def _persisted(engine: Any) -> int | None:
    persisted: int | None = (engine.health if isinstance(engine, Flashpoint) else engine.status).persisted
    return persisted


# ---- doors: what is to be closed, a function that loads and returns the step, or 0, and one that saves ----------


def _facade(toy: Toy, url: str, options: dict[str, Any]) -> Way:
    persist = url if options.pop("persists", True) else None
    fp = Flashpoint(base_path(), deadline_s=60, on_world_size_change="keep", persist=persist, **options)
    fp.track(model=toy.model, optimizer=toy.optimizer)

    def save(step: int) -> None:
        assert fp.step() == step
        fp.wait()

    return fp, fp.resume, save


def _checkpointer(url: str, options: dict[str, Any]) -> Checkpointer:
    persist = Persist(url, options["persist_every"])
    return Checkpointer(base_path(), Config(persist=persist, sigterm_grace_s=options.get("grace_s", 20.0)))


def _dcp(toy: Toy, url: str, options: dict[str, Any]) -> Way:
    engine = _checkpointer(url, options)

    def state(step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(toy.model, toy.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}

    def resume() -> int:
        if (latest := engine.latest()) is None:
            return 0
        found = state(0)
        dcp.load(found, checkpoint_id=latest, storage_reader=engine.reader(latest))
        set_state_dict(toy.model, toy.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        assert found["step"] == latest.step
        return int(found["step"])

    def save(step: int) -> None:
        dcp.save(state(step), checkpoint_id=engine.id(step), storage_writer=engine.writer())

    return engine, resume, save


def _megatron(toy: Toy, url: str, options: dict[str, Any]) -> Way:
    """All ranks have everything, and save a share of it each."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
    from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
    from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
    from tests.support.megatron import load_from, without_cuda

    without_cuda()
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = _checkpointer(url, options)
    save_strategy = MLFlashpointMegatronAsyncSaveStrategy(engine.writer(), child=False)
    load_strategy = MLFlashpointMegatronLoadStrategy(checkpoint_loader=engine)
    queue = AsyncCallsQueue()

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

    def resume() -> int:
        if (latest := engine.latest()) is None:
            return 0
        found = load_from(str(latest), state(0), load_strategy)
        toy.take_over({name: whole(share) for name, share in found["state"].items()}, found["step"])
        assert found["step"] == latest.step
        return int(found["step"])

    def save(step: int) -> None:
        request = save_local_aware_megatron_checkpoint(state(step), engine.id(step), save_strategy, True)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        assert save_strategy.last_error is None

    return engine, resume, save


def _local(toy: Toy, url: str, options: dict[str, Any]) -> Way:
    manager = LocalCheckpointManager(base_path(), "session", "pairwise", persist=url, **options)

    def resume() -> int:
        if manager.find_latest() == -1:
            return 0
        state, checkpoint = manager.load()
        assert isinstance(state, BasicTensorAwareStateDict)
        toy.take_over(state.state_dict["tensors"], checkpoint.iteration)
        assert state.state_dict["rank"] == dist.get_rank()
        return checkpoint.iteration

    def save(step: int) -> None:
        state = BasicTensorAwareStateDict({"tensors": toy.tensors(), "rank": dist.get_rank()})
        if (request := manager.save(state, step, is_async=step % 2 == 0)) is not None:
            request.execute_sync()

    return manager, resume, save


_DOORS = {"facade": _facade, "dcp": _dcp, "megatron": _megatron, "local": _local}
_SHARDED = ("facade", "dcp")


def refuse_another_number_of_ranks(report: Report, rank: int, url: str) -> str:
    """What local checkpoints say that another number of ranks has persisted."""
    manager = LocalCheckpointManager(base_path(), "session", "pairwise", persist=url)
    try:
        manager.find_latest()
    except WorldSizeChangedError as error:
        return str(error)
    finally:
        manager.close()
    return "nothing"
