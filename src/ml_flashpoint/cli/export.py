"""`flashpoint export`: a version as files that other tools read.

Owns the command's arguments and what it prints; the formats are `adapter.pytorch.export`'s.
"""

from __future__ import annotations

import json
import sys

from ml_flashpoint.cli import output
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, ObjectNotFoundError


def export(sources: list[str], destination: str, *, format: str, prefix: str, as_json: bool = False) -> int:
    """Exports a version; returns the exit code of the command."""
    from ml_flashpoint.adapter.pytorch.export import export_version

    named = [output.split_source(source) for source in sources]
    steps = {step for _, step in named if step is not None}
    bases, base = [base for base, _ in named], ", ".join(sources)
    try:
        if len(steps) > 1:
            raise InvalidArgumentError("these are different steps", argument="SOURCE", value=base)
        with output.progress("exporting") as progress:
            made = export_version(
                bases, destination, next(iter(steps), None), format=format, prefix=prefix, progress=progress
            )
    except (ObjectNotFoundError, InvalidArgumentError) as error:
        return output.fail(error, base=base, as_json=as_json)
    except FlashpointError as error:
        return output.fail(error, base=base, as_json=as_json, code=output.DAMAGE)
    if as_json:
        told = {"step": made.step, "tensors": made.tensors, "bytes": made.nbytes, "left_out": made.left_out}
        print(json.dumps({"base": base, "export": str(made.path), "format": format, **told}, indent=2))
        return output.OK
    print(f"exported step {made.step} to {made.path}: {made.tensors} tensors")
    if made.left_out:
        print(f"left out, being no tensors: {', '.join(made.left_out)}", file=sys.stderr)
    return output.OK
