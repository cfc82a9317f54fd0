"""`flashpoint verify`: whether the bytes of versions in a store are those that were saved.

Owns what is printed; reading is `tools.check`'s, by ``preadv`` and not through a mapping, so that a file that shrinks
meanwhile is a finding and not a fault of this process. Imports no torch.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from rich.markup import escape

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import format_bytes, format_ranks
from ml_flashpoint.format.errors import ObjectNotFoundError
from ml_flashpoint.memory.lock import PRIVATE
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.stores.version_store import Version, VersionStore
from ml_flashpoint.tools.check import CheckedPart, check_part, look_at

STYLES: Final = {
    "ok": "green", "complete": "green", "incomplete": "yellow", "damaged": "bold red", "removed": "dim"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckedVersion:
    """A version and what was found of its parts."""

    version: Version
    parts: tuple[CheckedPart, ...]

    @property
    def problems(self) -> list[tuple[str, str]]:
        """Paths and messages."""
        found = [problem for part in self.parts for problem in part.problems]
        return found or ([(self.version.folder, self.version.problem)] if self.version.problem else [])

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.problems:
            return "damaged"
        if self.parts and all(part.removed for part in self.parts):
            return "removed"
        return "ok" if self.version.counts else "incomplete"

    @property
    def checked(self) -> list[CheckedPart]:
        """The parts that were not removed meanwhile."""
        return [part for part in self.parts if not part.removed]

    @property
    def bytes(self) -> int:
        """Bytes of these that count."""
        return sum(part.bytes for part in self.checked)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "version": self.version.folder.rpartition("/")[2],
            "step": self.version.step,
            "attempt": self.version.save_id,
            "folder": self.version.folder,
            "state": ("complete" if self.version.complete else "incomplete") if self.verdict == "ok" else self.verdict,
            "ok": not self.problems,
            "problems": [{"path": path, "message": message} for path, message in self.problems],
            "parts": [
                {
                    "rank": part.rank,
                    "bytes": part.bytes,
                    "result": "removed" if part.removed else "damaged" if part.problems else "ok",
                    "problems": [{"path": path, "message": message} for path, message in part.problems],
                }
                for part in self.parts
            ],
        }


def versions_at(source: str, step: int | None = None) -> tuple[VersionStore, list[Version]]:
    """Return a store and the versions in it, or those of a step.

    Raises:
        ObjectNotFoundError: there is no store, or no such version.
    """
    store = open_store(source)
    found, names = store.versions(), store.files.list()
    if not found and not (names if store.durable else PRIVATE in names):
        raise ObjectNotFoundError(
            "there is nothing of a job here",
            path=store.path,
            hint="give the folder of the job, on the node whose memory it is in, or the URL of its persist=",
        )
    found = [version for version in found if step in (None, version.step)]
    if step is not None and not found:
        raise ObjectNotFoundError(f"there is no version of step {step} here", path=store.path)
    return store, found


@output.command
def verify_base(source: str, *, as_json: bool = False, threads: int = 2) -> int:
    """Verify every object of a store, or of one step of it.

    Args:
        source: base container, URL or folder of persisted versions; with ``@STEP``, only that step.
        threads: parts that are read at the same time.
    """
    store, versions = versions_at(*output.split_source(source))
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
                CheckedVersion(version, tuple(pool.map(lambda part: check_part(store, part, advance), parts)))
                for version, parts in looked
            ]
    seconds = time.monotonic() - began
    if as_json:
        print(json.dumps(_to_json(store, results, seconds), indent=2))
    else:
        _print(store, results, seconds)
    return output.DAMAGE if any(result.problems for result in results) else output.OK


def _to_json(store: VersionStore, results: Sequence[CheckedVersion], seconds: float) -> dict[str, Any]:
    return {
        "url" if store.durable else "base": store.path,
        "ok": not any(result.problems for result in results),
        "seconds": round(seconds, 3),
        "objects": _object_count(results),
        "bytes": sum(result.bytes for result in results),
        "versions": [result.to_json() for result in results],
    }


def _print(store: VersionStore, results: Sequence[CheckedVersion], seconds: float) -> None:
    for result in results:
        about = f"{result.version.folder} {result.version.save_id or '-'}"
        for removed, verdict in ((False, result.verdict if result.verdict != "damaged" else "ok"), (True, "removed")):
            fitting = [part for part in result.parts if part.removed == removed and not part.problems]
            if fitting or (verdict == "incomplete" and not removed):
                ranks = format_ranks(part.rank for part in fitting) if fitting else format_ranks(result.version.ranks)
                _say(verdict, f"{about}: ranks {ranks}, {format_bytes(sum(part.bytes for part in fitting))}")
        for path, message in result.problems:
            _say("damaged", f"{path}: {message}")
    checked = [part for result in results for part in result.checked]
    bad = sum(bool(part.problems) for part in checked) + sum(bool(result.version.problem) for result in results)
    size = format_bytes(sum(result.bytes for result in results))
    verdict = f"{bad} of {len(checked)} parts are damaged" if bad else "all as saved"
    print(f"{store.path}: {_object_count(results)} objects, {size} in {seconds:.1f} s: {verdict}")


def _say(verdict: str, text: str) -> None:
    if output.is_terminal():
        output.console().print(f"[{STYLES[verdict]}]{verdict:10}[/] {escape(text)}", highlight=False, soft_wrap=True)
    else:
        print(f"{verdict:10} {text}")


def _object_count(results: Sequence[CheckedVersion]) -> int:
    manifests = [part.manifest for result in results for part in result.checked if part.manifest is not None]
    return sum(len(manifest.objects) for manifest in manifests)
