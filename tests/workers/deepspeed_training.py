"""A small model that DeepSpeed trains with ZeRO of all stages, for `tests.support.forked.Team`.

Ranks tell of each step in a file, of which a test reads what lives that were killed came to.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or processes wait for something to compile, which nothing does

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.stage3  # which engines import, for seconds
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ml_flashpoint.adapter.deepspeed import DeepSpeedFlashpoint
from ml_flashpoint.format.errors import FlashpointError
from tests.support.state_digest import digest
from tests.support.worker import base_path

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which every rank would compile
deepspeed.utils.logger.setLevel("WARNING")

Report = Callable[..., None]
WIDTH, SAMPLES, MICRO_BATCH = 20, 46, 4
# What is in the state dicts of optimizers of torch, and of DeepSpeed.
OF_OPTIMIZERS = {"state", "param_groups", "base_optimizer_state", "single_partition_of_fp32_groups"}
OF_OPTIMIZERS |= {"optimizer_state_dict", "fp32_flat_groups", "fp32_groups"}

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
BF16 = {"bf16": {"enabled": True}}
KINDS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 0, bf16": BF16,
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 1, bf16": {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, **BF16},
    "stage 1, bf16, fp32 gradients": {
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        **BF16,
    },
    "stage 2": {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2},
    "stage 2, offloaded": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 30}},
    "stage 3, bf16": {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2, **BF16},
}


class Net(nn.Module):
    """With dropout, a frozen layer, and a buffer in which each rank has another average."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.lerp_(x.mean(0), 0.1)  # in fp32, whatever the weights are in
        x = x.to(self.last.weight.dtype)
        y: torch.Tensor = self.last(F.dropout(self.first(self.frozen(x)).relu(), 0.2, self.training))
        return F.mse_loss(y + self.average.to(y.dtype), x)


def collate(rows: list[torch.Tensor]) -> torch.Tensor:
    """Adds noise by random numbers of torch, Python and NumPy."""
    batch = torch.stack(rows)
    return batch + torch.rand(batch.shape) * random.random() * float(np.random.uniform())


def set_ranks(rank: int) -> None:
    """Set what a launcher does, and have workers of loaders forked, as in a program: not by a fork server anew."""
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))


def make_engine(kind: str, rank: int, seed: int, **more: Any) -> Any:
    """Return a new engine; then begin random numbers, with another ``seed`` in each life."""
    set_ranks(rank)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 1.0,
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 200}},
        "steps_per_print": None,
        **KINDS[kind],
        **more,
    }
    torch.manual_seed(1)
    data = list(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3)))
    engine, *_ = deepspeed.initialize(model=Net(), training_data=data, collate_fn=collate, config=config)  # type: ignore[arg-type]
    set_seeds(rank, seed)
    return engine


def set_seeds(rank: int, seed: int) -> None:
    for set_seed in (torch.manual_seed, random.seed, np.random.seed):
        set_seed(5 + rank + 10 * seed)


def state_of(engine: Any) -> dict[str, str]:
    """Digests of all that a run comes to on this rank, and of what it would draw next."""
    own = engine.optimizer.state_dict()
    found: dict[str, Any] = {
        "scheduler": engine.lr_scheduler.state_dict(),
        "average": engine.module.average,
        "optimizer": {name: own[name] for name in own.keys() & OF_OPTIMIZERS},
        "rate": engine.get_lr(),
        "counts": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "drawn": (torch.rand(3), random.random(), float(np.random.uniform())),
    }
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found["weights"] = [each.detach().clone() for each in engine.module.parameters()]
    return {name: digest(value) for name, value in found.items()}


def loop(engine: Any, batches: Callable[[Any], Iterable[Any]], stepped: Callable[[float], int], steps: int) -> None:
    """Train from the engine's step to one."""
    loader = engine.training_dataloader
    in_epoch = len(loader) // engine.gradient_accumulation_steps()
    while engine.global_steps < steps:
        loader.data_sampler.set_epoch(engine.global_steps // in_epoch)
        for batch in batches(loader):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            if stepped(loss.item()) == steps:
                return


def train(report: Report, rank: int, kind: str, told: Path, life: int, hold: int, steps: int) -> dict[str, str] | None:
    """Resume, and train up to ``steps``; or wait to be killed after step ``hold``, if it comes first."""
    torch.set_num_threads(1)
    engine = make_engine(kind, rank, life)
    with (
        DeepSpeedFlashpoint(engine, base_path(), strict=True, deadline_s=60) as fp,
        open(told / f"{rank}.jsonl", "ab", 0) as file,
    ):

        def tell(**values: Any) -> None:
            file.write(json.dumps(values).encode() + b"\n")

        step = fp.resume()
        tell(resumes=step)
        if not step:  # as in a first life
            set_seeds(rank, 0)

        def stepped(loss: float) -> int:
            step = fp.step()
            copied = fp.last_replicated
            tell(micro=engine.micro_steps, loss=loss, copied=copied)
            report("step", step)
            if copied is not None:
                report("copied", copied)
            return step

        loop(engine, fp.batches, stepped, min(hold, steps))
        if hold < steps:
            assert fp.wait()
            report("copied", fp.last_replicated)
            report.listen()  # type: ignore[attr-defined]
        assert fp.wait()
    return state_of(engine)


def undisturbed(report: Report, rank: int, kind: str, steps: int) -> tuple[dict[str, str], dict[int, float]]:
    """Train in one life, without us."""
    torch.set_num_threads(1)
    engine, losses = make_engine(kind, rank, 0), {}

    def stepped(loss: float) -> int:
        losses[engine.micro_steps] = loss
        return int(engine.global_steps)

    loop(engine, lambda loader: loader, stepped, steps)
    return state_of(engine), losses


def resume_error(report: Report, rank: int, kind: str, options: dict[str, Any]) -> tuple[str, str]:
    """Resume, and return the type and the text of the error that comes of it; the step, if none does."""
    with DeepSpeedFlashpoint(make_engine(kind, rank, 9), base_path(), deadline_s=30, **options) as fp:
        try:
            return "", str(fp.resume())
        except FlashpointError as error:
            return type(error).__name__, str(error)


def beside_durable(report: Report, rank: int, folder: Path) -> list[Any]:
    """Save by DeepSpeed and by us, and return what is loaded: what memory has; what the folder has, without memory."""
    engine = make_engine("stage 1", rank, 0)
    with DeepSpeedFlashpoint(engine, base_path(), every_n_steps=1, strict=True) as fp:
        fp.resume(fallback=lambda: engine.load_checkpoint(folder))
        loop(engine, fp.batches, lambda _: fp.step(), 2)
        engine.save_checkpoint(folder)
        durable = state_of(engine)
        loop(engine, fp.batches, lambda _: fp.step(), 4)
        assert fp.wait()
        newest = state_of(engine)
    found: list[Any] = [durable, newest]
    for where in (base_path(), base_path().with_name("another")):
        engine = make_engine("stage 1", rank, 1)
        with DeepSpeedFlashpoint(engine, where, strict=True) as fp:
            step = fp.resume(fallback=lambda: engine.load_checkpoint(folder))  # noqa: B023 - called at once
            found.append((step, fp.steps_done, state_of(engine)))
    return found


def run_blocks(report: Report, rank: int, blocks: list[str]) -> tuple[int, int]:
    """Run the blocks of the guide with an engine of their own."""
    config = {"train_micro_batch_size_per_gpu": MICRO_BATCH, "optimizer": ADAMW, "zero_optimization": {"stage": 1}}
    set_ranks(rank)
    data = list(torch.randn(6 * MICRO_BATCH, WIDTH))
    names: dict[str, Any] = {"model": Net(), "config": config, "data": data, "epochs": 2}
    for block in blocks:
        exec(block, names)
    names["fp"].close()
    return names["step"], names["engine"].global_steps


def batches_of_epochs(report: Report, rank: int, epochs: int, stop_at: int | None) -> dict[int, int]:
    """Train as the guide says, up to a step. Return how many batches each epoch had."""
    engine, given = make_engine("stage 1", rank, 0), Counter[int]()
    with DeepSpeedFlashpoint(engine, base_path(), strict=True) as fp:
        loader = engine.training_dataloader
        for epoch in range(fp.resume() // len(loader), epochs):
            for batch in fp.batches(loader):
                engine.backward(engine(batch))
                engine.step()
                given[epoch] += 1
                if fp.step() == stop_at:
                    assert fp.wait()
                    return dict(given)
    return dict(given)


def save_while_accumulating(report: Report, rank: int) -> tuple[list[int], str, int | None]:
    """Train for four batches of two each, and save by hand after three."""
    engine, steps, caught = make_engine("stage 2", rank, 0), [], ""
    with DeepSpeedFlashpoint(engine, base_path(), strict=True) as fp:
        for batch in fp.batches(engine.training_dataloader):
            engine.backward(engine(batch))
            engine.step()
            steps.append(fp.step())
            if len(steps) == 3:
                try:
                    fp.save()
                except FlashpointError as error:
                    caught = type(error).__name__
            if len(steps) == 4:
                break
        assert fp.wait()
        return steps, caught, fp.last_saved


def refused(report: Report, rank: int, config: dict[str, Any]) -> tuple[str, str]:
    """Return the error of an engine that is not supported."""
    try:
        DeepSpeedFlashpoint(make_engine("stage 1", rank, 0, **config), base_path())
    except FlashpointError as error:
        return type(error).__name__, str(error)
    return "", ""
