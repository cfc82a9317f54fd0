"""`flashpoint demo` with another job in place of its own: the first argument is the module to run.

A template forks its agents and ranks, which takes most of the time; see `tests.support.warm`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from ml_flashpoint.cli.demo import nodes, story
from ml_flashpoint.cli.main import app
from tests.support import warm

_cold_environ = psutil.Process.environ


def _environ(process: psutil.Process) -> Mapping[str, str]:
    environment = warm.environment_of(process.pid)
    return _cold_environ(process) if environment is None else environment


class _Started:
    """What the demo uses of `subprocess`."""

    DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT

    @staticmethod
    def Popen(argv: Sequence[str], *, env: Mapping[str, str], cwd: str, **_: Any) -> warm.WarmProcess:
        return warm.popen(argv, env, cwd=str(cwd))


if __name__ == "__main__":
    story.JOB = sys.argv.pop(1)
    if not warm.ALL_COLD:
        psutil.Process.environ = _environ
        nodes.subprocess = _Started  # type: ignore[assignment]
    app(["demo", *sys.argv[1:]])
