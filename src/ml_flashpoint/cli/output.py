"""Shared by the subcommands: exit codes, and the two ways to print: lines, and rich's tables.

Nothing else writes to standard output or standard error while a subcommand runs, so `clean` is the one place where text
from files and from other nodes goes to a terminal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TextIO, cast

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

_P = ParamSpec("_P")

OK = 0
DAMAGE = 1
USAGE = 2


_SUSPECT = re.compile(r"[^\n\t -~]+")


def clean(text: str) -> str:
    """Replace what is neither printable, a line break nor a tab by its escape in Python, such as ``\\x1b``.

    Afterwards nothing in the text moves a cursor, sets a colour or a title, hides other text, or fails to be encoded.
    """
    return _SUSPECT.sub(_escaped, text)


def _escaped(suspect: re.Match[str]) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in suspect[0])


class _CleanStream:
    """A text stream that cleans what is written to it, and is otherwise the stream below.

    Attributes:
        below: that stream.
    """

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

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean(text), **options)

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
    return _CleanConsole(file=stream.below if isinstance(stream, _CleanStream) else stream)


def is_terminal(*, stderr: bool = False) -> bool:
    """Whether people watch: else lines are printed that other programs can read."""
    return (sys.stderr if stderr else sys.stdout).isatty()


def split_source(source: str) -> tuple[str, int | None]:
    """A base container and a step, of ``BASE@STEP``; or the base container alone, which may be called like that."""
    base, at, text = source.rpartition("@")
    named = at and text.isascii() and text.isdecimal() and not os.path.lexists(source)
    return (base, int(text)) if named else (source, None)


def split_sources(sources: Sequence[str]) -> tuple[list[str], int | None]:
    """The same of several, which name one step at most.

    Raises:
        InvalidArgumentError: they name several.
    """
    named = [split_source(source) for source in sources]
    steps = {step for _, step in named if step is not None}
    if len(steps) > 1:
        raise InvalidArgumentError("these are different steps", argument="SOURCE", value=", ".join(sources))
    return [base for base, _ in named], next(iter(steps), None)


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if people watch: to be called with bytes done, and bytes in all."""
    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = is_terminal(stderr=True)
    with Progress(*columns, console=console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def write_file(target: Path, text: str, argument: str) -> None:
    """Write a file, whole or not at all.

    Args:
        argument: which one has named it.

    Raises:
        InvalidArgumentError: it cannot be written.
    """
    try:
        descriptor, new = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(new, 0o644)
            os.replace(new, target)
        except BaseException:
            os.unlink(new)
            raise
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot be written: {error.strerror}", argument=argument, value=str(target)
        ) from error


def command(function: Callable[_P, int | None]) -> Callable[_P, int]:
    """Has what carries a command out return an exit code, and report what fails. Its first argument says what is looked
    at, and it may have ``as_json``."""

    @functools.wraps(function)
    def coded(*args: _P.args, **options: _P.kwargs) -> int:
        try:
            return function(*args, **options) or OK
        except FlashpointError as error:
            source: Any = args[0]
            base = split_source(source)[0] if isinstance(source, str) else ", ".join(source)
            nothing = isinstance(error, ObjectNotFoundError) and not isinstance(error, MissingPartsError)
            code = USAGE if nothing or isinstance(error, InvalidArgumentError) else DAMAGE
            return fail(error, base=base, as_json=bool(options.get("as_json")), code=code)

    return coded


def fail(error: FlashpointError, *, base: str | None = None, as_json: bool, code: int = USAGE) -> int:
    """Report why nothing was done, and return the exit code for it: by default that there is nothing to look at."""
    if as_json:
        about = {} if base is None else {"base": base}
        print(json.dumps({**about, "error": str(error)}, indent=2))
    print(f"flashpoint: {error}", file=sys.stderr)
    return code
