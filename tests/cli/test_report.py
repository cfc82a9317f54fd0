"""`flashpoint report`: a page from the events of a real job, of damaged files, and of texts that are no friends."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli.main import app
from ml_flashpoint.cli.report import collect as collecting
from ml_flashpoint.cli.report.charts import Series, line_chart
from ml_flashpoint.cli.report.collect import Collected, collect
from ml_flashpoint.cli.report.page import page_of, show_seconds
from ml_flashpoint.events import flush
from ml_flashpoint.format import events
from ml_flashpoint.format.events import Event, encode_event
from tests.facade.test_overlap import Job


def _of(rank: int = 0, step: int | None = 1, time_s: float = 1000.0, node: str = "node-0") -> dict[str, Any]:
    return {"time_s": time_s, "rank": rank, "node": node, "base": "/dev/shm/job", "step": step}


def _written(path: Path, told: Sequence[Event | str]) -> str:
    path.write_text("".join(each if isinstance(each, str) else encode_event(each) for each in told))
    return str(path)


def _run(*options: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["report", *options])
    return done.exit_code, done.stdout, done.stderr


class _Page(HTMLParser):
    """What a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


_TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "b", "i", "div", "span", "section"}
_TAGS |= {"svg", "line", "text", "path", "circle", "rect", "table", "thead", "tbody", "tr", "th", "td"}


def _checked(text: str) -> _Page:
    """A page, if it is of its own elements only, loads nothing, and draws nothing that is no number."""
    page = _Page(text)
    assert set(page.tags) <= _TAGS
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "xlink:href", "style", "srcset", "action", "data"}
    assert not [name for name in names if name.startswith("on")]
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', text)
    assert "default-src 'none'" in text
    return page


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
    assert re.search(r"page.html: \d+ events of 1 ranks", told)
    text = _checked(page.read_text()).text
    for expected in ("1 on 1", "6newest verified step", "1recoveries", "0failures", "from memory"):
        assert expected in text
    code, document, _ = _run(str(lines), "--json")
    found = json.loads(document)
    assert (code, found["left_out"], found["bases"]) == (0, 0, [str(tmpfs / "job")])
    assert [each["step"] for each in found["steps"]] == [1, 2, 3, 4, 5, 6]
    assert all(each["held"]["most_s"] > 0 and each["verified"]["count"] == 1 for each in found["steps"])
    (recovery,) = found["recoveries"]
    assert (recovery["step"], recovery["source"]) == (3, "memory")
    assert [phase["name"] for phase in recovery["phases"]] == ["detect", "plan", "fetch", "load"]
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
    assert found.events == 2
    assert progress == [(len(lines[0]), (tmp_path / "events").stat().st_size)]
    assert found.left_out == 8 + 3, "the long line is read in three pieces"
    assert found.ranks[0].held.total == 1.5
    _checked(page_of(found))


@pytest.mark.slow
@settings(max_examples=25)
@given(text=st.text(max_size=60) | st.sampled_from(["<script>x()</script>", "' onload='x()", '"><img src=x>', "&lt;"]))
def test_text_of_events_stays_text(text: str) -> None:
    collected = Collected(files=[text])
    fields = {**_of(node=text), "base": text}
    for event in (
        events.SaveFailed(**fields, error=text),
        events.LoopHeld(**fields, seconds=0.1),
        events.PartCommitted(**fields, bytes=1, seconds=0.2),
        events.VersionVerified(**fields, seconds=0.2),
    ):
        collected.add(event)
    collected.end(collecting.Recoveries().add(events.Resumed(**fields, source=text, seconds=1.0)))
    back = collecting.Recoveries()
    back.add(events.SteppedBack(**fields, error=text))
    collected.end(back.rest())
    collected.finish()
    page = _checked(page_of(collected))
    if text.isprintable() and text.strip():
        assert text in page.text


def test_failures_are_listed_newest_first_and_alike_ones_once(tmp_path: Path) -> None:
    told = [events.SaveFailed(**_of(rank, 5, 1000.0 + rank), error="no room") for rank in range(4)]
    told.append(events.ReplicationFailed(**_of(2, 6, 1100.0), error="no answer"))
    page = _checked(page_of(collect([_written(tmp_path / "events", told)])))
    assert re.search(r"2\D*node-0\D*6\D*replication_failed.*0-3\D*node-0\D*5\D*save_failed", page.text, re.DOTALL)


def test_many_events_take_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MOST_FAILURES", 10)
    told: list[Event] = []
    for step in range(3000):
        told.append(events.LoopHeld(**_of(0, step, 1000.0 + step), seconds=0.01 * (step == 1234) + 0.001))
        told.append(events.SaveFailed(**_of(0, step, 1000.0 + step), error=f"number {step}"))
    found = collect([_written(tmp_path / "events", told)])
    assert [each.step for each in found.failures] == list(range(2990, 3000))
    assert found.failure_count == 3000
    text = page_of(found)
    assert len(text) < 60_000
    assert "11 ms" in text, "the worst step is not thinned out"


def test_charts() -> None:
    def chart(points: Sequence[tuple[float, float]]) -> str:
        return line_chart([Series("s", points, "a")], label="x", show_x=str, show_y=str)

    assert "Nothing of that" in chart([])
    one = chart([(5.0, 0.0)])
    assert re.findall(r'd="([^"]*)"', one) == ["M72.0 226.0"]
    steps = line_chart([Series("s", [(0, 1), (10, 2)], "a", steps=True)], label="x", show_x=str, show_y=str)
    assert re.findall(r'd="([^"]*)"', steps) == ["M72.0 119.0H886.0L886.0 12.0"]


def test_seconds_for_people() -> None:
    told = [show_seconds(each) for each in (0, 0.0038, 1, 119, 120, 9000, 200_000)]
    assert told == ["0", "3.8 ms", "1 s", "119 s", "2 min", "2.5 h", "2.31 d"]


def test_what_is_refused(tmp_path: Path) -> None:
    lines = _written(tmp_path / "events", [events.LoopHeld(**_of(), seconds=0.1)])
    assert _run(lines, "-o", lines)[0] == 2
    assert Path(lines).read_text().startswith("{"), "it is as it was"
    assert _run(str(tmp_path / "missing"))[0] == 2
    assert _run(str(tmp_path))[0] == 2
    assert _run(lines, "-o", str(tmp_path / "no" / "page.html"))[0] == 2
    empty = _written(tmp_path / "empty", ["none\n"])
    code, text, told = _run(empty, "--json")
    assert (code, "there are no events in it (1 lines that are none)" in told) == (2, True)
    assert "error" in json.loads(text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "events"], "nothing temporary is left"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium on this machine")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    told: list[Event] = []
    for step in range(50):
        told.append(events.LoopHeld(**_of(0, step, 1000.0 + step), seconds=0.01))
        told.append(events.VersionVerified(**_of(0, step, 1000.0 + step), seconds=0.1))
    _written(tmp_path / "events", told)
    assert _run(str(tmp_path / "events"), "-o", str(tmp_path / "page.html"))[0] == 0
    argv = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    picture = tmp_path / "page.png"
    argv += ["--window-size=1000,1600", f"--screenshot={picture}", f"file://{tmp_path / 'page.html'}"]
    subprocess.run(argv, check=True, capture_output=True, timeout=200)
    assert picture.stat().st_size > 20_000, "it is not an empty page"
