"""Taking states apart and putting them together again around other tensors."""

from __future__ import annotations

import io
from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ml_flashpoint.adapter.pytorch.staging import TensorLeaves
from ml_flashpoint.copy.tensors import is_plain_strided, materialized, storable_name
from ml_flashpoint.format.errors import NotStagedError
from tests.support.tensors import assert_same


def _copies(leaves: TensorLeaves) -> dict[int, torch.Tensor]:
    return {index: tensor.clone() for index, tensor in enumerate(leaves.tensors)}


def test_places_are_dcps_names() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    state: dict[str, Any] = {
        "model": {"w": torch.ones(2), "": torch.ones(3)},
        "list": [torch.ones(4), {"x": torch.ones(5)}],
        5: {6: torch.ones(6)},
        "": torch.ones(7),
        "other": OrderedDict(user=UserDict(y=torch.ones(8))),
    }
    leaves = TensorLeaves(state)
    flat, _ = flatten_state_dict(state)
    paths = leaves.places.paths
    assert paths == list(flat)
    assert [leaves.tensors[i] is flat[path] for path, i in zip(paths, leaves.indices, strict=True)] == [True] * 7


def test_rebuilt_states_have_the_replacements_and_copies_of_everything_else() -> None:
    inner = [1, 2]
    state = {
        "a": torch.ones(2),
        "tuple": (torch.zeros(3), inner),
        "n": None,
        "nested": {"list": [inner, torch.ones(1)]},
    }
    leaves = TensorLeaves(state)
    copies = _copies(leaves)
    built = leaves.rebuild(copies)
    assert_same(built, state)
    assert built["a"] is copies[0]
    assert built["tuple"][0] is copies[1]
    inner.append(3)
    state["nested"]["list"].append("more")
    assert built["tuple"][1] == [1, 2]
    assert len(built["nested"]["list"]) == 2


def test_each_memory_is_taken_once() -> None:
    tensor = torch.arange(12.0)
    parameter = torch.nn.Parameter(torch.ones(3))
    state = {
        "a": tensor,
        "b": tensor,
        "same_view": tensor[:],
        "half": tensor[:6],
        "other_shape": tensor.view(3, 4),
        "other_shape_again": tensor.view(3, 4),
        "other_dtype": tensor.view(torch.int32),
        "transposed": tensor.view(3, 4).t(),
        "parameter": parameter,
        "detached": parameter.detach(),
        "empty": torch.empty(0),
        "empty_too": torch.empty(0),
    }
    leaves = TensorLeaves(state)
    assert leaves.indices == [0, 0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7]
    built = leaves.rebuild(_copies(leaves))
    assert_same(built, {key: value.detach() for key, value in state.items()})
    assert built["a"] is built["same_view"]


def test_conjugates_and_negatives_are_memory_of_their_own() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    leaves = TensorLeaves({"a": numbers, "conjugate": numbers.conj(), "imag": numbers.imag, "neg": numbers.conj().imag})
    assert len(leaves.tensors) == 4
    assert not any(tensor.is_conj() or tensor.is_neg() for tensor in leaves.tensors)
    assert leaves.rebuild(_copies(leaves))["neg"].tolist() == [-2.0, 4.0]


def test_tensors_that_are_more_than_memory_are_copied_whole() -> None:
    sparse = torch.eye(3).to_sparse()
    leaves = TensorLeaves({"sparse": sparse, "meta": torch.empty(3, device="meta"), "graph": sparse * 2})
    assert leaves.tensors == []
    built = leaves.rebuild({})
    sparse.values().zero_()
    assert torch.equal(built["sparse"].to_dense(), torch.eye(3))
    assert built["meta"].is_meta


def test_what_cannot_be_copied_is_told() -> None:
    class Uncopyable:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no")

    with pytest.raises(TypeError, match="no"):
        TensorLeaves({"a": torch.ones(1), "bad": Uncopyable(), "b": torch.ones(2)})


def test_what_is_left_out_is_pickled_by_no_planner() -> None:
    left_out = TensorLeaves({"a": torch.ones(3)}).rebuild({})["a"]
    assert (left_out.is_meta, left_out.shape, left_out.dtype) == (True, (3,), torch.float32)
    with pytest.raises(NotStagedError, match="has no data"):
        torch.save({"nested": left_out}, io.BytesIO())


def test_dtensors_keep_what_they_are(process_group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    state = {
        "shard": distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(1)]),
        "replicate": distribute_tensor(torch.ones(2), mesh, [Replicate()]),
        "parameter": torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])),
    }
    leaves = TensorLeaves(state)
    built = leaves.rebuild(_copies(leaves))
    assert all(type(tensor) is torch.Tensor for tensor in leaves.tensors)
    assert isinstance(built["parameter"], DTensor)
    assert built["parameter"].placements == (Shard(0),)
    assert_same(built, {"shard": state["shard"], "replicate": state["replicate"], "parameter": state["parameter"]})
    assert built["shard"].device_mesh is mesh


def test_results_of_collectives_are_waited_for(process_group: None) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    under_way = all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert isinstance(under_way, AsyncCollectiveTensor)
    assert not is_plain_strided(under_way)
    assert type(materialized(under_way)) is torch.Tensor
    leaves = TensorLeaves({"a": under_way})
    assert_same(leaves.rebuild(_copies(leaves)), {"a": torch.ones(4)})


def test_names_are_unique_and_storable() -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1), "a.b#1": torch.ones(1), "__metadata__": torch.ones(1)}
    state |= {"\ud800": torch.ones(1), "__flashpoint__.tail": torch.ones(1)}
    names = TensorLeaves(state).names
    assert len(set(names)) == 6
    assert not any(name.startswith("__") for name in names)
    for name in names:
        name.encode()


@pytest.mark.parametrize(("fqn", "name"), [("a.b", "a.b"), ("__x", "item __x"), ("ü", "ü"), ("\udc80", "\\udc80")])
def test_storable_names(fqn: str, name: str) -> None:
    assert storable_name(fqn) == name


def test_places_are_kept_for_states_of_one_structure() -> None:
    one = torch.ones(4)
    places = TensorLeaves({"a": one, "b": 1}).places
    assert TensorLeaves({"a": torch.zeros(4), "b": "text"}, places).places is places
    for state in (
        {"a": one},
        {"b": one, "a": 1},
        {"a": one.double(), "b": 1},
        {"a": one.view(2, 2), "b": 1},
        {"a": one, "b": one},
        {"a": one, "b": [1, 2]},
        {"a": [one], "b": 1},
        {"a": one.to_sparse(), "b": 1},
    ):
        assert TensorLeaves(state, places).places is not places


class Quantized(torch.Tensor):
    """A tensor that is more than its memory, on a device as it seems."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=device)  # type: ignore[attr-defined]
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Quantized(args[0].values, (kwargs or {}).get("device", args[0].device))


def test_what_is_more_than_its_memory_leaves_its_device_while_it_is_staged() -> None:
    """It is pickled later, by a thread for which the device works in another order."""
    leaves = TensorLeaves({"quantized": Quantized(torch.ones(3), torch.device("cuda", 1))})
    staged = leaves.rebuild({})["quantized"]
    assert type(staged) is Quantized
    assert staged.device == torch.device("cpu")


@pytest.mark.parametrize(("value", "expected"), [(object(), 1), ({1}, 1), (3, 0), (b"", 0), (torch.ones(2), 0)])
def test_values_that_may_hold_tensors_are_complete_before_other_threads_see_them(
    value: object, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    stream = type("Played", (), {"synchronize": lambda self: waited.append(1)})()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    TensorLeaves({"value": value, "x": 1})
    assert len(waited) == expected
