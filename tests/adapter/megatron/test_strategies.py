"""The strategies in one process: wrong arguments, and plans that are none. Saves are tested on several ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from ml_flashpoint import events
from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError, InvalidNameError, UnaskedVersionsError
from ml_flashpoint.memory.container import BaseContainer
from tests.support.megatron import Door, TorchDist, check_load, without_cuda
from tests.support.megatron_states import Layout, sharded_state
from tests.support.tensors import OVERLAPPING

without_cuda()


@pytest.fixture
def make_door(tmpfs: Path) -> Iterator[Callable[[], Door]]:
    """Makes doors on the same base container, one after the other; the last one is closed at the end."""
    doors: list[Door] = []

    def make() -> Door:
        for door in doors:
            door.close()
        doors.append(Door(tmpfs / "job"))
        return doors[-1]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make
    for door in doors:
        door.close()
    dist.destroy_process_group()


@pytest.fixture
def door(make_door: Callable[[], Door]) -> Door:
    return make_door()


def test_elements_that_share_memory_are_loaded_into_such(door: Door) -> None:
    def state(whole: torch.Tensor) -> dict[str, Any]:
        views = {name: view(whole) for name, view in OVERLAPPING.items()}
        return {name: ShardedTensor.from_rank_offsets(name, each) for name, each in views.items()}

    saved = state(torch.arange(48.0).view(6, 8) * 1j)
    door.save_megatron(saved, 1)
    loaded = door.load_megatron(state(torch.zeros(6, 8, dtype=torch.complex64)), 1)
    assert all(torch.equal(loaded[name], saved[name].data) for name in OVERLAPPING)


def test_constructors_name_what_they_cannot_take(door: Door) -> None:
    wrong: Any = object()
    with pytest.raises(InvalidArgumentError, match="storage_writer must be a MemoryStorageWriter, got <object"):
        MLFlashpointMegatronAsyncSaveStrategy(storage_writer=wrong)
    with pytest.raises(InvalidArgumentError, match=r"checkpoint_loader must be .*, got <object"):
        MLFlashpointMegatronLoadStrategy(checkpoint_loader=wrong)


@pytest.mark.parametrize(
    ("folder", "error"), [("relative/step-1_ckpt", InvalidNameError), ("/dev/shm/job/iter_1", InvalidArgumentError)]
)
def test_a_folder_that_is_no_version_is_refused(door: Door, folder: str, error: type[Exception]) -> None:
    for asynchronous in (False, True):
        with pytest.raises(error):
            save_local_aware_megatron_checkpoint({}, folder, door.save_strategy, asynchronous)
    with pytest.raises(error):
        door.save_strategy.async_save({}, folder)
    with pytest.raises(error):
        door.save_strategy.save({}, folder)
    with pytest.raises(error):
        door.load_strategy.load({}, folder)


def test_another_strategy_is_refused(door: Door, tmpfs: Path) -> None:
    theirs = TorchDist(tmpfs / "other").save_strategy
    with pytest.raises(InvalidArgumentError, match="save_strategy"):
        save_local_aware_megatron_checkpoint({}, door.version(1), theirs, False)


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


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (
            {"inner": [torch.ones(2), {"mine": _Mine()}]},
            "'common state.extra.inner.1.mine' holds .*_Mine, which megatron",
        ),
        (pathlib.PurePosixPath("/a"), "'common state.extra' holds .*PurePosixPath"),
        ([1, {"array": np.ones(3)}], "'common state.extra.1.array' holds .*numpy"),
        (ShardedTensor.from_rank_offsets("csr", torch.eye(3).to_sparse_csr()), "'csr' is a sharded tensor of layout"),
    ],
)
def test_what_megatron_core_could_not_load_is_refused_when_it_is_saved(
    door: Door, value: Any, why: str, asynchronous: bool
) -> None:
    state = sharded_state(Layout(), 1) | {"extra": value}
    door.save_megatron(state, 1, asynchronous=asynchronous)
    assert re.search(why, str(door.save_strategy.last_error)), door.save_strategy.last_error
    assert door.latest() is None


def test_so_it_is_by_dist_checkpointing_itself(door: Door) -> None:
    os.makedirs(door.version(1))
    dist_checkpointing.save(sharded_state(Layout(), 1) | {"extra": _Mine()}, door.version(1), door.save_strategy)
    assert re.search("common state.*holds .*_Mine", str(door.save_strategy.last_error))
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
