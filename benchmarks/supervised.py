"""Runs the benchmarks in a child process, and removes what the child leaves, however it ends.

The parent measures nothing and opens nothing, so that it can remove a folder when the child has run out of descriptors
or of memory, or was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import NoReturn

MEMORY = Path("/dev/shm")
_FOLDER = "FLASHPOINT_BENCH_FOLDER"


def folder() -> Path | None:
    """Return the folder that the parent removes at the end; None in the parent itself."""
    given = os.environ.get(_FOLDER)
    return Path(given) if given else None


def run(module: str, arguments: list[str], memory: Path = MEMORY) -> int:
    """Run a module with these arguments in a child process, and return its exit code.

    Args:
        memory: the tmpfs in which its folder is made.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    made = Path(tempfile.mkdtemp(prefix="flashpoint-bench-", dir=memory))
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, _FOLDER: str(made)},
            start_new_session=True,
        )
        try:
            return child.wait()
        finally:
            _kill_session(child)
    finally:
        shutil.rmtree(made)


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """Kill the child, and what it has started and left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
