"""An environment for each package that is compared, or why there is none. ``make bench-peers`` makes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from benchmarks.rivals.kinds import Kind

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "bench-peers"
TORCH = f"torch=={version('torch').partition('+')[0]}"
"""The one that is measured with here, so that all have the same."""
_REASON = "reason.json"
_TIMEOUT_S = 1200.0


def _python_in(folder: Path) -> Path:
    return folder / "bin" / "python"


def python_of(kind: Kind) -> tuple[Path | None, str]:
    """The interpreter of a kind, or None and the reason."""
    if not kind.package:
        return Path(sys.executable), ""
    folder = FOLDER / kind.name
    state = _state_of(folder)
    if state.get("package") != _wanted(kind):
        return None, "its environment is not made: make bench-peers"
    reason = state.get("reason", "")
    return (None if reason else _python_in(folder)), reason


def _wanted(kind: Kind) -> str:
    return " ".join((TORCH, kind.package, *kind.needs))


def _state_of(folder: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((folder / _REASON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def make(kind: Kind) -> str:
    """Make the environment of a kind, unless it is there.

    Returns:
        why there is none, or nothing.
    """
    folder = FOLDER / kind.name
    state = _state_of(folder)
    if state.get("package") == _wanted(kind) and not state.get("reason"):
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    reason = _installed(folder, kind)
    if reason:
        shutil.rmtree(folder)
        folder.mkdir(parents=True)
    (folder / _REASON).write_text(json.dumps({"package": _wanted(kind), "reason": reason}), encoding="utf-8")
    return reason


def _installed(folder: Path, kind: Kind) -> str:
    """The package without what it requires, so that it brings no other torch; it is first, as it may not install."""
    steps = (["--no-deps", kind.package, *kind.needs], ["setuptools>=77", "numpy", "psutil", TORCH])
    for step in steps:
        command = [str(_python_in(folder)), "-m", "pip", "install", "-q", *step]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"pip did not end in {_TIMEOUT_S:.0f} s"
        if run.returncode:
            return f"pip: {why(run.stdout + run.stderr)}"
    return ""


def why(output: str) -> str:
    """The line of pip's output that tells most: what stopped a build, or else the last error, without colours."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in output.splitlines()]
    for sign in (r"fatal: ", r"CMake Error", r"\w*Error: ", r"ERROR: ", r""):
        found = [line for line in lines if re.search(sign, line) and line]
        if found:
            return found[0 if sign == "fatal: " else -1].removeprefix("ERROR: ")[:200]
    return "it ended without a word"
