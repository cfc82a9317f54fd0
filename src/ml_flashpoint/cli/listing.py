"""`flashpoint ls` and `flashpoint verify`: base containers of this node, versions, and what is damaged. No torch."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.text import Text

from ml_flashpoint.cli import output
from ml_flashpoint.cli.output import bytes_text, or_dash, ranks_text
from ml_flashpoint.cli.view import VersionView, durable_state, existing, find_bases, read, split
from ml_flashpoint.format.errors import ObjectNotFoundError
from ml_flashpoint.tools.check import check_part, look_at


def list_versions(source: str, *, as_json: bool) -> int:
    """Show the versions in a base container, or persisted ones."""
    view = read(source)
    found: dict[str, Any] = {"url": view.path} if view.durable else {"base": view.path}
    found["ok"] = not view.problems
    summary = f"{view.path}: {output.plural(len(view.versions), 'version')}"
    if not view.durable:
        found |= {"live": {str(rank): pid for rank, pid in view.live.items()}, "resident_bytes": view.resident_bytes}
        summary += f", {bytes_text(view.resident_bytes)} of memory, {output.running_text(view.live)}"
    found["versions"] = [version.to_json() for version in view.versions]
    rows = [_row(each, view.durable) for each in view.versions]
    drop = ("run", "whole", "of", "not yet")
    parts = [output.table(rows, tuple(name for name in drop if name in rows[0]))] if rows else []
    output.show(found, as_json, summary, *parts, *_damage(view.problems))
    return output.DAMAGE if view.problems else output.OK


def _row(version: VersionView, durable: bool) -> dict[str, str]:
    row = {"version": version.name, "state": "gone back from" if version.abandoned else version.state}
    if durable:
        row["ranks"] = ranks_text(version.own)
    else:
        row |= {"own ranks": ranks_text(version.own), "copies of": ranks_text(version.copied)}
        row |= {"not yet": ranks_text(version.writing), "whole": "yes" if version.complete else "no"}
    row |= {"of": str(version.version.world_size or "?"), "size": bytes_text(version.bytes)}
    return row | {"run": version.version.save_id or "-"}


def _damage(problems: list[tuple[str, str]]) -> list[Text]:
    return [output.line(("damaged", "bold red"), f" {path}: {message}") for path, message in problems]


def list_bases(*, as_json: bool) -> int:
    """Show all base containers on this node, those that take most memory first."""
    found = []
    for base in find_bases():
        if (told := _base_to_json(base)) is not None:
            found.append(told)
    found.sort(key=lambda told: -told["resident_bytes"])
    rows = [
        {
            "base container": told["base"],
            "job": "left over" if told["leftover"] else "running",
            "memory": bytes_text(told["resident_bytes"]),
            "steps": ", ".join(map(str, told["steps"][:3])) + (", ..." if len(told["steps"]) > 3 else "") or "-",
            "whole": or_dash(told["complete"]),
            "last event": f"{output.time_text(max(0.0, time.time() - told['updated_s']))} ago"
            if told["updated_s"]
            else "-",
        }
        for told in found
    ]
    none = "no base containers in the memory of this node that this user may read"
    parts: list[str | Text] = [output.table(rows, ("whole", "steps", "last event"))] if rows else [none]
    if left := [told for told in found if told["leftover"]]:
        size, first = bytes_text(sum(told["resident_bytes"] for told in left)), left[0]["base"]
        parts.append(
            f"dead jobs hold {size} of memory. To look: flashpoint ls {first}. To remove: flashpoint rm {first}"
        )
    output.show({"bases": found}, as_json, *parts)
    return output.OK


def _base_to_json(base: Path) -> dict[str, Any] | None:
    try:
        view = read(base)
    except ObjectNotFoundError:
        return None  # removed meanwhile, or somebody else's
    return {
        "base": view.path,
        "leftover": not view.live,
        "live": list(view.live),
        "steps": [version.step for version in view.versions],
        "complete": next((each.step for each in view.versions if each.complete), None),
        "resident_bytes": view.resident_bytes,
        "updated_s": max((each.status.updated_s for each in view.ranks if each.status is not None), default=0.0),
    }


def verify_versions(source: str, *, as_json: bool, threads: int) -> int:
    """Compare all bytes of a store, or of one step of it, with their digests."""
    path, step = split(source)
    store = existing(path)
    versions = [version for version in store.versions() if step in (None, version.step)]
    if step is not None and not versions:
        hint = "flashpoint ls lists the versions"
        raise ObjectNotFoundError(f"there is no version of step {step} here", path=store.path, hint=hint)
    began = time.monotonic()
    looked = [(version, look_at(store, version)) for version in versions]
    total, done, lock = sum(part.bytes for _, parts in looked for part in parts), 0, threading.Lock()
    with output.progress("verifying") as progress:

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress(done, total)

        with ThreadPoolExecutor(threads) as pool:
            results = [
                VersionView(version, "", tuple(pool.map(lambda part: check_part(store, part, advance), parts)))
                for version, parts in looked
            ]
    results = [dataclasses.replace(each, state=durable_state(each.version, each.parts)) for each in results]
    checked = [part for result in results for part in result.parts if not part.removed]
    objects = sum(part.manifest is not None for part in checked)
    problems = [problem for result in results for problem in result.problems]
    size, seconds = sum(result.bytes for result in results), time.monotonic() - began
    bad = sum(bool(part.problems) for part in checked)
    # A version without its marker or a manifest: no part of it is to blame, or one that was counted.
    bad += sum(bool(each.version.problem) and not any(part.problems for part in each.parts) for each in results)
    verdict = f"{bad} of {len(checked)} parts are damaged" if bad else "all as saved"
    rows = [
        {
            "result": "ok" if result.state == "complete" else result.state,
            "version": result.name,
            "ranks": ranks_text(result.own),
            "size": bytes_text(result.bytes),
            "run": result.version.save_id or "-",
        }
        for result in results
    ]
    found = {"url" if store.durable else "base": store.path, "ok": not problems, "seconds": round(seconds, 3)}
    found |= {"objects": objects, "bytes": size, "versions": [result.to_json() for result in results]}
    summary = f"{store.path}: {output.plural(objects, 'object')}, {bytes_text(size)} in {seconds:.1f} s: {verdict}"
    output.show(found, as_json, *([output.table(rows, ("run",))] if rows else []), *_damage(problems), summary)
    return output.DAMAGE if problems else output.OK
