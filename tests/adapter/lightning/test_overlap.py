"""A trainer goes on as soon as a save returns, with overlap: what is saved is what it was then.

The device that overlap copies from is played: its memory is the host's, and its streams lag behind.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from ml_flashpoint.adapter.lightning import FlashpointCallback
from tests.support.played_cuda import PlayedDevice, lock_slots
from tests.support.witness import Witness

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH = 64


class Model(LightningModule):
    """With automatic optimization, forward and backward come within the optimizer's step, after its hooks."""

    def __init__(self, *, automatic: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 8)
        )
        self.automatic_optimization = automatic
        self.made: list[torch.optim.Optimizer] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.made.append(torch.optim.AdamW(self.parameters(), lr=0.1))
        return self.made[-1]


class Checks(Callback):
    """Compares each version with what it was to be, and notes what is still to be copied at Lightning's hooks."""

    def __init__(self, base: Path, ours: FlashpointCallback, witness: Witness) -> None:
        self.base, self.ours, self.witness = base, ours, witness
        self.same: dict[int, bool] = {}
        self.under_way: dict[str, list[bool]] = {"start": [], "update": [], "end": []}

    def _note(self, hook: str) -> None:
        assert self.ours.flashpoint is not None
        late = self.ours.flashpoint._checkpointer.overlap._late
        self.under_way[hook].append(late is not None and not late.over)

    def on_train_batch_start(self, *_: Any) -> None:
        self._note("start")

    def on_before_zero_grad(self, *_: Any) -> None:
        self._note("update")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        ours = self.ours.flashpoint
        assert ours is not None
        assert ours.wait(60)
        lock_slots(ours._checkpointer._pool)
        if trainer.global_step > 1:
            self.same[trainer.global_step - 1] = self.witness.latest_is_in(self.base)

    def on_train_epoch_end(self, *_: Any) -> None:
        self._note("end")


def _fit(folder: Path, model: Model, *callbacks: Callback, **options: Any) -> None:
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
            **{"max_steps": 10, **options},
        )
        trainer.fit(model, DataLoader(torch.randn(400, WIDTH), batch_size=8))


@pytest.mark.parametrize("automatic", [True, False])
def test_the_state_is_copied_from_a_device_while_forward_and_backward_run(
    tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, automatic: bool
) -> None:
    model = Model(automatic=automatic)
    PlayedDevice(monkeypatch, [model], model.made).lag()
    ours, witness = FlashpointCallback(tmpfs / "job", 1, strict=True, overlap=True), Witness(monkeypatch)
    checks = Checks(tmpfs / "job", ours, witness)
    _fit(tmp_path, model, ours, checks)
    assert checks.same == dict.fromkeys(range(1, 10), True)
    assert all(witness.late[4:9])
    assert checks.under_way["update" if automatic else "start"][5:] == [True] * 5


@pytest.mark.parametrize("options", [{}, {"max_epochs": 1, "max_steps": -1}])
def test_nothing_is_copied_any_more_when_others_may_change_it(
    tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Weight averaging exchanges the parameters at the end."""
    model = Model()
    PlayedDevice(monkeypatch, [model], model.made)
    ours, witness = FlashpointCallback(tmpfs / "job", 1, strict=True, overlap=True), Witness(monkeypatch)
    checks = Checks(tmpfs / "job", ours, witness)
    _fit(tmp_path, model, ours, checks, EMAWeightAveraging(decay=0.5), **options)
    assert any(witness.late)
    assert checks.under_way["end"] == [False]
