"""Records of runs: which saves of which runs exist.

A run number is chosen once, when the ranks open a base container or go back in one. Each node has the record of each
run: its lineage, which are the runs that it goes on from and the last step of each that counts. All nodes write the
record. After a barrier all mark the run as begun. A save that is not in the lineage of the newest begun run does not
exist. The suffix of a record's file is the mark. Once a version of the run was verified, the file has a second name: a
job whose versions are all lost is not one that never had any.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ml_flashpoint.format.errors import DamagedError, SaveError, UnreadableError
from ml_flashpoint.format.files import read_file, replace_file, writing
from ml_flashpoint.format.manifest import decode_record, encode_record
from ml_flashpoint.format.names import MAX_RUN, RUN_PATTERN, SaveId
from ml_flashpoint.memory.container import RUNS, BaseContainer, names_in

_MARKS = ("written", "begun", "verified")
_NAME = re.compile(rf"({RUN_PATTERN})\.({'|'.join(_MARKS)})")
_KIND = "mlflashpoint-run-1"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class RunRecord:
    """The record of a run.

    Attributes:
        run: number of the run, from 1.
        lineage: earlier runs that it goes on from, and the last step of each that counts.
        begun: True once all nodes have the record.
        verified: True once a version of the run was verified, if this node has heard of that.
    """

    run: int
    lineage: Mapping[int, int] = field(default_factory=dict)
    begun: bool = False
    verified: bool = False

    @property
    def had_versions(self) -> bool:
        """True if a version has existed in this run: a verified one, or the one that the run goes on from."""
        return self.verified or bool(self.lineage)

    def has(self, save: SaveId) -> bool:
        """Return True if a save is of this run, or counts in it."""
        return save.run == self.run or save.step <= self.lineage.get(save.run, -1)


def newest_begun(records: Iterable[RunRecord]) -> RunRecord | None:
    """Return the record by which saves exist, of those that all nodes have; None if no run has begun."""
    return max((each for each in records if each.begun), key=lambda each: (each.run, each.verified), default=None)


def next_run(records: Iterable[RunRecord], found: Iterable[SaveId], chosen: SaveId | None) -> RunRecord:
    """Return the record of a new run, above the ``records`` of all nodes and all saves that were ``found`` on any node
    or durable tier, and which goes on from the ``chosen`` save. Raise a `SaveError` if the numbers are used up."""
    known = list(records)
    run = 1 + max([each.run for each in known] + [save.run for save in found], default=0)
    if run > MAX_RUN:
        raise SaveError(f"no run can follow run {MAX_RUN}", hint="remove the folder of that run, which no job has made")
    if chosen is None:
        return RunRecord(run)
    past = newest_begun(known)
    earlier = {at: step for at, step in (past.lineage if past else {}).items() if at < chosen.run}
    return RunRecord(run, {**earlier, chosen.run: chosen.step})


def read_records(container: BaseContainer) -> list[RunRecord]:
    """Return the records on this node, by run. Raise a `DamagedError` if one is not as it was written, an
    `UnreadableError` if it cannot be read just now."""
    found: dict[int, RunRecord] = {}
    folder = container.private / RUNS
    matches = filter(None, map(_NAME.fullmatch, names_in(folder)))
    for match in sorted(matches, key=lambda match: _MARKS.index(match[2])):  # the last mark counts
        with contextlib.suppress(FileNotFoundError):
            found[int(match[1])] = _read(folder / match[0], int(match[1]), match[2])
    return [found[run] for run in sorted(found)]


def write_record(container: BaseContainer, record: RunRecord) -> None:
    """Write the record of a run that has not begun. Raise a `CapacityError` if the filesystem is full, or another
    `SaveError`."""
    path = container.private / RUNS / f"{record.run:08d}.written"
    content = {"run": record.run, "lineage": sorted(record.lineage.items())}
    with writing(path):
        replace_file(path, [encode_record(_KIND, content)], fsync=False)


def mark_begun(container: BaseContainer, run: int) -> None:
    """Mark a run as begun, once all nodes have its record, and remove the records of earlier runs. Takes no memory.
    Raise a `SaveError` if there is no record of the run on this node."""
    folder = container.private / RUNS
    begun = folder / f"{run:08d}.begun"
    try:
        os.rename(folder / f"{run:08d}.written", begun)
    except OSError as error:
        if not begun.exists():
            raise SaveError(f"cannot mark run {run} as begun: {error.strerror}", path=begun) from error
    for name in names_in(folder):
        if (match := _NAME.fullmatch(name)) and int(match[1]) < run:
            (folder / name).unlink(missing_ok=True)


def mark_verified(container: BaseContainer, run: int) -> None:
    """Mark a begun run as one that has had a verified version. Takes no memory; safe to repeat."""
    begun = container.private / RUNS / f"{run:08d}.begun"
    try:
        with contextlib.suppress(FileExistsError):
            os.link(begun, begun.with_suffix(".verified"))
    except OSError as error:
        raise SaveError(f"cannot mark run {run} as verified: {error.strerror}", path=begun) from error


def _read(path: Path, run: int, mark: str) -> RunRecord:
    try:
        content = decode_record(_KIND, read_file(path, _MOST_BYTES), path)
        record = RunRecord(content["run"], {int(at): int(step) for at, step in content["lineage"]})
        if record.run != run:
            raise ValueError(f"it is of run {record.run}, unlike its name")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"cannot read the record of a run: {error.strerror}", path=path) from error
    except (DamagedError, ValueError, TypeError, KeyError) as error:
        text = f"the record of a run is not valid: {error}"
        hint = "if another node has the record of this run, remove this one"
        raise DamagedError(text, path=path, hint=hint) from error
    return replace(record, begun=mark != "written", verified=mark == "verified")
