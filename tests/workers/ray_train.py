"""Training functions of Ray Train for tests/e2e/test_ray_train.py: a small model that is killed and goes on."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ml_flashpoint.adapter.ray_train import RayTrainFlashpoint
from tests.support.state_digest import digest

WIDTH, SAMPLES = 24, 46


def _collate(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
    """Adds noise by random numbers of torch, Python and NumPy."""
    batch = torch.stack([row[0] for row in rows])
    return batch + torch.rand(batch.shape) * random.random() * float(np.random.uniform())


def _rank() -> int:
    return int(ray.train.get_context().get_world_rank())


def _tell(config: dict[str, Any], **values: Any) -> None:
    with open(Path(config["told"]) / f"{_rank()}.jsonl", "a") as lines:
        lines.write(json.dumps(values) + "\n")


def train(config: dict[str, Any]) -> None:
    """Train for two epochs, and once more undisturbed, in the life that gets to the end; tell what both come to.

    ``config``: ``told``: folder for what is told. ``epochs``: other than 2. ``kills``: steps after which a rank, by
    turns, kills itself once each. ``hold``: step after which all wait for their end, in the first life; or "saved":
    when anything is saved, and the next life ends at once. ``options`` of the `RayTrainFlashpoint`.
    """
    root = os.environ["RAY_TRAIN_TEST_ROOT"]
    parts = _parts()
    with RayTrainFlashpoint(root, **config.get("options", {})) as fp:
        fp.track(**parts)
        step, reported = fp.resume(), ray.train.get_checkpoint()
        _tell(config, resumes=step, reported=None if reported is None else _pointer(reported))
        node = ray.get_runtime_context().get_node_id()
        (Path(config["told"]) / f"node-{_rank()}").write_text(f"{node} {root}\n")
        if step and config.get("hold") == "saved":
            return
        resumed = _loop(
            parts, step, config.get("epochs", 2), fp.batches, partial(_stepped, config, fp, step), fp.report
        )
        _tell(config, failures=fp.health.failures)
    parts, step = _parts(), 0

    def counted(loss: float) -> int:
        nonlocal step
        step += 1
        _tell(config, undisturbed=step, loss=loss)
        return step

    # Ray's own loop fetches a batch ahead, and so draws its random numbers earlier.
    undisturbed = _loop(parts, 0, 2, lambda loader: loader._dataloader, counted, lambda metrics: None)
    _tell(config, weights=resumed, undisturbed_weights=undisturbed)


def _parts() -> dict[str, Any]:
    """Return a new model, optimizer, scheduler and loader, and begin random numbers anew."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3)))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, 4, shuffle=True, collate_fn=_collate))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5 + _rank())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


def _loop(
    parts: dict[str, Any],
    step: int,
    epochs: int,
    batches: Callable[[Any], Any],
    stepped: Callable[[float], int],
    report: Callable[[dict[str, Any]], None],
) -> str:
    """Train from a step on. Return a digest of the weights."""
    model, optimizer, scheduler, loader = parts.values()
    for epoch in range(step // len(loader), epochs):
        loader.sampler.set_epoch(epoch)
        for batch in batches(loader):
            loss = F.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            stepped(loss.item())
        report({"epoch": epoch})
    return digest([*model.parameters()])


def _stepped(config: dict[str, Any], fp: RayTrainFlashpoint, began: int, loss: float) -> int:
    """Count a step, tell of it, and die or wait if that is the plan."""
    step, told = fp.step(), Path(config["told"])
    _tell(config, step=step, loss=loss)
    killed = told / f"killed-{step}"
    if step in config.get("kills", ()) and _rank() == step % 2 and not killed.exists():
        killed.touch()
        fp.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    if not began and config.get("hold") in (step, "saved" if fp.last_saved is not None else step):
        fp.save()
        fp.wait(60)
        (told / f"holds-{_rank()}").write_text(f"{step}\n")
        signal.pause()
    return step


def _pointer(checkpoint: Any) -> Any:
    with checkpoint.as_directory() as folder:
        return json.loads((Path(folder) / "flashpoint.json").read_text())
