"""How a request waits for a save that is made in another process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ml_flashpoint.local.async_request import await_removal
from tests.support.forked import Child, call


def _await(report: Any, path: str, parent: int) -> None:
    report("waits")
    await_removal(path, parent)


def test_waiting_elsewhere_ends_with_the_file(tmp_path: Path) -> None:
    marker = tmp_path / "under-way"
    marker.touch()
    parent = call(_parent)
    with Child(_await, str(marker), parent) as child:
        child.next_report("waits")
        assert child.alive
        marker.unlink()
        child.join()


def _parent(report: Any) -> int:
    return os.getppid()


def test_waiting_elsewhere_ends_with_the_trainer(tmp_path: Path) -> None:
    marker = tmp_path / "under-way"
    marker.touch()
    with Child(_await, str(marker), -1) as child:  # nobody's number
        child.join()
