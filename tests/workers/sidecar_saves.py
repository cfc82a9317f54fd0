"""Ranks that save versions with files beside the parts. Functions here run in children of `tests.support.forked`."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from ml_flashpoint.core.sidecars import sidecar_items, sidecar_labels

from tests.support.forked import Report
from tests.workers.fault_engine import Rank, base_here

FILES = {"common.pt": b"common" * 1000, "metadata.json": b"{}"}


def save(report: Report, rank: int, steps: list[int], carrier: int) -> None:
    """Save these steps; ``carrier`` keeps the files for all."""
    engine = Rank(base_here(), replicate=True)
    for step in steps:
        files = sidecar_items(FILES) if rank == carrier else []
        engine.saver.save(
            engine.version(step), [("w", torch.full((1000,), float(step)))], files, labels=sidecar_labels(carrier)
        )
    assert engine.saver.wait(30)
    report("done")
    report.listen()  # as long as others may need its service
    engine.close()


def recover(report: Report, rank: int) -> tuple[str | None, dict[str, bytes]]:
    """Recover, and say which version and what files are beside the parts of this node."""
    engine = Rank(base_here(), replicate=True)
    found = engine.loader.get_latest_complete_checkpoint(engine.base)
    files = {}
    if found is not None:
        folder = Path(str(found))
        files = {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder)) if name in FILES}
    report("done")
    report.listen()
    engine.close()
    return (None if found is None else found.name), files
