"""What subcommands print with ``--json`` has the form that `flashpoint schema` tells, and no field that it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli.main import app
from ml_flashpoint.cli.schemas import COMMANDS, schema_of
from ml_flashpoint.events import flush
from tests.facade.test_overlap import Job

jsonschema = pytest.importorskip("jsonschema")

_NOT_RUN_HERE = {"demo"}  # it takes minutes, and `tests/e2e/test_demo.py` reads what it prints


def _closed(schema: Any) -> Any:
    """The same, without room for fields that it does not name."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    return {**found, "additionalProperties": False} if "properties" in schema and "type" in schema else found


def _run(*args: object) -> tuple[int, list[Any]]:
    done = CliRunner().invoke(app, [*map(str, args)])
    looks = "--count" in args  # each is a line
    documents = done.stdout.splitlines() if looks else [done.stdout]
    return done.exit_code, [json.loads(each) for each in documents]


def _check(command: str, document: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of(command))
    jsonschema.validate(document, _closed(schema_of(command)))


def test_all_that_take_json_are_described() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    taking = {name for name, each in commands.items() if any("--json" in p.opts for p in each.params)}
    assert taking == set(COMMANDS)
    for name in COMMANDS:
        code, (shown,) = _run("schema", name)
        assert (code, shown) == (0, schema_of(name))
    assert CliRunner().invoke(app, ["schema", "metrics"]).exit_code == 2


@pytest.mark.slow
def test_what_they_print_has_that_form(tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, store, lines = tmpfs / "job", tmpfs / "store", tmp_path / "events.jsonl"
    monkeypatch.setenv("FLASHPOINT_EVENTS", str(lines))
    job = Job()
    with Flashpoint(base, persist=str(store), persist_every=1, keep=2) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(2):
            job.step()
            fp.step()
            assert fp.wait()
        fp.pin("before")
    assert flush()
    monkeypatch.delenv("FLASHPOINT_EVENTS")
    with Flashpoint(base) as fp:
        fp.track(**Job().tracked).resume()
    dcp, copies = tmp_path / "dcp", tmp_path / "copies"
    runs: list[tuple[object, ...]] = [
        ("ls", base),
        ("ls", store),
        ("ls", "--all"),
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
    assert {str(run[0]) for run in runs} == set(COMMANDS) - _NOT_RUN_HERE
    for run in runs:
        code, documents = _run(*run, "--json")
        assert code == (1 if run[0] == "diff" else 0), (run, documents)
        for document in documents:
            _check(str(run[0]), document)
            assert "error" not in document
    for run in (("ls", base), ("status", base), ("verify", base), ("inspect", base), ("rm", base)):
        code, (document,) = _run(*run, "--json")
        assert code == 2
        _check(run[0], document)
        assert document["error"]
