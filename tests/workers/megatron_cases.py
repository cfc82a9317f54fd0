"""Cases of the Megatron-LM door on several ranks, each beside megatron-core's own `torch_dist` where that can be.

Arguments are names of cases; each runs on a base container of its own, and its outcome is reported. Started by
tests/e2e/test_megatron_ranks.py.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from ml_flashpoint.core.errors import CapacityError, DeadlineError, FlashpointError
from ml_flashpoint.core.rank_group import rank_group
from tests.support.megatron import Door, TorchDist, load_from, without_cuda
from tests.support.megatron_states import LAYOUTS, Layout, assert_same_state, plain, sharded_state
from tests.support.worker import base_path, leave, rank, report, world_size

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


# -- layouts -----------------------------------------------------------------------------------------------------


@case
def every_layout(door: Door, other: TorchDist) -> None:
    """Saved in each layout, loaded in it and in others: as megatron-core does, and as it must be."""
    layouts = LAYOUTS[world_size()]
    for step, saved_by in enumerate(layouts, 1):
        door.save_megatron(sharded_state(saved_by, step), step, asynchronous=step % 2 == 0)
        assert door.save_strategy.last_error is None
        other.save(sharded_state(saved_by, step))
        for layout in {layouts[(step + shift) % len(layouts)]: None for shift in (-1, 0, 2, 5)}:
            same = layout == saved_by
            theirs = other.load(sharded_state(layout, 0, blank=True, own_objects=same))
            ours = door.load_megatron(sharded_state(layout, 0, blank=True, own_objects=same), step)
            assert_same_state(ours, theirs)
            assert_same_state(ours, expected(layout, step, own_objects=same))


@case
def fully_parallel(door: Door, other: TorchDist) -> None:
    """megatron-core's wrapper spreads what is replicated; each rank then stores its share."""
    layout = Layout(dp=world_size())
    wrapped = FullyParallelSaveStrategyWrapper(door.save_strategy, do_cache_distribution=True)
    used = []
    for step in (1, 2, 3):
        door.save_megatron(sharded_state(layout, step), step, strategy=wrapped, asynchronous=step == 2)
        assert door.save_strategy.last_error is None
        check_load(door, layout, step)
        used.append(_header_bytes(door, step))
    other.save(
        sharded_state(layout, 3),
        strategy=FullyParallelSaveStrategyWrapper(other.save_strategy, do_cache_distribution=True),
    )
    check_load(door, layout, 3)
    assert_same_state(other.load(sharded_state(layout, 0, blank=True)), expected(layout, 3))
    door.save_megatron(sharded_state(layout, 4), 4)
    alone = _header_bytes(door, 4)
    if world_size() > 1:
        shares = _gathered((used[-1], alone))
        assert max(share for share, _ in shares) < max(whole for _, whole in shares), shares


@case
def fully_parallel_load(door: Door, other: TorchDist) -> None:
    """megatron-core's other wrapper: each rank loads a share of what is replicated, and gives it to the others."""
    from tests.support.megatron_gpt import PlayedCuda

    layout = Layout(dp=world_size())
    door.save_megatron(sharded_state(layout, 1), 1)
    with PlayedCuda():
        wrapped = FullyParallelLoadStrategyWrapper(door.load_strategy)
        check_load(door, layout, 1, strategy=wrapped)


def _header_bytes(door: Door, step: int) -> int:
    """Bytes of tensors in this rank's object."""
    reader = door.loader.read_manifest(_id(door, step), rank())
    opened = door.loader.open_object(_id(door, step), reader, reader.objects[0])
    count = sum(entry.nbytes for entry in opened.layout.tensors)
    door.loader.release()
    return count


def _id(door: Door, step: int) -> Any:
    from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId

    return CheckpointContainerId(door.version(step))


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@case
def a_gpt_with_the_distributed_optimizer(door: Door, other: TorchDist) -> None:
    """Loaded into other models, of another layout too, which go on as after a load by `torch_dist`.

    Not quite as the first one does: without Apex, megatron-core does not restore the count of steps.
    """
    from tests.support.megatron_gpt import Gpt, PlayedCuda

    world = world_size()
    old = version_of_megatron_core() < (0, 15)
    shardings = ["fully_sharded_model_space"] if old else ["dp_reshardable", "fully_reshardable"]
    step = 0
    with PlayedCuda():
        for sharding in shardings:
            step += 10
            trained = Gpt(min(2, world), sharding, seed=1)
            for number in (1, 2):
                trained.step(number)
            door.save_megatron(trained.sharded_state() | {"step": step}, step, asynchronous=True)
            assert door.save_strategy.last_error is None
            other.save(trained.sharded_state() | {"step": step})
            saved = trained.parameters()
            loss = trained.step(3)
            reshardable = sharding != "dp_reshardable"
            for tp in {min(2, world): None, 1: None} if reshardable else [min(2, world)]:
                results = []
                for load in (functools.partial(door.load_megatron, step=step), other.load):
                    model = Gpt(tp, sharding, seed=7)
                    model.step(9)  # torch's optimizers have no state to load into before
                    loaded = load(model.sharded_state(is_loading=True))
                    results.append((loaded, model))
                (ours, model), (theirs, model_of_theirs) = results
                assert ours["step"] == step
                if sharding == "fully_reshardable":
                    # Without Apex, megatron-core's optimizer cannot take it; the others hold uninitialized padding.
                    assert_same_state(ours, theirs)
                    continue
                model.load(ours)
                model_of_theirs.load(theirs)
                if tp == min(2, world):
                    assert_same_state(model.parameters(), saved)
                    assert model.step(3) == model_of_theirs.step(3) == loss
                else:
                    assert model.step(3) == model_of_theirs.step(3)
                assert_same_state(model.parameters(), model_of_theirs.parameters())


def version_of_megatron_core() -> tuple[int, int]:
    major, minor, *_ = megatron.core.__version__.split(".")
    return int(major), int(minor)


# -- what is beside the tensors ----------------------------------------------------------------------------------


@case
def what_megatron_core_reads_by_itself(door: Door, other: TorchDist) -> None:
    layout = some_layout()
    content = {"distrib_optim_sharding_type": "dp_reshardable", "version": 3}
    door.save_megatron(sharded_state(layout, 1), 1, content_metadata=content)
    folder = door.version(1)
    assert sorted(name for name in os.listdir(folder) if not name.startswith(("rank-", "."))) == [
        "common.pt",
        "metadata.json",
    ]
    other.save(sharded_state(layout, 1))
    assert dist_checkpointing.check_is_distributed_checkpoint(folder)
    common = dist_checkpointing.load_common_state_dict(folder)
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict=common) == content
    del common["content_metadata"]
    assert_same_state(common, dist_checkpointing.load_common_state_dict(str(other.folder)))
    for of in ("load_tensors_metadata", "load_sharded_metadata"):
        ours = getattr(door.load_strategy, of)(folder)
        theirs = getattr(other.load_strategy, of)(Path(other.folder))
        assert ours == theirs
    door.loader.release()


@case
def saved_by_dist_checkpointing_itself(door: Door, other: TorchDist) -> None:
    """Which writes the common state on rank 0 only; a recovery brings it to all nodes."""
    layout = some_layout()
    for step in (1, 2):
        folder = door.version(step)
        os.makedirs(folder, exist_ok=True)
        dist.barrier()
        request = dist_checkpointing.save(
            sharded_state(layout, step), folder, door.save_strategy, async_sharded_save=step == 2
        )
        if step == 2:
            door.queue.schedule_async_request(request)
            door.queue.maybe_finalize_async_calls(blocking=True)
        assert door.save_strategy.last_error is None
        check_load(door, layout, step)
        assert {"common.pt", "metadata.json"} <= set(os.listdir(folder))


@case
def strict_handling(door: Door, other: TorchDist) -> None:
    layout = some_layout()
    door.save_megatron(sharded_state(layout, 1), 1)
    other.save(sharded_state(layout, 1))

    def template() -> dict[str, Any]:
        state = sharded_state(layout, 0, blank=True)
        state["optimizer"]["state"].pop(0)
        state["unknown"] = ShardedTensor.from_rank_offsets("unknown", torch.full((3,), -1.0), replica_id=rank())
        state["unknown object"] = ShardedObject("unknown object", -1, (1,), (0,), replica_id=rank())
        return state

    for strict in StrictHandling:
        results: list[Any] = []
        for load in (functools.partial(door.load_megatron, template(), 1), functools.partial(other.load, template())):
            try:
                results.append(load(strict=strict))
            except (Exception, CheckpointException) as error:
                results.append(error)
        ours, theirs = results
        failed = isinstance(theirs, BaseException)
        assert isinstance(ours, BaseException) == failed, (strict, ours, theirs)
        if failed:
            continue
        if strict in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL):
            assert ours[1:] == theirs[1:], strict
            ours, theirs = ours[0], theirs[0]
        assert_same_state(ours, theirs)
        assert_same_state(ours["model"], expected(layout, 1)["model"])


@case
def flattened_ranges(door: Door, other: TorchDist) -> None:
    """Of a tensor, each rank has a range of its elements. megatron-core gave that up with 0.16."""

    def state(step: int, blank: bool) -> dict[str, Any]:
        whole = torch.arange(6.0 * 4).view(6, 4) + 100 * step
        each = whole.numel() // world_size()
        mine = slice(rank() * each, (rank() + 1) * each)
        data = whole.flatten()[mine]
        return {
            "flat": ShardedTensor.from_rank_offsets_flat(
                "flat", torch.full_like(data, -1) if blank else data, (6, 4), flattened_range=mine
            )
        }

    if not hasattr(ShardedTensor, "from_rank_offsets_flat"):
        assert version_of_megatron_core() >= (0, 16)
        with pytest.raises(CheckpointingException):
            ShardedTensor(
                "flat", torch.zeros(3), torch.float32, (6,), (6,), (0,), (1,), flattened_range=slice(0, 3)
            ).validate_metadata_integrity()
        return
    for step in (1, 2):
        door.save_megatron(state(step, False), step, asynchronous=step == 2)
        assert door.save_strategy.last_error is None
        other.save(state(step, False))
        ours = door.load_megatron(state(step, True), step)
        assert_same_state(ours, other.load(state(step, True)))
        assert_same_state(ours, plain(state(step, False)))


# -- how saves go ------------------------------------------------------------------------------------------------


@case
def the_staged_copies_are_the_object(door: Door, other: TorchDist) -> None:
    """One copy, made before the call returns: what changes after it does not show."""
    layout = some_layout()
    write, writes = door.saver.write, list[Any]()

    def noted(ticket: Any, *args: Any, **options: Any) -> None:
        write(ticket, *args, **options)
        writes.append(ticket)

    door.saver.write = noted  # type: ignore[method-assign]
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
    assert len(writes) == 3
    for ticket in writes:
        assert ticket.filled.arena is ticket.staged.arena, "what was staged was copied once more"


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    data = getattr(value, "data", None)
    return [data] if isinstance(data, torch.Tensor) else []


@case
def plans_are_sent_when_they_change(door: Door, other: TorchDist) -> None:
    layout = some_layout()
    sent: list[int] = []
    gather = rank_group().gather

    def counted(blob: bytes) -> list[bytes]:
        sent.append(len(blob))
        return gather(blob)

    for step in range(1, 8):
        state = sharded_state(layout, step)
        if step >= 4 and rank() == world_size() - 1:
            state["more"] = ShardedTensor.from_rank_offsets("more", torch.full((5,), float(step)))
        rank_group().gather = counted  # type: ignore[method-assign]
        request = save_local_aware_megatron_checkpoint(state, door.version(step), door.save_strategy, True)
        del rank_group().gather
        door.queue.schedule_async_request(request)
        door.queue.maybe_finalize_async_calls(blocking=True)
        assert door.save_strategy.last_error is None
        template = sharded_state(layout, 0, blank=True)
        wanted = expected(layout, step)
        if step >= 4:
            template["more"] = ShardedTensor.from_rank_offsets("more", torch.zeros(5), replica_id=rank())
            wanted["more"] = torch.full((5,), float(step))
        assert_same_state(door.load_megatron(template, step, validate_access_integrity=False), wanted)
    changed = rank() == world_size() - 1
    assert [count > 0 for count in sent] == [True, False, False, changed, False, False, False], sent


@case
def an_exchange_of_plans_that_breaks_off(door: Door, other: TorchDist) -> None:
    """What rank 0 did not hear is said again: no save is described by the plans of another."""
    layout = some_layout()
    gather = rank_group().gather

    def cut_off(blob: bytes) -> list[bytes]:
        gather(blob)
        raise DeadlineError("played")

    logging.disable(logging.CRITICAL)
    failed = []
    for step in range(1, 7):
        state = sharded_state(layout, step)
        if step >= 3:
            state["more"] = ShardedTensor.from_rank_offsets("more", torch.full((5,), float(step)), replica_id=rank())
        if step == 3 and rank() == 0:
            rank_group().gather = cut_off  # type: ignore[method-assign]
        door.save_megatron(state, step)
        vars(rank_group()).pop("gather", None)
        if door.save_strategy.last_error is not None:
            failed.append(step)
            continue
        template, wanted = sharded_state(layout, 0, blank=True), expected(layout, step)
        if step >= 3:
            template["more"] = ShardedTensor.from_rank_offsets("more", torch.zeros(5), replica_id=rank())
            wanted["more"] = torch.full((5,), float(step))
        assert_same_state(door.load_megatron(template, step), wanted)
    logging.disable(logging.NOTSET)
    assert failed == [3, 4], failed


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
                request = dist_checkpointing.save(
                    sharded_state(layout, step),
                    str(other.folder / str(step)),
                    other.save_strategy,
                    async_sharded_save=True,
                )
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
    step = 0
    logging.disable(logging.CRITICAL)

    def no_room(*args: Any, **options: Any) -> None:
        raise CapacityError("no room")

    def damage(kind: str, state: dict[str, Any]) -> None:
        if rank() != last:
            return
        if kind == "no data":
            state["optimizer"]["step"].data = None
            state["optimizer"]["step"].replica_id = 0
        elif kind == "an object":
            state["rng"].data = lambda: None
        elif kind in ("stage", "write", "seal"):
            setattr(door.saver, kind, no_room)

    for asynchronous in (False, True):
        for itself in (False, True):
            for kind in ("no data", "an object", "stage", "write", "seal"):
                step += 1
                state = sharded_state(layout, step)
                damage(kind, state)
                _save(door, state, step, asynchronous, itself)
                for name in ("stage", "write", "seal"):
                    vars(door.saver).pop(name, None)
                assert isinstance(door.save_strategy.last_error, FlashpointError), kind
                assert door.queue.get_num_unfinalized_calls() == 0
                step += 1
                _save(door, sharded_state(layout, step), step, asynchronous, itself)
                assert door.save_strategy.last_error is None, door.save_strategy.last_error
                check_load(door, layout, step)
    logging.disable(logging.NOTSET)
    door.settle()
    dist.barrier()
    # What failed has left nothing, but for the folder of the very last failure, which the next save removes.
    versions = sorted(name for name in os.listdir(door.base) if name.startswith("step-"))
    assert versions == [f"step-{step}_ckpt"], versions
    copies = len(door.replication.held_by(rank())) if door.replication.initialized else 0
    assert len(door.arena_bytes(rank())) <= 3 * (1 + copies), door.arena_bytes(rank())


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
def common_state_that_cannot_be_saved(door: Door, other: TorchDist) -> None:
    layout = some_layout()
    logging.disable(logging.CRITICAL)
    state = sharded_state(layout, 1) | ({"bad": lambda: None} if rank() == 0 else {})
    door.save_megatron(state, 1, validate_access_integrity=False)
    logging.disable(logging.NOTSET)
    assert isinstance(door.save_strategy.last_error, FlashpointError)
    assert "rank 0" in str(door.save_strategy.last_error)
    door.save_megatron(sharded_state(layout, 2), 2)
    check_load(door, layout, 2)


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
        return os.putenv, ("FLASHPOINT_TEST_UNPICKLED", "1")


@case
def objects_that_could_run_code_are_refused(door: Door, other: TorchDist) -> None:
    state = {"o": ShardedObject("o", Harmless(), (1,), (0,), replica_id=rank())}
    template = {"o": ShardedObject("o", None, (1,), (0,), replica_id=rank())}
    door.save_megatron(state, 1)
    assert door.save_strategy.last_error is None
    with pytest.raises(FlashpointError, match="putenv"):
        door.load_megatron(template, 1)
    trusting = MLFlashpointMegatronLoadStrategy(
        door.replication, door.loader, safe_globals=[(os.putenv, f"{os.putenv.__module__}.putenv")]
    )
    door.load_megatron(template, 1, strategy=trusting)


# -- across jobs -------------------------------------------------------------------------------------------------


def save_for_others(root: Path, layouts: list[Layout]) -> None:
    """Save what `load_from_others` loads, each layout in a base container of its own; and as `torch_dist`."""
    for layout in layouts:
        door = Door(root / str(layout))
        for step in (1, 2):
            door.save_megatron(sharded_state(layout, step), step, asynchronous=step == 2)
            assert door.save_strategy.last_error is None
        TorchDist(root.parent.parent / f"torch_dist-{layout}").save(sharded_state(layout, 2))
        door.settle()
        dist.barrier()
        door.close()


def load_and_keep(root: Path, saved_by: list[Layout]) -> None:
    """Load that in the layout that it was saved in, and compare with `torch_dist`."""
    for layout in saved_by:
        door = Door(root / str(layout))
        ours = door.load_megatron(sharded_state(layout, 0, blank=True), 2)
        assert {"common.pt", "metadata.json"} <= set(os.listdir(door.version(2)))
        assert_same_state(ours, expected(layout, 2))
        other = TorchDist(root.parent.parent / f"torch_dist-{layout}")
        assert_same_state(ours, other.load(sharded_state(layout, 0, blank=True)))
        dist.barrier()
        door.close()


def load_from_fewer(root: Path, saved_by: list[Layout]) -> None:
    """Load what `load_from_others` has saved."""
    for saved in saved_by:
        door = Door(root / str(saved))
        check_load(door, LAYOUTS[world_size()][0], 3, LAYOUTS[2][0])
        door.close()


def load_from_others(root: Path, saved_by: list[Layout]) -> None:
    """Load that, in all layouts of this many ranks, and compare with `torch_dist`; then save, and load that."""
    for saved in saved_by:
        door = Door(root / str(saved))
        other = TorchDist(root.parent.parent / f"torch_dist-{saved}")
        for layout in LAYOUTS[world_size()]:
            same = layout == saved
            found = door.loader.get_latest_complete_checkpoint(door.base)
            assert found is not None
            assert found.step == 2
            assert {"common.pt", "metadata.json"} <= set(os.listdir(str(found)))
            ours = load_from(str(found), sharded_state(layout, 0, blank=True, own_objects=same), door.load_strategy)
            assert_same_state(ours, expected(layout, 2, own_objects=same))
            assert_same_state(ours, other.load(sharded_state(layout, 0, blank=True, own_objects=same)))
        layout = LAYOUTS[world_size()][0]
        door.save_megatron(sharded_state(layout, 3), 3)
        check_load(door, layout, 3)
        door.settle()
        dist.barrier()
        door.close()


# Not in `main`: the process of a persistent caller imports this, too.
without_cuda()


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    meeting = dist.new_group(timeout=timedelta(seconds=120))
    layouts = {str(layout): layout for each in LAYOUTS.values() for layout in each}
    for name in names:
        began = time.monotonic()
        error = None
        function, *args = name.split(":")
        try:
            if function in ("save_for_others", "load_and_keep", "load_from_others", "load_from_fewer"):
                globals()[function](base_path(), [layouts[each] for each in args])
            else:
                door = Door(base_path() / name)
                CASES[function](door, TorchDist(base_path().parent.parent / f"torch_dist-{name}"))
                door.settle()
                dist.barrier()
                door.close()
        except BaseException:
            error = traceback.format_exc()
        report(case=name, error=error, seconds=round(time.monotonic() - began, 2))
        dist.barrier(meeting)
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
