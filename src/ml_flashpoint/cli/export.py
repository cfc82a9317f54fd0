"""`flashpoint export`: a version as files that other tools read.

Owns the command's arguments and what it prints; the formats are `adapter.pytorch.export`'s.
"""

from __future__ import annotations

import json
import sys

from ml_flashpoint.cli import output


@output.command
def export(sources: list[str], destination: str, *, format: str, prefix: str, as_json: bool = False) -> None:
    """Exports a version."""
    from ml_flashpoint.adapter.pytorch.export import export_version

    bases, step = output.split_sources(sources)
    with output.progress("exporting") as progress:
        made = export_version(bases, destination, step, format=format, prefix=prefix, progress=progress)
    if as_json:
        told = {"step": made.step, "tensors": made.tensors, "bytes": made.nbytes, "left_out": made.left_out}
        print(json.dumps({"base": ", ".join(sources), "export": str(made.path), "format": format, **told}, indent=2))
        return
    print(f"exported step {made.step} to {made.path}: {made.tensors} tensors")
    if made.left_out:
        print(f"left out, being no tensors: {', '.join(made.left_out)}", file=sys.stderr)
