"""One rank that fails, saves once more than the others or forgets to ask: what all are told; later saves work."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.dist_checkpointing import ShardedTensor

from ml_flashpoint.format.errors import DivergedError, SaveError, UnaskedVersionsError
from tests.support import forked, megatron
from tests.support.worker import base_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

megatron.without_cuda()
forked.preload("tests.support.megatron")

STEPS = range(1, 7)
START = threading.Thread.start


def _state(rank: int, step: int) -> dict[str, Any]:
    return {"weight": ShardedTensor.from_rank_offsets("weight", torch.full((100,), float(step)), (0, rank, 2))}


def _save(door: megatron.Door, rank: int, step: int, asynchronous: bool) -> None:
    # The strategy itself: megatron-core's own collectives around it would wait for the other rank.
    strategy = door.save_strategy
    if not asynchronous:
        strategy.save(_state(rank, step), door.version(step))
        return
    request = strategy.async_save(_state(rank, step), door.version(step))
    for finalize in request.finalize_fns:
        finalize()


def play(report: forked.Report, rank: int, fault: str, asynchronous: bool) -> dict[int, str]:
    """Save some steps; rank 1 does something else at step 3. The errors, by step."""
    door, errors = megatron.Door(base_path()), dict[int, str]()
    for step in STEPS:
        if rank == 1 and step == 3 and fault == "begins once more":
            door.saver.fail(door.saver.begin(exchanged=True), SaveError("given up"))
        elif rank == 1 and step == 3 and fault == "no thread":
            threading.Thread.start = _refuse  # type: ignore[method-assign]
        elif rank == 0 and step == 3 and fault == "saves once more":
            continue
        try:
            _save(door, rank, step, asynchronous)
        finally:
            threading.Thread.start = START  # type: ignore[method-assign]
        if (error := door.save_strategy.last_error) is not None:
            errors[step] = type(error).__name__
            assert isinstance(error, SaveError), error
    door.settle()
    dist.barrier()
    assert door.saver.stats.last_verified == STEPS[-1]
    blank = {"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(100), (0, rank, 2))}
    found = door.loader.get_latest_complete_checkpoint(door.base)
    assert found is not None
    loaded = door.load_strategy.load(blank, Path(str(found)))
    assert torch.equal(loaded["weight"], torch.full((100,), float(STEPS[-1])))
    door.close()
    return errors


def _refuse(thread: threading.Thread) -> None:
    if thread.name == "flashpoint-megatron":
        raise RuntimeError("can't start new thread")
    START(thread)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_one_rank_begins_alone_costs_nothing(tmpfs: Path, asynchronous: bool) -> None:
    assert forked.call_team(play, tmpfs, 2, "begins once more", asynchronous) == [{}, {}]


def test_a_thread_that_cannot_be_started_costs_one_save(tmpfs: Path) -> None:
    assert forked.call_team(play, tmpfs, 2, "no thread", True) == [{3: SaveError.__name__}] * 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_saves_once_more_is_in_step_again_behind_the_others(tmpfs: Path, asynchronous: bool) -> None:
    ahead, behind = forked.call_team(play, tmpfs, 2, "saves once more", asynchronous)
    assert ahead == {4: DivergedError.__name__}
    assert behind == dict.fromkeys((3, 4), DivergedError.__name__)


def forget_to_ask(report: forked.Report, rank: int, step: int, asynchronous: bool) -> str | None:
    door, said = megatron.Door(base_path()), None
    try:
        _save(door, rank, step, asynchronous)
    except UnaskedVersionsError as error:
        said = str(error)
    door.settle()
    dist.barrier()
    door.close()
    return said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_versions_that_nobody_asked_about_are_not_saved_over(tmpfs: Path, asynchronous: bool) -> None:
    assert forked.call_team(forget_to_ask, tmpfs, 2, 60, asynchronous) == [None, None]
    shutil.rmtree(tmpfs / "node-0")  # a machine was replaced: only rank 1 finds something
    for said in forked.call_team(forget_to_ask, tmpfs, 2, 2, asynchronous):
        assert said is not None
        assert "call get_latest_complete_checkpoint(base) before the first save" in said
    assert [path.name for path in (tmpfs / "node-1" / "job").glob("step-*")] == ["step-60_ckpt"]
    assert list((tmpfs / "node-0" / "job").glob("step-*")) == []
