"""Ranks that forget to ask whether there are versions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.dist_checkpointing import ShardedTensor

from ml_flashpoint.format.errors import UnaskedVersionsError
from tests.support import forked, megatron
from tests.support.worker import base_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

megatron.without_cuda()
forked.preload("tests.support.megatron")


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
