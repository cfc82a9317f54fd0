"""Subcommands print text from files without the escapes in it, and one JSON document where that is asked for."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli import output
from ml_flashpoint.cli.main import app
from ml_flashpoint.events import flush
from ml_flashpoint.status import Status, write_status
from tests.flashpoint.test_overlap import Job

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]"
"""Sets the title, clears the screen, sets a colour by an 8-bit escape, turns text round; and rich's own markup."""
NAMES = [EVIL, "\udc9b"]  # the other is no UTF-8


class Terminal(io.StringIO):
    """Shows what is written to it, as far as rich and the commands know."""

    def isatty(self) -> Literal[True]:
        return True


class Evil:
    """State with a key like that."""

    def state_dict(self) -> dict[str, Any]:
        return {EVIL: torch.ones(2), "step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.fixture
def base(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dead job's base container, with such texts wherever a file, or a file's name, can have them."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "300")
    base = tmpfs / f"job-{EVIL}"
    with Flashpoint(tmpfs / "job", keep=3) as fp:
        fp.track(evil=Evil()).resume()
        for _ in range(2):
            fp.step()
            assert fp.wait()
    (tmpfs / "job").rename(base)
    errors = {f"{kind}error": EVIL for kind in ("", "replication_", "agreement_", "persist_")}
    write_status(
        base / ".flashpoint" / "status" / "0",
        Status(rank=0, node=EVIL, updated_s=1.0, nodes=2, copies_on=(EVIL,), verified=1, **errors),
    )
    for name in NAMES:
        Path(os.fsdecode(os.fsencode(base) + b"/" + os.fsencode(name))).write_text(name, "utf-8", "surrogateescape")
    step_1 = next(base.glob("step-1_ckpt"))
    for manifest in step_1.glob("*.manifest"):
        manifest.write_text(EVIL)
    for name in NAMES:
        (step_1 / name).write_text(EVIL)
    (tmpfs / "events.jsonl").write_text(json.dumps({"schema": 1, "event": EVIL, "error": EVIL}) + f"\n{EVIL}\n")
    return base


COMMANDS: dict[str, Callable[[Path], list[list[str]]]] = {
    "ls": lambda base: [[str(base)], [f"{base}-none"], []],
    "status": lambda base: [[str(base)]],
    "verify": lambda base: [[str(base)]],
    "inspect": lambda base: [[f"{base}@2"], [f"{base}@1"]],
    "diff": lambda base: [[f"{base}@2", f"{base}@2"], [f"{base}@2", f"{base}@1"]],
    "report": lambda base: [[str(base.parent / "events.jsonl"), "-o", str(base.parent / f"{EVIL}.html")]],
    "metrics": lambda base: [[f"{base}-none", "--port", "0"]],
    "copy": lambda base: [[f"{base}@1", f"{base}-copy"], [str(base), f"{base}-copy"]],
    "export": lambda base: [[str(base), "--to", f"{base}-{form}", "--format", form] for form in ("safetensors", "hf")],
    "persist": lambda base: [[str(base), "--to", f"{base}-persisted"], [f"{base}@1", "--to", f"{base}-persisted"]],
    "plan": lambda base: [["--params", "1e9", "--nodes", "2", "--replication", EVIL]],
    "doctor": lambda base: [[str(base)]],
    "rm": lambda base: [[str(base)], [f"{base}@2", "--yes"], [str(base), "--yes"]],
}


@pytest.mark.slow
@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("terminal", [Terminal, io.StringIO], ids=["terminal", "pipe"])
def test_no_escape_gets_out(base: Path, monkeypatch: pytest.MonkeyPatch, terminal: type[io.StringIO]) -> None:
    assert typer.main.get_command(app).commands.keys() == COMMANDS.keys()  # type: ignore[attr-defined]
    escaped, shown = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]", dict[str, str]()
    for command, calls in COMMANDS.items():
        for arguments in calls(base):
            with monkeypatch.context() as patched:
                printed = terminal()
                patched.setattr("sys.stdout", printed)
                patched.setattr("sys.stderr", printed)
                app([command, *arguments], standalone_mode=False)
            text = printed.getvalue()
            for part in ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\u202e", "\udc9b"):
                assert part not in text, (command, arguments, text)
            text.encode()
            shown[command] = shown.get(command, "") + text
    assert {"ls", "verify", "copy", "persist", "rm"} <= {name for name in shown if escaped in shown[name]}
    assert escaped in shown["status"] or json.dumps(EVIL) in shown["status"]
    assert r"\udc9b" in shown["rm"]


def test_what_is_left_as_it_is() -> None:
    text = "step-1_ckpt\t1.5 GiB – é, 漢字, 😀\n"
    assert output.clean(text) == text
    assert output.clean(output.clean(EVIL)) == output.clean(EVIL)


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
