"""Which base containers there are in the memory of this node, of jobs that run and of dead ones.

Owns where they are looked for: in folders that this user may read, on filesystems in memory, not far below where these
are mounted; and how `flashpoint ls --all` shows them. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from rich.markup import escape
from rich.table import Table

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import (
    NotABaseContainerError,
    format_bytes,
    format_ranks,
    read_base,
    read_ranks,
)
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.memory.lock import PRIVATE

_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs")
_DEPTH: Final = 5
"""Folders below a mount: /dev/shm/<user>/<jobs>/<job> is three."""


def find_bases() -> list[Path]:
    """All base containers on this node, by path."""
    mounts = {each.mountpoint for each in psutil.disk_partitions(all=True) if each.fstype in _IN_MEMORY}
    return sorted({base for mount in mounts for base in _bases_in(Path(mount), _DEPTH)})


def base_of(name: str) -> str:
    """The base container that a user names by its path, or by its last folder, the name of the job.

    Raises:
        NotABaseContainerError: no job is called so on this node.
        InvalidArgumentError: several are.
    """
    if os.sep in name or os.path.lexists(name):
        return name
    found = [base for base in find_bases() if base.name == name]
    if len(found) > 1:
        raise InvalidArgumentError(
            f"there are several of this name, {', '.join(map(str, found))}", argument="BASE", value=name
        )
    if not found:
        raise NotABaseContainerError(
            "no job in the memory of this node is called so", path=name, hint="flashpoint ls --all lists them"
        )
    return str(found[0])


def _bases_in(folder: Path, depth: int) -> Iterator[Path]:
    """Those in a folder and in folders on the same filesystem below it; nothing that is in a base container."""
    try:
        device = os.stat(folder).st_dev
        with os.scandir(folder) as entries:
            below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    if PRIVATE in below:
        yield folder
        return
    for name in below if depth else ():
        try:
            same = os.stat(folder / name, follow_symlinks=False).st_dev == device
        except OSError:
            continue
        if same:
            yield from _bases_in(folder / name, depth - 1)


# ---- flashpoint ls --all ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BaseSummary:
    """A base container on this node.

    Attributes:
        base: its path.
        live: its ranks whose processes run here.
        steps: of its versions here, newest save first.
        complete: the newest step that this node could restore alone; None if there is none.
        resident_bytes: memory that it takes.
        updated_s: when something last happened, in seconds since the epoch; 0.0 where nothing says so.
    """

    base: Path
    live: tuple[int, ...]
    steps: tuple[int, ...]
    complete: int | None
    resident_bytes: int
    updated_s: float

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        lists = {"live": list(self.live), "steps": list(self.steps)}
        return {**dataclasses.asdict(self), **lists, "base": str(self.base), "leftover": not self.live}


def list_bases(*, as_json: bool = False) -> int:
    """Show all base containers on this node, those that take most memory first; returns the exit code."""
    found = sorted(filter(None, map(_summary, find_bases())), key=lambda each: -each.resident_bytes)
    if as_json:
        print(json.dumps({"bases": [each.to_json() for each in found]}, indent=2))
        return output.OK
    if not output.is_terminal():
        for each in found:
            whole = "-" if each.complete is None else each.complete
            print(
                f"{each.base} leftover={'no' if each.live else 'yes'} live={format_ranks(each.live)}"
                f" steps={','.join(map(str, each.steps)) or '-'} complete={whole}"
                f" resident_bytes={each.resident_bytes} updated_s={each.updated_s:.0f}"
            )
        return output.OK
    _print_table(found)
    return output.OK


def _summary(base: Path) -> BaseSummary | None:
    try:
        view = read_base(base)
        told = [status for status, _ in read_ranks(base).values() if status is not None]
    except NotABaseContainerError:
        return None  # removed meanwhile, or somebody else's
    complete = next((version.step for version in view.versions if version.complete and not version.problems), None)
    updated_s = max((status.updated_s for status in told), default=0.0)
    steps = tuple(version.step for version in view.versions)
    return BaseSummary(view.base, tuple(view.live), steps, complete, view.resident_bytes, updated_s)


def _print_table(found: Sequence[BaseSummary]) -> None:
    console = output.console()
    if not found:
        console.print("no base containers in the memory of this node, as far as this user may look")
        return
    table = Table()
    table.add_column("base container", overflow="fold")  # a path is there to be copied
    for name in ("job", "steps", "whole here", "memory", "last sign of life"):
        table.add_column(name, no_wrap=True)
    for each in found:
        job = f"[green]ranks {format_ranks(each.live)} run[/]" if each.live else "[yellow]left over[/]"
        ago = f"{_span(time.time() - each.updated_s)} ago" if each.updated_s else "-"
        steps = ", ".join(map(str, each.steps[:3])) + (", …" if len(each.steps) > 3 else "")
        whole = "-" if each.complete is None else f"step {each.complete}"
        table.add_row(escape(str(each.base)), job, steps or "-", whole, format_bytes(each.resident_bytes), ago)
    console.print(table)
    left = [each for each in found if not each.live]
    if left:
        size = format_bytes(sum(each.resident_bytes for each in left))
        text = f"left over: {size} of memory. Look with: flashpoint ls {left[0].base}"
        console.print(
            f"{text}, remove with: flashpoint rm {left[0].base}", markup=False, highlight=False, soft_wrap=True
        )


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
