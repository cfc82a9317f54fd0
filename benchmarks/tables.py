"""The tables of docs/benchmarks.md: which rows they show, and how. Needs nothing but the standard library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Show = Callable[[Row], str]


class Found:
    """All rows, by state and case.

    Attributes:
        runs: that they come from, in the order of the file.
    """

    def __init__(self, runs: list[dict[str, Any]]) -> None:
        self.runs = runs
        self._rows = {(row["state"], row["case"]): (at, row) for at, run in enumerate(runs) for row in run["rows"]}

    def row(self, state: str, case: str, used: list[int]) -> Row:
        """One of them. Its run is added to ``used``."""
        at, row = self._rows[state, case]
        used.append(at)
        return row

    def of_state(self, state: str, used: list[int]) -> Iterator[Row]:
        """All of a state, in the order of the file."""
        for (of, case), _ in list(self._rows.items()):
            if of == state:
                yield self.row(of, case, used)


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        head: of its columns. lines: makes the cells of its lines, and tells which runs they come from.
    """

    head: tuple[str, ...]
    lines: Callable[[Found, list[int]], list[list[str]]]


# ---- cells ------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """With as many digits as mean something."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def ms(row: Row) -> str:
    return number(row["seconds"] * 1e3) if row["runs"] else str(row["note"])


def us(row: Row) -> str:
    return f"{row['seconds'] * 1e6:,.0f}" if row["runs"] else str(row["note"])


def ratio(row: Row) -> str:
    return "" if row["ratio"] is None else f"{row['ratio']:.2f}"


def microseconds(row: Row) -> str:
    return f"{us(row)} µs"


def note(row: Row) -> str:
    return str(row["note"])


Cell = tuple[str, str, Show]
"""State and case of a row, and what is shown of it."""


def table(head: tuple[str, ...], lines: Iterable[tuple[str, tuple[Cell | str, ...]]]) -> Table:
    """A table whose lines are known: a label, and cells."""
    kept = list(lines)

    def made(found: Found, used: list[int]) -> list[list[str]]:
        def shown(cell: Cell | str) -> str:
            return cell if isinstance(cell, str) else cell[2](found.row(cell[0], cell[1], used))

        return [[label, *(shown(cell) for cell in cells)] for label, cells in kept]

    return Table(head, made)


def timed(state: str, labels: dict[str, str]) -> Table:
    """Time and ratio of cases of one state, with a label for each."""
    lines = [(label, ((state, case, ms), (state, case, ratio))) for label, case in labels.items()]
    return table(("case", "median ms", "× memcpy"), lines)


# ---- loops ------------------------------------------------------------------------------------------------


_KINDS = {
    "ours: `Flashpoint`": "ours: Flashpoint",
    "ours: `Flashpoint(overlap=False)`": "ours: Flashpoint, overlap=False",
    "`dcp.async_save` with torch's cached stager": "dcp.async_save, torch's cached stager",
    "`torch.save`": "torch.save",
}


def _loops(found: Found, used: list[int]) -> list[list[str]]:
    """`benchmarks.loop`: time held and what a step takes, of that without saves."""
    states = [f"{name} steps, saving at each" for name in ("long", "short")]
    lines = []
    for label, case in _KINDS.items():
        cells = [label]
        for state in states:
            step, alone = (found.row(state, f"{kind}: step", used) for kind in (case, "no saves"))
            slower = f"{step['seconds'] / alone['seconds']:.2f}" if step["runs"] else ""
            cells += [ms(found.row(state, f"{case}: held", used)), slower]
        lines.append(cells)
    alone = [f"{ms(found.row(state, 'no saves: step', used))} ms" for state in states]
    return [*lines, ["a step without saves", "", alone[0], "", alone[1]]]


def _many(found: Found, used: list[int]) -> list[list[str]]:
    """The same, of a model of many small tensors."""
    state = "20,000 tensors, saving at each"
    alone = found.row(state, "no saves: step", used)
    lines = []
    for label, case in list(_KINDS.items())[:2]:
        step = found.row(state, f"{case}: step", used)["seconds"] / alone["seconds"]
        lines.append([label, ms(found.row(state, f"{case}: held", used)), f"{step:.2f}"])
    return [*lines, ["a step without saves", "", f"{ms(alone)} ms"]]


_PERSISTING = {
    "saves alone": "saves",
    "and a thread that only writes": "saves, and a thread that only writes",
    "and persisting": "saves, persisting",
}


def _persist(found: Found, used: list[int]) -> list[list[str]]:
    """`benchmarks.persist`: medians, and what a round's turns differ by."""
    lines = []
    for label, kind in _PERSISTING.items():
        rows = [
            found.row(f"persisting, {steps} steps", f"ours: {kind}: {what}", used)
            for steps in ("long", "short")
            for what in ("held", "step")
        ]
        lines.append([label, *(f"{ms(row)} {note(row)}".strip() for row in rows)])
    return lines


def _rivals(loop: str) -> Table:
    """`benchmarks.rivals`: all kinds in one loop."""

    def lines(found: Found, used: list[int]) -> list[list[str]]:
        made = []
        for row in found.of_state(f"rivals, {loop} steps", used):
            label = f"**{row['label']}**" if row["case"].startswith("ours") else row["label"]
            if row["runs"]:
                median, low, high = row["slowdown"]
                held = [ms(row), number(1 / row["ratio"])]
                made.append([label, *held, f"{median:.2f} ({low:.2f} to {high:.2f})", row["note"] or row["leaves"]])
            else:
                made.append([label, "", "", "", row["note"]])
        return made

    return Table(("", "held, ms", "held, memcpys", "step, × that without saves", "after a save"), lines)


# ---- all of them ------------------------------------------------------------------------------------------

_LARGE, _SMALL, _MIB = "128 tensors, 2 GiB", "1 KB", "64 MiB"
_UNCHANGED = "4 × 64 MiB, unchanged"


def _times_one(row: Row) -> str:
    return f"{row['ratio']:.2f} × one client"


def _in_ms(row: Row) -> str:
    return f"{ms(row)} ms" + ("" if row["ratio"] is None else f", {1 / row['ratio']:.1f} × memcpy of the values")


TABLES = {
    "large": timed(
        _LARGE,
        {
            "ours: copy into the slot alone": "ours: copy into the slot alone",
            "ours: engine save, committed, with digests": "ours: engine save, committed",
            "ours: `dcp.save`, committed, with torch's planning": "ours: dcp.save, committed",
            "ours: `dcp.async_save` on a thread: caller blocked": "ours: async THREAD, caller blocked",
            "ours: `dcp.async_save` on a thread: until committed": "ours: async THREAD, to committed",
            "ours: load, from a mapping that is held": "ours: load, held mapping",
            "ours: new process: recover and verify every block": "ours: fresh process, recover + verify",
            "ours: new process: load after that": "ours: fresh process, load after that",
            "ours: new process: both": "ours: fresh process, both",
            "`torch.save`": "torch.save",
            "`torch.load`": "torch.load(mmap=False)",
            "safetensors `save_file`": "safetensors save_file",
            "`dcp.save`, FileSystemWriter": "dcp.save, FileSystemWriter",
            "`dcp.load`, FileSystemReader": "dcp.load, FileSystemReader",
            "`dcp.async_save` with torch's cached stager: caller blocked": "dcp.async_save, cached stager, blocked",
            "`dcp.async_save` with torch's cached stager: until written": "dcp.async_save, cached stager, written",
        },
    ),
    "lightning": timed(
        "Lightning, Adam",
        {
            "ours: `FlashpointCallback`": "ours: FlashpointCallback, blocked",
            "`ModelCheckpoint`'s save with `AsyncCheckpointIO`": "AsyncCheckpointIO, blocked",
        },
    ),
    "many": Table(("", "held, ms", "step, × that without saves"), _many),
    "loops": Table(("", "held, ms", "long step, ×", "held, ms", "short step, ×"), _loops),
    "persist": Table(("", "held, ms", "long step, ms", "held, ms", "short step, ms"), _persist),
    "rivals-long": _rivals("long"),
    "rivals-short": _rivals("short"),
    "dictionary-small": table(
        ("1 KB, µs", "put", "get", ""),
        [
            (label, (*((_SMALL, f"{case}: {what}", us) for what in ("put", "get")), (_SMALL, f"{case}: get", note)))
            for label, case in {
                "ours": "ours",
                "`multiprocessing.Manager().dict()`": "multiprocessing.Manager().dict()",
                "Ray objects": "Ray",
                "dragonhpc": "dragonhpc",
            }.items()
        ],
    ),
    "dictionary-large": table(
        ("64 MiB", "put, × memcpy", "get, × memcpy"),
        [
            ("ours", ((_MIB, "ours: put of a tensor", ratio), (_MIB, "ours: get, copy=True", ratio))),
            ("ours, a view", ("", (_MIB, "ours: get, a view", microseconds))),
            (
                "`multiprocessing.Manager().dict()`",
                (
                    (_MIB, "multiprocessing.Manager().dict(): put of an array", ratio),
                    (_MIB, "multiprocessing.Manager().dict(): get", ratio),
                ),
            ),
            ("Ray objects", ((_MIB, "Ray: put of an array", ratio), (_MIB, "Ray: get, a view", microseconds))),
            ("dragonhpc", ((_MIB, "dragonhpc: put of an array", ratio), (_MIB, "dragonhpc: get", ratio))),
        ],
    ),
    "dictionary-rest": table(
        ("", ""),
        [
            (
                "4 clients on 4 managers, putting and getting 1 KB at once",
                ((_SMALL, "ours: put and get, 4 clients", _times_one),),
            ),
            ("the same with 16 MiB", (("16 MiB", "ours: put and get, 4 clients", _times_one),)),
            (
                "`checkpoint()` of 256 MiB that did not change, replicated: caller blocked",
                ((_UNCHANGED, "ours: checkpoint(), caller blocked", _in_ms),),
            ),
            ("the same: until committed", ((_UNCHANGED, "ours: checkpoint(), until committed", _in_ms),)),
            ("the same: what was sent", ((_UNCHANGED, "ours: checkpoint(), until committed", note),)),
        ],
    ),
}
