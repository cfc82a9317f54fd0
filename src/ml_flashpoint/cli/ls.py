"""`flashpoint ls`: what one node holds of a job's checkpoints.

Owns how that is shown; what there is to show is `cli.base_view`'s.
"""

from __future__ import annotations

import json
from typing import Any

from rich.markup import escape
from rich.table import Table

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import (
    BaseView,
    NotABaseContainerError,
    PartView,
    State,
    VersionView,
    format_bytes,
    format_ranks,
    read_base,
)
from ml_flashpoint.cli.store_view import list_store
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.persist.opening import persisted_url

_STYLES = {State.DAMAGED: "bold red", State.WRITING: "yellow", State.REPLICATED: "green", State.LOCAL: "cyan"}


def list_versions(base: str, *, as_json: bool = False) -> int:
    """Show the versions in a base container, or persisted ones; returns the exit code of the command."""
    try:
        url = persisted_url(base)
        if url is not None:
            return list_store(url, as_json=as_json)
        view = read_base(base)
    except (NotABaseContainerError, InvalidArgumentError) as error:
        return output.fail(error, base=base, as_json=as_json)
    if as_json:
        print(json.dumps(to_json(view), indent=2))
    elif output.is_terminal():
        _print_table(view)
    else:
        _print_lines(view)
    return output.DAMAGE if view.problems else output.OK


def to_json(view: BaseView) -> dict[str, Any]:
    """What ``flashpoint ls --json`` prints."""
    return {
        "base": str(view.base),
        "ok": not view.problems,
        "live": {str(rank): pid for rank, pid in view.live.items()},
        "resident_bytes": view.resident_bytes,
        "versions": [_version_to_json(version) for version in view.versions],
        "leftovers": list(view.leftovers),
    }


def _version_to_json(version: VersionView) -> dict[str, Any]:
    return {
        "version": version.version,
        "step": version.step,
        "attempt": version.save_id,
        "state": version.state.value,
        "world_size": version.world_size,
        "complete": version.complete,
        "own_ranks": list(version.own_ranks),
        "copied_ranks": list(version.copied_ranks),
        "writing_ranks": list(version.writing),
        "bytes": version.bytes,
        "abandoned": version.abandoned,
        "parts": [_part_to_json(part) for part in version.parts],
        "problems": [problem.to_json() for problem in version.problems],
    }


def _part_to_json(part: PartView) -> dict[str, Any]:
    manifest = part.manifest
    return {
        "rank": part.rank,
        "copy": part.copy,
        "node": manifest.node if manifest is not None else None,
        "bytes": part.bytes,
        "manifest": str(part.path),
        "objects": [
            {"path": str(part.path.parent / record.name), "bytes": record.size, "file_bytes": record.file_size}
            for record in (manifest.objects if manifest is not None else ())
        ],
        "labels": dict(manifest.labels) if manifest is not None else {},
    }


def _print_lines(view: BaseView) -> None:
    print(_summary(view))
    for version in view.versions:
        print(
            f"{version.version} step={version.step} state={version.state.value} own={format_ranks(version.own_ranks)}"
            f" copies={format_ranks(version.copied_ranks)} writing={format_ranks(version.writing)}"
            f" world={_world(version)} complete={'yes' if version.complete else 'no'} bytes={version.bytes}"
            f" save_id={version.save_id}{' abandoned=yes' if version.abandoned else ''}"
        )
    for problem in view.problems:
        print(f"damaged: {problem.path}: {problem.message}")
    for path in view.leftovers:
        print(f"no manifest: {path}")


def _print_table(view: BaseView) -> None:
    console = output.console()
    console.print(_summary(view), markup=False, highlight=False, soft_wrap=True)
    if view.versions:
        table = Table("version", "state", "own ranks", "copies of ranks", "not yet", "of", "complete", "size", "save")
        for version in view.versions:
            table.add_row(
                version.version,
                f"[{_STYLES[version.state]}]{version.state.value}[/]",
                format_ranks(version.own_ranks),
                format_ranks(version.copied_ranks),
                format_ranks(version.writing),
                _world(version),
                "yes" if version.complete else "no",
                format_bytes(version.bytes),
                escape(version.save_id + ("\ngone back from" if version.abandoned else "")),
            )
        console.print(table)
    for problem in view.problems:
        console.print(f"[bold red]damaged[/] {escape(problem.path)}: {escape(problem.message)}", soft_wrap=True)
    for path in view.leftovers:
        console.print(f"[dim]no manifest: {escape(path)}[/]", soft_wrap=True)


def _summary(view: BaseView) -> str:
    count = len(view.versions)
    versions = "no versions" if not count else f"{count} version{'s' if count > 1 else ''}"
    job = f"ranks {format_ranks(view.live)} are running here" if view.live else "no rank is running here"
    return f"{view.base}: {versions}, {format_bytes(view.resident_bytes)} of memory, {job}"


def _world(version: VersionView) -> str:
    return "?" if version.world_size is None else str(version.world_size)
