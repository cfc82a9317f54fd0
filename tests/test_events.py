"""Events: everybody who subscribes is told, in order, and at nobody's expense; lines are read as they were written."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint import events
from ml_flashpoint.events import (
    KINDS,
    SCHEMA,
    Event,
    PartReplicated,
    SaveFailed,
    VersionVerified,
    decode_event,
    encode_event,
)
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support.forked import call


@dataclass
class _Rank:
    rank: int = 3
    node: str = "rack/7"


def _verify(step: int, base: object = "/dev/shm/a", rank: int = 3) -> None:
    events.emit(VersionVerified, _Rank(rank), base, step, seconds=0.25)


@pytest.fixture
def told() -> Iterator[list[Event]]:
    told: list[Event] = []
    with events.subscribe(told.append):
        yield told


def test_subscribers_are_told_in_order_until_they_end_whatever_others_raise(caplog: pytest.LogCaptureFixture) -> None:
    one, two = list[int | None](), list[int | None]()

    def fail(event: Event) -> None:
        raise ValueError("not today")

    with events.subscribe(lambda event: one.append(event.step)):
        with events.subscribe(fail), events.subscribe(lambda event: two.append(event.step)):
            for step in range(100):
                _verify(step)
        _verify(100)
    _verify(101)
    assert one == list(range(101))
    assert two == list(range(100))
    assert "a subscriber failed" in caplog.text


def test_events_of_one_base_container_whatever_it_is_called(tmp_path: Path) -> None:
    told: list[int | None] = []
    (tmp_path / "job").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "job")
    with events.subscribe(lambda event: told.append(event.step), tmp_path / "link"):
        for step, base in enumerate([tmp_path / "job", tmp_path / "link", tmp_path / "other", None]):
            _verify(step, base)
    assert told == [0, 1]


def test_nobody_waits_for_a_slow_subscriber(caplog: pytest.LogCaptureFixture) -> None:
    called, go_on, told = threading.Event(), threading.Event(), list[int | None]()

    def slow(event: Event) -> None:
        told.append(event.step)
        called.set()
        assert go_on.wait(60)

    with events.subscribe(slow):
        _verify(0)
        assert called.wait(60)
        for step in range(1, 20_000):
            _verify(step)
        assert not events.flush(0.01)
        go_on.set()
    assert told == list(range(len(told)))
    assert 1 < len(told) < 20_000
    assert "too slow" in caplog.text


def test_a_subscriber_is_called_and_may_flush_and_end_itself() -> None:
    ended: list[bool] = []

    def once(event: Event) -> None:
        ended.append(events.flush())
        subscription.close()

    subscription = contextlib.ExitStack()
    subscription.enter_context(events.subscribe(once))
    for step in (1, 2):
        _verify(step)
        assert events.flush()
    assert ended == [True]
    with pytest.raises(InvalidArgumentError, match="subscriber"), events.subscribe(None):  # type: ignore[arg-type]
        pass


def _in_child(function: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # which ends it if it hangs
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_tells_nobody_of_its_parents(told: list[Event]) -> None:
    def child() -> None:
        mine: list[Event] = []
        with events.subscribe(mine.append):
            _verify(2)
        assert [event.step for event in mine] == [2]
        assert not told

    _in_child(child)
    _verify(1)
    assert events.flush()
    assert [event.step for event in told] == [1]


def _forks_a_child_that_ends(report: Callable[..., None]) -> None:
    def child() -> None:
        atexit._clear()
        goes_on, mine = threading.Event(), list[int | None]()
        with events.subscribe(lambda event: (goes_on.wait(20), mine.append(event.step))):
            _verify(2)
            atexit.register(goes_on.set)  # runs first
            atexit._run_exitfuncs()
            assert mine == [2]

    with events.subscribe(lambda event: None):
        _verify(1)
        assert events.flush()
        _in_child(child)


def test_a_forked_child_that_ends_waits_for_its_subscribers() -> None:
    """Also where it forgets what its parent registered, as children of multiprocessing do since Python 3.13. In a
    process of its own: what other tests have loaded does not survive a fork that forgets what was registered."""
    call(_forks_a_child_that_ends)


# ---- the file -------------------------------------------------------------------------------------------------


def _steps(path: Path) -> list[int | None]:
    assert events.flush()
    return [event.step for event in events.read_events(path)]


def test_the_file_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_EVENTS", str(tmp_path / "{node}-{rank}.jsonl"))
    _verify(1)
    _verify(2)
    assert _steps(tmp_path / "rack_7-3.jsonl") == [1, 2]
    monkeypatch.setenv("FLASHPOINT_EVENTS", str(tmp_path / "other"))
    _verify(3)
    monkeypatch.delenv("FLASHPOINT_EVENTS")
    _verify(4)
    assert _steps(tmp_path / "rack_7-3.jsonl") == [1, 2]
    assert _steps(tmp_path / "other") == [3]


def test_processes_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv("FLASHPOINT_EVENTS", str(path))
    _verify(0)
    assert events.flush()

    def child() -> None:
        for step in range(1, 200):
            _verify(step, rank=1)
        assert events.flush()

    _in_child(child)
    _verify(200)
    assert _steps(path) == list(range(201))
    with path.open("a") as file:
        file.write('{"schema": 1, "event": "version_ver')  # of a process that was killed
    assert _steps(path) == list(range(201))


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "wb") as file:
        while True:
            os.write(file.fileno(), b"x" * 4096)


def test_a_file_that_cannot_be_written_stops_nothing(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: list[Event]
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setenv("FLASHPOINT_EVENTS", str(small_tmpfs / "missing" / "events"))
    _verify(1)
    monkeypatch.setenv("FLASHPOINT_EVENTS", str(small_tmpfs / "events"))
    _verify(2)
    assert events.flush()
    _fill(small_tmpfs / "filling")
    for step in range(3, 200):
        _verify(step)
    assert events.flush()
    (small_tmpfs / "filling").unlink()
    _verify(200)
    assert events.flush()
    monkeypatch.delenv("FLASHPOINT_EVENTS")
    _verify(201)
    assert events.flush()
    assert [event.step for event in told] == list(range(1, 202))
    steps = _steps(small_tmpfs / "events")
    assert steps[0] == 2
    assert steps[-1] == 200
    assert [record.message.split(":")[0].split(" to ")[0] for record in caplog.records] == [
        "events cannot be written",
        "events cannot be written",
    ]


# ---- lines ------------------------------------------------------------------------------------------------------

_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(0, 2**53),
    "float": st.floats(0, 1e12),
    "str": st.text(max_size=20),
    "int | None": st.none() | st.integers(0, 2**40),
    "str | None": st.none() | st.text(max_size=20),
    "tuple[int, ...]": st.lists(st.integers(0, 10_000), max_size=4).map(tuple),
    "tuple[str, ...]": st.lists(st.text(max_size=20), max_size=4).map(tuple),
}


@st.composite
def _events(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from(sorted(KINDS)))
    hints = {name: getattr(hint, "__name__", "") for name, hint in get_type_hints(KINDS[kind]).items()}
    names = {f.name: str(f.type) for f in dataclasses.fields(KINDS[kind])}
    assert hints.keys() == names.keys()
    return KINDS[kind](**{name: draw(_VALUES[hint]) for name, hint in names.items()})


@given(_events())
def test_what_is_written_is_read(event: Event) -> None:
    line = encode_event(event)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert decode_event(line) == decode_event(line.encode()) == event
    assert decode_event(line[: len(line) // 2]) is None


def test_the_form_of_a_line(told: list[Event]) -> None:
    events.emit(PartReplicated, _Rank(), "/dev/shm/a", 4, bytes=7, holders=(1, 3), seconds=0.5)
    assert events.flush()
    (event,) = told
    assert event.time_s > 1.7e9
    assert json.loads(encode_event(event)) == {
        "schema": 1,
        "event": "part_replicated",
        "time_s": event.time_s,
        "rank": 3,
        "node": "rack/7",
        "base": "/dev/shm/a",
        "step": 4,
        "bytes": 7,
        "holders": [1, 3],
        "seconds": 0.5,
    }


def test_what_a_newer_release_adds_is_left_out() -> None:
    verified = {"schema": SCHEMA, "event": "version_verified", "seconds": 1}
    assert decode_event(json.dumps({**verified, "colour": "red"})) == VersionVerified(seconds=1)
    assert decode_event(json.dumps({**verified, "event": "version_painted"})) is None
    assert decode_event(json.dumps({**verified, "schema": SCHEMA + 1})) is None


def test_values_of_other_types_are_no_event() -> None:
    good = {"schema": SCHEMA, "event": "version_verified", "seconds": 1}
    wrong: list[dict[str, Any]] = [{"seconds": each} for each in ("1", True, None, [1], {"a": 1})]
    for change in (*wrong, {"rank": 1.5}, {"node": 3}, {"step": "7"}):
        assert decode_event(json.dumps({**good, **change})) is None, change


@given(st.binary(max_size=200) | st.text(max_size=200) | st.recursive(st.none(), st.lists).map(json.dumps))
def test_anything_else_is_no_event(line: bytes | str) -> None:
    assert decode_event(line) is None


def test_a_line_that_would_take_all_memory_is_no_event() -> None:
    line = encode_event(SaveFailed(error="x" * (1 << 20)))
    assert decode_event(line) is None
    assert decode_event("[" * 60_000) is None
