"""`make bench` and its kin: a peer's failure is a row with its reason, nothing is left behind, and pages say what is
measured."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import loop, page, peers
from benchmarks.cuda import __main__ as on_gpus
from benchmarks.rivals import environments, running
from benchmarks.rivals.catalogue import KINDS
from benchmarks.rivals.kinds import Kind
from benchmarks.rivals.loops import LOOPS
from benchmarks.tables import TABLES
from benchmarks.timing import Memcpy, Result
from tests.support.forked import Report, call, wait_until
from tests.support.processes import child_environment

# ---- peers -----------------------------------------------------------------------------------------------------

TENSORS = 400


def rows_with_few_descriptors(report: Report, folder: Path) -> tuple[list[Result], list[str]]:
    """The rows of peers that save more tensors than the process may open files, and what they leave."""
    limit = len(os.listdir("/proc/self/fd")) + TENSORS // 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    state = {str(number): torch.rand(8) for number in range(TENSORS)}
    store = f"file://{folder.parent}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)  # DCP wants it to save later
    rows = list(peers.saves_and_loads("few", state, Memcpy(state), folder))
    torch.distributed.destroy_process_group()
    return rows, os.listdir(folder)


@pytest.mark.slow
def test_a_peer_that_runs_out_of_descriptors_is_a_row_with_the_reason(tmpfs: Path) -> None:
    rows, left = call(rows_with_few_descriptors, tmpfs / "peers")
    assert [row.case for row in rows if row.runs] == [
        "torch.save",
        "torch.load(mmap=False)",
        "safetensors save_file",
        "dcp.save, FileSystemWriter",
        "dcp.load, FileSystemReader",
    ]
    (row,) = [row for row in rows if not row.runs]
    assert row.case == "dcp.async_save, cached stager, blocked"
    assert row.note.startswith("failed: RuntimeError: ")
    assert "Too many open files" in row.note
    assert left == [], "what the peer held is free, and its files can be removed"


def test_a_peer_that_fails_in_a_loop_leaves_the_others_measured(tmpfs: Path) -> None:
    def fail(step: int) -> None:
        raise OSError("no room")

    sound: Any = (lambda step: None, lambda: 0.0, lambda: None)

    def rows_with(failing: str) -> list[Result]:
        kinds = {"no saves": sound, "ours: sound": sound, failing: (fail, lambda: 0.0, lambda: None)}
        return list(loop._compared("short", lambda: loop._Loop(1, 2, 1), tmpfs / "loop", lambda *_: {**kinds}))

    rows = rows_with("peer")
    assert {row.case: bool(row.runs) for row in rows} == {
        "peer: step": False,
        "peer: held": False,
        "no saves: step": True,
        "ours: sound: step": True,
        "ours: sound: held": True,
    }
    with pytest.raises(OSError, match="no room"):
        rows_with("ours: failing")


@pytest.mark.parametrize("how", ["exit", "descriptors", "terminated", "interrupted"])
def test_nothing_is_left_however_it_ends(tmpfs: Path, how: str) -> None:
    script = "import sys; from pathlib import Path; from benchmarks import supervised; "
    script += "sys.exit(supervised.run('tests.workers.benchmark_that_fails', [sys.argv[1]], Path(sys.argv[2])))"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, how, str(tmpfs)], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    assert parent.stdout is not None
    left = int(parent.stdout.readline())
    ended = {"exit": 7, "descriptors": 1, "terminated": 128 + signal.SIGTERM, "interrupted": -signal.SIGINT}
    if how in ("terminated", "interrupted"):
        parent.send_signal(signal.SIGTERM if how == "terminated" else signal.SIGINT)
    parent.communicate(timeout=60)
    assert parent.returncode == ended[how]
    assert list(tmpfs.iterdir()) == []
    wait_until(lambda: not psutil.pid_exists(left), "the process that it left has ended", 60)


# ---- docs/benchmarks.md ----------------------------------------------------------------------------------------

MACHINE = {"processor": "EPYC", "cores": 2, "torch": "2.13.0", "taken": "2026-11-24 10:00", "load": 0.5}


def _row(case: str, seconds: float) -> dict[str, Any]:
    return {"state": "Lightning, Adam", "case": case, "seconds": seconds, "ratio": 0.5, "runs": 5, "note": ""}


RUNS: list[dict[str, Any]] = [
    {
        "command": "make bench",
        "machine": MACHINE,
        "rows": [_row("ours: FlashpointCallback, blocked", 0.5), _row("AsyncCheckpointIO, blocked", 1.25)],
    }
]


def test_the_page_is_what_the_rows_give() -> None:
    text = (page.DOCS / "benchmarks.json").read_text(encoding="utf-8")
    written = (page.DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert page.main(["--check"]) == 0, "python -m benchmarks.page writes it anew"
    assert page.as_text(json.loads(text)["runs"]) == text
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", written)) == set(TABLES)


def test_a_table_tells_what_it_was_taken_on_and_a_row_that_is_missing_is_named() -> None:
    shown = page.rendered("a\n<!-- table: lightning -->\nold\n<!-- end -->\nb\n", RUNS)
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
    with pytest.raises(KeyError, match="FlashpointCallback"):
        page.rendered("<!-- table: lightning -->\n<!-- end -->", [])


def test_a_new_run_replaces_rows_of_older_ones_and_nothing_else() -> None:
    taken = {"machine": MACHINE, "rows": [_row("AsyncCheckpointIO, blocked", 2.0)]}
    after = page.with_run(RUNS, taken, "make bench again")
    assert [[row["seconds"] for row in run["rows"]] for run in after] == [[0.5], [2.0]]
    assert [run["command"] for run in after] == ["make bench", "make bench again"]
    assert [run["command"] for run in page.with_run(after, {**taken, "rows": RUNS[0]["rows"]}, "all")] == ["all"]
    of_a_gpu = {"section": "saves", "case": "held", "seconds": 0.1}
    (run,) = page.with_run([], {"machine": {"name": "H100"}, "rows": [of_a_gpu]}, "make bench-cuda")
    assert run["rows"] == [{"state": "GPU, saves", "case": "held", "seconds": 0.1}]


# ---- on a GPU, tried on the CPU --------------------------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.mark.slow
def test_all_sections_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "rows.json"
    assert on_gpus.main(["--device", "cpu", "--tiny", "--json", str(found)]) == 0
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
    assert on_gpus.main([]) == 0
    assert "skipped: there is no CUDA device" in capsys.readouterr().out


# ---- beside others ---------------------------------------------------------------------------------------------


def test_a_rival_that_cannot_be_run_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    kind = Kind("other", "other", "nowhere:Other", "other==1.0")
    (row,) = running.results(0.001, 1, (kind,), ("long",))
    assert (row.runs, row.label, row.note) == (0, "other", "skipped: its environment is not made: make bench-peers")
    (tmp_path / "other").mkdir()
    state = f'{{"package": "{environments.TORCH} other==1.0", "reason": "pip: no such thing"}}'
    (tmp_path / "other" / "reason.json").write_text(state)
    (row,) = running.results(0.001, 1, (kind,), ("long",))
    assert row.note == "skipped: pip: no such thing"


@pytest.mark.slow
def test_ours_is_measured_as_rivals_are() -> None:
    kinds = tuple(kind for kind in KINDS if kind.name == "ours")
    (row,) = running.results(0.001, 1, kinds, LOOPS[-1:])
    assert (row.state, row.note) == (f"rivals, {LOOPS[-1]} steps", "")
    assert 0 < row.low_s <= row.seconds <= row.high_s
    assert 0 < row.slowdown[1] <= row.slowdown[0] <= row.slowdown[2]
    assert row.stored >= row.nbytes > 0
    assert row.label in row.line()
