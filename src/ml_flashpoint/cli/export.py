"""`flashpoint export`: a version as files that other tools read.

Owns the command's arguments and what it prints; the formats are `tools.export`'s.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Final

from ml_flashpoint.cli import output
from ml_flashpoint.format.errors import InvalidArgumentError

_MAX_BYTES: Final = 64 << 20


@output.command
def export(
    sources: list[str],
    destination: str,
    *,
    format: str,
    prefix: str,
    name_map: str | None = None,
    as_json: bool = False,
) -> None:
    """Export a version."""
    from ml_flashpoint.tools.export import export_version

    bases, step = output.split_sources(sources)
    names = None if name_map is None else read_names(name_map)
    with output.progress("exporting") as progress:
        made = export_version(bases, destination, step, format=format, prefix=prefix, names=names, progress=progress)
    if as_json:
        told = {"step": made.step, "tensors": made.tensors, "bytes": made.nbytes, "left_out": made.left_out}
        print(json.dumps({"base": ", ".join(sources), "export": str(made.path), "format": format, **told}, indent=2))
        return
    print(f"exported step {made.step} to {made.path}: {made.tensors} tensors")
    if made.left_out:
        print(f"left out, since the format has no place for it: {', '.join(made.left_out)}", file=sys.stderr)


def read_names(path: str) -> dict[str, str]:
    """Read names by names from a file with one JSON object.

    Raises:
        InvalidArgumentError: it is none.
    """
    try:
        if os.path.getsize(path) > _MAX_BYTES:
            raise ValueError("it is too large")
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
            raise ValueError("not an object of names by names")
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"cannot be read: {error}", argument="--name-map", value=path) from error
    return found
