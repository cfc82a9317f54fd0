"""`flashpoint copy`: a version out of any store, into a folder. Owns what it prints."""

from __future__ import annotations

import json

from ml_flashpoint.cli import output
from ml_flashpoint.tools.copy import copy_version


@output.command
def copy(source: str, destination: str, *, as_json: bool = False, partial: bool = False) -> None:
    """Copy a version."""
    base, step = output.split_source(source)
    with output.progress("copying") as progress:
        copied = copy_version(base, destination, step, partial=partial, progress=progress)
    print(json.dumps({"base": base, "copy": str(copied)}, indent=2) if as_json else f"copied to {copied}")
