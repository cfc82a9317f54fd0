"""Cases of the Megatron-LM door on several ranks, each beside megatron-core's own `torch_dist` where that can be.

Arguments are names of cases; each runs on a base container of its own, and its outcome is reported. Started by
tests/e2e/test_megatron_ranks.py.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.cases import go_through
from tests.support.cuts import cut_in_the_midst
from tests.support.megatron import Door, TorchDist, without_cuda
from tests.support.megatron_cases import CASES, case, check_load, expected, some_layout
from tests.support.megatron_states import LAYOUTS, Layout, assert_same_state, plain, sharded_state
from tests.support.worker import base_path, leave, rank, world_size

# -- layouts -----------------------------------------------------------------------------------------------------


@case
def every_layout(door: Door, other: TorchDist) -> None:
    """Saved in each layout, loaded in it and in another: as megatron-core does, and as it must be."""
    layouts = LAYOUTS[world_size()]
    for step, saved_by in enumerate(layouts, 1):
        door.save_megatron(sharded_state(saved_by, step), step, asynchronous=step % 2 == 0)
        assert door.save_strategy.last_error is None
        other.save(sharded_state(saved_by, step))
        for layout in (saved_by, layouts[(step + 4) % len(layouts)]):
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


def _header_bytes(door: Door, step: int) -> int:
    """Bytes of tensors in this rank's object."""
    version = _id(door, step)
    with door.checkpointer.open_version(version) as reader:
        return sum(entry.nbytes for entry in reader.open(rank()).layout.tensors)


def _id(door: Door, step: int) -> Any:
    from ml_flashpoint.format.names import CheckpointContainerId

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
    from tests.support.megatron_gpt import SHARDING, Gpt, PlayedCuda

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
        # Since 0.19 `torch_dist` has the common state among its objects, and no file.
        theirs = {key: each for key, each in theirs.items() if each.key != "common_state"}
        assert ours == theirs


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

    if version_of_megatron_core() >= (0, 16):
        return
    for step in (1, 2):
        door.save_megatron(state(step, False), step, asynchronous=step == 2)
        assert door.save_strategy.last_error is None
        other.save(state(step, False))
        ours = door.load_megatron(state(step, True), step)
        assert_same_state(ours, other.load(state(step, True)))
        assert_same_state(ours, plain(state(step, False)))


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


def load_from_others(root: Path, saved_by: list[Layout]) -> None:
    """Load that, in all layouts of this many ranks, and compare with `torch_dist`; then save, and load that."""
    for saved in saved_by:
        door = Door(root / str(saved))
        other = TorchDist(root.parent.parent / f"torch_dist-{saved}")
        for layout in LAYOUTS[world_size()]:
            same = layout == saved
            ours = door.load_megatron(sharded_state(layout, 0, blank=True, own_objects=same), 2)
            assert {"common.pt", "metadata.json"} <= set(os.listdir(door.version(2)))
            assert_same_state(ours, expected(layout, 2, own_objects=same))
            assert_same_state(ours, other.load(sharded_state(layout, 0, blank=True, own_objects=same)))
        layout = LAYOUTS[world_size()][0]
        door.save_megatron(sharded_state(layout, 3), 3)
        check_load(door, layout, 3)
        door.settle()
        dist.barrier()
        door.close()


@case
def cut_connections(door: Door, other: TorchDist) -> None:
    """Each rank's copy breaks off in its midst, and then what is sent to ranks whose node has lost its memory."""
    layout, base = LAYOUTS[world_size()][0], base_path() / "cut"
    door = Door(base)
    door.latest()
    for step in (1, 2):
        with cut_in_the_midst() as cuts:
            door.save_megatron(sharded_state(layout, step), step, asynchronous=step == 2)
            door.settle()
            dist.barrier()
        assert door.save_strategy.last_error is None
        assert (door.checkpointer.status.verified, len(cuts)) == (step, 1)
    door.close()
    dist.barrier()
    lost = os.environ["FLASHPOINT_NODE_ID"] == "node-1"
    if lost and int(os.environ["LOCAL_RANK"]) == 0:
        shutil.rmtree(base)
    dist.barrier()
    door = Door(base)
    with cut_in_the_midst() as cuts:
        check_load(door, layout, 2)
        dist.barrier()
    assert sum(map(len, _gathered(cuts))) > 0
    door.close()


# Not below: the process of a persistent caller imports this, too.
without_cuda()


def run(name: str) -> None:
    layouts = {str(layout): layout for each in LAYOUTS.values() for layout in each}
    function, *args = name.split(":")
    if function in ("save_for_others", "load_from_others"):
        globals()[function](base_path(), [layouts[each] for each in args])
        return
    door = Door(base_path() / name)
    CASES[function](door, TorchDist(base_path().parent.parent / f"torch_dist-{name}"))
    door.settle()
    dist.barrier()
    door.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    go_through(sys.argv[1:], run)
    dist.destroy_process_group()
    leave()
