"""Copies by several threads: everything is copied once, failures and interrupts leave no thread at work."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.copy.cpu import _do_all, copy_all, threads_for
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import InvalidArgumentError

DEADLINE_S = 60.0


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_COPY_THREADS", "4")


def test_a_failure_elsewhere_is_raised_once_nobody_is_at_work() -> None:
    """The caller's job is over first; the other thread still works when that fails, and is waited for."""
    over, meeting, mine = threading.Event(), threading.Barrier(2), threading.get_ident()

    def job() -> None:
        meeting.wait(DEADLINE_S)  # two threads work at once
        if threading.get_ident() == mine:
            return
        try:
            raise OSError("from another thread")
        finally:
            over.set()

    with pytest.raises(OSError, match="from another thread"):
        _do_all(iter([job, job]), 2)
    assert over.is_set()


def test_an_interrupt_waits_for_the_others() -> None:
    inside, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    mine = threading.get_ident()

    def job() -> None:
        if threading.get_ident() != mine:
            inside.set()
            may_end.wait(DEADLINE_S)
            ended.set()
            return
        inside.wait(DEADLINE_S)
        threading.Timer(0.05, may_end.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _do_all(iter([job, job, lambda: pytest.fail("a job after an interrupt")]), 2)
    assert ended.is_set()


def test_a_signal_while_others_are_waited_for_is_raised_when_they_are_done() -> None:
    inside, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    mine = threading.get_ident()

    def job() -> None:
        if threading.get_ident() == mine:
            inside.wait(DEADLINE_S)  # then there is no job left, and the caller waits
            return
        inside.set()
        os.kill(os.getpid(), signal.SIGINT)
        may_end.wait(DEADLINE_S)
        ended.set()

    def raises(*_: object) -> None:
        threading.Timer(0.05, may_end.set).start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, raises)
    try:
        with pytest.raises(KeyboardInterrupt):
            _do_all(iter([job, job]), 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


def test_a_child_copies_too(four: None) -> None:
    source = torch.arange(8 << 20)
    target = torch.empty_like(source)
    copy_all([target], [source])  # there are threads now, none of which the child has
    child = os.fork()
    if child == 0:
        target.zero_()
        copy_all([target], [source])
        os._exit(0 if torch.equal(target, source) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 9 << 20), st.sampled_from(("uint8", "bfloat16", "complex64"))), max_size=6))
def test_all_is_copied_whatever_the_sizes(sizes: list[tuple[int, str]]) -> None:
    before = os.environ.get("FLASHPOINT_COPY_THREADS")
    os.environ["FLASHPOINT_COPY_THREADS"] = "4"
    try:
        sources = []
        for seed, (size, dtype) in enumerate(sizes):
            data = torch.arange(seed, seed + size + 9, dtype=torch.int64).to(torch.uint8)
            itemsize = getattr(torch, dtype).itemsize
            source = data[: size // itemsize * itemsize].view(getattr(torch, dtype))
            sources.append(source if seed % 2 else source[: source.numel() // 2 * 2].view(2, -1).t())
        targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
        copy_all(targets, sources)
    finally:
        os.environ.pop("FLASHPOINT_COPY_THREADS")
        if before is not None:
            os.environ["FLASHPOINT_COPY_THREADS"] = before
    for target, source in zip(targets, sources, strict=True):
        same = torch.equal(target.view(torch.uint8), source.contiguous().view(torch.uint8))
        assert same


@pytest.mark.parametrize(
    ("nbytes", "ranks", "torchs", "expected"),
    [
        (1 << 30, "1", 1, 8),
        (1 << 30, "4", 1, 4),
        (1 << 30, "64", 1, 1),
        (1 << 30, "many", 1, 8),
        (1 << 30, "1", 2, 1),
        (20 << 20, "1", 1, 2),
        (9, "1", 1, 1),
    ],
)
def test_threads_follow_from_size_and_cores(
    nbytes: int, ranks: str, torchs: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a host share its cores, and where torch has several threads, it copies by them itself."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    assert threads_for(nbytes) == expected


def test_a_limit_that_is_none_is_refused_by_name_before_anything_is_saved(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("0", "-1", "two", "", "1.5", "99999"):
        monkeypatch.setenv("FLASHPOINT_COPY_THREADS", value)
        with pytest.raises(InvalidArgumentError, match="FLASHPOINT_COPY_THREADS"):
            Checkpointer(tmpfs / "job")
    assert not (tmpfs / "job").exists()


@pytest.mark.usefixtures("four")
def test_threads_write_what_the_caller_may_write() -> None:
    """Into parameters that were made in inference mode, which nothing outside of it may change."""
    sources = [torch.rand(4 << 20) for _ in range(4)]
    with torch.inference_mode():
        targets = [torch.empty(4 << 20) for _ in sources]
        for _ in range(4):
            copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources))
