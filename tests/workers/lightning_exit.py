"""A Lightning job that saves at every step and then just ends, as a script does: by its last line, or by an error.

Nothing is closed, destroyed or waited for. Argument: `ends` or `fails`.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from ml_flashpoint.adapter.lightning import FlashpointCallback
from tests.support.worker import base_path, report, world_size

STEPS = 6

warnings.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1000, 1000)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        report(step=self.trainer.global_step)
        if sys.argv[1] == "fails" and self.trainer.global_step == STEPS - 1:
            raise RuntimeError("as asked")
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2 * STEPS, 1000), batch_size=2)  # type: ignore[arg-type]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[FlashpointCallback(base_path())],
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(Model())
