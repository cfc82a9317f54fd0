"""What the calls of `LocalCheckpointManager` mean, in one process. Several ranks are in tests/e2e."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, LoadError, UnaskedVersionsError
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
from ml_flashpoint.ranks.strategies import RingReplicationStrategy
from tests.support.forked import Child


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


def test_a_fresh_folder(manager: LocalCheckpointManager, tmpfs: Path) -> None:
    assert (manager.local_ckpt_dir, manager.rank, manager.latest_iteration) == (tmpfs / "job", 0, -1)
    assert manager.find_latest() == -1
    with pytest.raises(CallOrderError, match="no checkpoint"):
        manager.load()


@pytest.mark.parametrize("folder", ["relative", "./a", Path("a/b"), "", 3, None])
def test_the_folder_must_be_an_absolute_path(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"root_local_ckpt_dir.*absolute path|absolute path.*root_local"):
        LocalCheckpointManager(folder)
    assert list(tmp_path.iterdir()) == []


def test_save_find_load(manager: LocalCheckpointManager) -> None:
    assert manager.save(state(3), 7) is None
    assert manager.latest_iteration == 7
    loaded, checkpoint_id = manager.load()
    assert checkpoint_id == (7, 0, "job")
    assert isinstance(checkpoint_id, CheckpointId)
    assert value_of((loaded, checkpoint_id)) == 3
    assert manager.find_latest() == 7


def test_what_was_found_is_kept_until_the_next_save(manager: LocalCheckpointManager, tmpfs: Path) -> None:
    manager.save(state(), 1)
    manager.save(state(), 2)
    assert manager.find_latest() == 2
    for path in manager.local_ckpt_dir.glob("step-2_ckpt/*"):
        path.unlink()
    assert manager.find_latest() == 2, "it does not look again"
    manager.save(state(), 3)
    assert manager.find_latest() == 3


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


def test_sessions_are_apart(tmpfs: Path) -> None:
    one, other = LocalCheckpointManager(tmpfs, "one"), LocalCheckpointManager(tmpfs, "other")
    one.save(state(1), 5)
    other.save(state(2), 3)
    assert (one.find_latest(), other.find_latest()) == (5, 3)
    assert (value_of(one.load()), value_of(other.load())) == (1, 2)
    one.close()
    other.close()


def test_a_failed_save_costs_nothing_that_was_there(manager: LocalCheckpointManager) -> None:
    for iteration in range(1, 6):
        manager.save(state(iteration), iteration)
    with pytest.raises(CheckpointingException):
        manager.save(BasicTensorAwareStateDict({"a": lambda: 0}), 6)
    assert value_of(manager.load()) == 5


class ByMethod(BasicTensorAwareStateDict):
    """Overrides a property by a method, as subclasses in the field do."""

    def is_hollow(self) -> bool:  # type: ignore[override]
        return False

    def restore_tensor_device(self, non_blocking: bool = True) -> None: ...


class HollowByMethod(ByMethod):
    def is_hollow(self) -> bool:  # type: ignore[override]
        return True


def test_is_hollow_may_be_a_method(manager: LocalCheckpointManager) -> None:
    manager.save(ByMethod({"a": torch.ones(1)}), 1)
    assert manager.find_latest() == 1
    with pytest.raises(CallOrderError, match="hollow"):
        manager.save(HollowByMethod({"a": torch.ones(1)}), 2)


def test_a_failed_save_can_be_repeated_at_once(manager: LocalCheckpointManager) -> None:
    for _ in range(3):
        with pytest.raises(CheckpointingException, match="can be repeated"):
            manager.save(BasicTensorAwareStateDict({"a": lambda: 0}), 6)
    manager.save(state(1), 6)
    manager.save(state(2), 6)
    assert value_of(manager.load()) == 1, "an iteration is saved once a run"
    manager.save(state(2), 6)
    assert value_of(manager.load()) == 2


def test_a_failed_save_can_be_repeated_after_an_older_one_has_ended(manager: LocalCheckpointManager) -> None:
    older = manager.save(state(1), 1, is_async=True)
    assert older is not None
    with pytest.raises(CheckpointingException, match="can be repeated"):
        manager.save(BasicTensorAwareStateDict({"a": lambda: 0}), 2)
    older.execute_sync()
    manager.save(state(2), 2)
    assert value_of(manager.load()) == 2


@pytest.mark.parametrize("iteration", [-1, 1.0, "1", True, None, 2**70])
def test_iterations_that_are_none(manager: LocalCheckpointManager, iteration: Any) -> None:
    with pytest.raises(InvalidIterationError, match="iteration must be"):
        manager.save(state(), iteration)
    with pytest.raises(InvalidIterationError, match="iteration must be"):
        manager.save(state(), iteration, is_async=True)
    manager.save(state(), 0)


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


def test_states_that_cannot_be_saved(manager: LocalCheckpointManager) -> None:
    with pytest.raises(InvalidArgumentError, match="BasicTensorAwareStateDict"):
        manager.save({"a": 1}, 1)  # type: ignore[arg-type]
    hollow = state()
    hollow.pop_tensors()
    with pytest.raises(CallOrderError, match="hollow"):
        manager.save(hollow, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"root_local_ckpt_dir": None}, "root_local_ckpt_dir"),
        ({"root_local_ckpt_dir": "/"}, "root_local_ckpt_dir"),
        ({"session_id": "a/b"}, "session_id"),
        ({"session_id": ".."}, "session_id"),
        ({"session_id": 3}, "session_id"),
        ({"repl_strategy": "clique"}, "repl_strategy"),
        ({"safe_globals": [3]}, "safe_globals"),
    ],
)
def test_bad_arguments_are_named(tmpfs: Path, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{named} must be"):
        LocalCheckpointManager(**{"root_local_ckpt_dir": tmpfs, **arguments})


def test_a_folder_that_cannot_be_used_is_named(tmpfs: Path) -> None:
    (tmpfs / "file").write_text("")
    with pytest.raises(FlashpointError, match="file"):
        LocalCheckpointManager(tmpfs / "file")


def test_strategies_of_the_engine_are_accepted(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = LocalCheckpointManager(tmpfs, repl_strategy=RingReplicationStrategy())
    assert "protects no part" in caplog.text, "there is one node only"
    manager.save(state(2), 1)
    assert value_of(manager.load()) == 2
    manager.close()


def test_closed_is_closed(manager: LocalCheckpointManager) -> None:
    manager.save(state(), 1)
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


def test_an_asynchronous_save_counts_when_it_is_finalized(manager: LocalCheckpointManager) -> None:
    manager.save(state(1), 1)
    request = manager.save(state(2), 2, is_async=True)
    assert request is not None
    assert manager.latest_iteration == 1
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert manager.latest_iteration == 2
    assert value_of(manager.load()) == 2


def test_saves_may_overlap(manager: LocalCheckpointManager) -> None:
    queue = AsyncCallsQueue()
    for iteration in range(1, 4):  # as many as surely have memory, however late the first is verified
        request = manager.save(state(iteration), iteration, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)
    queue.close()
    assert (manager.find_latest(), value_of(manager.load())) == (3, 3)


def test_a_failed_asynchronous_save_is_told_when_it_is_finalized(manager: LocalCheckpointManager) -> None:
    manager.save(state(1), 1)
    request = manager.save(BasicTensorAwareStateDict({"a": lambda: 0}), 2, is_async=True)
    assert request is not None
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException, match=r"rank 0.*cannot be saved"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert (manager.latest_iteration, value_of(manager.load())) == (1, 1)
    # Again, at once.
    request = manager.save(state(2), 2, is_async=True)
    assert request is not None
    request.execute_sync()
    assert value_of(manager.load()) == 2


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


def test_the_request_can_be_waited_for_in_another_process(manager: LocalCheckpointManager) -> None:
    """As a queue that forks or sends it does: see `BackgroundSave`."""
    import pickle

    manager.save(state(), 1)
    request = manager.save(state(), 2, is_async=True)
    assert request is not None
    assert request.async_fn is not None
    request.execute_sync()
    pickle.loads(pickle.dumps(request._replace(finalize_fns=[]))).async_fn()


# ---- logs and leftovers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_logs(manager: LocalCheckpointManager, caplog: pytest.LogCaptureFixture, is_async: bool) -> None:
    caplog.set_level(logging.INFO, "ml_flashpoint.local")
    request = manager.save(state(), 12, is_async=is_async)
    if request is not None:
        request.execute_sync()
    (path,) = manager.local_ckpt_dir.glob("step-12_ckpt/*.safetensors")
    infos = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert any(str(path) in message for message in infos)


def _save_and_hang(report: Any, root: Path) -> None:
    manager = LocalCheckpointManager(root)
    manager.save(state(1), 1)
    iteration = 2
    while True:
        manager.save(state(iteration), iteration, is_async=True)
        report("saving")
        iteration += 1


def test_what_a_crash_left_is_cleaned_at_the_next_start(tmpfs: Path) -> None:
    with Child(_save_and_hang, tmpfs / "job") as child:
        for _ in range(20):
            child.next_report("saving")
        child.kill()
    with contextlib.closing(LocalCheckpointManager(tmpfs / "job")) as manager:
        found = manager.find_latest()
        assert found >= 1
        assert value_of(manager.load()) == found
        manager.save(state(found + 1), found + 1)
        assert value_of(manager.load()) == found + 1


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
