"""A trainer goes on before what its optimizer updates is copied: what is saved is what it was, or the save fails."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from ml_flashpoint.adapter.lightning import FlashpointCallback
from tests.support.copied_bytes import CopiedBytes
from tests.support.witness import Witness

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH = 64


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 8)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Checks(Callback):
    """Compares each version with what it was to be, once the next step is done.

    Args:
        meddle_at: after the save of this step, something changes a parameter and tells nobody.
    """

    def __init__(self, base: Path, ours: FlashpointCallback, witness: Witness, meddle_at: int = -1) -> None:
        self.base, self.ours, self.witness, self.meddle_at = base, ours, witness, meddle_at
        self.same: dict[int, bool] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.meddle_at:
            with torch.no_grad():
                pl_module.layers[0].bias.add_(1)  # type: ignore[index,operator,union-attr]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        assert self.ours.flashpoint is not None
        assert self.ours.flashpoint.wait(60)
        if trainer.global_step > 1:
            self.same[trainer.global_step - 1] = self.witness.latest_is_in(self.base)


def _fit(folder: Path, *callbacks: Callback, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            callbacks=list(callbacks),
            max_steps=steps,
        )
        trainer.fit(Model(), DataLoader(torch.randn(400, WIDTH), batch_size=8))


def test_each_version_is_the_state_of_its_step(tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, witness = FlashpointCallback(tmpfs / "job", 1, strict=True), Witness(monkeypatch)
    checks = Checks(tmpfs / "job", ours, witness)
    _fit(tmp_path, ours, checks, steps=16)
    assert checks.same == dict.fromkeys(range(1, 16), True)
    assert witness.late[:7] == [True] * 7  # where it is not measured yet whether it pays


def test_a_change_that_nobody_announced_fails_the_save_and_no_later_one(
    tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, witness = FlashpointCallback(tmpfs / "job", 1), Witness(monkeypatch)
    checks = Checks(tmpfs / "job", ours, witness, meddle_at=3)
    _fit(tmp_path, ours, checks, steps=6)
    assert checks.same == {1: True, 2: True, 3: False, 4: True, 5: True}
    assert witness.late == [True] * 3 + [False] * 3
    assert ours.flashpoint is not None
    assert "was changed while it was copied" in str(ours.flashpoint.health.last_error)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_an_optimizer_updates_is_not_copied_while_the_trainer_waits(
    tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    Witness(monkeypatch)  # nobody else copies
    copied, seen = CopiedBytes(monkeypatch), list[int]()

    class Counts(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            seen.append(copied.here())

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            copied.here()

    _fit(tmp_path, FlashpointCallback(tmpfs / "job", 1, overlap=overlap), Counts(), steps=4)
    updated = 3 * sum(parameter.nbytes for parameter in Model().parameters())
    assert all((held < 0.1 * updated) == overlap for held in seen[1:])
