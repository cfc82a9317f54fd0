"""What DCP saves through our writer, it loads through our reader: every dtype, layout and structure."""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.dcp import Door
from tests.support.tensors import OVERLAPPING, PLANNED_DTYPES, assert_same, blank, dtype_name, raw, tensor_of


def _round_trip(door: Door, mode: str, state: dict[str, Any], **options: Any) -> None:
    """Three saves, so that what was kept of the first one is used and used again."""
    for step in (1, 2, 3):
        door.save_by(mode, state, step, **options)
        assert_same(door.load(blank(state), step), state)


def test_every_dtype_shape_and_stride(door: Door, mode: str) -> None:
    state: dict[str, Any] = {}
    for seed, dtype in enumerate(PLANNED_DTYPES):
        whole = tensor_of(dtype, (6, 8), seed)
        state[dtype_name(dtype)] = {
            "scalar": tensor_of(dtype, (), seed),
            "empty": tensor_of(dtype, (0,), seed),
            "empty_of_rows": tensor_of(dtype, (3, 0, 2), seed),
            "whole": whole,
            "transposed": whole.t(),
            "strided": whole[1:5:2, 3:],
            "column": whole[:, 2],
            "expanded": whole[:1].expand(4, 8),
            "one_element_expanded": whole[3, 3].expand(5),
            "inner": whole.view(-1)[7:13],
        }
    _round_trip(door, mode, state)


def test_elements_that_share_memory_are_loaded_into_such(door: Door, mode: str) -> None:
    state = {name: view(tensor_of(torch.complex64, (6, 8), 1)) for name, view in OVERLAPPING.items()}
    door.save_by(mode, state, 1)
    zeros = {name: view(torch.zeros(6, 8, dtype=torch.complex64)) for name, view in OVERLAPPING.items()}
    assert_same(door.load(zeros, 1), state)


def test_lazily_conjugated_and_negated_views_are_not_taken_for_what_they_view(door: Door, mode: str) -> None:
    numbers = tensor_of(torch.complex64, (5,), 1).nan_to_num()
    state = {"a": numbers, "conjugated": numbers.conj(), "negated": numbers.conj().imag, "imaginary": numbers.imag}
    assert state["conjugated"].is_conj()
    assert state["negated"].is_neg()
    _round_trip(door, mode, state)


def test_nested_structures_and_plain_values(door: Door, mode: str) -> None:
    state = {
        "model": OrderedDict(weight=torch.arange(6.0).view(2, 3), bias=torch.ones(3, dtype=torch.bfloat16)),
        "optim": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(4)}, 1: {}}, "groups": [{"lr": 0.1}]},
        "list": [torch.ones(2), 5, [torch.zeros(1), {"deep": torch.full((2, 2), 7)}]],
        "plain_list": [1, 2.5, "three", None],
        "plain_tuple": (1, (2, "x")),
        "step": 17,
        "name": "run",
        "none": None,
        "flag": True,
        "complex": 1 + 2j,
        "bytes": b"\0\1",
        "numpy": np.float64(2.5),
        "when": datetime.timedelta(seconds=3),
        "dtype": torch.float16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "set": {1, 2},
    }
    _round_trip(door, mode, state)


def test_states_of_generators(door: Door, mode: str) -> None:
    import random

    random_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    state = {"python": random_state, "numpy": numpy_state, "torch": torch_state}
    door.save_by(mode, state, 1)
    loaded = door.load({"python": None, "numpy": None, "torch": torch.zeros_like(torch_state)}, 1)
    assert loaded["python"] == random_state
    assert loaded["numpy"][0] == numpy_state[0]
    assert np.array_equal(loaded["numpy"][1], numpy_state[1])
    assert torch.equal(loaded["torch"], torch_state)


def test_states_without_any_bytes_of_tensors(door: Door, mode: str) -> None:
    states: list[dict[str, Any]] = [{}, {"a": {}}, {"step": 3}, {"none": torch.empty(0)}]
    for step, state in enumerate(states, 1):
        door.round_trip(state, step, mode)


def test_tied_tensors_are_stored_once_and_loaded_as_both(door: Door, mode: str) -> None:
    tied = torch.rand(100, 100)
    state = {"embedding": tied, "head": tied, "view_of_all": tied.view(100, 100), "other_shape": tied.view(-1)}
    state["transposed"] = tied.t()
    _round_trip(door, mode, state)
    stored = [entry.nbytes for entry in door.header(3).layout.tensors if entry.dtype == "float32"]
    assert stored == [tied.nbytes] * 3  # the tied one, and two that lie differently


def test_parameters_modules_and_optimizers(door: Door, mode: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    parameters = dict(model.named_parameters())
    assert all(p.requires_grad for p in parameters.values())
    state = {"parameters": parameters, "model": model.state_dict(), "optim": optimizer.state_dict()}
    state["graph"] = model[0].weight * 2
    assert state["graph"].grad_fn is not None
    _round_trip(door, mode, state)


def test_tensors_that_are_more_than_their_memory(door: Door, mode: str) -> None:
    dense = torch.tensor([[0.0, 1.5, 0.0], [2.5, 0.0, 3.5]])
    state = {
        "coo": dense.to_sparse(),
        "coo_uncoalesced": torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (4,)),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 3)),
        "per_tensor": torch.quantize_per_tensor(torch.rand(3, 4), 0.1, 3, torch.quint8),
        "per_channel": torch.quantize_per_channel(
            torch.rand(3, 4), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
        ),
        "dense": dense,
    }
    _round_trip(door, mode, state)


class _Labelled(torch.Tensor):
    """A subclass with `__torch_function__`, the kind that libraries put metadata on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_that_are_their_memory(door: Door, process_group: None, mode: str) -> None:
    under_way = all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert isinstance(under_way, AsyncCollectiveTensor)
    labelled = torch.arange(5.0).as_subclass(_Labelled)
    door.save_by(mode, {"labelled": labelled, "buffer": torch.nn.Buffer(torch.ones(3)), "reduced": under_way}, 1)
    loaded = door.load({"labelled": torch.zeros(5), "buffer": torch.zeros(3), "reduced": torch.zeros(4)}, 1)
    assert_same(loaded, {"labelled": torch.arange(5.0), "buffer": torch.ones(3), "reduced": torch.ones(4)})


def test_subclasses_that_wrap_others_are_saved_whole_and_loaded_if_allowed(
    make_door: Callable[..., Door], mode: str
) -> None:
    pair = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(CheckpointException, match=r"(?s)'pair' holds .*TwoTensor.*safe_globals"):
        make_door().save_by(mode, {"pair": pair}, 1)
    door = make_door(safe_globals=[TwoTensor])
    for step in (1, 2):
        state = {"pair": TwoTensor(torch.full((3,), float(step)), torch.arange(3.0)), "plain": torch.ones(2)}
        door.save_by(mode, state, step)
        target = {"pair": TwoTensor(torch.zeros(3), torch.zeros(3)), "plain": torch.zeros(2)}
        with pytest.raises(CheckpointException, match=r"(?s)TwoTensor.*safe_globals"):
            door.load(dict(target), step)
        loaded = door.load(dict(target), step, reader={"safe_globals": [TwoTensor]})
        assert type(loaded["pair"]) is TwoTensor
        assert_same([loaded["pair"].a, loaded["pair"].b], [state["pair"].a, state["pair"].b])


def test_a_meta_tensor_is_refused_by_name_and_the_next_save_works(door: Door, mode: str) -> None:
    state = {"good": torch.ones(3), "bad.one": torch.empty(5, device="meta"), "bad.two": torch.empty(5, device="meta")}
    with pytest.raises(CheckpointException, match=r"(?s)bad\.one.*meta"):
        door.save_by(mode, state, 1)
    assert door.latest() is None
    good = {"good": torch.ones(3)}
    door.round_trip(good, 2, mode)


def test_objects_open_with_safetensors_while_in_memory(door: Door, mode: str) -> None:
    native = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    native += [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64]
    state = {dtype_name(dtype): tensor_of(dtype, (7, 5), seed) for seed, dtype in enumerate(native)}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "step": 4, "c128": tensor_of(torch.complex128)}
    for step in (1, 2):
        door.save_by(mode, state, step)
    path = door.object_path(2)
    loaded = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(loaded)
        for name, expected in state.items():
            if isinstance(expected, torch.Tensor) and expected.dtype is not torch.complex128:
                assert_same(loaded[name], expected, name)
                assert_same(file.get_tensor(name), expected, name)
    assert loaded["c128"].numpy().tobytes() == raw(state["c128"])


def test_loads_convert_into_parameters_and_refuse_another_shape(door: Door) -> None:
    saved = torch.arange(20.0).view(4, 5)
    door.save({"x": saved, "w": torch.ones(3)}, 1)
    weight = torch.nn.Parameter(torch.zeros(3))
    loaded = door.load({"x": torch.zeros(4, 5, dtype=torch.bfloat16), "w": weight}, 1)
    assert torch.equal(loaded["x"], saved.bfloat16())
    assert loaded["w"] is weight
    assert weight.requires_grad
    assert weight.tolist() == [1.0] * 3
    with pytest.raises(CheckpointException, match=r"(?s)[Ss]ize mismatch.*w"):
        door.load({"w": torch.zeros(4)}, 1)


def test_names_that_are_strange_or_that_the_format_reserves(door: Door, mode: str) -> None:
    state = {"a": torch.ones(2), "a@0": torch.zeros(3), "": torch.ones(1), "ünïcode ☃": torch.ones(2)}
    state |= {'quote"\\\n': torch.ones(3), "x.shard0": torch.ones(4), "tensor#1": torch.ones(5)}
    state |= {"__metadata__": torch.ones(2), "__flashpoint__.tail": torch.ones(3), "__dcp_metadata__": torch.ones(4)}
    state |= {"__flashpoint__.gap.0": 7, "__x": torch.ones(5), "item __x": torch.ones(6), "item __x'": torch.ones(7)}
    _round_trip(door, mode, state | {"\udc80": torch.ones(8)})


def test_loads_into_targets_of_any_stride(door: Door) -> None:
    for step, dtype in enumerate(PLANNED_DTYPES, 1):
        saved = tensor_of(dtype, (4, 6))
        door.save({"x": saved}, step)
        backing = tensor_of(dtype, (6, 10), 9)
        target = backing[:, 2:9:2].t()
        before = raw(backing[:, :2])
        loaded = door.load({"x": target}, step)["x"]
        assert raw(loaded) == raw(saved)
        assert loaded.data_ptr() == target.data_ptr()
        assert raw(backing[:, :2]) == before
