"""A small training job whose every step depends on all that a checkpoint must bring back.

Owns the job: a model with dropout, an optimizer with moments, a scheduler, and data whose order is drawn from the
generators of Python, NumPy and torch. Two runs are the same if `Job.digests` says so. Run as a script, it is a rank
of a `tests.support.cluster.Cluster`; its functions are for children of `tests.support.forked`.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ml_flashpoint import Flashpoint

Report = Callable[..., None]

_SAMPLES, _FEATURES, _BATCH = 64, 12, 4


class Data:
    """Batches in an order that is drawn anew for each epoch; what is tracked besides torch's own objects."""

    def __init__(self) -> None:
        self.inputs = torch.linspace(-1, 1, _SAMPLES * _FEATURES).sin().view(_SAMPLES, _FEATURES)
        self.order = np.zeros(0, dtype=np.int64)
        self.position = 0

    def next(self) -> torch.Tensor:
        if self.position + _BATCH > len(self.order):
            self.order, self.position = np.random.permutation(_SAMPLES), 0
        chosen = self.order[self.position : self.position + _BATCH]
        self.position += _BATCH
        return self.inputs[torch.from_numpy(chosen)] * random.uniform(0.9, 1.1)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.copy(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]


class Job:
    """The job on this rank.

    Args:
        kind: plain, ddp (with batch normalization), or fsdp2.
        seed: of the data's order; the first weights are always the same.
        width: of the model.
    """

    def __init__(self, kind: str = "plain", seed: int = 0, width: int = 24) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(width) if kind == "ddp" else nn.LayerNorm(width)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(_FEATURES, width), norm, nn.GELU(), nn.Dropout(0.2), nn.Linear(width, 5)
        )
        if kind == "fsdp2":
            fully_shard(self.model[0])
            fully_shard(self.model[4])
            fully_shard(self.model)
        elif kind == "ddp":
            # Else DDP lays gradients out anew after the first step of a process, which changes the order of sums.
            self.model = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.data = Data()
        torch.manual_seed(seed * 1000 + rank)
        random.seed(seed * 1000 + rank)
        np.random.seed(seed * 1000 + rank)

    @property
    def tracked(self) -> dict[str, Any]:
        """What to track."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.data,
        }

    def step(self) -> float:
        """One step of training; the loss."""
        self.optimizer.zero_grad()
        loss = self.model(self.data.next()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def digests(self, *, shared: bool = False) -> dict[str, str]:
        """Digests of everything; tensors in full. Collective.

        Args:
            shared: only of what is the same whatever the number of ranks.
        """
        found = {f"model.{name.removeprefix('module.')}": _digest(t) for name, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name.removeprefix('module.')}.{key}"] = _digest(value)
        found["scheduler"] = repr(self.scheduler.state_dict())
        found["groups"] = repr([{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups])
        if not shared:
            found["data"] = f"{self.data.position} {self.data.order.tolist()}"
            found["python"] = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
            found["numpy"] = hashlib.sha256(repr(np.random.get_state(legacy=True)).encode()).hexdigest()
            found["torch"] = _digest(torch.get_rng_state())
        return found


def _digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    content = whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)}".encode() + content).hexdigest()


def undisturbed(steps: int, kind: str = "plain", seed: int = 0) -> dict[str, str]:
    """What a run without checkpoints ends with. On every rank."""
    job = Job(kind, seed)
    for _ in range(steps):
        job.step()
    return job.digests()


# ---- for children of tests.support.forked ---------------------------------------------------------------------


def train(report: Report, base: str, steps: int, pace_s: float = 0.0) -> dict[str, str]:
    """Trains up to `steps`, from wherever it can, saving every step."""
    job = Job()
    with Flashpoint(base, deadline_s=30) as fp:
        step = fp.track(**job.tracked).resume()
        report("resumed", step)
        while step < steps:
            job.step()
            step = fp.step()
            fp.wait()
            report("step", step)
            time.sleep(pace_s)
    return job.digests()


# ---- as a rank of a cluster -----------------------------------------------------------------------------------


def gate_of(root: Path, step: int) -> Path:
    """The file that lets the ranks of a cluster go on after this step."""
    return root / f"gate-{step}"


def main() -> None:
    from tests.support.worker import base_path, leave, report

    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="plain")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--gates", default="", help="steps to stop after until their files are there, by commas")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(options.kind)
    with Flashpoint(base_path(), deadline_s=60) as fp:
        step = fp.track(**job.tracked).resume()
        report(resumed=step)
        while step < options.steps:
            while str(step) in options.gates.split(",") and not gate_of(base_path().parent.parent, step).exists():
                time.sleep(0.05)
            job.step()
            step = fp.step()
            fp.wait()
            report(step=step, replicated=fp.last_replicated)
    report(digests=job.digests())
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
