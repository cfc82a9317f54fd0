"""An optimizer is tracked, and what it updates is not: said once, at the first save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support.loops import Stored

Tracked = dict[str, Any]


def _optimizer_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tracked:
    return {"optimizer": optimizer}


def _with_all_but_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tracked:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 3)))
    return {"optimizer": optimizer, "scheduler": scheduler, "loader": loader, "count": Stored(1)}


def _with_another_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tracked:
    return {"model": nn.Linear(3, 2), "optimizer": optimizer}


def _with_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tracked:
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("tracked", "said"),
    [
        (_optimizer_alone, True),
        (_with_all_but_the_model, True),
        (_with_another_model, True),
        (_with_the_model, False),
    ],
)
def test_weights_that_are_not_saved(
    base: Path, caplog: pytest.LogCaptureFixture, tracked: Callable[..., Tracked], said: bool
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Flashpoint(base, strict=True) as fp:
        fp.track(**tracked(model, optimizer)).resume()
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            fp.step()
        assert fp.wait()
    told = [each.getMessage() for each in caplog.records if "weights" in each.getMessage()]
    assert len(told) == said
    assert all("'optimizer'" in text for text in told)


@pytest.mark.parametrize("place", ["ckpts", "./ckpts", "../ckpts"])
def test_a_durable_store_that_depends_on_where_a_process_starts_is_refused(base: Path, place: str) -> None:
    with pytest.raises(InvalidArgumentError, match="absolute path") as caught:
        Flashpoint(base, persist=place)
    assert caught.value.argument == "persist"
    assert not base.exists()
