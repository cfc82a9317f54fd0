"""A state counts as of the same structure exactly if DCP would plan it alike, and what is taken out of it is it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from ml_flashpoint.format.errors import NotStagedError, SaveError
from ml_flashpoint.state.archive import load_archive, save_archive
from ml_flashpoint.state.plan import Offer, Share, Tree
from ml_flashpoint.state.replicas import Replica, written_by

_tensors = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.sampled_from([(), (2,), (3,), (2, 3), (0,)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
_values = st.one_of(
    _tensors,
    st.integers(0, 1),
    st.sampled_from(["a", 0.5, None]),
)
_inner: Any = st.recursive(
    _values,
    lambda each: st.dictionaries(st.sampled_from("xyz"), each, max_size=3),
    max_leaves=6,
)
_states = st.dictionaries(st.sampled_from("abc"), _inner, min_size=1, max_size=3)


def _planned(state: dict[str, Any]) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


def _offer(state: dict[str, Any]) -> Offer:
    return Offer(Tree(state))


def _share(state: dict[str, Any]) -> tuple[Share, Tree]:
    tree = Tree(state)
    offer = Offer(tree)
    return Share(offer, range(len(offer.plan.items))), tree


@given(_states, _states)
def test_a_plan_is_used_again_only_where_dcp_would_make_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = _offer(one).structure == Tree(other).structure
    first, second = _planned(one), _planned(other)
    if same:
        assert first.items == second.items
        assert first.planner_data == second.planner_data
    assert _offer(one).structure == Tree(one).structure


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(b=torch.ones(3, dtype=torch.float64)),
        lambda state: state.update(b=torch.ones(3).to_sparse()),
        lambda state: state.update(b=torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)),
        lambda state: state.update(b=state.pop("b"), a=state.pop("a")),
        lambda state: state.update(b=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ],
    ids=["dtype", "layout", "quantized", "order", "nested"],
)
def test_another_structure_is_noticed(change: Any) -> None:
    def state() -> dict[str, Any]:
        return {"a": {"m": torch.ones(2)}, "b": torch.ones(3)}

    offer, changed = _offer(state()), state()
    assert offer.structure == Tree(changed).structure
    change(changed)
    assert offer.structure != Tree(changed).structure


def test_the_plan_is_the_same_object_while_nothing_but_content_changes() -> None:
    one, other = torch.ones(3), torch.ones(3)
    share, tree = _share({"a": one, "b": other, "n": 1})
    plan = share.capture(tree).plan
    one.add_(1)
    assert share.capture(Tree({"a": one, "b": other, "n": 2})).plan is plan
    assert share.capture(Tree({"a": one.clone(), "b": other, "n": 2})).plan is plan, "memory is no part of a plan"
    tied = share.capture(Tree({"a": one, "b": one, "n": 2})).plan
    assert tied is not plan
    assert share.capture(Tree({"a": one, "b": one, "n": 2})).plan is tied


def test_tied_tensors_are_taken_once_until_they_are_no_more() -> None:
    one = torch.ones(3)
    state: dict[str, Any] = {"a": one, "b": one, "c": torch.zeros(3), "d": one[:2], "s": torch.eye(2).to_sparse()}
    share, tree = _share(state)
    assert [key for key, _ in share.capture(tree).tensors] == ["a", "c", "d"]
    some = Share(Offer(tree), [number for number, item in enumerate(Offer(tree).plan.items) if item.index.fqn in "cd"])
    assert [key for key, _ in some.capture(tree).tensors] == ["c", "d"]
    state["b"] = torch.full((3,), 2.0)
    tree = Tree(state)
    captured = share.capture(tree)
    share.copy_values(captured, tree)
    state["s"].values().zero_()
    assert [key for key, _ in captured.tensors] == ["a", "b", "c", "d"]
    tensors, items = share.named(captured, [tensor for _, tensor in captured.tensors], save_archive)
    assert torch.equal(dict(tensors)["b"], torch.full((3,), 2.0))
    assert torch.equal(load_archive(dict(items)["s"], "s", path="path").to_dense(), torch.eye(2)), "as it was then"


def test_what_cannot_be_saved_is_told_by_name() -> None:
    for tensor in (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.ones(2).to_mkldnn()):
        with pytest.raises(SaveError, match=r"'a\.b'"):
            _share({"a": {"b": tensor}})
    share, tree = _share({"a": {"b": torch.empty(3, device="meta")}})
    with pytest.raises(NotStagedError, match=r"'a\.b'"):
        share.capture(tree)


def test_a_state_that_could_not_be_taken_tree_nothing_behind() -> None:
    tied = torch.ones(3)
    share, tree = _share({"a": tied, "b": tied, "c": torch.ones(2)})
    share.capture(tree)
    with pytest.raises(NotStagedError):
        share.capture(Tree({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(2, device="meta")}))
    captured = share.capture(Tree({"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(2)}))
    assert len(captured.tensors) == 3


# ---- replicated state is divided so that every name is written once, by a rank that has it, in fair shares -----------


_items = st.dictionaries(st.sampled_from("abcdefgh"), st.just(1), max_size=8)
_kinds = st.dictionaries(st.sampled_from(["x", "y", "z"]), _items, min_size=1)


@given(_kinds, st.data())
def test_every_name_is_written_by_one_rank_that_has_it(kinds: dict[str, dict[str, int]], data: st.DataObject) -> None:
    sizes = data.draw(st.fixed_dictionaries({name: st.integers(1, 100) for name in "abcdefgh"}))
    of_ranks = data.draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=7))
    lists = {kind: [Replica(name, sizes[name]) for name in names] for kind, names in kinds.items()}
    written = [written_by(rank, of_ranks, lists) for rank in range(len(of_ranks))]
    every = sorted(name for names in written for name in names)
    assert every == sorted({name for kind in of_ranks for name in kinds[kind]})
    assert all(written[rank] <= kinds[kind].keys() for rank, kind in enumerate(of_ranks))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 9))
def test_ranks_that_have_the_same_write_as_much(sizes: list[int], ranks: int) -> None:
    items = [Replica(str(number), size) for number, size in enumerate(sizes)]
    loads = [sum(sizes[int(name)] for name in written_by(rank, ["x"] * ranks, {"x": items})) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes)


def test_what_one_rank_has_alone_counts_in_its_share() -> None:
    small, own, other, large = Replica("small", 1), Replica("own", 100), Replica("other", 1), Replica("large", 100)
    lists = {"x": [small, own, other, large], "y": [small, other, large]}
    assert [written_by(rank, ["x", "y"], lists) for rank in (0, 1)] == [{"small", "own"}, {"other", "large"}]
