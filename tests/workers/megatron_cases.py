"""Cases of the Megatron-LM door on several ranks, each beside megatron-core's own `torch_dist` where that can be.

Arguments are names of cases; each runs on a base container of its own, and its outcome is reported. Started by
tests/e2e/test_megatron.py.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import string
import sys
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
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.errors import CapacityError, FlashpointError
from ml_flashpoint.format.names import CheckpointContainerId
from tests.support import seed_snippets as seed
from tests.support.cases import go_through
from tests.support.megatron import (
    LAYOUTS,
    Door,
    Layout,
    TorchDist,
    assert_same_state,
    check_load,
    expected,
    sharded_state,
    without_cuda,
)
from tests.support.megatron_gpt import SHARDING, Gpt, PlayedCuda
from tests.support.worker import base_path, leave, rank, world_size


def some_layout() -> Layout:
    """One in which there is something of everything."""
    return {2: Layout(tp=2), 4: Layout(tp=2, dp=2)}[world_size()]


# -- layouts -----------------------------------------------------------------------------------------------------


def every_layout(door: Door, other: TorchDist) -> None:
    """Saved in each layout, loaded in that and in another one."""
    layouts = LAYOUTS[world_size()]
    for step, saved_by in enumerate(layouts, 1):
        door.save_megatron(sharded_state(saved_by, step), step, asynchronous=step % 2 == 0)
        assert door.save_strategy.last_error is None
        check_load(door, saved_by, step)
        check_load(door, layouts[(step + 5) % len(layouts)], step, saved_by)


def fully_parallel(door: Door, other: TorchDist) -> None:
    """megatron-core's wrapper spreads what is replicated; each rank then stores its share."""
    layout = Layout(dp=world_size())
    wrapped = FullyParallelSaveStrategyWrapper(door.save_strategy, do_cache_distribution=True)
    stored = []
    for step, strategy in enumerate((wrapped, wrapped, wrapped, None), 1):
        door.save_megatron(sharded_state(layout, step), step, strategy=strategy, asynchronous=step == 2)
        assert door.save_strategy.last_error is None
        check_load(door, layout, step)
        with door.checkpointer.open_version(CheckpointContainerId(door.version(step))) as reader:
            stored.append(sum(entry.nbytes for entry in reader.open(rank()).layout.tensors))
    shares = _gathered(stored)
    assert max(each[2] for each in shares) < max(each[3] for each in shares), shares


def fully_parallel_load(door: Door, other: TorchDist) -> None:
    """megatron-core's other wrapper: each rank loads a share of what is replicated, and gives it to the others."""
    layout = Layout(dp=world_size())
    door.save_megatron(sharded_state(layout, 1), 1)
    other.save(sharded_state(layout, 1))
    with PlayedCuda():
        wrapped = FullyParallelLoadStrategyWrapper(door.load_strategy)
        theirs = other.load(
            sharded_state(layout, 0, blank=True), strategy=FullyParallelLoadStrategyWrapper(other.load_strategy)
        )
        ours = door.load_megatron(sharded_state(layout, 0, blank=True), 1, strategy=wrapped)
        assert_same_state(ours, theirs)
        # Until 0.15 megatron-core's exchange mixes up the elements of tensors that are not contiguous.
        if version_of_megatron_core() >= (0, 16):
            assert_same_state(ours, expected(layout, 1))


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def a_gpt_with_the_distributed_optimizer(door: Door, other: TorchDist) -> None:
    """Loaded into other models, of another layout too, which go on as after a load by `torch_dist`.

    Not quite as the first one does: without Apex, megatron-core does not restore the count of steps.
    """
    world = world_size()
    shardings = [SHARDING] if SHARDING != "dp_reshardable" else [SHARDING, "fully_reshardable"]
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
                if reshardable:
                    # Until 0.14 the counts of steps are common state, which is the node's here, and rank 0's there.
                    for loaded in (ours, theirs) if sharding == "fully_sharded_model_space" else ():
                        states = loaded["optimizer"].pop("param_state")
                        loaded["optimizer"]["shards"] = {
                            key: shards
                            for key, state in states.items()
                            if (shards := {name: each for name, each in state.items() if name != "step"})
                        }
                    # Without Apex, megatron-core's optimizer cannot take it; the others hold uninitialized padding.
                    assert_same_state(ours, theirs)
                    continue
                model.load(ours)
                model_of_theirs.load(theirs)
                assert_same_state(model.parameters(), saved)
                assert model.step(3) == model_of_theirs.step(3) == loss
                assert_same_state(model.parameters(), model_of_theirs.parameters())


def version_of_megatron_core() -> tuple[int, int]:
    major, minor, *_ = megatron.core.__version__.split(".")
    return int(major), int(minor)


# -- what is beside the tensors ----------------------------------------------------------------------------------


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
        # Since 0.19 `torch_dist` has the common state among its objects, and no file.
        theirs = {key: each for key, each in theirs.items() if each.key != "common_state"}
        assert ours == theirs


def saved_by_dist_checkpointing_itself(door: Door, other: TorchDist) -> None:
    """Which writes the common state on rank 0 only; a recovery brings it to all nodes."""
    layout = some_layout()
    for step in (1, 2):
        door.save_by_megatron(sharded_state(layout, step), step, asynchronous=step == 2)
        assert door.save_strategy.last_error is None
        check_load(door, layout, step)
        assert {"common.pt", "metadata.json"} <= set(os.listdir(door.version(step)))


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


# -- how saves go ------------------------------------------------------------------------------------------------


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
        if rank() != last:
            return
        if kind == "no data":
            state["optimizer"]["step"].data = None
            state["optimizer"]["step"].replica_id = 0
        elif kind == "an object":
            state["rng"].data = lambda: None
        elif kind in ("stage", "commit"):
            setattr(Save, kind, no_room)

    kinds = ("no data", "an object", "stage", "commit")
    for number, (asynchronous, kind) in enumerate(itertools.product((False, True), kinds)):
        step += 1
        failed.add(f"step-{step}_ckpt")
        way = door.save_megatron if number % 3 else door.save_by_megatron
        save = functools.partial(way, asynchronous=asynchronous, validate_access_integrity=False)
        state = sharded_state(layout, step)
        damage(kind, state)
        save(state, step)
        for name, call in calls.items():
            setattr(Save, name, call)
        assert isinstance(door.save_strategy.last_error, FlashpointError), kind
        assert door.queue.get_num_unfinalized_calls() == 0
        step += 1
        save(sharded_state(layout, step), step)
        assert door.save_strategy.last_error is None, door.save_strategy.last_error
        check_load(door, layout, step)
    logging.disable(logging.NOTSET)
    door.settle()
    dist.barrier()
    if rank() == last:  # what failed here has left nothing; megatron-core's own files go as the base is opened next
        folders = failed.intersection(os.listdir(door.base))
        assert not [name for folder in folders for name in os.listdir(door.base / folder) if "rank-" in name]


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


# -- the guide ---------------------------------------------------------------------------------------------------


def the_guide(door: Door, long_term: TorchDist) -> None:
    """The user guide's code on Megatron-LM, as it stands there."""
    layout, base = LAYOUTS[world_size()][-1], str(door.base)
    further_imports, loading = seed.runnable_megatron_loading()
    names: dict[str, Any] = {}
    for imports in (seed.runnable_imports(), seed.MEGATRON_IMPORTS, further_imports):
        exec(imports, names)
    names |= {"checkpoint_dir": base, "checkpoint_base_container": base}
    for block in (seed.INITIALIZATION, seed.runnable_megatron_save_strategy(), seed.MEGATRON_LOAD_STRATEGY):
        exec(block, names)
    names |= {"long_term_storage_path": long_term.folder, "regular_megatron_load_strategy": long_term.load_strategy}
    long_term.save(sharded_state(layout, 50))
    for step in (0, 1, 2, 3):
        if step:
            strategy = names["megatron_save_strategy"]
            save_local_aware_megatron_checkpoint(sharded_state(layout, step), door.version(step), strategy, False)
            assert strategy.last_error is None
        # The guide's name for the outcome of its own first line.
        names["local_checkpoint_container"] = step > 0
        names["sharded_state_dict"] = sharded_state(layout, 0, blank=True)
        exec(loading, names)
        assert_same_state(names["state_dict"], expected(layout, step or 50))
        found = names["latest_saved_checkpoint_id"]
        assert (None if found is None else str(found)) == (door.version(step) if step else None)
    names["memory_storage_writer"].close()
    names["checkpoint_object_manager"].close()


# -- across jobs -------------------------------------------------------------------------------------------------


def save_for_others(root: Path, saved_by: Layout) -> None:
    """Save what the other three load."""
    door = Door(root)
    for step in (1, 2):
        door.save_megatron(sharded_state(saved_by, step), step, asynchronous=step == 2)
        assert door.save_strategy.last_error is None
    door.settle()
    _close(door)


def load_and_keep(root: Path, saved_by: Layout) -> None:
    """Load that in the layout that it was saved in."""
    door = Door(root)
    check_load(door, saved_by, 2)
    assert {"common.pt", "metadata.json"} <= set(os.listdir(door.version(2)))
    _close(door)


def load_from_others(root: Path, saved_by: Layout) -> None:
    """Load that in all layouts of this many ranks; then save, and load that."""
    door = Door(root)
    for layout in LAYOUTS[world_size()]:
        check_load(door, layout, 2, saved_by)
    assert {"common.pt", "metadata.json"} <= set(os.listdir(door.version(2)))
    layout = LAYOUTS[world_size()][0]
    door.save_megatron(sharded_state(layout, 3), 3)
    check_load(door, layout, 3)
    door.settle()
    _close(door)


def load_from_fewer(root: Path, saved_by: Layout) -> None:
    """Load what `load_from_others` has saved."""
    door = Door(root)
    check_load(door, LAYOUTS[world_size()][0], 3, LAYOUTS[2][0])
    _close(door)


def _close(door: Door) -> None:
    dist.barrier()
    door.close()


# Not below: the process of a persistent caller imports this, too.
without_cuda()


def run(name: str) -> None:
    function, _, saved_by = name.partition(":")
    if saved_by:
        globals()[function](base_path(), next(each for each in LAYOUTS[4] if str(each) == saved_by))
        return
    door = Door(base_path() / name)
    globals()[function](door, TorchDist(base_path().parent.parent / f"torch_dist-{name}"))
    door.settle()
    _close(door)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    go_through(sys.argv[1:], run)
    dist.destroy_process_group()
    leave()
