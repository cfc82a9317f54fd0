"""Asynchronous saves: what is staged is what is saved, once, whatever happens meanwhile."""

from __future__ import annotations

import copy
import errno
import gc
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from tests.support.dcp import RESULT_TIMEOUT_S, Door, checkpointer
from tests.support.planners import FailingPlanner, GatedPlanner, RenamingPlanner
from tests.support.tensors import assert_same, blank

pytestmark = pytest.mark.slow

try:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
except ImportError:  # torch 2.6
    DefaultStager = StagingOptions = None  # type: ignore[assignment,misc]

QUARTER, MIB = 256 << 10, 1 << 20


def _state(step: int, elements: int = 1000) -> dict[str, Any]:
    return {"w": torch.full((elements,), float(step)), "step": step, "nested": {"list": [step, {"x": step}]}}


def test_the_staged_copies_are_the_object(door: Door) -> None:
    for step in (1, 2, 3):
        state = {"w": torch.full((MIB,), float(step))}
        door.async_save(state, step).result(RESULT_TIMEOUT_S)
        # Had it been copied once more, behind what was staged, the object would be twice as large.
        assert door.object_path(step).stat().st_size < 4 * MIB * 1.1
        assert_same(door.load(blank(state), step), state)


def test_changes_after_async_save_has_returned_do_not_show(door: Door) -> None:
    for step in (1, 2, 3):
        more = {"a": {"b": torch.ones(3)}, "tied": [torch.zeros(2)] * 2, "sparse": torch.eye(3).to_sparse()}
        state, expected = _state(step) | copy.deepcopy(more), _state(step) | more
        planner = GatedPlanner()
        future = door.async_save(state, step, planner=planner)
        state["w"].fill_(-1)
        state["a"]["b"].zero_()
        state["sparse"].values().zero_()
        state["tied"][0].fill_(9)
        state["nested"]["list"][1]["x"] = "changed"
        state["nested"]["list"].append("more")
        state["a"]["c"] = torch.ones(1)
        state["extra"] = 1
        planner.gate.set()
        future.result(RESULT_TIMEOUT_S)
        assert_same(door.load(blank(expected), step), expected)


class _Counter:
    def __init__(self, count: int) -> None:
        self.tensor = torch.tensor([count])
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensor, self.count = state_dict["tensor"], state_dict["count"]


def test_stateful_objects(door: Door, mode: str) -> None:
    door.save_by(mode, {"counter": _Counter(2)}, 2)
    loaded = _Counter(0)
    door.load({"counter": loaded}, 2)
    assert (loaded.tensor.tolist(), loaded.count) == ([2], 2)


@pytest.fixture
def roomy(door: Door) -> Door:
    """A door with two versions: from then on there may be slots for several saves in flight."""
    for step in (1, 2):
        door.save(_state(step), step)
        door.settle()
    return door


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_the_next_save_begins_once_the_asynchronous_one_has_ended(roomy: Door, way: str) -> None:
    planner = GatedPlanner()
    future = roomy.async_save(_state(3), 3, planner=planner)
    assert planner.entered.wait(RESULT_TIMEOUT_S)
    saving = threading.Thread(target=getattr(roomy, way), args=(_state(4), 4))
    saving.start()
    saving.join(0.2)
    assert saving.is_alive(), "there is a slot for it, and it did not wait"
    planner.gate.set()
    saving.join(RESULT_TIMEOUT_S)
    future.result(RESULT_TIMEOUT_S)
    roomy.settle()
    assert safetensors.torch.load_file(roomy.object_path(3))["w"][0] == 3
    assert_same(roomy.load(blank(_state(4)), 4), _state(4))


def test_many_saves_in_flight_without_waiting(door: Door) -> None:
    futures = [door.async_save(_state(step), step) for step in range(1, 9)]
    assert [bool(future.result(RESULT_TIMEOUT_S)) for future in futures] == [True] * 8
    assert_same(door.load(blank(_state(8)), 8), _state(8))


@pytest.mark.skipif("async_stager" not in inspect.signature(dcp.async_save).parameters, reason="needs a later torch")
@pytest.mark.parametrize(("shared", "answers_later"), [(True, False), (False, False), (False, True)])
def test_a_stager_of_the_users_own(door: Door, shared: bool, answers_later: bool) -> None:
    stager: Any = BlockingAsyncStager(cache_staged_state_dict=shared)
    if DefaultStager is not None:
        stager = DefaultStager(StagingOptions(False, shared, answers_later, False))
    for step in (1, 2):
        state = _state(step)
        future = door.async_save(state, step, async_stager=stager)
        if not answers_later:
            state["w"].fill_(-1)
        future.result(RESULT_TIMEOUT_S)
        assert_same(door.load(blank(_state(step)), step), _state(step))
    # And the writer's own again.
    door.async_save(_state(4), 4).result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(_state(4)), 4), _state(4))


def test_memory_stays_at_four_versions_whatever_their_sizes(door: Door, mode: str) -> None:
    """Tensors are allocated anew for each, items that are no tensors vary, too, and names outgrow their room."""
    for step, count in enumerate([4, 8, 16, 3, 3, 12, 1, 20, 20, 20, 20, 20, 20], 1):
        state = {"w": torch.full((count * QUARTER // 4,), float(step)), "data": b"\xab" * (count * step % 5 * QUARTER)}
        planner = RenamingPlanner() if step % 2 else DefaultSavePlanner()
        prefix = RenamingPlanner.PREFIX if step % 2 else ""
        door.save_by(mode, state, step, planner=planner)
        renamed = {prefix + name: value for name, value in state.items()}
        assert_same(door.load(blank(renamed), step), renamed)
    assert len(door.slot_bytes()) <= 4
    assert sum(door.slot_bytes()) < 4 * 24 * QUARTER * 1.1, door.slot_bytes()


def test_structures_that_change_between_saves(door: Door, mode: str) -> None:
    one, two = torch.arange(64.0), torch.arange(64.0) * -1
    states: list[dict[str, Any]] = [
        {"a": one, "b": two},
        {"b": one, "a": two},
        {"a": two, "b": one},
        {"a": one.view(8, 8), "b": two},
        {"a": one.view(4, 16), "b": two.view(2, 32)},
        {"a": one.double(), "b": two},
        {"a": one.view(torch.int32), "b": two},
        {"a": one, "b": one},
        {"a": one, "b": two, "c": one},
        {"a": {"b": one}, "c": two},
        {"a": [one, two], "c": 1},
        {"a": one[:32], "b": one[32:], "c": two[::2]},
        {"a": one, "b": 3},
        {"a": "text", "b": two},
        {"a": one, "b": two},
        {"a": one},
        {},
        {"a": one, "b": two},
    ]
    for step, state in enumerate(states, 1):
        door.round_trip(state, step, mode)
        stored = set(safetensors.torch.load_file(door.object_path(step)))
        names, _ = flatten_state_dict(state)
        assert set(names) <= stored | _aliases(door.object_path(step)), "what other tools see under these names"


def _aliases(path: Path) -> set[str]:
    with safetensors.safe_open(path, "pt") as file:
        return set(json.loads(file.metadata()["__flashpoint__"])["aliases"])


class _Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("this must not be copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("this must not be pickled")


def test_a_value_that_cannot_be_copied_fails_that_save_where_ranks_can_tell_each_other(door: Door, mode: str) -> None:
    door.save_by(mode, _state(1), 1)
    with pytest.raises(CheckpointException, match=r"(?s)this must not be"):
        door.save_by(mode, _state(2) | {"bad": _Uncopyable()}, 2)
    door.settle()
    assert_same(door.load(blank(_state(1)), 1), _state(1))
    door.round_trip(_state(3), 3, mode)
    assert door.saver.status.failures == 1


def test_a_planner_that_fails_costs_that_save_only(door: Door, mode: str) -> None:
    kept: list[BaseException] = []
    for step, method in enumerate(["", "create_local_plan", "", "create_global_plan", "", "resolve_data", ""], 1):
        if not method:
            door.round_trip(_state(step), step, mode)
            continue
        with pytest.raises(CheckpointException) as caught:
            door.save_by(mode, _state(step), step, planner=FailingPlanner(method))
        kept.append(caught.value)  # with its traceback, and whatever hangs on that
        assert door.latest() == step - 1
    door.settle()
    assert len(door.slot_bytes()) <= 4


def test_a_save_that_never_starts_is_given_up(door: Door) -> None:
    door.save(_state(1), 1)
    staged = door.writer.stage(_state(2))
    before = door.saver.status.failures
    del staged
    gc.collect()
    door.settle()
    assert door.saver.status.failures == before + 1
    door.round_trip(_state(3), 3)


def test_closing_the_writer_waits_for_a_first_save_whose_base_container_is_not_known_yet(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, reset = threading.Event(), door.writer.reset

    def late(*args: Any) -> None:
        assert closing.wait(RESULT_TIMEOUT_S)
        reset(*args)

    monkeypatch.setattr(door.writer, "reset", late)
    monkeypatch.setattr(door.writer, "stop_watching", closing.set)  # closing begins with it
    future = door.async_save(_state(1), 1)
    door.writer.close()
    assert door.object_path(1).exists()
    future.result(RESULT_TIMEOUT_S)


@pytest.fixture
def start_thread() -> Iterator[Callable[..., None]]:
    """Starts a thread that lives until the test ends, as those of loaders and loggers do."""
    ended = threading.Event()
    yield lambda *, daemon: threading.Thread(target=ended.wait, daemon=daemon).start()
    ended.set()


@pytest.mark.timeout(60)
def test_a_saving_process_that_cannot_be_started_holds_up_no_later_save(
    door: Door, process_group: None, monkeypatch: pytest.MonkeyPatch, start_thread: Callable[..., None]
) -> None:
    """What it was to save is staged, and stays for as long as somebody keeps the failure with its traceback."""
    executor = pytest.importorskip("torch.distributed.checkpoint._async_process_executor")

    def failing(process: Any, pg_init_info: object) -> None:
        process._save_process = SimpleNamespace(is_alive=lambda: False)
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    door.save(_state(1), 1)
    with monkeypatch.context() as context:
        context.setattr(executor, "_CHECKPOINT_PROCESS", None)
        context.setattr(executor._AsyncCheckpointProcess, "__init__", failing)
        kept = door.async_save(_state(2), 2, **checkpointer("process"))
        start_thread(daemon=True)
        with pytest.raises(BlockingIOError):
            kept.result(RESULT_TIMEOUT_S)
    door.save(_state(3), 3)
    assert door.saver.wait(20)
    assert (door.saver.status.verified, door.saver.status.failures) == (3, 1)
    assert_same(door.load(blank(_state(3)), 3), _state(3))


def test_a_staged_state_is_saved_once_whoever_has_looked_at_it(door: Door) -> None:
    door.save(_state(1), 1)
    state = _state(2)
    staged = door.writer.stage(state)
    assert "w" in dict(staged.items())
    state["w"].zero_()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(door.save, staged, 2).result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(_state(2)), 2), _state(2))
    assert (door.saver.status.saves, door.saver.status.failures) == (2, 0)
    with pytest.raises(CheckpointException, match=r"(?s)saved or given up before"):
        door.save(staged, 3)
    door.round_trip(_state(4), 4)


@pytest.mark.timeout(60)
def test_another_base_container_is_refused_and_holds_up_no_later_save(door: Door, tmp_path: Path) -> None:
    door.save(_state(1), 1)
    options: Any = {"checkpoint_id": str(tmp_path / "other" / "step-2_ckpt"), "storage_writer": door.writer}
    with pytest.raises(CheckpointException, match=r"(?s)one base container"):
        dcp.save(_state(2), **options)
    with pytest.raises(CheckpointException, match=r"(?s)one base container"):
        dcp.async_save(_state(2), **options).result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(_state(1)), 1), _state(1))
    with ThreadPoolExecutor(1) as pool:  # whose thread lives on
        assert pool.submit(dcp.save, door.writer.stage(_state(2)), **options).exception(RESULT_TIMEOUT_S) is not None
        gc.collect()  # torch keeps the failure, whose frames have the state, in a cycle
        door.round_trip(_state(3), 3)
    door.round_trip(_state(4), 4, "thread")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["relative", "/tmp/step-01_ckpt", None])
def test_a_checkpoint_id_that_is_no_version_is_refused_and_holds_up_no_later_save(
    door: Door, name: str | None, start_thread: Callable[..., None]
) -> None:
    with pytest.raises((CheckpointException, ValueError)):
        dcp.save(_state(1), checkpoint_id=name, storage_writer=door.writer)
    kept = dcp.async_save(_state(1), checkpoint_id=name, storage_writer=door.writer)
    start_thread(daemon=False)
    with pytest.raises((CheckpointException, ValueError)):
        kept.result(RESULT_TIMEOUT_S)
    staged = door.writer.stage(_state(1))
    start_thread(daemon=False)
    with pytest.raises((CheckpointException, ValueError)):
        dcp.save(staged, checkpoint_id=name, storage_writer=door.writer)
    door.round_trip(_state(2), 2)
