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

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli import output
from ml_flashpoint.cli.main import app
from ml_flashpoint.status import Status, write_status

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
@pytest.mark.parametrize("form", ["terminal", "pipe", "json"])
def test_no_escape_gets_out(base: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert commands.keys() == COMMANDS.keys()
    taking = {name for name, each in commands.items() if any("--json" in option.opts for option in each.params)}
    assert commands.keys() - taking == {"metrics"}
    escaped, shown = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]", dict[str, str]()
    for command in COMMANDS.keys() if form != "json" else taking:
        for arguments in COMMANDS[command](base):
            with monkeypatch.context() as patched:
                out, err = (Terminal(), Terminal()) if form == "terminal" else (io.StringIO(), io.StringIO())
                patched.setattr("sys.stdout", out)
                patched.setattr("sys.stderr", err)
                code = app([command, *arguments, *["--json"] * (form == "json")], standalone_mode=False)
            text = out.getvalue() + err.getvalue()
            for part in ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\u202e", "\udc9b"):
                assert part not in text, (command, arguments, text)
            text.encode()
            shown[command] = shown.get(command, "") + text
            if form == "json":
                document = json.loads(out.getvalue())  # one, also where it fails
                assert bool(document.get("error")) >= (code == 2), (command, arguments, document)
                assert code != 0 or "error" not in document
    if form != "json":
        assert {"ls", "verify", "copy", "persist", "rm"} <= {name for name in shown if escaped in shown[name]}
        assert escaped in shown["status"] or json.dumps(EVIL) in shown["status"]
        assert r"\udc9b" in shown["rm"]


def test_what_is_left_as_it_is() -> None:
    text = "step-1_ckpt\t1.5 GiB – é, 漢字, 😀\n"
    assert output.clean(text) == text
    assert output.clean(output.clean(EVIL)) == output.clean(EVIL)
