"""`flashpoint persist`: a version into a durable store, by hand. Owns what it prints."""

from __future__ import annotations

import json

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import format_bytes
from ml_flashpoint.tools.copy import persist_version


@output.command
def persist(sources: list[str], url: str, *, deadline_s: float = 600.0, as_json: bool = False) -> None:
    """Persist a version."""
    bases, step = output.split_sources(sources)
    with output.progress("persisting") as progress:
        made = persist_version(bases, url, step, progress=progress, deadline_s=deadline_s)
    version = made.version
    if as_json:
        told = {"step": version.step, "attempt": version.save_id, "world_size": version.world_size}
        rest = {"bytes": made.nbytes, "was_there": made.was_there, "newer": made.newer}
        print(json.dumps({"base": ", ".join(sources), "url": made.url, **told, **rest}, indent=2))
        return
    what = "was there already, whole" if made.was_there else f"is persisted, {format_bytes(made.nbytes)}"
    print(f"step {version.step} of {version.world_size} ranks {what}: {made.url}")
    if made.newer is not None:
        print(f"a job that resumes from there takes step {made.newer}, which was saved later")
