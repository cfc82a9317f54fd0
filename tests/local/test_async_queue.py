"""`AsyncRequest` and `AsyncCallsQueue` with functions of anybody's."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local import (
    AsyncCallsQueue,
    AsyncRequest,
    BackgroundWorkerError,
    BasicTensorAwareStateDict,
    CallOrderError,
    CheckpointingException,
    LocalCheckpointManager,
)
from ml_flashpoint.local.async_queue import BackgroundSave
from ml_flashpoint.memory.pool import Pool
from tests.support.forked import Child, call_team


@pytest.fixture
def queue() -> Iterator[AsyncCallsQueue]:
    made = AsyncCallsQueue()
    yield made
    made.close(abort=True)


def write(path: Path, text: str, more: str = "") -> None:
    path.write_text(f"{text}{more}")


def fail(text: str, *given: Any, **more: Any) -> None:
    raise ValueError(text)


def nothing() -> None: ...


def test_it_runs_beside_training_and_is_finalized_here(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    seen: list[str] = []
    request = AsyncRequest(write, (tmp_path / "a", None), [lambda: seen.append("first")], {"more": "y"}, lambda: "x")
    request.add_finalize_fn(lambda: seen.append((tmp_path / "a").read_text()))
    frozen = request.freeze()
    assert frozen.is_frozen
    with pytest.raises(CallOrderError, match="frozen"):
        frozen.add_finalize_fn(lambda: None)
    assert queue.schedule_async_request(frozen) == 0
    assert queue.get_num_unfinalized_calls() == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert queue.get_num_unfinalized_calls() == 0
    assert seen == ["first", "xy"]
    queue.schedule_async_request(AsyncRequest(nothing, None, [lambda: seen.append("closed")], None))  # type: ignore[arg-type]
    queue.close()
    queue.close()
    assert seen[2:] == ["closed"]
    with pytest.raises(CallOrderError, match="closed"):
        queue.schedule_async_request(AsyncRequest(None, (), []))


@pytest.mark.parametrize("where", ["call", "finalization"])
def test_what_fails_is_told_and_the_next_call_is_finalized(queue: AsyncCallsQueue, where: str) -> None:
    seen: list[int] = []
    if where == "call":
        queue.schedule_async_request(AsyncRequest(fail, ("no luck",), [partial(seen.append, 0)]))
    else:
        queue.schedule_async_request(AsyncRequest(None, (), [partial(fail, "no luck")]))
    queue.schedule_async_request(AsyncRequest(nothing, (), [partial(seen.append, 1)]))
    error, text = {
        "call": (BackgroundWorkerError, "asynchronous call 0 failed: ValueError: no luck"),
        "finalization": (ValueError, "no luck"),
    }[where]
    with pytest.raises(error, match=text):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert seen == [1]


def test_calls_are_finalized_in_order_and_not_before_they_have_ended(queue: AsyncCallsQueue) -> None:
    go_on = threading.Event()
    seen: list[int] = []
    queue.schedule_async_request(AsyncRequest(go_on.wait, (), [partial(seen.append, 0)]))
    queue.schedule_async_request(AsyncRequest(None, (), [partial(seen.append, 1)]))
    assert queue.maybe_finalize_async_calls() == []
    assert seen == []
    go_on.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert seen == [0, 1]


def _preload(report: Any, rank: int) -> None:
    seen: list[int] = []
    queue, preload = AsyncCallsQueue(), partial(fail, "cannot copy") if rank == 0 else nothing
    assert queue.schedule_async_request(AsyncRequest(print, ("a", None), [], preload_fn=preload)) == 0
    queue.schedule_async_request(AsyncRequest(nothing, (), [partial(seen.append, 1)]))
    with pytest.raises(BackgroundWorkerError, match="asynchronous call 0 failed: ValueError: cannot copy"):
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert seen == [1]


def test_all_ranks_are_told_that_one_could_not_preload(tmp_path: Path) -> None:
    call_team(_preload, tmp_path, 2)


def test_a_call_for_which_there_is_no_thread_has_failed(
    queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", partial(fail, "no more threads"))
        assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 0
    with pytest.raises(BackgroundWorkerError, match="asynchronous call 0 failed: ValueError: no more threads"):
        queue.maybe_finalize_async_calls(blocking=True)


def test_what_does_not_end_in_time_is_given_up(queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    seen: list[int] = []
    for number in range(2):
        queue.schedule_async_request(AsyncRequest(go_on.wait, (), [partial(seen.append, number)]))
    with monkeypatch.context() as patched:
        patched.setenv("FLASHPOINT_CALL_DEADLINE_S", "0.1")
        with pytest.raises(BackgroundWorkerError, match="asynchronous call 0 failed: it has not ended within"):
            queue.maybe_finalize_async_calls(blocking=True)
    queue.close(abort=True)
    assert (queue.get_num_unfinalized_calls(), seen) == (0, [])
    go_on.set()


def _leave_what_does_not_end(report: Any) -> None:
    AsyncCallsQueue().schedule_async_request(AsyncRequest(threading.Event().wait, (), []))


def test_a_process_ends_though_a_call_does_not() -> None:
    with Child(_leave_what_does_not_end, env={"FLASHPOINT_EXIT_DEADLINE_S": "0.1"}) as child:
        child.join()


def _leave_a_save(report: Any, folder: Path) -> None:
    manager, queue, ending, commit = LocalCheckpointManager(folder), AsyncCallsQueue(), threading.Event(), Pool.commit

    def commit_late(*args: Any) -> None:
        ending.wait()
        commit(*args)

    Pool.commit = commit_late  # type: ignore[method-assign, assignment]
    Finalize(None, ending.set, exitpriority=1000)  # the first of all that the end of the process runs
    request = manager.save(BasicTensorAwareStateDict({"a": torch.ones(9)}), 1, is_async=True)
    assert request is not None
    queue.schedule_async_request(request)


def test_a_local_save_that_nobody_finalized_is_committed(tmpfs: Path) -> None:
    with Child(_leave_a_save, tmpfs / "job") as child:
        child.join()
    with contextlib.closing(LocalCheckpointManager(tmpfs / "job")) as manager:
        assert manager.find_latest() == 1


def test_requests_of_others_are_taken(queue: AsyncCallsQueue) -> None:
    class Theirs(NamedTuple):
        async_fn: Any
        async_fn_args: tuple[Any, ...]
        finalize_fns: list[Any]

    seen: list[int] = []
    queue.schedule_async_request(Theirs(None, (), [partial(seen.append, 0)]))  # type: ignore[arg-type]
    assert queue.maybe_finalize_async_calls() == [0]
    assert seen == [0]
    with pytest.raises(InvalidArgumentError, match="async_request"):
        queue.schedule_async_request(3)  # type: ignore[arg-type]


def test_a_request_may_be_executed_at_once(tmp_path: Path) -> None:
    seen: list[int] = []
    AsyncRequest(write, (tmp_path / "a", "x"), [partial(seen.append, 0)]).execute_sync()
    assert (tmp_path / "a").exists()
    with pytest.raises(CheckpointingException, match="never"):
        AsyncRequest(fail, ("never",), [partial(seen.append, 1)]).execute_sync()
    assert seen == [0]
    with pytest.raises(CheckpointingException, match="second argument"):
        AsyncRequest(write, (), [], preload_fn=nothing).execute_sync()


def test_the_fields_are_those_of_megatrons_request() -> None:
    theirs = pytest.importorskip("megatron.core.dist_checkpointing.strategies.async_utils").AsyncRequest
    assert AsyncRequest._fields == theirs._fields
    assert AsyncRequest._field_defaults == theirs._field_defaults


# ---- a request that another process waits for -----------------------------------------------------------------------


def _await(report: Any, request: bytes) -> None:
    wait = pickle.loads(request)
    report("waits")
    wait()


def _begin(report: Any) -> None:
    committed: Future[None] = Future()
    save = BackgroundSave(committed)
    report("begun", pickle.dumps(save))
    report.listen()
    committed.set_result(None)
    report("saved")
    report.listen()


@pytest.mark.parametrize("end", ["saved", "killed"])
def test_waiting_elsewhere_ends_with_the_save_or_with_the_trainer(end: str) -> None:
    with Child(_begin) as trainer:
        (_, request) = trainer.next_report("begun")
        with Child(_await, request) as child:
            child.next_report("waits")
            assert child.alive
            trainer.say("go on") if end == "saved" else trainer.kill()
            child.join()
        with Child(_await, request) as late:
            late.join()
