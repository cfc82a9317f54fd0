"""`flashpoint rm`: what a dead job has left in memory on this node, or what it has persisted, or one version.

Owns the question, and what is printed; the removal is `tools.removal`'s.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import typer

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import BaseView, format_bytes, format_ranks, memory_of, read_base
from ml_flashpoint.format.errors import InvalidArgumentError, JobInUseError
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.tools.removal import removable, remove_versions


@output.command
def remove(
    source: str, *, yes: bool = False, newest: bool = False, deadline_s: float = 600.0, as_json: bool = False
) -> None:
    """Remove versions, or all that there is, if that is what the user wants."""
    base, step = output.split_source(source)
    store, before = open_store(base), 0
    if store.durable:
        described = "" if yes else _persisted(base, store.path, step, newest, deadline_s)
    else:
        if newest:
            raise InvalidArgumentError("is about persisted versions", argument="--newest", value=newest)
        view = read_base(base)
        if view.live:
            raise JobInUseError(
                f"ranks {format_ranks(view.live)} are running here", path=view.base, hint="end the job first"
            )
        described, before = _in_memory(view, step), view.resident_bytes
    if not yes:
        _ask(source, described, as_json)
    removed = remove_versions(base, step, newest=newest, deadline_s=deadline_s)
    path = Path(store.path)
    freed = 0 if store.durable else before - memory_of(path)
    left = sorted(os.listdir(path)) if not store.durable and step is None and path.exists() else []
    if as_json:
        memory = {} if store.durable else {"freed_bytes": freed, "left": left}
        print(json.dumps({"base": store.path, "versions": removed, **memory}, indent=2))
        return
    print(f"removed {', '.join(removed) or 'no versions'}{f', {format_bytes(freed)}' if freed else ''}: {store.path}")
    if left:
        print(f"left, being nobody's of ours: {', '.join(left)}", file=sys.stderr)


def _ask(source: str, what: str, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise InvalidArgumentError("nobody can be asked: say --yes", argument="SOURCE", value=source)
    print(what)
    typer.confirm("Remove that? What is gone cannot be had back", abort=True, err=True)


def _persisted(base: str, path: str, step: int | None, newest: bool, deadline_s: float) -> str:
    lines = [f"{path}:"]
    chosen, resumed = removable(base, step, newest=newest, deadline_s=deadline_s)
    for version in chosen:
        marks = ", the newest that is whole" if version.folder == resumed else ""
        lines.append(f"  {version.folder}{marks}{'' if version.counts or version.problem else ', not complete'}")
    return "\n".join(lines)


def _in_memory(view: BaseView, step: int | None) -> str:
    lines = [f"{view.base}: {'all of it, ' + format_bytes(view.resident_bytes) if step is None else f'step {step}'}"]
    for version in view.versions:
        if step in (None, version.step):
            whole = "whole" if version.complete else "not whole on this node"
            lines.append(f"  {version.version}: {format_bytes(version.bytes)}, {whole}")
    return "\n".join(lines)
