"""Runs test cases of the DCP door on all ranks, one after the other, and reports how each of them ended.

Arguments: names of cases, which are functions below, as `name` or `name:mode`.
"""

from __future__ import annotations

import itertools
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from tests.support.cases import go_through
from tests.support.dcp import RESULT_TIMEOUT_S, Door, checkpointer
from tests.support.planners import CastingPlanner, FailingPlanner, RenamingPlanner, caching_planner
from tests.support.sharded import Training, check, full_state, numbered, plain_state, sharded_state
from tests.support.tensors import assert_same, blank
from tests.support.worker import base_path, leave, rank, world_size


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),))


def _tensor_bytes(door: Door, step: int) -> int:
    return sum(entry.nbytes for entry in door.header(step, rank()).layout.tensors)


def _total(value: int) -> int:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return int(tensor)


# -- structures --------------------------------------------------------------------------------------------------


def sharded(door: Door, mode: str) -> None:
    mesh = _mesh()
    for step in (1, 2, 3):
        door.save_by(mode, sharded_state(step, mesh), step)
        check(door.load(blank(sharded_state(0, mesh)), step), full_state(step))
        assert_same(door.load(blank(full_state(0)), step), full_state(step))


def trained(door: Door, mode: str) -> None:
    """Replicated, and sharded in every way that this many ranks allow: what is loaded goes on as what was saved."""
    for kind in ("ddp", "fsdp", "hsdp", "tp", *(["fsdp+tp"] if world_size() == 4 else [])):
        of_kind = Door(door.base / kind)
        training, other = Training(kind), Training(kind, seed=9)
        other.step(99)
        for step in (1, 2, 3):
            training.step(step)
            of_kind.save_by(mode, training.state() | {"step": step}, step)
            expected = training.whole()
            state = other.state() | {"step": 0}
            of_kind.load(state, step)
            other.load(state)
            assert state["step"] == step
            check(other.whole(), expected)
        training.step(4)
        other.step(4)
        check(other.whole(), training.whole())
        dist.barrier()
        of_kind.close()


def submesh(door: Door, mode: str) -> None:
    """A DTensor on some of the ranks only."""
    mesh = DeviceMesh("cpu", [world_size() - 1])
    for step in (1, 2):
        inside = rank() == world_size() - 1
        local = numbered(step, 4, 3) if inside else torch.empty(0)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))
        state = {"part": tensor, "plain": plain_state(step)}
        door.save_by(mode, state, step)
        loaded = door.load({"part": torch.zeros(4, 3), "plain": blank(plain_state(0))}, step)
        assert_same(loaded, {"part": numbered(step, 4, 3), "plain": plain_state(step)})


# -- planners ----------------------------------------------------------------------------------------------------


def cached_plans(door: Door, mode: str) -> None:
    mesh = _mesh()
    for step in range(1, 7):
        state = sharded_state(step, mesh)
        if step == 5:
            state["more"] = numbered(step, 12)
        door.save_by(mode, state, step, planner=caching_planner())
        expected = full_state(step) | ({"more": numbered(step, 12)} if step == 5 else {})
        assert_same(door.load(blank(expected), step), expected)


def lowest_rank(door: Door, mode: str) -> None:
    for step in range(1, 5):
        door.save_by(mode, plain_state(step), step, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
        assert_same(door.load(blank(plain_state(0)), step), plain_state(step))
        assert (_tensor_bytes(door, step) > 0) == (rank() == 0)


def planners_take_turns(door: Door, mode: str) -> None:
    """Each kind distributes otherwise; what the others' plans taught must not be used against one."""
    failed = 0
    for step in range(1, 13):
        planner = [
            DefaultSavePlanner(),
            CastingPlanner(),
            DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            RenamingPlanner(),
            DefaultSavePlanner(flatten_state_dict=False),
        ][step % 5]
        try:
            door.save_by(mode, plain_state(step), step, planner=planner)
        except CheckpointException:
            failed += 1
            continue
        finally:
            door.settle()  # what a saving process says is heard a moment after its answer
        prefix = RenamingPlanner.PREFIX if step % 5 == 3 else ""
        load_planner = DefaultLoadPlanner(flatten_state_dict=False) if step % 5 == 4 else None
        loaded = door.load({f"{prefix}bias": torch.zeros(17)}, step, planner=load_planner)
        expected = numbered(step, 17)
        assert_same(loaded, {f"{prefix}bias": expected.bfloat16().float() if step % 5 == 1 else expected})
    # Twice a rank, since none knows why another one failed: then only what all of them leave to others is left out.
    assert failed <= (0 if mode == "sync" else 2 * world_size()), failed


# -- what other ranks write --------------------------------------------------------------------------------------


def others_are_not_staged(door: Door, mode: str) -> None:
    """Once the plan is known, a slot holds this rank's share and nothing else."""

    def state(step: int) -> dict[str, Any]:
        return {f"w{i}": numbered(step, 64, 1024) for i in range(16)} | {"mine": torch.full((1000,), float(step))}

    whole = sum(tensor.nbytes for tensor in state(0).values())
    used = {}
    for step in range(1, 6):
        door.save_by(mode, state(step), step)
        assert_same(door.load(blank(state(0)), step), state(step))
        header = door.header(step, rank())
        used[step] = header.layout.size - header.layout.data_start
        door.settle()  # what a saving process says is heard a moment after its answer
        assert _total(_tensor_bytes(door, step)) == whole, "a tensor was written by no rank or by several"
    gaps = sum(end - begin for begin, end in door.header(5, rank()).layout.gaps)
    assert gaps < 1024, gaps
    assert max(used.values()) < 1.1 * whole / world_size() + 65536, used
    assert len(door.slot_bytes(rank())) <= 4
    assert min(door.slot_bytes(rank())) < 1.1 * whole / world_size() + 65536, door.slot_bytes(rank())


def a_rank_changes_its_structure(door: Door, mode: str) -> None:
    """Which can change what all the others have to write. At most the save in which it happens may be lost."""
    failed: list[int] = []
    mesh = _mesh()
    for step in range(1, 17):
        extra: dict[str, Any] = {}
        if rank() == step // 4 % world_size() and step >= 4:
            extra = {f"only_here_{i}": numbered(step, 40 * (i + 1), 10) for i in range(step // 4)}
        state = {"plain": plain_state(step), "more": {f"w{i}": numbered(step, 11, i + 1) for i in range(9)}}
        state["dtensor"] = distribute_tensor(numbered(step, 8, 4), mesh, [Shard(0)])
        try:
            door.save_by(mode, state | extra, step)
        except CheckpointException as error:
            if "NotStagedError" not in str(error):
                raise
            failed.append(step)
            door.settle()  # the next one heeds what this one has found once that is taken in
            continue
        expected = {key: value for key, value in state.items() if key != "dtensor"}
        expected["dtensor"] = numbered(step, 8, 4)
        assert_same(door.load(blank(expected), step), expected)
        if extra:
            loaded = blank(extra)
            reader = MemoryStorageReader(checkpoint_loader=door.loader)
            dcp.load(loaded, checkpoint_id=door.version(step), storage_reader=reader, no_dist=True)
            assert_same(loaded, extra)
        dist.barrier()
    assert not any(later - earlier == 1 for earlier, later in itertools.pairwise(failed)), failed
    assert not failed or mode != "sync"
    assert len(failed) <= 4, failed
    assert _total(len(failed)) == len(failed) * world_size()


# -- failures ----------------------------------------------------------------------------------------------------


def a_planner_fails_on_one_rank(door: Door, mode: str) -> None:
    step = 0
    for method in ("create_local_plan", "create_global_plan", "finish_plan", "resolve_data"):
        for where in range(world_size()):
            if method == "create_global_plan" and where != 0:
                continue
            step += 1
            planner = FailingPlanner(method, ranks=(where,), rank=rank())
            with pytest.raises(CheckpointException, match=f"the planner fails in {method}"):
                door.save_by(mode, sharded_state(step, _mesh()), step, planner=planner)
            began = time.monotonic()
            step += 1
            door.save_by(mode, sharded_state(step, _mesh()), step)
            check(door.load(blank(sharded_state(0, _mesh())), step), full_state(step))
            door.settle()
            assert time.monotonic() - began < RESULT_TIMEOUT_S - 10, "a save that failed holds the later ones up"
    assert len(door.slot_bytes(rank())) <= 4, door.slot_bytes(rank())


# -- ways of calling ---------------------------------------------------------------------------------------------


def each_rank_for_itself(door: Door, mode: str) -> None:
    """Several ranks save one version together, or none."""
    with pytest.raises(CheckpointException, match=r"1 of the job's .* ranks save, which makes no version"):
        door.save_by(mode, plain_state(1), 1, no_dist=True)
    dist.barrier()
    door.save_by(mode, plain_state(2), 2)
    assert_same(door.load(blank(plain_state(0)), 2), plain_state(2))


def a_step_saved_twice(door: Door, mode: str) -> None:
    mesh = _mesh()
    for value in (1, 2, 3):
        door.save_by(mode, sharded_state(value, mesh), 5)
        check(door.load(blank(sharded_state(0, mesh)), 5), full_state(value))


def without_waiting(door: Door, mode: str) -> None:
    """As the tutorial does: the next save is started although the last one may be under way."""
    mesh = _mesh()
    # Not the group on which states are made meanwhile: their collectives would meet those of the saving thread.
    options = {**checkpointer(mode), "process_group": dist.new_group()}
    futures = []
    for step in range(1, 9):
        state = sharded_state(step, mesh)
        futures.append(door.async_save(state, step, **options))
        state["plain"]["weight"].zero_()
        state["sharded"]["rows"].to_local().zero_()
    for future in futures:
        future.result(RESULT_TIMEOUT_S)
    check(door.load(blank(sharded_state(0, mesh)), 8), full_state(8))
    state = sharded_state(10, mesh)
    door.async_save(sharded_state(9, mesh), 9, **options)
    door.save(state, 10)
    check(door.load(blank(sharded_state(0, mesh)), 10), full_state(10))


def changes_after_async_save(door: Door, mode: str) -> None:
    mesh = _mesh()
    for step in (1, 2, 3, 4):
        state = sharded_state(step, mesh)
        future = door.async_save(state, step, **checkpointer(mode))
        for tensor in state["sharded"].values():
            tensor.to_local().fill_(-1)
        for tensor in (state["plain"]["weight"], state["plain"]["list"][0]):
            tensor.fill_(-1)
        state["plain"]["list"][2] = "changed"
        future.result(RESULT_TIMEOUT_S)
        check(door.load(blank(sharded_state(0, mesh)), step), full_state(step))


# -- other world sizes -------------------------------------------------------------------------------------------


def save_for_others(root: Path) -> None:
    """Save what `load_from_others` loads, and leave it."""
    door = Door(root)
    for step in (1, 2):
        door.save(sharded_state(step, _mesh()), step)
    door.settle()
    dist.barrier()
    door.close()


def load_from_others(root: Path) -> None:
    door = Door(root)
    mesh = _mesh()
    check(door.load(blank(sharded_state(0, mesh)), 2), full_state(2))
    assert_same(door.load(blank(full_state(0)), 2), full_state(2))
    door.save(sharded_state(3, mesh), 3)
    assert_same(door.load(blank(full_state(0)), 3), full_state(3))
    door.close()


def run(name: str) -> None:
    function, _, mode = name.partition(":")
    if not mode:
        globals()[function](base_path())
        return
    door = Door(base_path() / name.replace(":", "-"))
    globals()[function](door, mode)
    dist.barrier()
    door.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    go_through(sys.argv[1:], run)
    dist.destroy_process_group()
    leave()
