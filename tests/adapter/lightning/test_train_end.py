"""The save that is due at the last batch of a training, and going on from it with more epochs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
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


def fit_shuffled(folder: Path, ours: FlashpointCallback | None, epochs: int) -> torch.Tensor:
    torch.manual_seed(7)
    model = Shuffled()
    batches = DataLoader(torch.arange(6.0).unsqueeze(1), shuffle=True)
    fit(folder, ours, model=model, batches=batches, max_steps=-1, max_epochs=epochs)
    return model.layer.weight


def test_a_trainer_that_is_given_more_epochs_goes_on_from_the_end(tmpfs: Path, tmp_path: Path) -> None:
    expected = fit_shuffled(tmp_path, None, 4)
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    fit_shuffled(tmp_path, ours, 2)
    weight = fit_shuffled(tmp_path, ours, 4)
    assert ours.flashpoint is not None
    assert ours.flashpoint.last_recovery is not None
    assert ours.flashpoint.last_recovery.version == "step-12_ckpt"
    assert torch.equal(weight, expected)
    assert ours.flashpoint.last_saved == 24


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
