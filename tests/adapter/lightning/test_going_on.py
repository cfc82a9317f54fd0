"""Trainings that go on from wherever they were ended: with more epochs, and after modules were unfrozen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from ml_flashpoint.adapter.lightning import FlashpointCallback
from tests.adapter.lightning.test_callback import Model, fit

pytestmark = pytest.mark.filterwarnings("ignore")


class Shuffled(Model):
    """Every draw shows: of the sampler, and of dropout."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(torch.nn.functional.dropout(batch.expand(2, self.width))).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Placed:
    """Batches in an order of its own for each epoch, by a loader that knows its place."""

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.place >= len(self):
            self.epoch, self.place = self.epoch + 1, 0
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < len(self):
            self.place += 1
            yield torch.tensor([[float(order[self.place - 1])]])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class StopAt(Callback):
    """What early stopping and a time limit do."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


@pytest.mark.parametrize(
    ("first", "stop", "then"),
    [
        ({"max_epochs": 2}, -1, {"max_epochs": 4}),
        ({"max_steps": 12}, -1, {"max_steps": 24}),
        ({"max_steps": 24}, 9, {"max_steps": 24}),
        ({"max_epochs": 4}, 9, {"max_epochs": 4}),
    ],
)
def test_a_trainer_goes_on_exactly_however_training_was_ended(
    tmpfs: Path, tmp_path: Path, first: dict[str, int], stop: int, then: dict[str, int]
) -> None:
    def train(ours: FlashpointCallback | None, stop: int, limits: dict[str, int]) -> tuple[int, Any]:
        torch.manual_seed(7)
        model = Shuffled()
        limits = {"max_steps": -1, "max_epochs": -1, **limits}
        trainer = fit(tmp_path, ours, model=model, callbacks=[StopAt(stop)], batches=Placed(), **limits)
        return trainer.current_epoch, model.layer.weight.tolist()

    expected = train(None, -1, then)
    train(FlashpointCallback(tmpfs / "job", strict=True), stop, first)
    assert train(FlashpointCallback(tmpfs / "job", strict=True), -1, then) == expected


def test_averages_are_not_saved_in_place_of_parameters(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    fit(tmp_path, ours, callbacks=[EMAWeightAveraging(decay=0.5)], max_steps=6)
    assert ours.flashpoint is not None
    assert ours.flashpoint.last_saved == 5


BATCHES, EPOCHS, UNFROZEN_IN = 6, 4, 1


class Crash(Exception):
    pass


class Unfreezing(LightningModule):
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
    model, ours = Unfreezing(crash_at), FlashpointCallback(folder / "job", every_n_steps=1, strict=True)
    unfreezes = BackboneFinetuning(UNFROZEN_IN, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1, train_bn=False)
    options = {"model": model, "batches": DataLoader(torch.ones(BATCHES, 2)), "max_steps": -1, "max_epochs": EPOCHS}
    try:
        trainer = fit(folder, ours, callbacks=[unfreezes], **options)
    except Crash:
        return {}
    (optimizer,) = trainer.optimizers
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "groups": [([names[each] for each in group["params"]], group["lr"]) for group in optimizer.param_groups],
        "parameters": [parameter.tolist() for parameter in model.parameters()],
    }


@pytest.mark.parametrize("crash_at", [3, 2 * BATCHES + 3])
def test_a_crash_before_or_after_unfreezing_changes_nothing(tmpfs: Path, crash_at: int) -> None:
    undisturbed = live(tmpfs / "undisturbed", seed=1)
    assert [len(names) for names, _ in undisturbed["groups"]] == [2, 4]
    live(tmpfs / "resumed", 1, crash_at)
    assert live(tmpfs / "resumed", seed=2) == undisturbed
