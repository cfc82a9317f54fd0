"""A state counts as of the same structure exactly if DCP would plan it alike, and what is taken out of it is it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from ml_flashpoint.facade.local_plan import Leaves, LocalPlan, Share, Structure
from ml_flashpoint.facade.packed_state import PackedState, item_bytes
from ml_flashpoint.format.errors import NotStagedError, SaveError

_tensors = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.sampled_from([(), (2,), (3,), (2, 3), (0,)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
_values = st.one_of(
    _tensors,
    st.integers(0, 1),
    st.sampled_from(["a", 0.5, None]),
    st.lists(st.integers(0, 1), max_size=2),
    st.tuples(st.integers(0, 1)),
)
_inner: Any = st.recursive(
    _values,
    lambda each: st.one_of(st.dictionaries(st.sampled_from("xyz"), each, max_size=3), st.lists(each, max_size=2)),
    max_leaves=6,
)
_states = st.dictionaries(st.sampled_from("abc"), _inner, min_size=1, max_size=3)


def _planned(state: dict[str, Any]) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


@given(_states)
def test_values_are_found_in_the_order_and_under_the_paths_that_dcp_has(state: dict[str, Any]) -> None:
    flat, paths = flatten_state_dict(state)
    leaves = Leaves(state)
    assert [id(value) for value in leaves.values] == [id(value) for value in flat.values()]
    assert list(leaves.paths(state)) == list(paths.values())


@given(_states, _states)
def test_a_plan_is_used_again_only_where_dcp_would_make_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = Structure(Leaves(one)).is_of(Leaves(other))
    first, second = _planned(one), _planned(other)
    if same:
        assert first.items == second.items
        assert first.planner_data == second.planner_data
    assert Structure(Leaves(one)).is_of(Leaves(one))


@given(_states)
def test_what_is_captured_is_the_state(state: dict[str, Any]) -> None:
    leaves = Leaves(state)
    local = LocalPlan(state, leaves, coordinator=True)
    share = Share(local, range(len(local.plan.items)))
    for _ in range(2):
        captured = share.capture(leaves)
        copies = [tensor.clone() for _, tensor in captured.tensors]
        tensors, items = share.named(captured, copies, item_bytes)
        found: dict[str, Any] = dict(tensors) | {
            key: torch.load(io.BytesIO(data), weights_only=True) for key, data in items
        }
        flat, _ = flatten_state_dict(state)
        assert found.keys() == flat.keys()
        for key, value in flat.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[key], value, rtol=0, atol=0)
            else:
                assert found[key] == value
                assert type(found[key]) is type(value)
        assert sorted(key for key, _ in items) == sorted(share.byte_keys)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(b=torch.ones(3, 1)),
        lambda state: state.update(b=torch.ones(3, dtype=torch.float64)),
        lambda state: state.update(b=torch.ones(3).to_sparse()),
        lambda state: state.update(b=3.0),
        lambda state: state.update(b=torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)),
        lambda state: state.update(c=1),
        lambda state: state.pop("b"),
        lambda state: state.update(b=state.pop("b"), a=state.pop("a")),
        lambda state: state["a"].append(torch.ones(1)),
        lambda state: state.update(b=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ],
    ids=["shape", "dtype", "layout", "kind", "quantized", "more", "less", "order", "longer", "nested"],
)
def test_another_structure_is_noticed(change: Any) -> None:
    def state() -> dict[str, Any]:
        return {"a": [torch.ones(2)], "b": torch.ones(3)}

    structure, changed = Structure(Leaves(state())), state()
    assert structure.is_of(Leaves(changed))
    change(changed)
    assert not structure.is_of(Leaves(changed))


def test_a_parameter_whose_memory_was_replaced_is_noticed() -> None:
    module = nn.Linear(4, 4)
    structure = Structure(Leaves({"w": module.weight}))
    module.to(torch.bfloat16)
    assert not structure.is_of(Leaves({"w": module.weight}))


def _share(state: dict[str, Any]) -> tuple[Share, Leaves]:
    leaves = Leaves(state)
    local = LocalPlan(state, leaves, coordinator=True)
    return Share(local, range(len(local.plan.items))), leaves


def test_tied_tensors_are_taken_once_until_they_are_no_more() -> None:
    one = torch.ones(3)
    state = {"a": one, "b": one, "c": torch.zeros(3), "d": one[:2]}
    share, leaves = _share(state)
    assert [key for key, _ in share.capture(leaves).tensors] == ["a", "c", "d"]
    state["b"] = torch.full((3,), 2.0)
    captured = share.capture(Leaves(state))
    assert [key for key, _ in captured.tensors] == ["a", "b", "c", "d"]
    tensors, _ = share.named(captured, [tensor for _, tensor in captured.tensors], item_bytes)
    assert torch.equal(dict(tensors)["b"], torch.full((3,), 2.0))


def test_values_are_as_they_were_when_they_were_taken() -> None:
    state: dict[str, Any] = {"a": [1, [2]], "p": PackedState(b"abc"), "s": torch.eye(2).to_sparse()}
    share, leaves = _share(state)
    captured = share.capture(leaves)
    state["a"][1].append(3)
    state["s"].values().zero_()
    _, items = share.named(captured, [], lambda fqn, value: repr(value).encode())
    content = dict(items)
    assert content["a"] == b"[1, [2]]"
    assert content["p"] == b"b'abc'"
    assert b"1., 1." in content["s"]


def test_some_of_a_plan() -> None:
    state = {name: torch.full((2,), float(number)) for number, name in enumerate("abcd")}
    leaves = Leaves(state)
    local = LocalPlan(state, leaves, coordinator=False)
    share = Share(local, (1, 3))
    captured = share.capture(leaves)
    assert [(key, tensor[0].item()) for key, tensor in captured.tensors] == [("b", 1.0), ("d", 3.0)]
    assert all(item.type is not WriteItemType.BYTE_IO for item in share.items)


def test_what_cannot_be_saved_is_told_by_name() -> None:
    for tensor in (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.ones(2).to_mkldnn()):
        with pytest.raises(SaveError, match=r"'a\.b'"):
            _share({"a": {"b": tensor}})
    share, leaves = _share({"a": {"b": torch.empty(3, device="meta")}})
    with pytest.raises(NotStagedError, match=r"'a\.b'"):
        share.capture(leaves)

    class Uncopied:
        def __deepcopy__(self, memo: object) -> object:
            raise ValueError("not me")

    share, leaves = _share({"a": Uncopied()})
    with pytest.raises(SaveError, match=r"'a' cannot be copied.*not me"):
        share.capture(leaves)


def test_a_state_that_could_not_be_taken_leaves_nothing_behind() -> None:
    tied = torch.ones(3)
    share, leaves = _share({"a": tied, "b": tied, "c": torch.ones(2)})
    share.capture(leaves)
    with pytest.raises(NotStagedError):
        share.capture(Leaves({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(2, device="meta")}))
    captured = share.capture(Leaves({"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(2)}))
    assert len(captured.tensors) == 3
