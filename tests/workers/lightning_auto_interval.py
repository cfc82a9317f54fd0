"""A rank of a Lightning job with `every_n_steps="auto"`, which tells at which steps it saved.

Argument: how many to train. They have two batches each, and epochs, of 25 steps, end with validation.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from ml_flashpoint.adapter.lightning import FlashpointCallback, resume_path
from tests.support.worker import base_path, leave, report, world_size

warnings.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(50, 64))  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(1, 64))  # type: ignore[arg-type]


class Noting(FlashpointCallback):
    """Notes the steps that it saves at."""

    def __init__(self) -> None:
        super().__init__(base_path(), "auto", mtbf_s=3.6, deadline_s=60)
        self.saved: list[int] = []

    def save(self, trainer: Trainer) -> None:
        self.saved.append(trainer.global_step)
        super().save(trainer)


def main() -> None:
    torch.set_num_threads(1)
    ours = Noting()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[ours],
        max_steps=int(sys.argv[1]),
        max_epochs=-1,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    path = resume_path(trainer)
    trainer.fit(Model(), ckpt_path=path)
    assert ours.flashpoint is not None
    health = ours.flashpoint.health
    report(
        found=None if path is None else str(path),
        saved=ours.saved,
        every=health.every_n_steps,
        reason=health.interval_reason,
        failures=health.failures,
        verified=ours.flashpoint.last_replicated,
    )
    dist.destroy_process_group()


main()
leave()
