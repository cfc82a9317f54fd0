"""A small training job whose every step depends on all that a checkpoint must bring back.

Owns the job: a model with dropout, an optimizer with moments, a scheduler, and data whose order is drawn from the
generators of Python, NumPy and torch. Two runs are the same if `Job.digests` says so. Run as a script, it is a rank
of a `tests.support.cluster.Cluster`; its functions are for children of `tests.support.forked`.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ml_flashpoint import Flashpoint
from tests.support import worker
from tests.support.sharded import gathered
from tests.support.state_digest import digest

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
        found = {
            f"model.{name.removeprefix('module.')}": digest(gathered(t)) for name, t in self.model.state_dict().items()
        }
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name.removeprefix('module.')}.{key}"] = digest(gathered(value))
        found["scheduler"] = repr(self.scheduler.state_dict())
        found["groups"] = repr([{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups])
        if not shared:
            found["data"] = f"{self.data.position} {self.data.order.tolist()}"
            found["python"] = digest(random.getstate())
            found["numpy"] = digest(np.random.get_state(legacy=True))
            found["torch"] = digest(torch.get_rng_state())
        return found


def undisturbed(steps: int, kind: str = "plain", seed: int = 0) -> dict[str, str]:
    """What a run without checkpoints ends with. On every rank."""
    job = Job(kind, seed)
    for _ in range(steps):
        job.step()
    return job.digests()


def train(report: Report, base: Path | str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train up to ``steps``, from wherever it can, saving every step. Return what was found, and what came of it.

    Args:
        options: of the `Job` and of the `Flashpoint`.
    """
    torch.set_num_threads(1)
    options = {"deadline_s": 60, **options}
    job = Job(**{name: options.pop(name) for name in ("kind", "seed", "width") if name in options})
    with Flashpoint(base, **options) as fp:
        step = fp.track(**job.tracked).resume()
        recovery = fp.last_recovery
        assert recovery is not None
        found = job.digests(shared=True) if step else {}
        report("resumed", step, recovery.source)
        while step < steps:
            job.step()
            step = fp.step()
            fp.wait()
            report("step", step, fp.health.persisted, fp.last_replicated)
        assert fp.wait() or not options.get("strict")
        replicated, bytes_saved = fp.last_replicated, fp.health.bytes
    return {
        "recovery": asdict(recovery),
        "found": found,
        "shared": job.digests(shared=True),
        "digests": job.digests(),
        "replicated": replicated,
        "bytes": bytes_saved,
    }


def exit_without_closing(report: Report, base: str, url: str, forgets: bool) -> None:
    """Save, and end. ``forgets`` what the parent registered, as children of multiprocessing do since Python 3.13."""
    if forgets:
        atexit._clear()
    fp = Flashpoint(base, persist=url)
    fp.track(**Job().tracked).resume()
    for _ in range(3):
        fp.step()
        fp.wait()
    atexit._run_exitfuncs()  # which a child of multiprocessing does not


# ---- as a rank of a cluster -----------------------------------------------------------------------------------


def gate_of(root: Path, step: int) -> Path:
    """The file that lets the ranks of a cluster go on after this step."""
    return root / f"gate-{step}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="plain")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--gates", default="", help="steps to stop after until their files are there, by commas")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    def told(what: str, step: int, _: Any, replicated: int | None = None) -> None:
        worker.report(**{what: step, "replicated": replicated})
        while str(step) in given.gates.split(",") and not gate_of(worker.base_path().parent.parent, step).exists():
            time.sleep(0.05)

    dist.init_process_group("gloo")
    worker.report(digests=train(told, worker.base_path(), given.steps, {"kind": given.kind})["digests"])
    dist.destroy_process_group()
    worker.leave()


if __name__ == "__main__":
    main()
