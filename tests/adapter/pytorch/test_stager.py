"""DCP's staging future: ``dcp.async_save`` returns a future that says when the state may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from ml_flashpoint import Checkpointer
from ml_flashpoint.adapter.pytorch import memory_stager
from ml_flashpoint.adapter.pytorch.memory_stager import MemoryStager
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support.dcp import RESULT_TIMEOUT_S, Door, checkpointer
from tests.support.tensors import assert_same, blank

pytestmark = pytest.mark.skipif(not memory_stager.HAS_FUTURES, reason="this torch knows no staging futures")


def _async_save(door: Door, state: dict[str, Any], step: int, **options: Any) -> Any:
    return dcp.async_save(
        state,
        checkpoint_id=door.version(step),
        storage_writer=door.writer,
        async_stager=MemoryStager(door.writer),
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_each_version_is_the_state_at_the_call(door: Door, process_group: None, mode: str) -> None:
    stager = MemoryStager(door.writer)
    assert isinstance(stager, AsyncStager)
    assert not stager.should_synchronize_after_execute
    for step, wait in enumerate((None, stager.synchronize_staging, stager.close), 1):
        state: dict[str, Any] = {"w": torch.full((64, 64), float(step)), "note": "n"}
        response = _async_save(door, state, step, **checkpointer(mode))
        if wait is None:
            response.staging_completion.result(RESULT_TIMEOUT_S)
        else:
            wait()
        assert response.staging_completion.done()
        state["w"].zero_()
        response.upload_completion.result(RESULT_TIMEOUT_S)
        assert_same(door.load(blank(state), step), {"w": torch.full((64, 64), float(step)), "note": "n"})


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
