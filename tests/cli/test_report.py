"""`flashpoint report`: a page from the events of a real job, of damaged files, and of texts that are no friends."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.cli.main import app
from ml_flashpoint.cli.report import Facts, collect, page_of
from ml_flashpoint.events import Event, encode_event, flush
from tests.flashpoint.test_overlap import Job


def _of(rank: int = 0, step: int | None = 1, time_s: float = 1000.0, node: str = "node-0") -> dict[str, Any]:
    return {"time_s": time_s, "rank": rank, "node": node, "base": "/dev/shm/job", "step": step}


def _written(path: Path, told: Sequence[Event | str]) -> str:
    path.write_text("".join(each if isinstance(each, str) else encode_event(each) for each in told))
    return str(path)


def _run(*options: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["report", *options])
    return done.exit_code, done.stdout, done.stderr


def _figure(page: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The traces and the layout of a page, as a browser is given them."""
    call = page[page.rindex("Plotly.newPlot(") :]
    decoder = json.JSONDecoder()
    traces, end = decoder.raw_decode(call, call.index("["))
    layout, _ = decoder.raw_decode(call, call.index("{", end))
    return traces, layout


def _texts(page: str) -> str:
    return json.dumps(_figure(page), ensure_ascii=False)


def test_a_real_job_of_two_lives(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmpfs / "events.jsonl"
    monkeypatch.setenv("FLASHPOINT_EVENTS", str(lines))
    for _ in range(2):
        job = Job()
        with Flashpoint(tmpfs / "job") as fp:
            fp.track(**job.tracked).resume()
            for _ in range(3):
                job.step()
                fp.step()
                assert fp.wait()
        assert flush()
    monkeypatch.delenv("FLASHPOINT_EVENTS")
    page = tmpfs / "page.html"
    code, _, told = _run(str(lines), "-o", str(page))
    assert code == 0
    assert re.search(r"page.html: \d+ events of 1 rank", told)
    traces = {trace.get("name", trace["type"]): trace for trace in _figure(page.read_text())[0]}
    assert traces["verified"]["y"] == [1, 2, 3, 4, 5, 6]
    assert traces["recovery"]["y"] == [3]
    assert "No copies were made on other nodes" in _texts(page.read_text())
    code, document, _ = _run(str(lines), "--json")
    found = json.loads(document)
    assert (code, found["left_out"], found["bases"]) == (0, 0, [str(tmpfs / "job")])
    assert [each["step"] for each in found["steps"]] == [1, 2, 3, 4, 5, 6]
    assert all(each["held"]["most_s"] > 0 and each["verified"]["count"] == 1 for each in found["steps"])
    (recovery,) = found["recoveries"]
    assert (recovery["step"], recovery["source"]) == (3, "memory")
    assert list(recovery["seconds"]) == ["detect", "plan", "fetch", "load"]
    (rank,) = found["ranks"]
    assert (rank["saves"], rank["failures"], rank["verified"]) == (6, 0, 6)


def test_what_is_no_event_is_left_out_and_counted(tmp_path: Path) -> None:
    held = '{"schema": 1, "event": "loop_held", "rank": %s, "node": "n", "base": "/b", "step": %s, "time_s": %s'
    held += ', "seconds": %s}\n'
    lines = [
        held % (0, 1, 1000.0, 0.5),
        held % (0, 2, 1001, 1),
        held % (0, 1, "NaN", 0.5),
        held % (0, 1, 1000.0, "Infinity"),
        held % (0, 1, 1000.0, "-1"),
        held % (0, 1, 1000.0, "9" * 400),
        held % (0, "9" * 400, 1000.0, 0.5),
        held % ("-1", 1, 1000.0, 0.5),
        held % (0, 1, "9" * 400, 0.5),
        '{"schema": 1, "event": "loop_held", "x": "' + "y" * 300_000 + '"}\n',
        "\n",
        '{"torn": ',
    ]
    progress: list[tuple[int, int]] = []
    found = collect([_written(tmp_path / "events", lines)], lambda *told: progress.append(told))
    assert found.count == 2
    assert progress == [(len(lines[0]), (tmp_path / "events").stat().st_size)]
    assert found.left_out == 8 + 3, "the long line is read in three pieces"
    assert found.ranks[0].held.total == 1.5


@pytest.mark.slow
@settings(max_examples=15)
@given(text=st.text(max_size=60) | st.sampled_from(["<script>x()</script>", "</script><b>", '"><img src=x>', "&lt;"]))
def test_text_of_events_stays_text(text: str) -> None:
    facts = Facts()
    fields = {**_of(node=text), "base": text}
    for event in (
        events.SaveFailed(**fields, error=text),
        events.LoopHeld(**fields, seconds=0.1),
        events.VersionVerified(**fields, seconds=0.2),
        events.Resumed(**fields, source=text, seconds=1.0),
        events.SteppedBack(**fields, error=text),
    ):
        facts.add(event)
    page = page_of(facts)
    begin = page.rindex("Plotly.newPlot(")
    assert not re.search(r"[<>]", page[begin : page.index("</script>", begin)]), "no markup within the script"
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    escaped = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    tables = [trace for trace in _figure(page)[0] if trace["type"] == "table"]
    assert escaped.replace("'", "&#x27;") in tables[0]["cells"]["values"][-1]


def test_failures_are_listed_newest_first_and_alike_ones_once(tmp_path: Path) -> None:
    told: list[Event] = [events.SaveFailed(**_of(rank, 5, 1000.0 + rank), error="no room") for rank in range(4)]
    told.append(events.ReplicationFailed(**_of(2, 6, 1100.0), error="no answer"))
    told.append(events.PartReplicated(**_of(), bytes=1, holders=(1,), seconds=0.1))
    page = page_of(collect([_written(tmp_path / "events", told)]))
    failures = next(trace for trace in _figure(page)[0] if trace["type"] == "table")["cells"]["values"]
    assert failures[1:] == [["2", "0-3"], ["6", "5"], ["replication_failed", "save_failed"], ["no answer", "no room"]]
    assert "survives the loss of a node" in _texts(page)


def test_many_events_take_little(tmp_path: Path) -> None:
    told: list[Event] = []
    for step in range(6000):
        told.append(events.LoopHeld(**_of(0, step, 1000.0 + step), seconds=0.01 * (step == 2345) + 0.001))
        if step % 10 == 0:
            told.append(events.SaveFailed(**_of(0, step, 1000.0 + step), error=f"number {step}"))
    found = collect([_written(tmp_path / "events", told)])
    assert (len(found.failures), found.ranks[0].failures) == (500, 600)
    traces, _ = _figure(page_of(found))
    slowest = next(trace for trace in traces if trace.get("name") == "slowest rank, held")
    assert len(slowest["x"]) <= 2000
    assert slowest["y"][slowest["x"].index(2345)] == pytest.approx(0.011), "the worst step is not left out"


def test_what_is_refused(tmp_path: Path) -> None:
    lines = _written(tmp_path / "events", [events.LoopHeld(**_of(), seconds=0.1)])
    assert _run(lines, "-o", lines)[0] == 2
    assert Path(lines).read_text().startswith("{"), "it is as it was"
    assert _run(str(tmp_path / "missing"))[0] == 2
    assert _run(str(tmp_path))[0] == 2
    assert _run(lines, "-o", str(tmp_path / "no" / "page.html"))[0] == 2
    empty = _written(tmp_path / "empty", ["none\n"])
    code, text, told = _run(empty, "--json")
    assert (code, "no events in the files (1 other line)" in told) == (2, True)
    assert "error" in json.loads(text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "events"], "nothing temporary is left"
