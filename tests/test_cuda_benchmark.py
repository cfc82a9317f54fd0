"""The benchmark for GPUs, tried on the CPU: it measures what it says, fails in its place only, and ends in time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.cuda import __main__ as benchmark
from benchmarks.cuda.report import TINY, Row, Run, carried_out

CPU = torch.device("cpu")


@pytest.mark.slow
def test_all_sections_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "rows.json"
    assert benchmark.main(["--device", "cpu", "--tiny", "--json", str(found)]) == 0
    content = json.loads(found.read_text())
    assert content["machine"]["torch"] == torch.__version__
    rows = content["rows"]
    assert {row["section"] for row in rows} == {"floors", "memory", "copies", "saves", "loads", "training", "peers"}
    for row in rows:
        assert row["low"] <= row["seconds"] <= row["high"]
        assert row["runs"] or row["note"].startswith("left out"), row
        assert row["gb_s"] is None or row["gb_s"] > 0
    printed = capsys.readouterr().out.splitlines()
    assert sum(row["section"] in line for row, line in zip(rows, printed, strict=False)) == len(rows)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([]) == 0
    assert "skipped: there is no CUDA device" in capsys.readouterr().out


@pytest.mark.slow
def test_a_section_that_fails_is_told_of_and_no_time_is_overrun() -> None:
    def fine(run: Run) -> Iterator[Row]:
        yield run.measure("fine", "one", lambda: 0.5, 10**9, runs=3)
        yield run.measure("fine", "other", lambda: 1.0, 10**9, floor="one", runs=1)

    def broken(run: Run) -> Iterator[Row]:
        yield run.measure("broken", "first", lambda: None)
        raise ValueError("no such memory")

    rows = list(carried_out(Run(CPU, TINY, 60.0), {"broken": broken, "fine": fine}))
    assert [row.note for row in rows if row.section == "broken"] == ["", "failed: ValueError: no such memory"]
    one, other = (row for row in rows if row.section == "fine")
    assert (one.seconds, one.gb_s, one.runs) == (0.5, 2.0, 3)
    assert other.of_floor == 0.5
    rows = list(carried_out(Run(CPU, TINY, 0.0), {"fine": fine}))
    assert [(row.runs, row.note) for row in rows] == [(0, "left out: no time was left")]
    rows = list(carried_out(Run(CPU, TINY, 60.0), {"fine": fine, "broken": broken}, "fi"))
    assert {row.section for row in rows} == {"fine"}
