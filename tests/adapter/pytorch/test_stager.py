"""DCP's staging future: ``dcp.async_save`` returns before the state is copied, and says when it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ml_flashpoint import Engine
from ml_flashpoint.adapter.pytorch import memory_stager
from ml_flashpoint.adapter.pytorch.memory_stager import MemoryStager
from ml_flashpoint.core import overlap as overlap_module
from ml_flashpoint.core.overlap import Overlap
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support.copied_bytes import CopiedBytes, nbytes_of
from tests.support.dcp import RESULT_TIMEOUT_S, Door, checkpointer
from tests.support.tensors import assert_same, blank, clones

pytestmark = pytest.mark.skipif(not memory_stager.HAS_FUTURES, reason="this torch knows no staging futures")


@pytest.fixture
def nobody_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies gets no processor time before somebody waits for it."""
    monkeypatch.setattr(Overlap, "_start", lambda self, late: None)


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


def test_a_call_copies_nothing_and_staging_is_complete_once_all_is_copied(
    door: Door, nobody_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, copied = Job(), CopiedBytes(monkeypatch)
    job.step()
    door.save(job.state(), 1)  # the base container is known from now on
    everything = nbytes_of(job.state())
    copied.here()
    door.async_save(job.state(), 2).result(RESULT_TIMEOUT_S)
    assert copied.here() == everything  # the writer as its own stager
    response = _async_save(door, job.state(), 3)
    assert copied.here() == 0
    assert not response.staging_completion.done()
    assert not response.upload_completion.done()
    door.writer.before_update()
    assert copied.here() == everything
    assert response.staging_completion.done()
    response.upload_completion.result(RESULT_TIMEOUT_S)


@pytest.mark.parametrize("wait", ["synchronize_staging", "close"])
def test_the_stager_can_be_waited_for(door: Door, nobody_copies: None, wait: str) -> None:
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


def test_a_change_before_that_fails_the_save_and_no_later_one(door: Door, nobody_copies: None) -> None:
    job = Job()
    job.step()
    door.save(job.state(), 1)
    response = _async_save(door, job.state(), 2)
    with torch.no_grad():
        job.model[1].bias.add_(1)
    door.writer.before_update()
    response.staging_completion.result(RESULT_TIMEOUT_S)  # the state may change, whatever became of the copy
    with pytest.raises(CheckpointException, match=r"'model\.1\.bias' was changed while it was copied"):
        response.upload_completion.result(RESULT_TIMEOUT_S)
    expected = clones(job.state())
    response = _async_save(door, job.state(), 3)
    assert response.staging_completion.done()
    job.step()
    response.upload_completion.result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(expected), 3), expected)


def test_operations_on_a_sharded_parameter_are_counted(
    door: Door, process_group: None, nobody_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap_module, "_content", lambda tensor, most: 0)  # the counters alone
    monkeypatch.setattr(overlap_module, "_samples", lambda *_: [])
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    door.save({"model": model.state_dict()}, 1)
    response = _async_save(door, {"model": model.state_dict()}, 2)
    with torch.no_grad():
        model[1].bias.add_(1)
    door.writer.before_update()
    with pytest.raises(CheckpointException, match=r"'model\.1\.bias' was changed"):
        response.upload_completion.result(RESULT_TIMEOUT_S)


def test_where_an_optimizer_is_watched_everything_else_may_change_at_once(door: Door, nobody_copies: None) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    door.writer.watch(optimizer)
    door.save({"model": model.state_dict()}, 1)
    expected = clones({"model": model.state_dict()})
    response = _async_save(door, {"model": model.state_dict()}, 2)
    assert not response.staging_completion.done()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()  # waits by itself
    assert response.staging_completion.done()
    response.upload_completion.result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(expected), 2), expected)


def test_staging_is_complete_where_all_was_copied_at_once(make_door: Callable[..., Door]) -> None:
    job = Job()
    job.step()
    door = make_door(cache_staged_state_dict=False)
    for step in (1, 2):
        response = _async_save(door, job.state(), step)
        assert response.staging_completion.done()
        response.upload_completion.result(RESULT_TIMEOUT_S)


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
    with Engine.open(tmpfs / "job") as engine:
        assert engine.stager is engine.stager
        for step in (1, 2):
            response = dcp.async_save(
                {"w": torch.full((3,), float(step))},
                checkpoint_id=engine.version(step),
                storage_writer=engine.writer,
                async_stager=engine.stager,
            )
            response.upload_completion.result(RESULT_TIMEOUT_S)  # type: ignore[union-attr]
        found = {"w": torch.zeros(3)}
        latest = engine.latest()
        assert latest is not None
        dcp.load(found, checkpoint_id=latest, storage_reader=engine.reader(latest))
        assert found["w"][0] == 2


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="writer=7"):
        MemoryStager(7)  # type: ignore[arg-type]


def test_the_thread_that_saves_does_not_begin_before_all_is_copied(door: Door, nobody_copies: None) -> None:
    began = threading.Event()

    class Noting(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            began.set()
            return super().create_local_plan()

    door.save({"w": torch.ones(3)}, 1)
    response = _async_save(door, {"w": torch.ones(3)}, 2, planner=Noting())
    assert not began.is_set()
    door.writer.before_update()
    response.upload_completion.result(RESULT_TIMEOUT_S)
    assert began.is_set()
