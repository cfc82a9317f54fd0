"""`flashpoint copy`: a version out of the base container of a running job, or out of a durable store.

Owns the command's arguments and what it prints; the copy is `core.copy_version`'s, or `core.copy_persisted`'s.
"""

from __future__ import annotations

import json

from ml_flashpoint.cli import output
from ml_flashpoint.core.copy_persisted import copy_persisted
from ml_flashpoint.core.copy_version import copy_version
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.persist.opening import persisted_url


@output.command
def copy(source: str, destination: str, *, as_json: bool = False, partial: bool = False) -> None:
    """Copies a version."""
    base, step = output.split_source(source)
    url = persisted_url(base)
    if url is not None and partial:
        raise InvalidArgumentError("is about base containers", argument="--partial", value=partial)
    with output.progress("copying") as progress:
        if url is not None:
            copied = copy_persisted(url, destination, step, progress=progress)
        else:
            copied = copy_version(base, destination, step, partial=partial, progress=progress)
    print(json.dumps({"base": base, "copy": str(copied)}, indent=2) if as_json else f"copied to {copied}")
