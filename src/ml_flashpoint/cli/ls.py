"""`flashpoint ls`: what one node holds of a job's checkpoints, or what a durable store does.

Owns how that is shown; what there is to show of a node is `cli.base_view`'s.
"""

from __future__ import annotations

import json
from typing import Any

from rich.markup import escape
from rich.table import Table

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import (
    BaseView,
    PartView,
    State,
    VersionView,
    format_bytes,
    format_ranks,
    read_base,
)
from ml_flashpoint.cli.verify import STYLES, CheckedVersion, versions_at
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.tools.check import look_at

_STYLES = {
    State.DAMAGED: "bold red",
    State.PARTIAL: "dim",
    State.WRITING: "yellow",
    State.REPLICATED: "green",
    State.LOCAL: "cyan",
}


@output.command
def list_versions(base: str, *, as_json: bool = False) -> int:
    """Show the versions in a base container, or persisted ones."""
    if open_store(base).durable:
        return _list_durable(base, as_json=as_json)
    view = read_base(base)
    if as_json:
        print(json.dumps(to_json(view), indent=2))
    elif output.is_terminal():
        _print_table(view)
    else:
        _print_lines(view)
    return output.DAMAGE if view.problems else output.OK


def _list_durable(url: str, *, as_json: bool) -> int:
    store, versions = versions_at(url)
    looked = [CheckedVersion(version, tuple(look_at(store, version))) for version in versions]
    found = [each for each in looked if each.verdict != "removed" and (each.version.save_id or each.problems)]
    if as_json:
        told = [_durable_to_json(each) for each in found]
        ok = not any(each.problems for each in found)
        print(json.dumps({"url": store.path, "ok": ok, "versions": told}, indent=2))
        return output.OK if ok else output.DAMAGE
    print(f"{store.path}: {len(found) or 'no'} version{'' if len(found) == 1 else 's'}")
    if output.is_terminal() and found:
        table = Table("version", "state", "ranks", "of", "size", "save")
        for each in found:
            version, state = each.version, _state(each)
            table.add_row(
                version.folder.rpartition("/")[2], f"[{STYLES[state]}]{state}[/]", format_ranks(version.ranks),
                _size(version.world_size), format_bytes(each.bytes), escape(version.save_id),
            )  # fmt: skip
        output.console().print(table)
    for each in () if output.is_terminal() else found:
        version = each.version
        print(
            f"{version.folder.rpartition('/')[2]} step={version.step} state={_state(each)}"
            f" ranks={format_ranks(version.ranks)} world={_size(version.world_size)} bytes={each.bytes}"
            f" save_id={version.save_id or '-'} folder={version.folder}"
        )
    for path, message in (problem for each in found for problem in each.problems):
        print(f"damaged: {path}: {message}")
    return output.DAMAGE if any(each.problems for each in found) else output.OK


def _state(each: CheckedVersion) -> str:
    return "complete" if each.verdict == "ok" else each.verdict


def _durable_to_json(each: CheckedVersion) -> dict[str, Any]:
    version = each.version
    return {
        "version": version.folder.rpartition("/")[2],
        "step": version.step,
        "attempt": version.save_id,
        "state": _state(each),
        "world_size": version.world_size or None,
        "complete": _state(each) == "complete",
        "ranks": list(version.ranks),
        "bytes": each.bytes,
        "folder": version.folder,
        "problems": [f"{path}: {message}" for path, message in each.problems],
    }


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
            f" world={_size(version.world_size)} complete={'yes' if version.complete else 'no'} bytes={version.bytes}"
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
                _size(version.world_size),
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


def _size(world_size: int | None) -> str:
    return str(world_size) if world_size else "?"
