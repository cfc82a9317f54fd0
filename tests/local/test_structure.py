"""What a state may be made of, that it comes back bit for bit, and that nothing in a checkpoint is executed."""

from __future__ import annotations

import copy
import json
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import InvalidArgumentError, UnsafeContentError
from ml_flashpoint.local import (
    BasicTensorAwareStateDict,
    CallOrderError,
    CheckpointingException,
    LocalCheckpointManager,
    NoReplicasAvailableError,
    TensorAwareStateDict,
)
from ml_flashpoint.local.structure import ARCHIVE_KEY, HEADER_KEY
from ml_flashpoint.state.archive import save_archive
from tests.local.states import (
    Frozen,
    Hooked,
    HookedState,
    Ordinary,
    Pair,
    Plain,
    WholeState,
    assert_equal,
    everything,
)


@pytest.fixture
def manager(tmpfs: Path) -> Iterator[LocalCheckpointManager]:
    made = LocalCheckpointManager(tmpfs / "job")
    yield made
    made.close()


def round_trip(manager: LocalCheckpointManager, state: Any, *, is_async: bool = False) -> Any:
    wrapped = state if isinstance(state, TensorAwareStateDict) else BasicTensorAwareStateDict(state)
    request = manager.save(wrapped, max(0, manager.latest_iteration + 1), is_async=is_async)
    if request is not None:
        request.execute_sync()
    loaded, _ = manager.load()
    return loaded.state_dict if isinstance(loaded, BasicTensorAwareStateDict) else loaded


@pytest.mark.parametrize("is_async", [False, True])
def test_everything_comes_back_bit_for_bit(manager: LocalCheckpointManager, is_async: bool) -> None:
    state = everything()
    got = round_trip(manager, state, is_async=is_async)
    assert_equal(got, state)
    assert got["tied"][0] is got["tied"][1], "tied weights are one tensor still"
    assert got["tied"][2][1].first is got["tied"][0]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_callers_state_is_not_touched_and_saved_as_it_was(manager: LocalCheckpointManager, is_async: bool) -> None:
    state: dict[str, Any] = {"a": torch.ones(1000), "nested": [{"b": torch.zeros(2)}, Plain(torch.ones(1))]}
    tensors = (state["a"], state["nested"][0]["b"], state["nested"][1].content)
    expected = copy.deepcopy(state)
    wrapped = BasicTensorAwareStateDict(state)
    request = manager.save(wrapped, 1, is_async=is_async)
    assert_equal(state, expected)
    assert all(map(lambda a, b: a is b, tensors, (state["a"], state["nested"][0]["b"], state["nested"][1].content)))
    state["a"].zero_()
    state["nested"].append(2)
    if request is not None:
        request.execute_sync()
    loaded, _ = manager.load()
    assert_equal(loaded.state_dict, expected)  # type: ignore[attr-defined]
    wrapped.copy_tensors_to_cpu()
    assert wrapped.is_away
    assert_equal(round_trip(manager, wrapped, is_async=is_async), {**expected, "a": torch.zeros(1000)})


def test_a_subclass_with_only_the_two_methods_is_stored_whole(manager: LocalCheckpointManager) -> None:
    got = round_trip(manager, WholeState([torch.full((3,), 5.0), {"a": Frozen(torch.zeros(2))}]))
    assert type(got) is WholeState
    assert_equal(got.content, [torch.full((3,), 5.0), {"a": Frozen(torch.zeros(2))}])
    assert got.restored == 1
    (path,) = manager.local_ckpt_dir.glob("step-0_ckpt/*.safetensors")
    assert torch.equal(load_file(path)["content.0"], torch.full((3,), 5.0)), "its tensors are the object's"


# ---- what is not allowed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [Ordinary(1), Hooked(1), HookedState([1])], ids=lambda value: type(value).__name__)
def test_other_types_need_to_be_listed_when_saving_and_when_loading(tmpfs: Path, value: Any) -> None:
    state = value if isinstance(value, TensorAwareStateDict) else BasicTensorAwareStateDict({"v": value})
    name = type(value).__name__
    manager = LocalCheckpointManager(tmpfs / "job")
    with pytest.raises(CheckpointingException, match=name) as refused:
        manager.save(state, 1)
    assert isinstance(refused.value.__cause__, UnsafeContentError)
    manager = LocalCheckpointManager(tmpfs / "job", safe_globals=[type(value)])
    manager.save(state, 1)
    loaded, _ = manager.load()
    got: Any = loaded.state_dict["v"] if isinstance(loaded, BasicTensorAwareStateDict) else loaded
    assert type(got) is type(value)
    assert got.content == value.content
    manager = LocalCheckpointManager(tmpfs / "job")
    assert manager.find_latest() == 1
    with pytest.raises(UnsafeContentError, match=name):
        manager.load()
    manager.close()


@pytest.mark.parametrize("value", [lambda: 0, defaultdict(lambda: 0)], ids=["function", "factory"])
def test_what_cannot_be_stored_is_refused(manager: LocalCheckpointManager, value: Any) -> None:
    with pytest.raises(CheckpointingException, match=r"state_dict\.place.*cannot be saved"):
        manager.save(BasicTensorAwareStateDict({"place": value}), 1)


def test_a_state_that_contains_itself_is_refused(manager: LocalCheckpointManager) -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(InvalidArgumentError, match="contains itself"):
        BasicTensorAwareStateDict(state)
    with pytest.raises(CheckpointingException, match="contains itself"):
        manager.save(WholeState(state), 1)


# ---- what somebody else has written ----------------------------------------------------------------------


def _load_crafted(base: Path, archive: bytes, **changed: Any) -> Any:
    """What a manager makes of a checkpoint with this archive and a header that was changed so."""
    data = changed.pop("header", None)
    header = {"wrapped": True, "devices": {"t": "cpu"}, "meshes": [], **changed}
    data = json.dumps(header).encode() if data is None else data
    items = [(HEADER_KEY, data), *([(ARCHIVE_KEY, archive)] if archive else [])]
    with Checkpointer(base) as checkpointer:
        save = checkpointer.begin(1)
        save.fill([("t", torch.ones(2))], items)
        save.commit()
        save.committed.result(20)
    manager = LocalCheckpointManager(base)
    try:
        assert manager.find_latest() == 1
        return manager.load()
    finally:
        manager.close()


class Crafted:
    """Tensors that an archive describes as a test says."""

    def __init__(self, *described: Any) -> None:
        self.described = described

    def take(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return self.described

    def give(self, *described: Any) -> torch.Tensor:
        return torch.ones(2)


def _archive(*described: Any) -> bytes:
    return save_archive({"x": torch.ones(2)}, "state", leaves=Crafted(*described))


def test_a_pickle_is_not_opened(tmpfs: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmpfs / "exploded"),)

    with pytest.raises(UnsafeContentError, match="mkdir"):
        _load_crafted(tmpfs / "job", save_archive(Bomb(), "state", allowed=None))
    assert not (tmpfs / "exploded").exists()


@pytest.mark.parametrize(
    ("archive", "changed"),
    [
        *((_archive(*wrong), {}) for wrong in (("u", 0), ("t", "0"), (), ("t", 0, "m"), ("t", 0, "m", [], [], []))),
        (b"", {}),
        (_archive("t", 0), {"header": b""}),
        (_archive("t", 0), {"header": b"[]"}),
        (_archive("t", 0), {"devices": {"nothing": "cpu"}}),
        (_archive("t", 0), {"devices": {"t": "nowhere"}}),
        (_archive("t", 0), {"wrapped": False}),
    ],
)
def test_a_state_that_makes_no_sense_is_passed_over(tmpfs: Path, archive: bytes, changed: dict[str, Any]) -> None:
    with pytest.raises(NoReplicasAvailableError):
        _load_crafted(tmpfs / "job", archive, **changed)
    loaded, _ = _load_crafted(tmpfs / "sound", _archive("t", 0))
    assert_equal(loaded.state_dict, {"x": torch.ones(2)})


# ---- the hollow protocol ---------------------------------------------------------------------------------------------


def small_state() -> dict[str, Any]:
    return {
        "a": torch.arange(6.0).view(2, 3),
        "nested": [{"b": torch.ones(2, dtype=torch.int32)}, Pair(torch.zeros(1), "x"), Plain(torch.ones(4))],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "plain": 3,
    }


def test_popping_and_inserting_gives_the_same_state() -> None:
    wrapped = BasicTensorAwareStateDict(small_state())
    before = list(wrapped.tensors)
    popped = wrapped.pop_tensors()
    assert wrapped.is_hollow
    assert len(popped) == 5
    assert all(torch.equal(one, other) for one, other in zip(before, popped, strict=True))
    assert wrapped.state_dict["a"].is_meta
    assert isinstance(wrapped.state_dict["parameter"], torch.nn.Parameter)
    wrapped.insert_tensors(popped)
    assert not wrapped.is_hollow
    assert_equal(wrapped.state_dict, small_state())


def test_new_tensors_have_the_old_shapes_and_dtypes() -> None:
    wrapped = BasicTensorAwareStateDict(small_state())
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
    wrapped = BasicTensorAwareStateDict(small_state())
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
    original = small_state()
    wrapped = BasicTensorAwareStateDict(original)
    wrapped.copy_tensors_to_cpu()
    original["a"].zero_()
    assert torch.equal(wrapped.state_dict["a"], torch.arange(6.0).view(2, 3))
    kept = wrapped.state_dict["a"]
    wrapped.copy_tensors_to_cpu()
    assert wrapped.state_dict["a"] is kept
    wrapped.restore_tensor_device()
    assert_equal(wrapped.state_dict["parameter"], small_state()["parameter"])


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
