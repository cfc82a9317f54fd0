"""What is known of CUDA without any: whose a device is, and what memory is locked, with a runtime that is played."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from ml_flashpoint.copy.cuda import SLICE, PageLock, device_today, is_locked, slices
from tests.support.played_cuda import PlayedRuntime, play

SOURCES = Path(__file__).parents[2] / "src" / "ml_flashpoint"


def on(index: int) -> torch.device:
    return torch.device("cuda", index)


@pytest.mark.parametrize(
    ("saved", "ours", "expected"),
    [
        ("cpu", [on(1)], torch.device("cpu")),
        ("cuda:3", [torch.device("cpu"), on(1), on(1)], on(1)),  # the rank has moved
        ("cuda:0", [], on(2)),  # nothing says where it is now
        ("cuda:1", [on(0), on(1)], on(1)),  # a model that lies on several
        ("cuda:7", [on(0), on(1)], on(2)),
    ],
)
def test_what_was_on_a_device_goes_to_todays(
    saved: str, ours: list[torch.device], expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert device_today(saved, ours) == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_today(saved, ours) == torch.device("cpu")


def test_nothing_asks_torch_whether_cuda_is_available() -> None:
    """That initialises the driver, and children that a job forks later cannot use CUDA."""
    asking = [str(path) for path in SOURCES.rglob("*.py") if "cuda.is_available()" in path.read_text().replace("`", "")]
    assert asking == [] or asking == [str(SOURCES / "copy" / "cuda.py")]


def lock_all(lock: PageLock) -> None:
    while lock.extend():
        pass


def test_a_mapping_is_locked_by_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PlayedRuntime()
    play(monkeypatch, runtime, device=3)
    begin, size = 7 * SLICE + 8192, 2 * SLICE
    lock = PageLock(begin, size)
    assert lock.is_due
    assert not is_locked(begin, 1)
    assert lock.extend()
    assert is_locked(begin, SLICE - 8192)
    assert not is_locked(begin, SLICE), "of which all but a part is in the next slice"
    assert not is_locked(8 * SLICE, 1)
    lock_all(lock)
    assert lock.is_whole
    assert list(runtime.locked.items()) == [(b, e - b) for b, e in slices(begin, begin + size)]
    assert all(is_locked(b, e - b) for b, e in slices(begin, begin + size))
    assert not is_locked(begin - 1, 1)
    assert not is_locked(begin + size, 1)
    assert set(runtime.devices) == {3}
    lock.release()
    assert not runtime.locked
    assert not is_locked(begin, 1)
    assert not lock.is_whole
    lock.release()
    assert runtime.calls.count("unregister") == 3


def test_a_refusal_is_drained_remembered_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = PlayedRuntime(room=SLICE)
    play(monkeypatch, runtime)
    with caplog.at_level(logging.WARNING):
        for begin in (0, 8 * SLICE):
            lock = PageLock(begin, 2 * SLICE)
            lock_all(lock)
            assert runtime.last_error() == 0, "the next kernel would raise it"
            calls = len(runtime.calls)
            lock_all(lock)
            assert len(runtime.calls) == calls, "it was tried again"
            assert not lock.is_due
            assert not lock.is_whole
    assert len(caplog.records) == 1
    assert "CUDA error 2" in caplog.text
    assert is_locked(0, SLICE)
    assert not is_locked(SLICE, 1)


def test_memory_that_cuda_takes_for_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PlayedRuntime()
    play(monkeypatch, runtime)
    runtime.locked[2 * SLICE - 4096] = 8192
    lock = PageLock(2 * SLICE, SLICE)
    lock_all(lock)
    assert not lock.is_whole
    assert not is_locked(2 * SLICE, 4096)
    assert runtime.locked == {2 * SLICE - 4096: 8192}
    assert runtime.last_error() == 0


def test_a_runtime_that_fails_or_was_not_used_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unused, failing = PlayedRuntime(), PlayedRuntime()
    play(monkeypatch, unused, device=None)  # nothing was copied from a device yet
    lock = PageLock(0, SLICE)
    assert not lock.is_due
    assert not lock.extend()
    assert not unused.calls
    play(monkeypatch, failing)
    failing.guard = lambda device: (_ for _ in ()).throw(RuntimeError("the device is lost"))  # type: ignore[method-assign]
    lock_all(lock)
    assert not lock.is_due
    assert "the device is lost" in caplog.text


def test_a_torch_whose_runtime_cannot_be_found_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one for the CPU alone."""
    play(monkeypatch, None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch._C, "__file__", "/nowhere/libtorch.so")
    for _ in range(3):
        assert not PageLock(0, SLICE).extend()
    assert len(caplog.records) == 1


def test_a_forked_child_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PlayedRuntime()
    play(monkeypatch, runtime)
    lock = PageLock(0, SLICE)
    lock_all(lock)
    child = os.fork()
    if not child:
        status = 1
        try:
            lock.release()
            status = int(is_locked(0, 1) or PageLock(SLICE, SLICE).extend() or runtime.calls != ["register"])
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert is_locked(0, SLICE)
