"""docs/benchmarks.md says what docs/benchmarks.json has, and new rows take the place of older ones."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks import page
from benchmarks.tables import TABLES

MACHINE = {"processor": "EPYC", "cores": 2, "torch": "2.13.0", "taken": "2026-11-24 10:00", "load": 0.5}


def _row(case: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"state": "Lightning, Adam", "case": case, "seconds": seconds, "ratio": 0.5, "runs": 5, "note": "", **more}


def _runs() -> list[dict[str, Any]]:
    rows = [_row("ours: FlashpointCallback, blocked", 0.5), _row("AsyncCheckpointIO, blocked", 1.25)]
    return [{"command": "make bench", "machine": MACHINE, "rows": rows}]


def test_the_page_is_what_the_rows_give() -> None:
    runs = json.loads((page.DOCS / "benchmarks.json").read_text(encoding="utf-8"))["runs"]
    written = (page.DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert page.rendered(written, runs) == written, "python -m benchmarks.page writes it anew"
    assert page.main(["--check"]) == 0
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", written)) == set(TABLES)


def test_the_rows_are_written_as_they_are_read() -> None:
    text = (page.DOCS / "benchmarks.json").read_text(encoding="utf-8")
    assert page.as_text(json.loads(text)["runs"]) == text


def test_a_table_tells_what_it_was_taken_on() -> None:
    shown = page.rendered("a\n<!-- table: lightning -->\nold\n<!-- end -->\nb\n", _runs())
    assert shown.splitlines() == [
        "a",
        "<!-- table: lightning -->",
        "| case | median ms | × memcpy |",
        "|---|---|---|",
        "| ours: `FlashpointCallback` | 500 | 0.50 |",
        "| `ModelCheckpoint`'s save with `AsyncCheckpointIO` | 1,250 | 0.50 |",
        "",
        "*2026-11-24 10:00, 2 cores of EPYC, torch 2.13.0, load 0.5: `make bench`*",
        "<!-- end -->",
        "b",
    ]


def test_a_new_run_replaces_rows_of_older_ones_and_nothing_else() -> None:
    taken = {"machine": MACHINE, "rows": [_row("AsyncCheckpointIO, blocked", 2.0)]}
    before = _runs()
    after = page.with_run(before, taken, "make bench again")
    assert [[row["seconds"] for row in run["rows"]] for run in after] == [[0.5], [2.0]]
    assert [run["command"] for run in after] == ["make bench", "make bench again"]
    assert before == _runs()
    assert [run["command"] for run in page.with_run(after, {**taken, "rows": _runs()[0]["rows"]}, "all")] == ["all"]


def test_rows_of_a_gpu_are_taken_too() -> None:
    row = {"section": "saves", "case": "held", "seconds": 0.1}
    (run,) = page.with_run([], {"machine": {"name": "H100"}, "rows": [row]}, "make bench-cuda")
    assert run["rows"] == [{"state": "GPU, saves", "case": "held", "seconds": 0.1}]


def test_a_row_that_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match="FlashpointCallback"):
        page.rendered("<!-- table: lightning -->\n<!-- end -->", [])
