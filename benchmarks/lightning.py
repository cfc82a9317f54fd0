"""Lightning: how long a save keeps the training loop, beside `ModelCheckpoint` with `AsyncCheckpointIO`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from benchmarks.timing import RUNS, WARMUPS, Memcpy, Result, measure, of_peer
from ml_flashpoint.adapter.lightning import FlashpointCallback, resume_path

STATE = "Lightning, Adam"


class _Model(LightningModule):
    """160 MiB of parameters in 40 tensors, and Adam's state of them: 480 MiB."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        rows = max(1, int(1024 * scale))
        self.weights = torch.nn.ParameterList(torch.rand(rows, 1024) for _ in range(40))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum() * 1e-9

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), foreach=True)


class _Timed(Callback):
    """Makes a save at each step, when the one before has ended."""

    def __init__(self, ours: FlashpointCallback | None, folder: Path) -> None:
        self.ours, self.folder, self.blocked = ours, folder, list[float]()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        began = time.perf_counter()
        if self.ours is not None:
            self.ours.save(trainer)
        else:
            # What ModelCheckpoint calls.
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
        self.blocked.append(time.perf_counter() - began)
        if self.ours is not None:
            assert self.ours.flashpoint is not None
            assert self.ours.flashpoint.wait(60)
        else:
            trainer.strategy.checkpoint_io.teardown()  # waits for the writer
            (self.folder / f"{trainer.global_step}.ckpt").unlink()


def results(folder: Path, scale: float) -> Iterator[Result]:
    """Rows of the same model's saves, one after the other."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    model = _Model(scale)
    memcpy = Memcpy({str(number): torch.cat([weight.detach()] * 3) for number, weight in enumerate(model.weights)})
    yield from _rows("ours: FlashpointCallback, blocked", model, memcpy, folder, is_ours=True)
    peer = "AsyncCheckpointIO, blocked"
    yield from of_peer(STATE, peer, _rows(peer, model, memcpy, folder, is_ours=False))


def _rows(case: str, model: _Model, memcpy: Memcpy, folder: Path, *, is_ours: bool) -> Iterator[Result]:
    ours = FlashpointCallback(folder / "job", 1 << 30, strict=True) if is_ours else None
    timed = _Timed(ours, folder)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=WARMUPS + RUNS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[] if is_ours else [AsyncCheckpointIO()],
        callbacks=[*([ours] if ours else [ModelCheckpoint(folder, save_top_k=0)]), timed],
        enable_checkpointing=not is_ours,
        default_root_dir=folder,
    )
    path = resume_path(trainer) if is_ours else None
    trainer.fit(model, DataLoader(torch.zeros(WARMUPS + RUNS, 1)), ckpt_path=path)
    blocked = iter(timed.blocked)
    yield measure(STATE, case, lambda _: next(blocked), memcpy)
