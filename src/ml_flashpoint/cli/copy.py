"""`flashpoint copy`: a version out of the base container of a running job.

Owns the command's arguments and what it prints; the copy is `core.copy_version`'s.
"""

from __future__ import annotations

import json

from ml_flashpoint.cli import output
from ml_flashpoint.core.copy_version import copy_version
from ml_flashpoint.format.errors import FlashpointError, ObjectNotFoundError


def copy(source: str, destination: str, *, as_json: bool = False, partial: bool = False) -> int:
    """Copies a version; returns the exit code of the command."""
    base, step = output.split_source(source)
    try:
        with output.progress("copying") as progress:
            copied = copy_version(base, destination, step, partial=partial, progress=progress)
    except ObjectNotFoundError as error:
        return output.fail(error, base=base, as_json=as_json)
    except FlashpointError as error:
        return output.fail(error, base=base, as_json=as_json, code=output.DAMAGE)
    print(json.dumps({"base": base, "copy": str(copied)}, indent=2) if as_json else f"copied to {copied}")
    return output.OK
