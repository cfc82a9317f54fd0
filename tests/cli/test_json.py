"""All subcommands that take ``--json`` print one JSON document, also where they fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli.main import app
from ml_flashpoint.events import flush
from tests.flashpoint.test_overlap import Job


def _run(*args: object) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*map(str, args)])
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.slow
def test_they_print_one_document(tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, store, lines = tmpfs / "job", tmpfs / "store", tmp_path / "events.jsonl"
    monkeypatch.setenv("FLASHPOINT_EVENTS", str(lines))
    job = Job()
    with Flashpoint(base, persist=str(store), persist_every=1, keep=2) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(2):
            job.step()
            fp.step()
            assert fp.wait()
    assert flush()
    monkeypatch.delenv("FLASHPOINT_EVENTS")
    with Flashpoint(base) as fp:
        fp.track(**Job().tracked).resume()
    dcp, copies = tmp_path / "dcp", tmp_path / "copies"
    runs: list[tuple[object, ...]] = [
        ("ls", base),
        ("ls", store),
        ("ls",),
        ("status", base),
        ("verify", base),
        ("verify", store),
        ("inspect", base),
        ("diff", f"{base}@1", f"{base}@2"),
        ("report", lines),
        ("copy", base, copies),
        ("export", store, "--to", dcp),
        ("persist", base, "--to", tmpfs / "by-hand"),
        ("plan", "--params", "7e9", "--nodes", 4),
        ("doctor", base),
        ("rm", f"{tmpfs}/by-hand@2", "--yes", "--newest"),
        ("rm", base, "--yes"),
    ]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    taking = {name for name, each in commands.items() if any("--json" in p.opts for p in each.params)}
    assert {str(run[0]) for run in runs} == taking
    for run in runs:
        code, document = _run(*run, "--json")
        assert code == (1 if run[0] == "diff" else 0), (run, document)
        assert "error" not in document
    for run in (("ls", base), ("status", base), ("verify", base), ("inspect", base), ("rm", base)):
        code, document = _run(*run, "--json")
        assert (code, bool(document["error"])) == (2, True)
