"""What is learned of other ranks' shares, from plans made up here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ml_flashpoint.adapter.pytorch.omission import Omission, left_to_others, tensor_names
from ml_flashpoint.adapter.pytorch.tensor_leaves import TensorLeaves
from tests.support.planners import CACHES_PLANS, CastingPlanner, RenamingPlanner, SwappingPlanner


def _plan(*names: str, data: tuple[str, ...] = ()) -> SavePlan:
    items = [WriteItem(MetadataIndex(name, torch.Size([0])), WriteItemType.TENSOR) for name in names]
    return SavePlan(items + [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in data])


@dataclass
class _Staged:
    """What is learned of a save."""

    others: frozenset[str] | None = None
    succeeded: bool | None = None


def _saved(others: set[str] | None, error: Exception | None = None) -> Any:
    return _Staged(None if others is None else frozenset(others), error is None)


def _state(*names: str) -> dict[str, Any]:
    return {name: torch.ones(3) for name in names}


def _needed(omission: Omission, state: dict[str, Any]) -> list[str]:
    leaves = TensorLeaves(state, omission.places)
    return [leaves.places.paths[leaves.indices.index(i)] for i in omission.needed(leaves)]


def test_plans_tell_what_is_left_to_others() -> None:
    own = tensor_names(_plan("a", "b", "c", data=("d",)))
    assert own == {"a", "b", "c"}
    planner = DefaultSavePlanner()
    assert left_to_others(planner, own, _plan("a", data=("d",))) == {"b", "c"}
    assert left_to_others(planner, own, _plan("a", "b", "c")) == set()
    assert left_to_others(CastingPlanner(), own, _plan("a")) == {"b", "c"}


def test_nothing_is_left_to_others_where_names_or_data_may_be_of_something_else() -> None:
    own = tensor_names(_plan("a", "b"))

    class Combining(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            raise AssertionError

    class Foreign:
        pass

    for kind in (RenamingPlanner, SwappingPlanner, Combining):
        assert left_to_others(kind(), own, _plan("a")) == set()
    assert left_to_others(Foreign(), own, _plan("a")) == set()  # type: ignore[arg-type]
    assert left_to_others(DefaultSavePlanner(), own, _plan("renamed by the global plan")) == set()


@pytest.mark.skipif(not CACHES_PLANS, reason="this torch does not keep plans")
def test_the_empty_plan_that_stands_for_a_cached_one() -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = "test_omission"
    assert tensor_names(SavePlan([], usable=False)) is None
    assert left_to_others(planner, None, _plan("a")) is None
    SavePlanner._cached_save_plan["test_omission"] = _plan("a", "b")
    try:
        assert left_to_others(planner, None, _plan("a")) == {"b"}
    finally:
        del SavePlanner._cached_save_plan["test_omission"]


def test_what_others_write_is_left_out_from_the_next_save_on() -> None:
    omission = Omission()
    state = _state("a", "b", "c")
    assert _needed(omission, state) == ["a", "b", "c"]
    omission.watch(_saved({"b", "c"}))
    assert _needed(omission, state) == ["a"]
    assert _needed(omission, _state("a", "b", "c")) == ["a"]


def test_another_structure_is_staged_whole() -> None:
    omission = Omission()
    _needed(omission, _state("a", "b"))
    omission.watch(_saved({"b"}))
    for state in (_state("b", "a"), _state("a", "b", "c"), {"a": torch.ones(3), "b": torch.ones(4)}, _state("b")):
        assert _needed(omission, state) == list(state)


def test_a_save_of_an_earlier_structure_teaches_nothing() -> None:
    omission = Omission()
    _needed(omission, _state("a", "b"))
    omission.watch(_saved({"b"}))
    _needed(omission, _state("a", "b", "c"))
    assert _needed(omission, _state("a", "b")) == ["a", "b"]


def test_an_outcome_that_is_not_known_yet_teaches_later() -> None:
    omission = Omission()
    _needed(omission, _state("a", "b"))
    save: Any = _Staged()
    omission.watch(save)
    assert _needed(omission, _state("a", "b")) == ["a", "b"]
    save.others, save.succeeded = frozenset({"b"}), True
    assert _needed(omission, _state("a", "b")) == ["a"]


def test_tied_tensors_are_left_out_only_if_others_write_them_under_every_name() -> None:
    tied = torch.ones(3)
    state = {"a": tied, "b": tied, "c": torch.ones(3)}
    omission = Omission()
    _needed(omission, state)
    omission.watch(_saved({"a", "c"}))
    assert _needed(omission, state) == ["a"]
    omission.watch(_saved({"a", "b"}))
    assert _needed(omission, state) == ["c"]


def test_a_name_that_stands_for_two_places_leaves_nothing_out() -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    omission = Omission()
    _needed(omission, state)
    omission.watch(_saved({"a.b"}))
    assert len(omission.needed(TensorLeaves(state))) == 2


def test_a_failure_is_answered_by_staging_the_whole_and_learning_anew() -> None:
    omission = Omission()
    state = _state("a", "b", "c")
    _needed(omission, state)
    omission.watch(_saved({"b"}))
    assert _needed(omission, state) == ["a", "c"]
    omission.watch(_saved({"a"}, RuntimeError()))
    assert _needed(omission, state) == ["a", "b", "c"]
    omission.watch(_saved({"a"}))
    assert _needed(omission, state) == ["b", "c"]


def test_failures_that_come_again_leave_out_what_all_plans_do() -> None:
    omission = Omission()
    state = _state("a", "b", "c")
    plans = [{"a", "c"}, {"b", "c"}]
    failed = 0
    for turn in range(20):
        needed = set(_needed(omission, state))
        lacks = (set(state) - plans[turn % 2]) - needed
        failed += bool(lacks)
        omission.watch(_saved(plans[turn % 2], RuntimeError() if lacks else None))
    assert failed == 2
    assert _needed(omission, state) == ["a", "b"]


def test_a_failure_whose_plan_is_known_teaches_as_much() -> None:
    omission = Omission()
    state = _state("a", "b")
    _needed(omission, state)
    omission.watch(_saved(None, RuntimeError()))
    assert _needed(omission, state) == ["a", "b"]
    omission.watch(_saved({"b"}, RuntimeError()))
    assert _needed(omission, state) == ["a"]
    omission.watch(_saved({"b"}, RuntimeError()))  # not because of what was left out
    assert _needed(omission, state) == ["a"]
