"""`flashpoint verify`: whether the bytes of a job's checkpoints on one node are those that were saved.

Owns reading objects from outside the job; comparing their digests is `cli.blocks`'. Reads by `preadv` and not through a
mapping, so that a file that shrinks meanwhile is a finding and not a fault of this process.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.markup import escape

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import (
    BaseView,
    NotABaseContainerError,
    PartView,
    Problem,
    VersionView,
    format_bytes,
    format_ranks,
    read_base,
    still_committed,
)
from ml_flashpoint.cli.blocks import wrong_blocks
from ml_flashpoint.cli.store_view import verify_store
from ml_flashpoint.core.object_content import read_fully
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.persist.opening import persisted_url


@dataclass(frozen=True, slots=True)
class PartResult:
    """What verifying one part has found.

    Attributes:
        part: the part.
        problems: what is wrong with it, file by file.
        pruned: whether the job removed it meanwhile; then nothing is wrong.
    """

    part: PartView
    problems: tuple[Problem, ...]
    pruned: bool


def verify_base(base: str, *, as_json: bool = False, threads: int = 2) -> int:
    """Verify every object in a base container, or of persisted versions; returns the exit code of the command.

    Args:
        base: base container, URL or folder of persisted versions; with ``@STEP``, only that step.
        threads: blocks that are read at the same time.
    """
    base, step = output.split_source(base)
    try:
        url = persisted_url(base)
        if url is not None:
            return verify_store(url, step, as_json=as_json, threads=threads)
        view = read_base(base)
        if step is not None:
            view = replace(view, versions=tuple(version for version in view.versions if version.step == step))
            if not view.versions:
                raise NotABaseContainerError(f"there is no version of step {step} here", path=base)
    except (NotABaseContainerError, InvalidArgumentError) as error:
        return output.fail(error, base=base, as_json=as_json)
    began = time.monotonic()
    results: list[tuple[VersionView, list[PartResult]]] = []
    total = sum(version.bytes for version in view.versions)
    with output.progress("verifying") as progress:
        done, lock = 0, threading.Lock()

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress(done, total)

        for version in view.versions:
            parts = [verify_part(part, threads=threads, advance=advance) for part in version.parts]
            results.append((version, parts))
    seconds = time.monotonic() - began
    damaged = any(result.problems for _, parts in results for result in parts)
    if as_json:
        print(json.dumps(_to_json(view, results, seconds), indent=2))
    else:
        _print(view, results, seconds)
    return output.DAMAGE if damaged else output.OK


def verify_part(
    part: PartView, *, threads: int = 2, advance: Callable[[int], object] = lambda count: None
) -> PartResult:
    """Read all bytes of a part and compares their digests with those in its manifest.

    Args:
        part: from `read_base`.
        threads: blocks that are read at the same time, at least 1.
        advance: called with the number of bytes of each block, from several threads.
    """
    problems = list(part.problems)
    if part.manifest is not None:
        known_bad = {problem.path for problem in problems}
        for record in part.manifest.objects:
            path = str(part.path.parent / record.name)
            if path not in known_bad:
                problems += [Problem(path, message) for message in _check_object(path, record, threads, advance)]
    # The job takes a part's manifest away before it uses the bytes for something else.
    if problems and not still_committed(part):
        return PartResult(part, (), pruned=True)
    return PartResult(part, tuple(problems), pruned=False)


def _check_object(path: str, record: ObjectRecord, threads: int, advance: Callable[[int], object]) -> list[str]:
    """What is wrong with the bytes of an object, one message or none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return [f"the object cannot be read: {error.strerror}"]

    def read(begin: int, block: memoryview) -> bool:
        advance(len(block))
        return read_fully(descriptor, block, begin)

    try:
        wrong = wrong_blocks(record, read, threads)
    except OSError as error:
        return [f"the object cannot be read: {error.strerror}"]
    finally:
        os.close(descriptor)
    return [] if wrong is None else [wrong]


def _to_json(view: BaseView, results: list[tuple[VersionView, list[PartResult]]], seconds: float) -> dict[str, Any]:
    return {
        "base": str(view.base),
        "ok": not any(result.problems for _, parts in results for result in parts),
        "seconds": round(seconds, 3),
        "objects": sum(_object_count(result) for _, parts in results for result in parts),
        "bytes": sum(result.part.bytes for _, parts in results for result in parts if not result.pruned),
        "versions": [
            {
                "version": version.version,
                "step": version.step,
                "attempt": version.save_id,
                "ok": not any(result.problems for result in parts),
                "parts": [
                    {
                        "rank": result.part.rank,
                        "copy": result.part.copy,
                        "bytes": result.part.bytes,
                        "result": _verdict(result),
                        "problems": [problem.to_json() for problem in result.problems],
                    }
                    for result in parts
                ],
            }
            for version, parts in results
        ],
        "leftovers": list(view.leftovers),
    }


def _print(view: BaseView, results: list[tuple[VersionView, list[PartResult]]], seconds: float) -> None:
    console = output.console()
    colours = {"ok": "green", "damaged": "bold red", "pruned": "dim"}

    def say(verdict: str, text: str) -> None:
        if output.is_terminal():
            console.print(f"[{colours[verdict]}]{verdict:8}[/] {escape(text)}", highlight=False, soft_wrap=True)
        else:
            print(f"{verdict:8} {text}")

    for version, parts in results:
        for verdict in ("ok", "pruned"):
            fitting = [result for result in parts if _verdict(result) == verdict]
            if fitting:
                size = format_bytes(sum(result.part.bytes for result in fitting))
                ranks = format_ranks(result.part.rank for result in fitting)
                say(verdict, f"{version.version} {version.save_id}: ranks {ranks}, {size}")
        for result in parts:
            for problem in result.problems:
                say("damaged", f"{problem.path}: {problem.message}")
    checked = [result for _, parts in results for result in parts if not result.pruned]
    count = sum(_object_count(result) for result in checked)
    size = format_bytes(sum(result.part.bytes for result in checked))
    bad = sum(bool(result.problems) for result in checked)
    verdict = f"{bad} of {len(checked)} parts are damaged" if bad else "all as saved"
    print(f"{view.base}: {count} objects, {size} in {seconds:.1f} s: {verdict}")


def _object_count(result: PartResult) -> int:
    return 0 if result.pruned or result.part.manifest is None else len(result.part.manifest.objects)


def _verdict(result: PartResult) -> str:
    if result.pruned:
        return "pruned"
    return "damaged" if result.problems else "ok"
