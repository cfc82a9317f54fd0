"""What a state may be made of, that it comes back bit for bit, and that nothing in a checkpoint is executed."""

from __future__ import annotations

import copy
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import InvalidArgumentError, UnsafeContentError
from ml_flashpoint.local import (
    BasicTensorAwareStateDict,
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


def test_the_callers_state_is_not_touched(manager: LocalCheckpointManager) -> None:
    state = {"a": torch.ones(3), "nested": [{"b": torch.zeros(2)}, Plain(torch.ones(1))]}
    tensors = (state["a"], state["nested"][0]["b"], state["nested"][1].content)  # type: ignore[union-attr,index]
    expected = copy.deepcopy(state)
    wrapped = BasicTensorAwareStateDict(state)
    manager.save(wrapped, 1)
    wrapped.copy_tensors_to_cpu()
    wrapped.pop_tensors()
    assert_equal(state, expected)
    nested: Any = state["nested"]
    assert all(a is b for a, b in zip(tensors, (state["a"], nested[0]["b"], nested[1].content), strict=True))


def test_what_is_changed_after_an_asynchronous_save_is_saved_as_it_was(manager: LocalCheckpointManager) -> None:
    state = {"a": torch.ones(1000), "n": [1]}
    request = manager.save(BasicTensorAwareStateDict(state), 1, is_async=True)
    assert request is not None
    state["a"].zero_()  # type: ignore[union-attr]
    state["n"].append(2)  # type: ignore[union-attr]
    request.execute_sync()
    loaded, _ = manager.load()
    assert_equal(loaded.state_dict, {"a": torch.ones(1000), "n": [1]})  # type: ignore[attr-defined]


def test_a_subclass_with_only_the_two_methods_is_stored_whole(manager: LocalCheckpointManager) -> None:
    got = round_trip(manager, WholeState([torch.ones(3), {"a": Frozen(torch.zeros(2))}]))
    assert type(got) is WholeState
    assert_equal(got.content, [torch.ones(3), {"a": Frozen(torch.zeros(2))}])
    assert got.restored == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_state_that_was_copied_to_the_cpu_comes_back_where_it_was(
    manager: LocalCheckpointManager, is_async: bool
) -> None:
    wrapped = BasicTensorAwareStateDict({"a": torch.ones(3), "b": [torch.zeros(2)]})
    wrapped.copy_tensors_to_cpu()
    got = round_trip(manager, wrapped, is_async=is_async)
    assert_equal(got, {"a": torch.ones(3), "b": [torch.zeros(2)]})
    assert wrapped.is_away


def test_its_tensors_are_tensors_of_the_checkpoint(manager: LocalCheckpointManager) -> None:
    from safetensors.torch import load_file

    manager.save(WholeState({"layer": [torch.full((3,), 5.0)]}), 2)
    (path,) = manager.local_ckpt_dir.glob("step-2_ckpt/*.safetensors")
    assert torch.equal(load_file(path)["content.layer.0"], torch.full((3,), 5.0))


# ---- what is not allowed ----------------------------------------------------------------------------------


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


def test_a_type_that_cannot_be_found_again_is_refused_when_saving(manager: LocalCheckpointManager) -> None:
    @dataclass
    class Hidden:
        a: int

    with pytest.raises(CheckpointingException, match=r"Hidden.*top level"):
        manager.save(BasicTensorAwareStateDict({"h": Hidden(1)}), 1)


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


# ---- what somebody else has written -----------------------------------------------------------------------


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


def test_a_crafted_checkpoint_is_read_like_any_other(tmpfs: Path) -> None:
    loaded, _ = _load_crafted(tmpfs / "job", _archive("t", 0))
    assert_equal(loaded.state_dict, {"x": torch.ones(2)})


def test_a_pickle_is_not_opened(tmpfs: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmpfs / "exploded"),)

    with pytest.raises(UnsafeContentError, match="mkdir"):
        _load_crafted(tmpfs / "job", save_archive(Bomb(), "state", allowed=None))
    assert not (tmpfs / "exploded").exists()


@pytest.mark.parametrize(
    "described",
    [("u", 0), (0, 0), ("t", "0"), (), ("t", 0, "m"), ("t", 0, "m", [], [], [])],
    ids=str,
)
def test_an_archive_that_makes_no_sense_is_passed_over(tmpfs: Path, described: Any) -> None:
    with pytest.raises(NoReplicasAvailableError):
        _load_crafted(tmpfs / "job", _archive(*described))


@pytest.mark.parametrize(
    "changed",
    [
        {"header": b""},
        {"header": b"not json"},
        {"header": b"[]"},
        {"devices": {"nothing": "cpu"}},
        {"devices": {"t": "nowhere"}},
        {"wrapped": False},
    ],
    ids=str,
)
def test_a_header_that_makes_no_sense_is_passed_over(tmpfs: Path, changed: Any) -> None:
    with pytest.raises(NoReplicasAvailableError):
        _load_crafted(tmpfs / "job", _archive("t", 0), **changed)


def test_a_state_without_its_archive_is_passed_over(tmpfs: Path) -> None:
    with pytest.raises(NoReplicasAvailableError):
        _load_crafted(tmpfs / "job", b"")
