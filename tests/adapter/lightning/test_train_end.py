"""The save that is due at the last batch of a training, and going on from it with more epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

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


def test_averages_are_not_saved_in_place_of_parameters(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True)
    fit(tmp_path, ours, callbacks=[EMAWeightAveraging(decay=0.5)], max_steps=6)
    assert ours.flashpoint is not None
    assert ours.flashpoint.last_saved == 5
