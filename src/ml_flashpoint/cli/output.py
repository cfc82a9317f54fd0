"""Printing of all subcommands: exit codes, errors, JSON or lines and tables, progress.

Only this prints while a subcommand runs, so `clean` is the one place where text from files and from other nodes goes to
a terminal.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.segment import Segment
from rich.text import Text

from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    MissingPartsError,
    ObjectNotFoundError,
)

OK, DAMAGE, USAGE = 0, 1, 2
"""Exit codes."""

STYLES: Final = {
    **dict.fromkeys(("ok", "complete", "replicated", "running"), "green"),
    **dict.fromkeys(("writing", "incomplete", "silent", "left over", "note"), "yellow"),
    **dict.fromkeys(("damaged", "degraded", "FAIL"), "bold red"),
    **dict.fromkeys(("partial", "removed", "ended", "gone back from"), "dim"),
    "local": "cyan",
}
"""Colours of states."""

_SUSPECT: Final = re.compile(r"[^\n\t -~]+")


# ---- cleaning -------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Replace each character that is neither printable, a line break nor a tab by its escape in Python, as ``\\x1b``.

    Afterwards nothing in the text moves a cursor, sets a colour or a title, hides other text, or fails to be encoded.
    """
    return _SUSPECT.sub(_escaped, text)


def _escaped(suspect: re.Match[str]) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in suspect[0])


class _CleanStream:
    """A text stream that cleans what is written to it, and is otherwise the stream below."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        self.below.write(clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


class _CleanConsole(Console):
    """A console whose own escapes go out, and none from the texts that it shows."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else clean(text), style, control)


@contextlib.contextmanager
def cleaned() -> Iterator[None]:
    """Clean all text that is written to standard output and standard error meanwhile, by whomever."""
    out, err = (cast(TextIO, _CleanStream(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def console(*, stderr: bool = False) -> Console:
    """Return a console on the present standard output, or standard error, that cleans the texts that it shows."""
    stream = sys.stderr if stderr else sys.stdout
    return _CleanConsole(file=stream.below if isinstance(stream, _CleanStream) else stream, highlight=False)


def is_terminal(*, stderr: bool = False) -> bool:
    """Return True if people watch."""
    return (sys.stderr if stderr else sys.stdout).isatty()


# ---- printing -------------------------------------------------------------------------------------------------------


def show(document: Mapping[str, Any], as_json: bool, *parts: str | Text) -> None:
    """Print one JSON document, or lines and tables."""
    if as_json:
        print(json.dumps(document, indent=2))
        return
    out = console()
    for part in parts:
        out.print(line(part) if isinstance(part, str) else part, soft_wrap=True)


def line(*pieces: str | tuple[str, str]) -> Text:
    """Return a text of pieces, plain or with styles. They are cleaned here: `Text` would leave out some characters."""
    return Text.assemble(*(clean(each) if isinstance(each, str) else (clean(each[0]), each[1]) for each in pieces))


def table(rows: Sequence[Mapping[str, str]], drop: Sequence[str] = ()) -> Text:
    """Return rows in aligned columns, under their names. Where a terminal is narrower, columns are left out, and named.

    Args:
        rows: at least one; texts by the names of columns, the same in all.
        drop: names of columns, in the order in which they are left out.
    """
    cells = {name: [name, *(clean(row[name]) for row in rows)] for name in rows[0]}
    widths = {name: max(map(cell_len, column)) for name, column in cells.items()}
    dropped = []
    for name in drop:
        if not is_terminal() or sum(widths.values()) + 2 * len(widths) - 2 <= console().width:
            break
        del widths[name]
        dropped.append(name)
    lines = [
        Text("  ").join(_cell(cells[name][number], width, header=not number) for name, width in widths.items())
        for number in range(1 + len(rows))
    ]
    for line in lines:
        line.rstrip()
    if dropped:
        lines.append(Text(f"this terminal is too narrow for: {', '.join(dropped)}", style="dim"))
    return Text("\n").join(lines)


def _cell(text: str, width: int, *, header: bool) -> Text:
    return Text(text + " " * (width - cell_len(text)), style="bold" if header else STYLES.get(text, ""))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks in short: ``0-3,8``; ``-`` for none."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def running_text(ranks: Collection[int]) -> str:
    """Return a sentence about the ranks that run on this node."""
    if not ranks:
        return "no rank is running here"
    return (
        f"rank {ranks_text(ranks)} is running here"
        if len(ranks) == 1
        else f"ranks {ranks_text(ranks)} are running here"
    )


def bytes_text(count: float) -> str:
    """Return a number of bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def time_text(seconds: float) -> str:
    """Return a duration for people: ``0.19 s``, ``16.7 min``."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"


def or_dash(value: object) -> str:
    """Return a value as text; a dash for None."""
    return "-" if value is None else str(value)


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 version``, ``2 versions``, ``no versions``."""
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], object]]:
    """Show progress on standard error, if people watch. Yields a function of bytes done, and bytes in all."""
    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = is_terminal(stderr=True)
    with Progress(*columns, console=console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def fail(error: FlashpointError, *, as_json: bool) -> int:
    """Print an error, and return its exit code: 2 if there is nothing to look at, or an argument is wrong."""
    if as_json:
        print(json.dumps({"error": str(error)}, indent=2))
    print(f"flashpoint: {error}", file=sys.stderr)
    nothing = isinstance(error, ObjectNotFoundError) and not isinstance(error, MissingPartsError)
    return USAGE if nothing or isinstance(error, InvalidArgumentError) else DAMAGE
