"""`flashpoint copy`: a version out of the base container of a running job.

Owns the command's arguments and what it prints; the copy is `core.copy_version`'s.
"""

from __future__ import annotations

import json
import sys

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ml_flashpoint.cli import output
from ml_flashpoint.core.copy_version import copy_version
from ml_flashpoint.format.errors import FlashpointError, ObjectNotFoundError


def copy(source: str, destination: str, *, as_json: bool = False, partial: bool = False) -> int:
    """Copies a version; returns the exit code of the command."""
    base, at, text = source.rpartition("@")
    step = int(text) if at and text.isascii() and text.isdecimal() else None
    base = base if step is not None else source
    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = output.is_terminal(stderr=True)
    try:
        with Progress(*columns, console=output.console(stderr=True), transient=True, disable=not shown) as bar:
            task = bar.add_task("copy", total=None)
            copied = copy_version(
                base,
                destination,
                step,
                partial=partial,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except ObjectNotFoundError as error:
        return output.fail(error, base=base, as_json=as_json)
    except FlashpointError as error:
        if as_json:
            print(json.dumps({"base": base, "error": str(error)}, indent=2))
        print(f"flashpoint: {error}", file=sys.stderr)
        return output.DAMAGE
    print(json.dumps({"base": base, "copy": str(copied)}, indent=2) if as_json else f"copied to {copied}")
    return output.OK
