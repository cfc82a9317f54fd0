"""Persisted versions as `flashpoint ls` and `flashpoint verify` show them.

Owns looking at a store from outside of a job, comparing what is in it with its digests, and how that is printed. Locks
nothing, changes nothing, imports no torch. What goes meanwhile, since newer versions are persisted, is no damage.
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
from rich.table import Table

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import format_bytes, format_ranks
from ml_flashpoint.cli.blocks import wrong_blocks
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DamagedError, FlashpointError, ObjectNotFoundError
from ml_flashpoint.format.failure_kinds import is_damage
from ml_flashpoint.format.manifest import Manifest, parse_manifest_name
from ml_flashpoint.persist.opening import open_store
from ml_flashpoint.persist.store import DurableStore
from ml_flashpoint.persist.versions import (
    MARKER,
    PersistedVersion,
    Unusable,
    list_persisted,
    read_part_manifest,
)

_STYLES: Final = {"complete": "green", "incomplete": "yellow", "damaged": "bold red", "removed": "dim"}
_LOOKS_AT_A_TIME: Final = 8


@dataclass(frozen=True)
class StoredVersion:
    """A version in a store.

    Attributes:
        folder: its name in the store.
        step: training step. save_id: the save, "" if that is not known.
        world_size: ranks that saved it; None if there is no valid marker.
        ranks: those whose parts are there, as far as can be told without reading them.
        manifests: theirs; of a version without a valid marker, none.
        problems: what is wrong with it.
    """

    folder: str
    step: int
    save_id: str
    world_size: int | None
    ranks: tuple[int, ...]
    manifests: tuple[Manifest, ...]
    problems: tuple[str, ...]

    @property
    def state(self) -> str:
        """`damaged`, `complete`, or `incomplete`: being written, or cut short."""
        return "damaged" if self.problems else "incomplete" if self.world_size is None else "complete"

    @property
    def bytes(self) -> int:
        """Bytes of its objects that count."""
        return sum(manifest.total_size for manifest in self.manifests)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "version": self.folder.rpartition("/")[2],
            "step": self.step,
            "attempt": self.save_id,
            "state": self.state,
            "world_size": self.world_size,
            "complete": self.state == "complete",
            "ranks": list(self.ranks),
            "bytes": self.bytes,
            "folder": self.folder,
            "problems": list(self.problems),
        }


def list_store(url: str, *, as_json: bool) -> int:
    """Show the versions in a store; returns the exit code of the command."""
    try:
        versions = _look(open_store(url))
    except FlashpointError as error:
        return output.fail(error, base=url, as_json=as_json)
    damaged = any(version.problems for version in versions)
    if as_json:
        told = [version.to_json() for version in versions]
        print(json.dumps({"url": url, "ok": not damaged, "versions": told}, indent=2))
        return output.DAMAGE if damaged else output.OK
    print(f"{url}: {_count(versions)}")
    if output.is_terminal() and versions:
        table = Table("version", "state", "ranks", "of", "size", "save")
        for each in versions:
            table.add_row(
                each.folder.rpartition("/")[2], f"[{_STYLES[each.state]}]{each.state}[/]", format_ranks(each.ranks),
                _world(each), format_bytes(each.bytes), escape(each.save_id),
            )  # fmt: skip
        output.console().print(table)
    elif versions:
        for each in versions:
            print(
                f"{each.folder.rpartition('/')[2]} step={each.step} state={each.state} ranks={format_ranks(each.ranks)}"
                f" world={_world(each)} bytes={each.bytes} save_id={each.save_id or '-'} folder={each.folder}"
            )
    for each in versions:
        for problem in each.problems:
            print(f"damaged: {problem}")
    return output.DAMAGE if damaged else output.OK


def verify_store(url: str, step: int | None, *, as_json: bool, threads: int) -> int:
    """Read all objects in a store, or those of a step; returns the exit code of the command."""
    began = time.monotonic()
    try:
        store = open_store(url)
        versions = [each for each in _look(store) if step is None or each.step == step]
        if not versions:
            raise ObjectNotFoundError(f"there is no version of step {step}", path=url)
    except FlashpointError as error:
        return output.fail(error, base=url, as_json=as_json)
    results = []
    with output.progress("verifying") as progress:
        done, total = 0, sum(version.bytes for version in versions)
        for version in versions:
            problems = list(version.problems)
            for manifest in version.manifests:
                problems += _check_part(store, version, manifest, threads)
                done += manifest.total_size
                progress(done, total)
            verdict = "damaged" if problems else version.state
            if verdict == "damaged" and not _is_there(store, version):
                verdict, problems = "removed", []
            results.append((version, verdict, problems))
    seconds = time.monotonic() - began
    damaged = any(problems for _, _, problems in results)
    if as_json:
        told = [
            {**version.to_json(), "state": verdict, "complete": verdict == "complete", "problems": problems}
            for version, verdict, problems in results
        ]
        print(json.dumps({"url": url, "ok": not damaged, "seconds": round(seconds, 3), "versions": told}, indent=2))
    else:
        _print_results(url, results, seconds)
    return output.DAMAGE if damaged else output.OK


def _print_results(url: str, results: list[tuple[StoredVersion, str, list[str]]], seconds: float) -> None:
    for version, verdict, problems in results:
        about = f"{version.folder}: ranks {format_ranks(version.ranks)}, {format_bytes(version.bytes)}"
        for text in problems or [about]:
            shown = "ok" if verdict == "complete" else verdict
            if output.is_terminal():
                output.console().print(
                    f"[{_STYLES[verdict]}]{shown:10}[/] {escape(text)}", highlight=False, soft_wrap=True
                )
            else:
                print(f"{shown:10} {text}")
    bad = sum(bool(problems) for _, _, problems in results)
    size = format_bytes(sum(version.bytes for version, verdict, _ in results if verdict != "removed"))
    verdict = f"{bad} of {_count(results)} damaged" if bad else "all as saved"
    print(f"{url}: {_count(results)}, {size} in {seconds:.1f} s: {verdict}")


def _count(versions: Sequence[object]) -> str:
    return f"{len(versions) or 'no'} version{'' if len(versions) == 1 else 's'}"


def _world(version: StoredVersion) -> str:
    return "?" if version.world_size is None else str(version.world_size)


# ---- looking ----------------------------------------------------------------------------------------------------


def _look(store: DurableStore) -> list[StoredVersion]:
    """The versions in a store, newest first. Raises an ObjectNotFoundError if there is nothing at all."""
    found, unusable = list_persisted(store)
    if not found and not unusable and not store.list():
        raise ObjectNotFoundError(
            "there is nothing here", path=store.path_of(""), hint="give the URL that the job was given as persist="
        )
    seen = [version for each in found if (version := _judge(store, each)) is not None]
    seen += [_judge_unusable(each) for each in unusable if each.names or each.marked]
    return sorted(seen, key=lambda version: version.save_id, reverse=True)


def _judge(store: DurableStore, version: PersistedVersion) -> StoredVersion | None:
    problems: list[str] = []
    lock = threading.Lock()

    def look(rank: int) -> Manifest | None:
        try:
            return read_part_manifest(store, version, rank)
        except FlashpointError as error:
            if not is_damage(error):
                raise
            with lock:
                problems.append(str(error))
            return None

    with ThreadPoolExecutor(_LOOKS_AT_A_TIME) as pool:
        manifests = [each for each in pool.map(look, range(version.world_size)) if each is not None]
    seen = StoredVersion(
        version.folder,
        version.step,
        version.save_id,
        version.world_size,
        tuple(manifest.rank for manifest in manifests),
        tuple(manifests),
        tuple(sorted(problems)),
    )
    return None if problems and not _is_there(store, seen) else seen


def _judge_unusable(of: Unusable) -> StoredVersion:
    name = of.folder.rpartition("/")[2]
    parsed = [each for each in map(parse_manifest_name, of.names) if each is not None and each[1] == of.newest_save]
    ranks = tuple(sorted(rank for rank, _ in parsed))
    step = CheckpointContainerId.parse_version_container(name)
    problems = (f"{of.folder}: {of.why}",) if of.marked else ()
    return StoredVersion(of.folder, -1 if step is None else step, of.newest_save, None, ranks, (), problems)


def _is_there(store: DurableStore, version: StoredVersion) -> bool:
    """Whether a version has not been removed: its marker goes first."""
    try:
        store.size(f"{version.folder}/{MARKER}")
    except ObjectNotFoundError:
        return False
    except FlashpointError:
        return True
    return True


def _check_part(store: DurableStore, version: StoredVersion, manifest: Manifest, threads: int) -> list[str]:
    """What is wrong with the bytes of a part, one message or none."""
    record = manifest.objects[0]
    name = f"{version.folder}/{record.name}"

    def read(begin: int, block: memoryview) -> bool:
        store.read_into(name, begin, block)
        return True

    try:
        wrong = wrong_blocks(record, read, threads)
    except (ObjectNotFoundError, DamagedError) as error:
        return [str(error)]
    except FlashpointError as error:
        return [f"it cannot be read: {error}"]
    return [] if wrong is None else [f"{store.path_of(name)}: {wrong}"]
