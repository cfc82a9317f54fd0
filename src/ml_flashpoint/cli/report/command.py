"""`flashpoint report`: reads events, writes a page, or prints what it says as JSON.

Owns the file that is written: whole or not at all, and never over what was read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from ml_flashpoint.cli import output
from ml_flashpoint.cli.report.collect import Collected, Sum, collect
from ml_flashpoint.cli.report.page import page_of
from ml_flashpoint.format.errors import InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.format.events import name_of
from ml_flashpoint.format.recoveries import Recovery


@output.command
def report(paths: list[str], *, to: str, as_json: bool = False) -> None:
    """Make a report of files of events; with ``as_json``, on standard output."""
    target = Path(to)
    if not as_json and any(os.path.exists(path) and target.exists() and target.samefile(path) for path in paths):
        raise InvalidArgumentError("is one of the files that are read", argument="--output", value=to)
    with output.progress("reading events") as tell:
        collected = collect(paths, tell)
    if not collected.events:
        raise ObjectNotFoundError(
            f"there are no events in it ({collected.left_out} lines that are none)",
            path=", ".join(paths),
            hint="give what FLASHPOINT_EVENTS names; see docs/operations.md",
        )
    if as_json:
        print(json.dumps(_to_json(collected), indent=2))
        return
    output.write_file(target, page_of(collected), "--output")
    print(f"{to}: {collected.events} events of {len(collected.ranks)} ranks", file=sys.stderr)


def _to_json(collected: Collected) -> dict[str, Any]:
    return {
        "files": collected.files,
        "events": collected.events,
        "left_out": collected.left_out,
        "kinds": dict(collected.kinds),
        "bases": sorted(collected.bases),
        "first_s": collected.first_s,
        "last_s": collected.last_s,
        "steps": [
            {"step": step, **{name: _of_sum(getattr(collected, name).get(step)) for name in _BY_STEP}}
            for step in sorted({step for name in _BY_STEP for step in getattr(collected, name)})
        ],
        "ranks": [
            {
                "rank": number,
                "node": rank.node,
                "saves": rank.saves,
                "failures": rank.failures,
                "part_bytes": rank.part_bytes,
                "verified": rank.verified,
                "held": _of_sum(rank.held),
            }
            for number, rank in sorted(collected.ranks.items())
        ],
        "recoveries": [_of_recovery(each) for each in collected.recoveries],
        "failures": [{"event": name_of(each), **dataclasses.asdict(each)} for each in collected.failures],
    }


_BY_STEP = ("held", "committed", "copied", "verified")


def _of_sum(of: Sum | None) -> dict[str, float] | None:
    return None if of is None or not of.count else {"count": of.count, "mean_s": of.mean, "most_s": of.most}


def _of_recovery(recovery: Recovery) -> dict[str, Any]:
    told = dataclasses.asdict(recovery)
    told["fetched_bytes"] = sum(part["bytes"] for part in told.pop("fetched"))
    told["stepped_back"] = [{"step": each["step"], "error": each["error"]} for each in told["stepped_back"]]
    return told
