"""What the calls of `LocalCheckpointManager` mean, in one process. Several ranks are in tests/e2e."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, UnaskedVersionsError
from ml_flashpoint.local import (
    AsyncCallsQueue,
    BasicTensorAwareStateDict,
    CallOrderError,
    CheckpointId,
    CheckpointingException,
    InvalidIterationError,
    LocalCheckpointManager,
    NoReplicasAvailableError,
    StaleIterationError,
)


def state(value: float = 1.0) -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict({"a": torch.full((1000,), value)})


def value_of(loaded: Any) -> float:
    tensor = loaded[0].state_dict["a"]
    assert torch.equal(tensor, torch.full((1000,), tensor[0].item()))
    return float(tensor[0])


@pytest.fixture
def manager(tmpfs: Path) -> Iterator[LocalCheckpointManager]:
    made = LocalCheckpointManager(tmpfs, "job")
    yield made
    made.close()


def test_save_find_load(manager: LocalCheckpointManager, tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ml_flashpoint.local")
    assert (manager.local_ckpt_dir, manager.rank, manager.latest_iteration) == (tmpfs / "job", 0, -1)
    assert manager.find_latest() == -1
    with pytest.raises(CallOrderError, match="no checkpoint"):
        manager.load()
    assert manager.save(state(3), 7) is None
    assert manager.latest_iteration == 7
    (path,) = manager.local_ckpt_dir.glob("step-7_ckpt/*.safetensors")
    assert str(path) in caplog.text
    loaded, checkpoint_id = manager.load()
    assert checkpoint_id == (7, 0, "job")
    assert isinstance(checkpoint_id, CheckpointId)
    assert value_of((loaded, checkpoint_id)) == 3
    assert manager.find_latest() == 7
    with contextlib.closing(LocalCheckpointManager(tmpfs, "other")) as other:
        other.save(state(2), 3)
        assert (manager.find_latest(), other.find_latest()) == (7, 3), "sessions are apart"
        assert (value_of(manager.load()), value_of(other.load())) == (3, 2)


@pytest.mark.parametrize("after", ["save", "load"])
def test_nothing_has_changed_once_an_iteration_was_not_there(tmpfs: Path, after: str) -> None:
    with contextlib.closing(LocalCheckpointManager(tmpfs)) as before:
        assert before.find_latest() == -1
        before.save(state(10.0), 10)
    with contextlib.closing(LocalCheckpointManager(tmpfs)) as manager:
        assert manager.find_latest() == 10
        with pytest.raises(LoadError, match="step 3"):
            manager.load(iteration=3)
        if after == "load":
            assert (value_of(manager.load()), manager.latest_iteration) == (10.0, 10)
        manager.save(state(11.0), 11)
        assert value_of(manager.load()) == 11.0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_save_costs_nothing_and_can_be_repeated_at_once(
    manager: LocalCheckpointManager, is_async: bool
) -> None:
    def saves(state: BasicTensorAwareStateDict, iteration: int) -> None:
        request = manager.save(state, iteration, is_async=is_async)
        if request is not None:
            queue = AsyncCallsQueue()
            queue.schedule_async_request(request)
            assert queue.maybe_finalize_async_calls(blocking=True) == [0]

    for iteration in range(1, 6):
        saves(state(iteration), iteration)
    for _ in range(3):
        with pytest.raises(CheckpointingException, match=r"rank 0.*cannot be saved.*can be repeated"):
            saves(BasicTensorAwareStateDict({"a": lambda: 0}), 6)
        assert (manager.latest_iteration, value_of(manager.load())) == (5, 5)
    saves(state(1), 6)
    saves(state(2), 6)
    assert value_of(manager.load()) == 1, "an iteration is saved once a run"
    saves(state(2), 6)
    assert value_of(manager.load()) == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_iterations_that_are_none(manager: LocalCheckpointManager, is_async: bool) -> None:
    for iteration in (-1, 1.0, "1", True, None, 2**70):
        with pytest.raises(InvalidIterationError, match="iteration must be"):
            manager.save(state(), iteration, is_async=is_async)  # type: ignore[arg-type]


def test_iterations_that_are_stale(manager: LocalCheckpointManager, tmpfs: Path) -> None:
    manager.save(state(), 5)
    with pytest.raises(StaleIterationError, match="older than iteration 5"):
        manager.save(state(), 4)
    again = LocalCheckpointManager(tmpfs, "job")
    assert again.find_latest() == 5
    with pytest.raises(StaleIterationError):
        again.save(state(), 4)
    # Nor by not looking.
    again = LocalCheckpointManager(tmpfs, "job")
    with pytest.raises(UnaskedVersionsError, match="find_latest"):
        again.save(state(9), 4)
    assert again.find_latest() == 5
    again.close()
    with contextlib.closing(LocalCheckpointManager(tmpfs, "another")) as back:
        back.save(state(9), 4)
        assert (back.find_latest(), value_of(back.load())) == (4, 9)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(
            ({"root_local_ckpt_dir": wrong}, "root_local_ckpt_dir")
            for wrong in (None, "/", "relative", Path("a"), "", 3)
        ),
        *(({"session_id": wrong}, "session_id") for wrong in ("a/b", "..", 3)),
        ({"repl_strategy": "clique"}, "repl_strategy"),
        ({"safe_globals": [3]}, "safe_globals"),
    ],
)
def test_bad_arguments_are_named(
    tmpfs: Path, arguments: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmpfs)
    with pytest.raises(InvalidArgumentError, match=named):
        LocalCheckpointManager(**{"root_local_ckpt_dir": tmpfs / "job", **arguments})
    assert list(tmpfs.iterdir()) == []


def test_closed_is_closed(manager: LocalCheckpointManager) -> None:
    manager.save(state(), 1)
    with pytest.raises(InvalidArgumentError, match="BasicTensorAwareStateDict"):
        manager.save({"a": 1}, 2)  # type: ignore[arg-type]
    hollow = state()
    hollow.pop_tensors()
    with pytest.raises(CallOrderError, match="hollow"):
        manager.save(hollow, 2)
    manager.close()
    manager.close()
    for use in (manager.find_latest, manager.load, lambda: manager.save(state(), 2)):
        with pytest.raises(CallOrderError, match="closed"):
            use()


def test_a_second_manager_takes_over(manager: LocalCheckpointManager, tmpfs: Path) -> None:
    manager.save(state(1), 1)
    manager.save(state(2), 2, is_async=True)
    second = LocalCheckpointManager(tmpfs, "job")
    with pytest.raises(CallOrderError, match="closed"):
        manager.find_latest()
    assert value_of(second.load()) == 2
    # In the order in which they were saved, whoever saved them.
    second.save(state(3), 2)
    assert value_of(LocalCheckpointManager(tmpfs, "job").load()) == 3
    LocalCheckpointManager(tmpfs, "job").close()


@pytest.mark.damages_on_purpose
def test_parts_without_the_rest_are_told_from_nothing(manager: LocalCheckpointManager) -> None:
    manager.save(state(), 1)
    manager.close()
    (path,) = manager.local_ckpt_dir.glob("step-1_ckpt/*.manifest")
    path.write_bytes(b"damaged")
    again = LocalCheckpointManager(manager.local_ckpt_dir)
    for look in (again.find_latest, again.load):
        with pytest.raises(NoReplicasAvailableError, match="step-1_ckpt on"):
            look()
    again.close()


def test_what_another_door_has_saved_is_told_from_what_is_lost(tmpfs: Path) -> None:
    """And no older one is gone back to: nobody would see it, and what is newer would be overwritten."""
    manager = LocalCheckpointManager(tmpfs, "job")
    manager.save(state(1), 1)
    manager.close()
    with Checkpointer(tmpfs / "job") as engine:
        assert engine.latest() == engine.id(1)
        save = engine.begin(2)
        save.fill([("a", torch.ones(10))])
        save.commit()
        save.committed.result(20)
    again = LocalCheckpointManager(tmpfs, "job")
    assert again.find_latest() == 2
    with pytest.raises(CheckpointingException, match="not saved by a LocalCheckpointManager") as caught:
        again.load()
    assert not isinstance(caught.value, NoReplicasAvailableError)
    assert again.find_latest() == 2
    again.close()


# ---- asynchronous saves -----------------------------------------------------------------------------------


def test_asynchronous_saves_overlap_and_count_when_they_are_finalized(manager: LocalCheckpointManager) -> None:
    queue = AsyncCallsQueue()
    for iteration in range(1, 4):  # as many as surely have memory, however late the first is verified
        request = manager.save(state(iteration), iteration, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)
    assert manager.latest_iteration == -1
    queue.close()
    assert (manager.latest_iteration, manager.find_latest(), value_of(manager.load())) == (3, 3, 3)


def test_a_failure_in_the_background_is_told_when_it_is_finalized(manager: LocalCheckpointManager) -> None:
    manager.save(state(1), 1)
    in_the_way = manager.local_ckpt_dir / "step-2_ckpt"
    in_the_way.write_text("")  # noticed by the commit, which is the last that the background does
    request = manager.save(state(2), 2, is_async=True)
    assert request is not None
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException, match=r"rank 0.*step-2_ckpt"):
        queue.maybe_finalize_async_calls(blocking=True)
    in_the_way.unlink()
    request = manager.save(state(2), 2, is_async=True)
    assert request is not None
    queue.schedule_async_request(request)
    queue.close()
    assert value_of(manager.load()) == 2
    pickle.loads(pickle.dumps(request._replace(finalize_fns=[]))).async_fn()  # as a queue that forks or sends it does


# ---- logs and leftovers -----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("is_async", [False, True])
def test_tensors_come_back_on_their_device(manager: LocalCheckpointManager, is_async: bool) -> None:
    on_device = torch.arange(1000.0, device="cuda")
    wrapped = BasicTensorAwareStateDict({"a": on_device, "b": torch.ones(3)})
    request = manager.save(wrapped, 1, is_async=is_async)
    assert wrapped.state_dict["a"].is_cuda, "the caller's state stays where it is"
    on_device.zero_()
    if request is not None:
        request.execute_sync()
    loaded: Any = manager.load()[0]
    assert loaded.state_dict["a"].device == on_device.device
    assert torch.equal(loaded.state_dict["a"].cpu(), torch.arange(1000.0))
    assert loaded.state_dict["b"].device.type == "cpu"
