"""The hollow protocol of `BasicTensorAwareStateDict`."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local import BasicTensorAwareStateDict, CallOrderError
from tests.local.states import Pair, Plain, WholeState, assert_equal


def state() -> dict[str, Any]:
    return {
        "a": torch.arange(6.0).view(2, 3),
        "nested": [{"b": torch.ones(2, dtype=torch.int32)}, Pair(torch.zeros(1), "x"), Plain(torch.ones(4))],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "plain": 3,
    }


def test_popping_and_inserting_gives_the_same_state() -> None:
    wrapped = BasicTensorAwareStateDict(state())
    before = list(wrapped.tensors)
    popped = wrapped.pop_tensors()
    assert wrapped.is_hollow
    assert len(popped) == 5
    assert all(torch.equal(one, other) for one, other in zip(before, popped, strict=True))
    assert wrapped.state_dict["a"].is_meta
    assert isinstance(wrapped.state_dict["parameter"], torch.nn.Parameter)
    wrapped.insert_tensors(popped)
    assert not wrapped.is_hollow
    assert_equal(wrapped.state_dict, state())


def test_new_tensors_have_the_old_shapes_and_dtypes() -> None:
    wrapped = BasicTensorAwareStateDict(state())
    popped = wrapped.pop_tensors()
    wrapped.init_tensors()
    assert not wrapped.is_hollow
    for made, old in zip(wrapped.tensors, popped, strict=True):
        assert (made.dtype, made.shape, made.device) == (old.dtype, old.shape, old.device)
        assert made.data_ptr() != old.data_ptr()


@pytest.mark.parametrize(
    "given",
    [[], [torch.ones(3)] * 2, [torch.ones(4)], [torch.ones(3, dtype=torch.int64)]],
    ids=["too few", "too many", "shape", "dtype"],
)
def test_tensors_that_do_not_fit_are_refused_and_nothing_changes(given: list[torch.Tensor]) -> None:
    wrapped = BasicTensorAwareStateDict({"a": torch.zeros(3)})
    wrapped.pop_tensors()
    with pytest.raises(InvalidArgumentError, match="tensor_data"):
        wrapped.insert_tensors(given)
    wrapped.insert_tensors([torch.ones(3)])
    assert_equal(wrapped.state_dict, {"a": torch.ones(3)})


def test_calls_out_of_order_are_refused() -> None:
    wrapped = BasicTensorAwareStateDict(state())
    for full in (wrapped.init_tensors, lambda: wrapped.insert_tensors([])):
        with pytest.raises(CallOrderError, match="not hollow"):
            full()
    kept = weakref.ref(wrapped.state_dict["a"])
    wrapped.pop_tensors()
    assert kept() is None, "a hollow state keeps no memory of its tensors"
    for hollow in ("pop_tensors", "copy_tensors_to_cpu", "restore_tensor_device", "tensors"):
        with pytest.raises(CallOrderError, match="hollow"):
            getattr(wrapped, hollow)()


def test_copies_on_the_cpu_are_copies_and_made_once() -> None:
    original = state()
    wrapped = BasicTensorAwareStateDict(original)
    wrapped.copy_tensors_to_cpu()
    original["a"].zero_()
    assert torch.equal(wrapped.state_dict["a"], torch.arange(6.0).view(2, 3))
    kept = wrapped.state_dict["a"]
    wrapped.copy_tensors_to_cpu()
    assert wrapped.state_dict["a"] is kept
    wrapped.restore_tensor_device()
    assert_equal(wrapped.state_dict["parameter"], state()["parameter"])


def test_a_subclass_need_not_implement_anything() -> None:
    whole = WholeState([torch.ones(2), {"a": torch.zeros(1)}])
    assert list(whole.values()) == [whole.content, 0]
    popped = whole.pop_tensors()
    assert [len(tensor) for tensor in popped] == [2, 1]
    assert whole.content[0].is_meta
    whole.insert_tensors(popped)
    assert_equal(whole.content, [torch.ones(2), {"a": torch.zeros(1)}])
    with pytest.raises(InvalidArgumentError, match="tensor-aware already"):
        BasicTensorAwareStateDict(BasicTensorAwareStateDict({}))


@pytest.mark.cuda
def test_tensors_go_back_to_their_device() -> None:
    wrapped = BasicTensorAwareStateDict({"a": torch.arange(3.0, device="cuda"), "b": torch.ones(1)})
    wrapped.copy_tensors_to_cpu(non_blocking=True)
    torch.cuda.synchronize()
    assert {tensor.device.type for tensor in wrapped.tensors} == {"cpu"}
    popped = wrapped.pop_tensors()
    wrapped.insert_tensors(popped)
    wrapped.restore_tensor_device()
    assert [tensor.device.type for tensor in wrapped.tensors] == ["cuda", "cpu"]
    assert torch.equal(wrapped.state_dict["a"].cpu(), torch.arange(3.0))
