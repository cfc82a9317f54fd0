"""`flashpoint import`: what other tools wrote, as a version that a job starts from.

Owns the command's arguments and what it prints; what happens is `adapter.pytorch.import_version`'s.
"""

from __future__ import annotations

import json

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import format_bytes


@output.command
def import_(
    source: str, url: str, step: int, *, prefix: str = "", deadline_s: float = 600.0, as_json: bool = False
) -> None:
    """Imports a version."""
    from ml_flashpoint.adapter.pytorch.import_version import import_version

    with output.progress("importing") as progress:
        made = import_version(source, url, step, prefix=prefix, progress=progress, deadline_s=deadline_s)
    if as_json:
        told = {"step": step, "attempt": made.version.save_id, "items": made.items, "bytes": made.nbytes}
        print(json.dumps({"base": source, "url": made.url, **told}, indent=2))
    else:
        print(f"imported {made.items} items, {format_bytes(made.nbytes)}, as step {step}: {made.url}")
