"""`flashpoint rm`: what a dead job has left in memory on this node, or what it has persisted, or one version.

Owns the question, and what is printed; the removal is `checkpoint_object_manager.removal`'s, or
`core.remove_persisted`'s.
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
from ml_flashpoint.persist.opening import persisted_url


@output.command
def remove(
    source: str, *, yes: bool = False, newest: bool = False, deadline_s: float = 600.0, as_json: bool = False
) -> None:
    """Removes a base container, or persisted versions, or one of them, if that is what the user wants."""
    base, step = output.split_source(source)
    if (url := persisted_url(base)) is not None:
        _remove_persisted(url, step, newest, deadline_s, yes=yes, as_json=as_json)
        return
    if newest:
        raise InvalidArgumentError("is about persisted versions", argument="--newest", value=newest)
    view = read_base(base)
    if view.live:
        raise JobInUseError(
            f"ranks {format_ranks(view.live)} are running here", path=view.base, hint="end the job first"
        )
    if not yes:
        _ask(source, _described(view, step), "Memory that is gone cannot be had back", as_json)
    removed = remove_from_base(Path(view.base), step)
    if as_json:
        told = {"versions": removed.versions, "freed_bytes": removed.freed_bytes, "left": removed.left}
        print(json.dumps({"base": str(view.base), **told}, indent=2))
        return
    print(f"removed {', '.join(removed.versions) or 'no versions'}, {format_bytes(removed.freed_bytes)}: {view.base}")
    if removed.left and step is None:
        print(f"left, being nobody's of ours: {', '.join(removed.left)}", file=sys.stderr)


def _remove_persisted(url: str, step: int | None, newest: bool, deadline_s: float, *, yes: bool, as_json: bool) -> None:
    from ml_flashpoint.core.remove_persisted import removable, remove_persisted

    if not yes:
        found = removable(url, step, newest=newest, deadline_s=deadline_s)
        words = {True: ", the newest that is whole", False: ""}
        lines = [f"  {each.folder}{words[each.is_newest]}{'' if each.marked else ', not complete'}" for each in found]
        _ask(url, "\n".join([f"{url}:", *lines]), "What is gone cannot be had back", as_json)
    removed = remove_persisted(url, step, newest=newest, deadline_s=deadline_s)
    if as_json:
        print(json.dumps({"base": url, "versions": removed}, indent=2))
        return
    print(f"removed {', '.join(removed)}: {url}")


def _ask(source: str, what: str, why: str, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise InvalidArgumentError("nobody can be asked: say --yes", argument="SOURCE", value=source)
    print(what)
    typer.confirm(f"Remove that? {why}", abort=True, err=True)


def _described(view: BaseView, step: int | None) -> str:
    lines = [f"{view.base}: {'all of it, ' + format_bytes(view.resident_bytes) if step is None else f'step {step}'}"]
    for version in view.versions:
        if step in (None, version.step):
            whole = "whole" if version.complete else "not whole on this node"
            lines.append(f"  {version.version}: {format_bytes(version.bytes)}, {whole}")
    return "\n".join(lines)
