"""`flashpoint doctor`: looks, shows, and says by its exit code whether there is something to mend.

Owns how findings are shown. What is looked at is `this_node`'s and `peers`'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from ml_flashpoint.cli import output
from ml_flashpoint.cli.doctor.finding import BAD, NOTE, OK, Examined, Finding
from ml_flashpoint.cli.doctor.this_node import examine
from ml_flashpoint.extras import require
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, InvalidNameError

_STYLES = {OK: "green", NOTE: "yellow", BAD: "bold red"}
_MARKS = {OK: "ok", NOTE: "note", BAD: "MEND"}


@output.command
def doctor(base: str, *, megabytes: int, deadline_s: float, as_json: bool = False) -> int:
    """Examine this node, or all of a job that is launched; returns the exit code of the command."""
    try:
        path = Path(str(CheckpointContainerId(base)))
    except InvalidNameError as error:
        raise InvalidArgumentError(f"must be an absolute path: {error.message}", argument="BASE", value=base) from error
    mine = examine(path)
    examined = [Examined("this node", mine)]
    if _is_launched():
        examined = _examine_all(path, mine, megabytes, deadline_s)
        if os.environ["RANK"] != "0" and len(examined) > 1:
            return _code(examined)  # rank 0 has the same to show
    if as_json:
        told = [each.to_json() for each in examined]
        print(json.dumps({"base": str(path), "ok": not _code(examined), "examined": told}, indent=2))
    else:
        _show(examined)
    return _code(examined)


def _is_launched() -> bool:
    """Whether a launcher has started this process beside others."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1") and "RANK" in os.environ


def _examine_all(base: Path, mine: tuple[Finding, ...], megabytes: int, deadline_s: float) -> list[Examined]:
    require("pytorch", "torch")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # pages of stacks, of what is a finding here
    from ml_flashpoint.cli.doctor.peers import examine_all

    try:
        return examine_all(base, mine, megabytes=megabytes, deadline_s=deadline_s)
    except FlashpointError as error:
        found = Finding("peers", BAD, error.message, error.hint or "")
        return [Examined("this node", (*mine, found))]


def _code(examined: Sequence[Examined]) -> int:
    bad = any(finding.level == BAD for each in examined for finding in each.findings)
    return output.DAMAGE if bad else output.OK


def _show(examined: Sequence[Examined]) -> None:
    """What nodes have in common is shown once, by the first of them."""
    console = output.console() if output.is_terminal() else None
    shown: dict[tuple[Finding, ...], str] = {}
    for each in examined:
        if (same := shown.setdefault(each.findings, each.name)) != each.name:
            print(f"{each.name}: as {same}")
            continue
        print(f"{each.name}:")
        for finding in each.findings:
            lines = [f"{finding.check}: {finding.text}"] + ([f"  -> {finding.mend}"] if finding.mend else [])
            for number, line in enumerate(lines):
                mark = _MARKS[finding.level] if number == 0 else ""
                if console is None:
                    print(f"  {mark:<4} {line}")
                else:
                    console.print(f"  [{_STYLES[finding.level]}]{mark:<4}[/] {escape(line)}", highlight=False)
