"""What the processes of test_embedded run: managers that only say that they are there, and their creators."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Config = dict[str, Any]
Ready = Callable[[], None]


def note_and_wait(config: Config, ready: Ready, stop: threading.Event) -> None:
    """Writes its configuration where the test looks, and serves until it is told to stop."""
    seen = {**config, "pid": os.getpid(), "cwd": os.getcwd(), "probe": os.environ.get("FLASHPOINT_TEST_PROBE")}
    path = Path(config["folder"]) / f"seen-{config['number']}"
    path.with_suffix(".new").write_text(json.dumps(seen))
    os.rename(path.with_suffix(".new"), path)
    ready()
    stop.wait()


def fail_second(config: Config, ready: Ready, stop: threading.Event) -> None:
    """Manager 1 cannot start."""
    if config["number"] == 1:
        raise RuntimeError("no room for manager 1")
    note_and_wait(config, ready, stop)


def die_second(config: Config, ready: Ready, stop: threading.Event) -> None:
    """Manager 1 is killed before it is ready."""
    if config["number"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    note_and_wait(config, ready, stop)


def never_ready(config: Config, ready: Ready, stop: threading.Event) -> None:
    """Starts for ever."""
    stop.wait()


def deaf(config: Config, ready: Ready, stop: threading.Event) -> None:
    """Does not end when it is told to."""
    ready()
    threading.Event().wait()


def fail_when_restarted(config: Config, ready: Ready, stop: threading.Event) -> None:
    """A manager that cannot come back."""
    if config["restarted"]:
        raise RuntimeError("cannot come back")
    note_and_wait(config, ready, stop)


def create(root: str, managers: int, entry: str, how: str) -> None:
    """A creator: starts managers, says who they are, and waits for its own end."""
    from ml_flashpoint.ddict.runtime import embedded
    from ml_flashpoint.ddict.runtime.embedded import EmbeddedRuntime

    runtime = EmbeddedRuntime(entry=f"{__name__}:{entry}", root=Path(root))
    its = {"folder": str(runtime.base)}
    runtime.start([{"manager": number, "number": number, **its} for number in range(managers)])
    children = []
    if how == "fork":
        # As a program does that forks workers of its own.
        children = [multiprocessing.get_context("fork").Process(target=threading.Event().wait) for _ in range(2)]
        for child in children:
            child.start()
    told = {
        "base": str(runtime.base),
        "pids": list(runtime.pids().values()),
        "fork_server": embedded.fork_server().pid,
        "children": [child.pid for child in children],
    }
    print(json.dumps(told), flush=True)
    if how == "exit":
        return
    sys.stdin.read()


if __name__ == "__main__":
    # Imported by its name, since that is what the managers import.
    from tests.workers import ddict_entries

    ddict_entries.create(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
