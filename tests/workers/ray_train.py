"""Training functions of Ray Train for tests/e2e/test_ray_train.py: a small model that is killed and goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
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

WIDTH, SAMPLES = 24, 46


def _collate(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
    """Adds noise by random numbers of torch, Python and NumPy."""
    batch = torch.stack([row[0] for row in rows])
    return batch + torch.rand(batch.shape) * random.random() * float(np.random.uniform())


def _model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
    prepared: nn.Module = ray.train.torch.prepare_model(model)
    return prepared


def _tell(config: dict[str, Any], **values: Any) -> None:
    rank = ray.train.get_context().get_world_rank()
    with open(Path(config["told"]) / f"{rank}.jsonl", "a") as lines:
        lines.write(json.dumps(values) + "\n")


def train(config: dict[str, Any]) -> None:
    """Train for some epochs.

    ``config``: ``told``: folder for what is told. ``epochs``. ``kills``: steps after which a rank, by turns, kills
    itself once each. ``hold``: step after which all wait for their end, in the first life; or "saved": when anything is
    saved, and the next life ends at once. ``options`` of the `RayTrainFlashpoint`.
    """
    context, told = ray.train.get_context(), Path(config["told"])
    rank = context.get_world_rank()
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = TensorDataset(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3)))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, 4, shuffle=True, collate_fn=_collate))
    torch.manual_seed(5 + rank), random.seed(5 + rank), np.random.seed(5 + rank)
    root = os.environ["RAY_TRAIN_TEST_ROOT"]
    with RayTrainFlashpoint(root, **config.get("options", {})) as fp:
        fp.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        began = step = fp.resume()
        reported = ray.train.get_checkpoint()
        _tell(config, resumes=step, reported=None if reported is None else _pointer(reported), pid=os.getpid())
        (told / f"node-{rank}").write_text(f"{ray.get_runtime_context().get_node_id()} {root}\n")
        if began and config.get("hold") == "saved":
            return
        for epoch in range(step // len(loader), config["epochs"]):
            if isinstance(loader.sampler, torch.utils.data.DistributedSampler):
                loader.sampler.set_epoch(epoch)
            for batch in fp.batches(loader):
                loss = F.mse_loss(model(batch), batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step = fp.step()
                _tell(config, step=step, loss=loss.item())
                if step in config.get("kills", ()) and rank == step % context.get_world_size():
                    with contextlib.suppress(FileExistsError):
                        (told / f"killed-{step}").touch(exist_ok=False)
                        fp.wait(60)
                        os.kill(os.getpid(), signal.SIGKILL)
                if not began and config.get("hold") in (step, "saved" if fp.last_saved is not None else None):
                    fp.wait(60)
                    (told / f"holds-{rank}").write_text(str(step))
                    signal.pause()
            fp.report({"epoch": epoch})
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        _tell(config, weights=hashlib.sha256(weights.numpy().tobytes()).hexdigest(), failures=fp.health.failures)


def _pointer(checkpoint: Any) -> Any:
    with checkpoint.as_directory() as folder:
        return json.loads((Path(folder) / "flashpoint.json").read_text())
