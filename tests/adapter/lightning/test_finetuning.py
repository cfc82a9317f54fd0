"""Finetuning callbacks, which unfreeze modules and add groups to optimizers: a resumed run trains what it trained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader

from ml_flashpoint.adapter.lightning import FlashpointCallback, resume_path

pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES, EPOCHS, UNFROZEN_IN = 6, 4, 1


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Crash(Exception):
    pass


class Model(LightningModule):
    def __init__(self, crash_at: int | None) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 3))
        self.head = nn.Linear(3, 1)
        self.crash_at = crash_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.crash_at:
            raise Crash
        loss: torch.Tensor = self.head(self.backbone(batch + self.trainer.global_step)).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((each for each in self.parameters() if each.requires_grad), lr=0.01)


def live(folder: Path, seed: int, crash_at: int | None = None) -> dict[str, Any]:
    """One life of a job; at its end, what is trained, how, and the parameters."""
    torch.manual_seed(seed)
    model = Model(crash_at)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[
            BackboneFinetuning(UNFROZEN_IN, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1, train_bn=False),
            FlashpointCallback(folder / "job", every_n_steps=1, strict=True),
        ],
        max_epochs=EPOCHS,
    )
    data = DataLoader(torch.ones(BATCHES, 2))
    try:
        trainer.fit(model, data, ckpt_path=resume_path(trainer))
    except Crash:
        return {}
    (optimizer,) = trainer.optimizers
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "groups": [([names[each] for each in group["params"]], group["lr"]) for group in optimizer.param_groups],
        "parameters": [parameter.tolist() for parameter in model.parameters()],
    }


@pytest.mark.parametrize("crash_at", [3, BATCHES + 2, 2 * BATCHES + 3])
def test_a_crash_before_or_after_unfreezing_changes_nothing(tmpfs: Path, crash_at: int) -> None:
    undisturbed = live(tmpfs / "undisturbed", seed=1)
    assert [len(names) for names, _ in undisturbed["groups"]] == [2, 4]
    live(tmpfs / "resumed", 1, crash_at)
    assert live(tmpfs / "resumed", seed=2) == undisturbed
