"""A small model on bytes, in a training function of Ray Train, that saves into memory and goes on after a crash.

    python examples/ray_train/train.py --steps 200

Kill a worker meanwhile (`kill -9`), or let it happen with `--die-at 50`: Ray starts the workers again, and they go on
from the newest step in memory. The lines with `# ours` are all that it takes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader

CONTEXT, WIDTH = 64, 96


def windows() -> torch.Tensor:
    """Return windows of the source of Python's standard library: bytes [count, CONTEXT + 1]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8)
    return text.unfold(0, CONTEXT + 1, CONTEXT).long()


def train_func(config: dict[str, Any]) -> None:
    """Train on each worker."""
    from ml_flashpoint.adapter.ray_train import RayTrainFlashpoint  # ours

    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(256, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 256))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ray.train.torch.prepare_data_loader(DataLoader(windows(), batch_size=8, shuffle=True))  # type: ignore[arg-type]
    is_first = ray.train.get_context().get_world_rank() == 0
    with RayTrainFlashpoint(config["root"], every_n_steps=1) as fp:  # ours
        step = began = fp.track(model=model, optimizer=optimizer, loader=loader).resume()  # ours
        while step < config["steps"]:
            if ray.train.get_context().get_world_size() > 1:
                loader.sampler.set_epoch(step // len(loader))
            for text in fp.batches(loader):  # ours: fp.batches
                loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step = fp.step()  # ours
                if step == config["die_at"] and not began and is_first:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == config["steps"]:
                    break
        fp.report({"step": step, "loss": loss.item(), "went_on_from": began})  # ours, or ray.train.report


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="/dev/shm/mlf-jobs", help="a folder in memory; each run has one in it")
    parser.add_argument("--name", default="ray-example", help="of the run: the same one goes on from where it was")
    parser.add_argument("--storage", default=None, help="where Ray keeps its own files; by default as Ray chooses")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--die-at", type=int, default=-1, metavar="STEP")
    arguments = parser.parse_args()
    failures = FailureConfig(max_failures=3)
    result = TorchTrainer(
        train_func,
        train_loop_config=vars(arguments),
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(name=arguments.name, storage_path=arguments.storage, failure_config=failures),
    ).fit()
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.3f}", end=", ")
    print(f"the last start went on from step {result.metrics['went_on_from']}")


if __name__ == "__main__":
    main()
