"""The strategies in one process: wrong arguments, and plans that are none. Saves are tested on several ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from ml_flashpoint import events
from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError, InvalidNameError, UnaskedVersionsError
from ml_flashpoint.memory.container import BaseContainer
from tests.support.megatron import Door, Layout, TorchDist, check_load, sharded_state, without_cuda
from tests.support.tensors import OVERLAPPING

without_cuda()


def test_elements_that_share_memory_are_loaded_into_such(door: Door) -> None:
    def state(whole: torch.Tensor) -> dict[str, Any]:
        views = {name: view(whole) for name, view in OVERLAPPING.items()}
        return {name: ShardedTensor.from_rank_offsets(name, each) for name, each in views.items()}

    saved = state(torch.arange(48.0).view(6, 8) * 1j)
    door.save_megatron(saved, 1)
    loaded = door.load_megatron(state(torch.zeros(6, 8, dtype=torch.complex64)), 1)
    assert all(torch.equal(loaded[name], saved[name].data) for name in OVERLAPPING)


def test_unusable_arguments_are_refused(door: Door, tmpfs: Path) -> None:
    wrong: Any = object()
    with pytest.raises(InvalidArgumentError, match="storage_writer must be"):
        MLFlashpointMegatronAsyncSaveStrategy(storage_writer=wrong)
    with pytest.raises(InvalidArgumentError, match="checkpoint_loader must be"):
        MLFlashpointMegatronLoadStrategy(checkpoint_loader=wrong)
    theirs = TorchDist(tmpfs / "other").save_strategy
    with pytest.raises(InvalidArgumentError, match="save_strategy"):
        save_local_aware_megatron_checkpoint({}, door.version(1), theirs, False)
    for folder, error in (
        ("relative/step-1_ckpt", InvalidNameError),
        ("/dev/shm/job/iter_1", InvalidArgumentError),
    ):
        for asynchronous in (False, True):
            with pytest.raises(error):
                save_local_aware_megatron_checkpoint({}, folder, door.save_strategy, asynchronous)
        for call in (door.save_strategy.async_save, door.save_strategy.save, door.load_strategy.load):
            with pytest.raises(error):
                call({}, folder)  # type: ignore[operator]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_that_cannot_be_written_beside_a_committed_part_are_no_failure(
    door: Door, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """They are in the object, and a recovery writes them: what is told is what a restart finds."""

    def full(*args: object) -> None:
        raise CapacityError("no space left on device")

    with monkeypatch.context() as context:
        context.setattr(BaseContainer, "write_sidecars", full)
        door.save_megatron(sharded_state(Layout(), 1), 1, asynchronous=asynchronous)
    assert door.save_strategy.last_error is None
    check_load(door, Layout(), 1)


class _Mine:
    pass


UNLOADABLE: list[tuple[Any, str]] = [
    ({"inner": [torch.ones(2), {"mine": _Mine()}]}, "'common state.extra.inner.1.mine' holds .*_Mine, which megatron"),
    (pathlib.PurePosixPath("/a"), "'common state.extra' holds .*PurePosixPath"),
    ([1, {"array": np.ones(3)}], "'common state.extra.1.array' holds .*numpy"),
    (ShardedTensor.from_rank_offsets("csr", torch.eye(3).to_sparse_csr()), "'csr' is a sharded tensor of layout"),
]


@pytest.mark.parametrize("way", ["sync", "async", "dist_checkpointing"])
def test_what_megatron_core_could_not_load_is_refused_when_it_is_saved(door: Door, way: str) -> None:
    for step, (value, why) in enumerate(UNLOADABLE, 1):
        state = sharded_state(Layout(), step) | {"extra": value}
        if way == "dist_checkpointing":
            door.save_by_megatron(state, step)
        else:
            door.save_megatron(state, step, asynchronous=way == "async")
        if way == "dist_checkpointing" and "common" in why:  # which has written it by now
            why = why.rpartition("holds ")[2]
        assert re.search(why, str(door.save_strategy.last_error)), door.save_strategy.last_error
        assert door.latest() is None


@pytest.mark.parametrize("unasked", [False, True])
def test_the_files_of_failed_saves_do_not_outlive_the_next_start(
    door: Door, make_door: Callable[[], Door], unasked: bool
) -> None:
    door.save_megatron(sharded_state(Layout(), 1), 1)
    other, extra = make_door(), _Mine() if not unasked else 1
    if not unasked:
        other.latest()
    os.makedirs(other.version(2))
    with pytest.raises(UnaskedVersionsError) if unasked else contextlib.nullcontext():
        dist_checkpointing.save(sharded_state(Layout(), 2) | {"extra": extra}, other.version(2), other.save_strategy)
    if unasked:
        with pytest.raises(UnaskedVersionsError, match=r"call get_latest_complete_checkpoint\(base\)"):
            other.save_strategy.async_save({}, other.version(2))
    assert unasked or os.listdir(other.version(2))
    assert make_door().latest() == 1
    assert not os.path.exists(other.version(2))


def test_a_common_state_of_many_kinds_comes_back(door: Door) -> None:
    extra = {"rng": random.getstate(), "namespace": argparse.Namespace(a=1), "dtype": torch.float32, "t": torch.ones(2)}
    door.save_megatron(sharded_state(Layout(), 1) | {"extra": extra}, 1)
    assert door.save_strategy.last_error is None
    assert door.load_megatron(sharded_state(Layout(), 0, blank=True), 1)["extra"]["namespace"] == extra["namespace"]


def test_how_long_saves_hold_the_loop_is_told(door: Door) -> None:
    told: list[events.Event] = []
    with events.subscribe(told.append):
        for step, asynchronous in ((1, False), (2, True)):
            state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((300,), float(step)))}
            door.save_megatron(state, step, asynchronous=asynchronous)
        door.settle()
        assert events.flush()
    held = [event for event in told if isinstance(event, events.LoopHeld)]
    assert [event.step for event in held] == [1, 2], "once each: what the background writes is not told as such"
    assert all(event.seconds > 0 for event in held)
