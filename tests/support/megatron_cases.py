"""Cases of the Megatron-LM door: their register, what they share, how saves go, and what becomes of those that fail.

A case is given a door, and `torch_dist`.
"""

from __future__ import annotations

import functools
import logging
import os
import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.errors import CapacityError, FlashpointError
from tests.support.megatron import Door, TorchDist
from tests.support.megatron_states import Layout, assert_same_state, plain, sharded_state
from tests.support.worker import base_path, rank, world_size

CASES: dict[str, Callable[[Door, TorchDist], None]] = {}


def case(function: Callable[[Door, TorchDist], None]) -> Callable[[Door, TorchDist], None]:
    CASES[function.__name__] = function
    return function


def some_layout() -> Layout:
    """One in which there is something of everything."""
    return {1: Layout(), 2: Layout(tp=2), 4: Layout(tp=2, dp=2)}[world_size()]


def expected(layout: Layout, step: int, **options: Any) -> Any:
    return plain(sharded_state(layout, step, **options))


def check_load(door: Door, layout: Layout, step: int, saved_by: Layout | None = None, **options: Any) -> None:
    """What is recovered is what was saved, bit for bit."""
    same = saved_by is None or saved_by == layout
    template = sharded_state(layout, 0, blank=True, own_objects=same)
    assert_same_state(door.load_megatron(template, step, **options), expected(layout, step, own_objects=same))


# -- how saves go ------------------------------------------------------------------------------------------------


@case
def the_staged_copies_are_the_object(door: Door, other: TorchDist) -> None:
    """One copy, made before the call returns: what changes after it does not show."""
    layout = some_layout()
    for step in (1, 2, 3):
        state = sharded_state(layout, step)
        tensors = _leaves(state["model"]) + _leaves(state["optimizer"])
        request = save_local_aware_megatron_checkpoint(state, door.version(step), door.save_strategy, True)
        for tensor in tensors:
            tensor.fill_(-7)
        door.queue.schedule_async_request(request)
        door.queue.maybe_finalize_async_calls(blocking=True)
        assert door.save_strategy.last_error is None
        check_load(door, layout, step)


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    data = getattr(value, "data", None)
    return [data] if isinstance(data, torch.Tensor) else []


@case
def a_structure_that_changes_on_one_rank(door: Door, other: TorchDist) -> None:
    """The save at which it changes fails on all ranks, or on none if they hear of it in time. Later ones have it."""
    layout = some_layout()
    failed = []
    logging.disable(logging.CRITICAL)
    for step in range(1, 7):
        state = sharded_state(layout, step)
        if step >= 4 and rank() == world_size() - 1:
            state["more"] = ShardedTensor.from_rank_offsets("more", torch.full((5,), float(step)))
        door.save_megatron(state, step, asynchronous=True, validate_access_integrity=False)
        if door.save_strategy.last_error is not None:
            assert "structure of the state has changed" in str(door.save_strategy.last_error)
            failed.append(step)
            continue
        template, wanted = sharded_state(layout, 0, blank=True), expected(layout, step)
        if step >= 4:
            template["more"] = ShardedTensor.from_rank_offsets("more", torch.zeros(5), replica_id=rank())
            wanted["more"] = torch.full((5,), float(step))
        assert_same_state(door.load_megatron(template, step, validate_access_integrity=False), wanted)
    logging.disable(logging.NOTSET)
    assert failed in ([], [4])


@case
def queues(door: Door, other: TorchDist) -> None:
    """Several requests under way in one queue; callers of both kinds, with a process and without."""
    layout = some_layout()
    step = 0
    for child, persistent in ((True, False), (False, False), (False, True), (True, True)):
        made = Door(base_path() / f"queues-{child}-{persistent}", child=child)
        queue = AsyncCallsQueue(persistent=persistent)
        finalized: list[int] = []
        started = step
        for number in range(3):
            step += 1
            if number == 1 and child:
                # As in a job that saves to disk, too, through the same queue.
                os.makedirs(other.folder / str(step), exist_ok=True)
                dist.barrier()
                request = other.async_save(sharded_state(layout, step), str(other.folder / str(step)))
            else:
                request = save_local_aware_megatron_checkpoint(
                    sharded_state(layout, step), made.version(step), made.save_strategy, True
                )
                assert (request.async_fn is not None) == child
            request.add_finalize_fn(functools.partial(finalized.append, step))
            queue.schedule_async_request(request)
        assert finalized == []
        queue.maybe_finalize_async_calls(blocking=True)
        assert finalized == [started + 1, started + 2, started + 3]
        assert queue.get_num_unfinalized_calls() == 0
        check_load(made, layout, step)
        queue.close()
        made.settle()
        dist.barrier()
        made.close()


# -- failures ----------------------------------------------------------------------------------------------------


@case
def a_save_that_fails_on_one_rank(door: Door, other: TorchDist) -> None:
    """It is told on all ranks, the queue and the training go on, and the next save is as good as any."""
    layout = some_layout()
    last = world_size() - 1
    step, failed = 0, set[str]()
    door.latest()  # opens the base container
    calls = {name: getattr(Save, name) for name in ("stage", "commit")}
    logging.disable(logging.CRITICAL)

    def no_room(*args: Any, **options: Any) -> None:
        raise CapacityError("no room")

    def damage(kind: str, state: dict[str, Any]) -> None:
        if rank() != (0 if kind == "common" else last):
            return
        if kind == "no data":
            state["optimizer"]["step"].data = None
            state["optimizer"]["step"].replica_id = 0
        elif kind == "an object":
            state["rng"].data = lambda: None
        elif kind == "common":
            state["bad"] = lambda: None
        elif kind in ("stage", "commit"):
            setattr(Save, kind, no_room)

    for asynchronous, itself in ((False, True), (True, False)):
        for kind in ("no data", "an object", "common", "stage", "commit"):
            step += 1
            failed.add(f"step-{step}_ckpt")
            state = sharded_state(layout, step)
            damage(kind, state)
            _save(door, state, step, asynchronous, itself)
            for name, call in calls.items():
                setattr(Save, name, call)
            assert isinstance(door.save_strategy.last_error, FlashpointError), kind
            assert door.queue.get_num_unfinalized_calls() == 0
            step += 1
            _save(door, sharded_state(layout, step), step, asynchronous, itself)
            assert door.save_strategy.last_error is None, door.save_strategy.last_error
            check_load(door, layout, step)
    logging.disable(logging.NOTSET)
    door.settle()
    dist.barrier()
    if rank() == last:  # what failed here has left nothing; megatron-core's own files go as the base is opened next
        folders = failed.intersection(os.listdir(door.base))
        assert not [name for folder in folders for name in os.listdir(door.base / folder) if "rank-" in name]


def _save(door: Door, state: dict[str, Any], step: int, asynchronous: bool, itself: bool) -> None:
    """Save in the way of the guide, or by `dist_checkpointing.save` itself."""
    if not itself:
        door.save_megatron(state, step, asynchronous=asynchronous, validate_access_integrity=False)
        return
    os.makedirs(door.version(step), exist_ok=True)
    dist.barrier()
    request = dist_checkpointing.save(
        state, door.version(step), door.save_strategy, async_sharded_save=asynchronous, validate_access_integrity=False
    )
    if asynchronous:
        door.queue.schedule_async_request(request)
        door.queue.maybe_finalize_async_calls(blocking=True)


@case
def a_load_that_fails_on_one_rank(door: Door, other: TorchDist) -> None:
    """All ranks learn of it; none goes on with what it has loaded."""
    layout = some_layout()
    door.save_megatron(sharded_state(layout, 1), 1)
    template = sharded_state(layout, 0, blank=True)
    if rank() == world_size() - 1:
        template["optimizer"]["step"] = ShardedTensor.from_rank_offsets("optimizer.step", torch.zeros(7), replica_id=1)
    mine = CheckpointingException if rank() == world_size() - 1 else FlashpointError
    with pytest.raises(mine):
        door.load_megatron(template, 1, validate_access_integrity=False)
    check_load(door, layout, 1)


class Harmless:
    """Pickles to a call; who loads it unchecked makes the call."""

    def __reduce__(self) -> Any:
        return string.capwords, ("a b",)


@case
def objects_that_could_run_code_are_refused(door: Door, other: TorchDist) -> None:
    state = {"o": ShardedObject("o", Harmless(), (1,), (0,), replica_id=rank())}
    template = {"o": ShardedObject("o", None, (1,), (0,), replica_id=rank())}
    trusted = [string.capwords]
    logging.disable(logging.ERROR)
    door.save_megatron(state, 1)
    logging.disable(logging.NOTSET)
    assert "capwords" in str(door.save_strategy.last_error) or rank() != 0
    assert isinstance(door.save_strategy.last_error, FlashpointError)
    writer = MemoryStorageWriter(door.saver, safe_globals=trusted)
    door.save_megatron(state, 1, strategy=MLFlashpointMegatronAsyncSaveStrategy(storage_writer=writer, child=False))
    with pytest.raises(FlashpointError, match="capwords"):
        door.load_megatron(template, 1)
    trusting = MLFlashpointMegatronLoadStrategy(checkpoint_loader=door.loader, safe_globals=trusted)
    door.load_megatron(template, 1, strategy=trusting)
