"""Planners of all kinds, each over several saves, since what was kept of one save must fit the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from tests.support.dcp import Door
from tests.support.planners import (
    CACHES_PLANS,
    AnyDtypePlanner,
    CastingPlanner,
    InPlacePlanner,
    ResolvingPlanner,
    SwappingPlanner,
    caching_planner,
)
from tests.support.tensors import PLAIN_DTYPES, assert_same, blank, dtype_name, tensor_of


@pytest.fixture(autouse=True)
def _no_cached_plans() -> Iterator[None]:
    """Torch keeps plans for the life of the process."""
    yield
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{name}", {}).clear()


def _state(step: int) -> dict[str, Any]:
    return {
        "a": torch.full((50, 3), float(step)),
        "b": torch.arange(20.0) + step,
        "nested": {"list": [torch.ones(4) * step, {"deep": torch.tensor(step)}], "lr": 0.1 * step},
        "tuple": (torch.full((5,), step), "x"),
        "step": step,
    }


def test_cached_plans(door: Door, mode: str) -> None:
    for step in range(1, 5):
        planner = caching_planner()
        door.round_trip(_state(step), step, mode, planner=planner)
    grown = _state(5) | {"more": torch.ones(9), "a": torch.rand(51, 3)}
    door.round_trip(grown, 5, mode, planner=caching_planner())
    door.round_trip(_state(6), 6, mode, planner=caching_planner())


def test_cached_plans_of_another_dtype(door: Door, mode: str) -> None:
    # Torch takes plans for the same although dtypes differ.
    for step, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.float32], 1):
        state = {"x": tensor_of(dtype, (10, 10), step), "y": tensor_of(torch.float32, (5,), step)}
        door.round_trip(state, step, mode, planner=caching_planner())


def _unflattened() -> DefaultLoadPlanner:
    # With only one of the two, torch loads what is no tensor into a copy of the state that it forgets.
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def test_nested_states_that_are_not_flattened(door: Door, mode: str) -> None:
    for step in (1, 2, 3):
        state = _state(step)
        door.save_by(mode, state, step, planner=DefaultSavePlanner(flatten_state_dict=False))
        loaded = door.load(blank(state), step, planner=_unflattened())
        assert_same(loaded, _state(step))
        for found in (loaded["nested"]["list"][0], loaded["tuple"][0]):
            assert type(found) is torch.Tensor
            assert found.untyped_storage().nbytes() == found.nbytes  # and not the whole slot


@pytest.mark.parametrize("planner", [CastingPlanner, ResolvingPlanner])
def test_planners_that_cast(door: Door, mode: str, planner: type[DefaultSavePlanner]) -> None:
    for step in (1, 2, 3, 4):
        door.save_by(mode, _state(step), step, planner=planner())
        loaded = door.load(blank(_state(step)), step)
        assert torch.equal(loaded["b"], (torch.arange(20.0) + step).bfloat16().float())
        assert loaded["step"] == step
    stored = {entry.key: entry.dtype for entry in door.header(4).layout.tensors}
    assert stored["a"] == "bfloat16"


def test_a_planner_may_write_to_what_was_staged(door: Door) -> None:
    for step in (1, 2, 3):
        state = {"a": torch.full((5000,), float(step)), "b": torch.full((3,), float(step))}
        door.save_by("thread", state, step, planner=InPlacePlanner())
        assert_same(door.load(blank(state), step), {name: -tensor for name, tensor in state.items()})


def test_planner_objects_that_take_turns(door: Door, mode: str) -> None:
    planners = [
        DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        CastingPlanner(flatten_sharded_tensors=False),
        DefaultSavePlanner(flatten_state_dict=False),
        SwappingPlanner(),
    ]
    for step in range(1, 9):
        kind = step % 4
        door.save_by(mode, _state(step), step, planner=planners[kind])
        loaded = door.load(
            {"a": torch.zeros(50, 3) if kind != 3 else torch.zeros(20), "step": 0},
            step,
            planner=_unflattened() if kind == 2 else None,
        )
        assert_same(loaded, {"a": _state(step)["b" if kind == 3 else "a"], "step": step})


def test_dtypes_that_only_a_planner_of_ones_own_can_plan(door: Door, mode: str) -> None:
    if not hasattr(DefaultSavePlanner, "_dedup_save_plans"):
        pytest.skip("this torch always asks for the sizes of elements")
    state = {dtype_name(d): {"x": tensor_of(d, (5, 3)), "t": tensor_of(d, (5, 3)).t()} for d in PLAIN_DTYPES}
    for step in (1, 2):
        door.round_trip(state, step, mode, planner=AnyDtypePlanner())


class _HalfLoader(DefaultLoadPlanner):
    """Loads into tensors of its own and hands them over when they are done."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.zeros(tuple(read_item.lengths), dtype=torch.float16)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        target = self.lookup_tensor(dataclasses.replace(read_item.dest_index, index=None))
        self.transform_tensor(read_item, target).copy_(tensor * 2)


def test_a_load_planner_that_converts(door: Door) -> None:
    door.save({"x": torch.arange(6.0)}, 1)
    loaded = door.load({"x": torch.zeros(6)}, 1, planner=_HalfLoader())
    assert torch.equal(loaded["x"], torch.arange(6.0) * 2)


def test_partial_loads(door: Door) -> None:
    door.save(_state(1), 1)
    loaded = door.load(
        {"b": torch.zeros(20), "absent": torch.ones(3)}, 1, planner=DefaultLoadPlanner(allow_partial_load=True)
    )
    assert_same(loaded, {"b": _state(1)["b"], "absent": torch.ones(3)})


@pytest.mark.skipif(not CACHES_PLANS, reason="torch 2.6 returns an empty state")
def test_a_state_made_from_the_metadata_alone(door: Door) -> None:
    state = {"model": {"w": torch.ones(3), "b": torch.zeros(2)}, "step": 4}
    door.save(state, 4)
    reader = MemoryStorageReader(checkpoint_loader=door.loader)
    loaded = _load_state_dict_from_keys(checkpoint_id=door.version(4), storage_reader=reader)
    assert_same(loaded, state)
    assert_same(
        _load_state_dict_from_keys("model", checkpoint_id=door.version(4), storage_reader=reader),
        {"model": state["model"]},
    )


def test_the_metadata_returned_says_where_everything_is(door: Door) -> None:
    metadata = door.save(_state(1), 1)
    assert set(metadata.storage_data) >= {MetadataIndex("step"), MetadataIndex("b", torch.Size([0]))}
    assert metadata.storage_meta.checkpoint_id == door.version(1)
