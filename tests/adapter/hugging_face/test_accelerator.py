"""Loaders of an Accelerator, and what is refused. Whole jobs that are killed: tests/e2e/test_hugging_face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset

from ml_flashpoint.adapter.accelerate import AcceleratorFlashpoint
from ml_flashpoint.format.errors import InvalidArgumentError

pytestmark = pytest.mark.slow


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(12.0).reshape(12, 1))


def prepared(data: Any, **config: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))
    loader = DataLoader(data, batch_size=2, shuffle=not isinstance(data, IterableDataset))
    return accelerator, accelerator.prepare(model, loader)[1]


def drawn(flashpoint: AcceleratorFlashpoint, loader: Any, stop: int) -> list[tuple[list[float], float]]:
    """Batches, and a random number that the loop draws for each, until so many steps are done."""
    found = []
    for batch in flashpoint.batches(loader):
        found.append((batch.flatten().tolist(), torch.rand(()).item()))
        if flashpoint.step() == stop:
            break
    return found


@pytest.mark.parametrize("data", [Numbers(), torch.arange(12.0).reshape(12, 1)], ids=["iterable", "map-style"])
@pytest.mark.parametrize("stop", [1, 2, 5, 6])
def test_the_rest_of_a_pass_and_the_next_one_are_the_undisturbed_runs(tmpfs: Path, data: Any, stop: int) -> None:
    torch.manual_seed(1)
    accelerator, loader = prepared(data)
    with AcceleratorFlashpoint(accelerator, tmpfs / "whole", strict=True) as whole:
        undisturbed = drawn(whole, loader, 0) + drawn(whole, loader, 0)
    torch.manual_seed(1)
    accelerator, loader = prepared(data)
    with AcceleratorFlashpoint(accelerator, tmpfs / "job", strict=True) as first:
        found = drawn(first, loader, stop)
        first.save()
    torch.manual_seed(2)
    accelerator, loader = prepared(data)
    with AcceleratorFlashpoint(accelerator, tmpfs / "job", strict=True) as second:
        assert second.resume() == stop
        while len(found) < 12:
            found += drawn(second, loader, 0)
    assert found == undisturbed


def test_a_loader_that_had_not_begun_begins_with_its_first_pass(tmpfs: Path) -> None:
    for _ in range(2):
        accelerator, loader = prepared(torch.arange(12.0).reshape(12, 1), use_seedable_sampler=True)
        with AcceleratorFlashpoint(accelerator, tmpfs / "job", strict=True) as flashpoint:
            if flashpoint.resume() == 0:
                flashpoint.step()
                flashpoint.save()
                continue
            drawn(flashpoint, loader, 3)
            assert loader.iteration == 0


def test_who_loops_over_the_loader_itself_is_told(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, loader = prepared(torch.arange(12.0).reshape(12, 1))
    with AcceleratorFlashpoint(accelerator, tmpfs / "job") as flashpoint:
        for _ in loader:
            flashpoint.step()
    assert caplog.text.count("nobody loops over fp.batches(loader)") == 1


def test_orders_that_would_not_come_back_are_refused(tmpfs: Path) -> None:
    accelerator, _ = prepared(torch.arange(12.0).reshape(12, 1), use_stateful_dataloader=True)
    with pytest.raises(InvalidArgumentError, match="use_seedable_sampler=True"):
        AcceleratorFlashpoint(accelerator, tmpfs / "stateful")
    accelerator, loader = prepared(Numbers())
    plain = DataLoader(torch.arange(12.0), batch_size=2)  # type: ignore[arg-type]
    dispatched = prepare_data_loader(plain, num_processes=2, process_index=0, dispatch_batches=True, put_on_device=True)
    accelerator._dataloaders.append(dispatched)
    with AcceleratorFlashpoint(accelerator, tmpfs / "dispatched") as flashpoint:
        with pytest.raises(InvalidArgumentError, match="dispatch_batches=False"):
            next(iter(flashpoint.batches(dispatched)))
        with pytest.raises(InvalidArgumentError, match="through"):
            flashpoint.batches(loader, through=iter)


def test_unusable_accelerators_are_refused(tmpfs: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="accelerator must be an Accelerator"):
        AcceleratorFlashpoint(object(), tmpfs / "job")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"prepare\(model"):
        AcceleratorFlashpoint(Accelerator(cpu=True), tmpfs / "job")
