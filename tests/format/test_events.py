"""Lines of events: what is written is read again, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.events import (
    KINDS,
    SCHEMA,
    Event,
    PartReplicated,
    SaveFailed,
    VersionVerified,
    decode_event,
    decode_events,
    encode_event,
)

_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(0, 2**53),
    "float": st.floats(0, 1e12),
    "str": st.text(max_size=20),
    "int | None": st.none() | st.integers(0, 2**40),
    "tuple[int, ...]": st.lists(st.integers(0, 10_000), max_size=4).map(tuple),
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


def test_the_form_of_a_line() -> None:
    line = json.loads(encode_event(PartReplicated(bytes=7, holders=(1, 3), seconds=0.5, step=4, rank=2, node="n")))
    assert line == {
        "schema": 1,
        "event": "part_replicated",
        "time_s": 0.0,
        "rank": 2,
        "node": "n",
        "base": "",
        "step": 4,
        "bytes": 7,
        "holders": [1, 3],
        "seconds": 0.5,
    }


def test_what_a_newer_release_adds_is_left_out() -> None:
    lines = [
        json.dumps({"schema": SCHEMA, "event": "version_verified", "seconds": 1, "colour": "red"}),
        json.dumps({"schema": SCHEMA, "event": "version_painted", "colour": "red"}),
        json.dumps({"schema": SCHEMA + 1, "event": "version_verified", "seconds": 1}),
    ]
    assert list(decode_events(lines)) == [VersionVerified(seconds=1)]


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "1"},
        {"seconds": True},
        {"seconds": None},
        {"rank": 1.5},
        {"node": 3},
        {"step": "7"},
        {"seconds": [1]},
        {"seconds": {"a": 1}},
    ],
)
def test_values_of_other_types_are_no_event(change: dict[str, Any]) -> None:
    assert decode_event(json.dumps({"schema": SCHEMA, "event": "version_verified", "seconds": 1, **change})) is None


@given(st.binary(max_size=200) | st.text(max_size=200) | st.recursive(st.none(), st.lists).map(json.dumps))
def test_anything_else_is_no_event(line: bytes | str) -> None:
    assert decode_event(line) is None


def test_a_line_that_would_take_all_memory_is_no_event() -> None:
    line = encode_event(SaveFailed(error="x" * (1 << 20)))
    assert decode_event(line) is None
    assert decode_event("[" * 60_000) is None
