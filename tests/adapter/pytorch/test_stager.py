"""DCP's staging future: ``dcp.async_save`` returns a future that says when the state may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from ml_flashpoint import Checkpointer
from ml_flashpoint.adapter.pytorch import memory_stager
from ml_flashpoint.adapter.pytorch.memory_stager import MemoryStager
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support.dcp import RESULT_TIMEOUT_S, Door, checkpointer
from tests.support.tensors import assert_same, blank, clones

pytestmark = pytest.mark.skipif(not memory_stager.HAS_FUTURES, reason="this torch knows no staging futures")


class Job:
    """A loop of which nothing but the step changes anything."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, before: Callable[[], object] = lambda: None) -> None:
        """Call ``before`` before anything changes."""
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 64)).square().mean().backward()
        before()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "note": "n"}


def _async_save(door: Door, state: dict[str, Any], step: int, **options: Any) -> Any:
    return dcp.async_save(
        state,
        checkpoint_id=door.version(step),
        storage_writer=door.writer,
        async_stager=MemoryStager(door.writer),
        **options,
    )


def _check_saves(door: Door, count: int, **options: Any) -> None:
    job = Job()
    for step in range(1, count + 1):
        job.step()
        expected = clones(job.state())
        response = _async_save(door, job.state(), step, **options)
        job.step(lambda: response.staging_completion.result(RESULT_TIMEOUT_S))  # noqa: B023 (called here)
        response.upload_completion.result(RESULT_TIMEOUT_S)
        assert_same(door.load(blank(expected), step), expected)


def test_each_version_is_the_state_at_the_call(door: Door) -> None:
    _check_saves(door, 15)


@pytest.mark.slow
def test_the_same_in_a_process(door: Door, process_group: None) -> None:
    _check_saves(door, 4, **checkpointer("process"))


@pytest.mark.parametrize("wait", ["synchronize_staging", "close"])
def test_the_stager_can_be_waited_for(door: Door, wait: str) -> None:
    job, stager = Job(), MemoryStager(door.writer)
    assert isinstance(stager, AsyncStager)
    assert not stager.should_synchronize_after_execute
    job.step()
    door.save(job.state(), 1)
    expected = clones(job.state())
    response = _async_save(door, job.state(), 2)
    getattr(stager, wait)()
    assert response.staging_completion.done()
    job.step()
    response.upload_completion.result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(expected), 2), expected)


def test_staging_is_complete_at_once_on_the_cpu(door: Door) -> None:
    job = Job()
    job.step()
    for step in (1, 2):
        expected = clones(job.state())
        response = _async_save(door, job.state(), step)
        assert response.staging_completion.done()
        job.step()
        response.upload_completion.result(RESULT_TIMEOUT_S)
        assert_same(door.load(blank(expected), step), expected)


def test_a_failed_staging_is_raised_by_the_write(door: Door) -> None:
    """On one rank alone, an error of the future would leave the others waiting."""

    class NotCopied:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("cannot be copied")

    door.save({"w": torch.ones(3)}, 1)
    response = _async_save(door, {"w": torch.ones(3), "mine": NotCopied()}, 2)
    response.staging_completion.result(RESULT_TIMEOUT_S)
    with pytest.raises(CheckpointException, match="cannot be copied"):
        response.upload_completion.result(RESULT_TIMEOUT_S)


def test_older_releases_of_torch_get_a_state(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_stager, "HAS_FUTURES", False)
    expected = {"w": torch.ones(3)}
    door.save(expected, 1)
    state = {"w": torch.ones(3)}
    future = _async_save(door, state, 2)
    state["w"].add_(1)
    future.result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(expected), 2), expected)


def test_an_engine_has_one(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job") as engine:
        assert engine.stager() is engine.stager()
        for step in (1, 2):
            response = dcp.async_save(
                {"w": torch.full((3,), float(step))},
                checkpoint_id=engine.id(step),
                storage_writer=engine.writer(),
                async_stager=engine.stager(),
            )
            response.upload_completion.result(RESULT_TIMEOUT_S)  # type: ignore[union-attr]
        found = {"w": torch.zeros(3)}
        latest = engine.latest()
        assert latest is not None
        dcp.load(found, checkpoint_id=latest, storage_reader=engine.reader(latest))
        assert found["w"][0] == 2


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match=r"writer must be .*, got 7"):
        MemoryStager(7)  # type: ignore[arg-type]
