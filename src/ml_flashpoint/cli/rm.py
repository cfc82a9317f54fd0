"""`flashpoint rm`: what a dead job has left in memory on this node, or one version of it.

Owns the question, and what is printed; the removal is `checkpoint_object_manager.removal`'s.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from ml_flashpoint.checkpoint_object_manager.removal import remove_from_base
from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import BaseView, format_bytes, format_ranks, read_base
from ml_flashpoint.format.errors import InvalidArgumentError, JobInUseError
from ml_flashpoint.persist.opening import is_url


@output.command
def remove(source: str, *, yes: bool = False, as_json: bool = False) -> None:
    """Removes a base container, or a version of it, if that is what the user wants."""
    base, step = output.split_source(source)
    if is_url(base):
        raise InvalidArgumentError("only what is in memory is removed", argument="BASE", value=base)
    view = read_base(base)
    if view.live:
        raise JobInUseError(
            f"ranks {format_ranks(view.live)} are running here", path=view.base, hint="end the job first"
        )
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise InvalidArgumentError("nobody can be asked: say --yes", argument="BASE", value=source)
        print(_described(view, step))
        typer.confirm("Remove that? Memory that is gone cannot be had back", abort=True, err=True)
    removed = remove_from_base(Path(view.base), step)
    if as_json:
        told = {"versions": removed.versions, "freed_bytes": removed.freed_bytes, "left": removed.left}
        print(json.dumps({"base": str(view.base), **told}, indent=2))
        return
    print(f"removed {', '.join(removed.versions) or 'no versions'}, {format_bytes(removed.freed_bytes)}: {view.base}")
    if removed.left and step is None:
        print(f"left, being nobody's of ours: {', '.join(removed.left)}", file=sys.stderr)


def _described(view: BaseView, step: int | None) -> str:
    lines = [f"{view.base}: {'all of it, ' + format_bytes(view.resident_bytes) if step is None else f'step {step}'}"]
    for version in view.versions:
        if step in (None, version.step):
            pins = f", pinned: {', '.join(version.pins)}" if version.pins else ""
            whole = "whole" if version.complete else "not whole on this node"
            lines.append(f"  {version.version}: {format_bytes(version.bytes)}, {whole}{pins}")
    return "\n".join(lines)
