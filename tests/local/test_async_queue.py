"""`AsyncRequest` and `AsyncCallsQueue` with functions of anybody's, in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
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
from tests.support import forked, warm
from tests.support.forked import Child

pytestmark = pytest.mark.slow
forked.preload(__name__)


@pytest.fixture(params=[True, False], ids=["persistent", "forked"])
def queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncCallsQueue]:
    if request.param and not warm.ALL_COLD:  # tests that make queues of their own have workers that import all anew
        monkeypatch.setattr("ml_flashpoint.local.async_queue.multiprocessing.get_context", forked.get_context)
    made = AsyncCallsQueue(persistent=request.param)
    yield made
    made.close(abort=True)


def write(path: Path, text: str, more: str = "") -> None:
    path.write_text(f"{text}{more} {os.getpid()}")


def write_tensor(path: Path, tensor: torch.Tensor) -> None:
    path.write_text(f"{tensor.sum().item()} {os.getpid()}")


def make_tensor() -> torch.Tensor:
    return torch.full((4,), 2.0)


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def leave() -> None:
    os._exit(3)


def fail(text: str, *given: Any, **more: Any) -> None:
    raise ValueError(text)


def wait_for(path: Path) -> None:
    path.read_text()  # a pipe with a name: returns once somebody has written to it


def test_it_runs_elsewhere_and_is_finalized_here(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    seen: list[str] = []
    request = AsyncRequest(write, (tmp_path / "a", "x"), [lambda: seen.append("first")], {"more": "y"})
    request.add_finalize_fn(lambda: seen.append((tmp_path / "a").read_text()))
    assert queue.schedule_async_request(request) == 0
    assert queue.get_num_unfinalized_calls() == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert queue.get_num_unfinalized_calls() == 0
    text, pid = seen[1].split()
    assert (seen[0], text) == ("first", "xy")
    assert int(pid) != os.getpid()


def test_what_is_preloaded_replaces_the_second_argument(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    queue.schedule_async_request(AsyncRequest(write_tensor, (tmp_path / "a", None), [], preload_fn=make_tensor))
    queue.close()
    total, pid = (tmp_path / "a").read_text().split()
    assert float(total) == 8
    assert int(pid) != os.getpid()


def test_calls_are_finalized_in_order_and_not_before_they_have_ended(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen: list[int] = []
    queue.schedule_async_request(AsyncRequest(wait_for, (pipe,), [partial(seen.append, 0)]))
    queue.schedule_async_request(AsyncRequest(None, (), [partial(seen.append, 1)]))
    assert queue.maybe_finalize_async_calls() == []
    assert seen == []
    pipe.write_text("go on")
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert seen == [0, 1]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (partial(die, signal.SIGKILL), "killed by SIGKILL"),
        (leave, "exit code 3"),
        (partial(fail, "no such luck"), "ValueError: no such luck"),
    ],
    ids=["killed", "left", "raised"],
)
def test_the_end_of_a_worker_is_reported_and_not_waited_for(
    queue: AsyncCallsQueue, tmp_path: Path, end: Callable[[], None], why: str
) -> None:
    seen: list[int] = []
    queue.schedule_async_request(AsyncRequest(end, (), [partial(seen.append, 0)]))
    with pytest.raises(BackgroundWorkerError, match=why):
        queue.maybe_finalize_async_calls(blocking=True)
    assert seen == [], "what failed is not finalized"
    # The queue goes on, with another worker if need be.
    queue.schedule_async_request(AsyncRequest(write, (tmp_path / "a", "x"), [partial(seen.append, 1)]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert seen == [1]


def test_preloading_may_fail(queue: AsyncCallsQueue) -> None:
    request = AsyncRequest(write, (1, 2), [], preload_fn=partial(fail, "no memory"))

    def run() -> None:
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)

    with pytest.raises((BackgroundWorkerError, ValueError), match="no memory"):
        run()


def test_a_finalization_may_fail(queue: AsyncCallsQueue) -> None:
    seen: list[int] = []
    queue.schedule_async_request(AsyncRequest(None, (), [partial(fail, "at last")]))
    queue.schedule_async_request(AsyncRequest(None, (), [partial(seen.append, 1)]))
    with pytest.raises(ValueError, match="at last"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(no_dist=True) == [1]
    assert seen == [1]


def test_closing_finalizes(queue: AsyncCallsQueue) -> None:
    seen: list[int] = []
    queue.schedule_async_request(AsyncRequest(None, (), [partial(seen.append, 0)]))
    queue.close()
    queue.close()
    assert seen == [0]
    with pytest.raises(CallOrderError, match="closed"):
        queue.schedule_async_request(AsyncRequest(None, (), []))


def test_aborting_gives_up_what_hangs(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen: list[int] = []
    queue.schedule_async_request(AsyncRequest(wait_for, (pipe,), [partial(seen.append, 0)]))
    queue.close(abort=True)
    assert queue.get_num_unfinalized_calls() == 0
    assert seen == []


def test_what_does_not_end_in_time_is_given_up(
    queue: AsyncCallsQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen: list[int] = []
    monkeypatch.setenv("FLASHPOINT_CALL_DEADLINE_S", "0.5")
    queue.schedule_async_request(AsyncRequest(wait_for, (pipe,), [partial(seen.append, 0)]))
    with pytest.raises(BackgroundWorkerError, match="asynchronous call 0 failed: it has not ended within"):
        queue.maybe_finalize_async_calls(blocking=True)
    monkeypatch.delenv("FLASHPOINT_CALL_DEADLINE_S")
    queue.schedule_async_request(AsyncRequest(write, (tmp_path / "a", "x"), [partial(seen.append, 1)]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert seen == [1]


def _leave_it_open(report: Any, path: Path) -> None:
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(AsyncRequest(write, (path, "x"), []))
    queue.maybe_finalize_async_calls(blocking=True)


def test_a_queue_that_was_not_closed_does_not_keep_its_process(tmp_path: Path) -> None:
    with Child(_leave_it_open, tmp_path / "a") as child:
        child.join()


def _leave_tensors(report: Any, path: Path, persistent: bool, is_daemon: bool) -> None:
    # All at once, so that the process ends while most of them are still on their way.
    queue = AsyncCallsQueue(persistent, is_daemon)
    for index in range(3):
        queue.schedule_async_request(AsyncRequest(write_tensor, (path / str(index), torch.ones(1000)), []))
    queue.schedule_async_request(AsyncRequest(fail, ("no such luck",), []))


@pytest.mark.parametrize("persistent", [True, False])
def test_what_nobody_closed_is_done_nevertheless_and_its_failures_are_told(tmp_path: Path, persistent: bool) -> None:
    with Child(_leave_tensors, tmp_path, persistent, False) as child:
        child.join()
        assert [(tmp_path / str(index)).read_text().split()[0] for index in range(3)] == ["1000.0"] * 3
        assert "asynchronous call 2 was not finalized" in child.log
        assert "asynchronous call 3 failed: ValueError: no such luck" in child.log


def _leave_a_save(report: Any, folder: Path, fails: bool) -> None:
    manager, queue = LocalCheckpointManager(folder), AsyncCallsQueue()
    if fails:
        (folder / "step-1_ckpt").write_text("in the way of the commit")
    request = manager.save(BasicTensorAwareStateDict({"a": torch.ones(9)}), 1, is_async=True)
    assert request is not None
    queue.schedule_async_request(request)


@pytest.mark.parametrize("fails", [False, True])
def test_a_local_save_that_nobody_finalized_is_told_of_if_it_failed(tmpfs: Path, fails: bool) -> None:
    with Child(_leave_a_save, tmpfs / "job", fails) as child:
        child.join()
        assert ("asynchronous call 0 failed" in child.log) == fails
    with contextlib.closing(LocalCheckpointManager(tmpfs / "job")) as manager:
        assert manager.find_latest() == (-1 if fails else 1)


def _leave_a_daemon(report: Any, pipe: Path) -> None:
    queue = AsyncCallsQueue(is_daemon=True)
    queue.schedule_async_request(AsyncRequest(wait_for, (pipe,), []))


def test_a_daemon_ends_with_its_process(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Child(_leave_a_daemon, pipe) as child:
        child.join()
        assert "asynchronous call 0 failed: it had not ended when the process did" in child.log


@pytest.mark.parametrize("persistent", [True, False])
def test_none_stands_for_no_arguments(tmp_path: Path, persistent: bool) -> None:
    queue = AsyncCallsQueue(persistent)
    queue.schedule_async_request(AsyncRequest(write, (tmp_path / "a", "x"), [], None))  # type: ignore[arg-type]
    queue.schedule_async_request(AsyncRequest(make_tensor, None, None, None))  # type: ignore[arg-type]
    queue.close()
    assert (tmp_path / "a").exists()
    AsyncRequest(make_tensor, None, None, None).execute_sync()  # type: ignore[arg-type]


class Unreadable:
    def __reduce__(self) -> Any:
        return fail, ("cannot be read",)


def test_a_request_that_cannot_be_unpickled_is_reported(queue: AsyncCallsQueue) -> None:
    if not queue.persistent:
        pytest.skip("nothing is pickled")
    queue.schedule_async_request(AsyncRequest(write, (Unreadable(), "x"), []))
    with pytest.raises(BackgroundWorkerError, match="ValueError: cannot be read"):
        queue.maybe_finalize_async_calls(blocking=True)


def test_requests_of_others_are_taken() -> None:
    class Theirs(NamedTuple):
        async_fn: Any
        async_fn_args: tuple[Any, ...]
        finalize_fns: list[Any]

    seen: list[int] = []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(Theirs(None, (), [partial(seen.append, 0)]))  # type: ignore[arg-type]
    queue.close()
    assert seen == [0]
    with pytest.raises(InvalidArgumentError, match="async_request"):
        AsyncCallsQueue().schedule_async_request(3)  # type: ignore[arg-type]


def test_a_frozen_request_takes_nothing_more() -> None:
    frozen = AsyncRequest(None, (), []).freeze()
    assert frozen.is_frozen
    with pytest.raises(CallOrderError, match="frozen"):
        frozen.add_finalize_fn(lambda: None)


def test_a_request_may_be_executed_at_once(tmp_path: Path) -> None:
    seen: list[int] = []
    AsyncRequest(write, (tmp_path / "a", "x"), [partial(seen.append, 0)]).execute_sync()
    assert (tmp_path / "a").exists()
    assert seen == [0]
    with pytest.raises(CheckpointingException, match="never"):
        AsyncRequest(fail, ("never",), [partial(seen.append, 1)]).execute_sync()
    assert seen == [0]
    with pytest.raises(CheckpointingException, match="second argument"):
        AsyncRequest(write, (), [], preload_fn=make_tensor).execute_sync()


def test_the_fields_are_those_of_megatrons_request() -> None:
    theirs = pytest.importorskip("megatron.core.dist_checkpointing.strategies.async_utils").AsyncRequest
    assert AsyncRequest._fields == theirs._fields
    assert AsyncRequest._field_defaults == theirs._field_defaults
