"""The process of a manager that the `supervisor` has started.

Owns what it does around the manager's own work, and its end. It has a socket, which leads to the creator. What is said
on it is JSON, a line each: the creator's first line is all that the manager needs to know, any other tells it to stop.
The manager says that it is ready, or why it failed. It ends when the creator does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeAlias

from ml_flashpoint.ddict.manager.manager import Manager
from ml_flashpoint.ddict.runtime.folder import LAST_WORDS_S, FolderHold, remove_unused

Entry: TypeAlias = "Callable[[dict[str, Any], Callable[[], None], threading.Event], None]"
"""What a manager process runs: ``run(config, ready, stop)``. It calls ``ready()`` once it serves, and returns soon
after ``stop`` is set."""

_END_GRACE_S = 10.0  # seconds that a manager gets to end by itself when its creator is gone

_MOST_ERROR_CHARACTERS = 20_000


def run(config: dict[str, Any], ready: Callable[[], None], stop: threading.Event) -> None:
    """Be a manager until told to stop; an `Entry`."""
    manager = Manager(config)
    try:
        ready()
        stop.wait()
    finally:
        manager.close()


def main(descriptor: int) -> None:
    """All that a started process does. ``descriptor``: of the socket that leads to the creator."""
    control = socket.socket(fileno=descriptor)
    said = control.makefile("rb")
    if (first := said.readline()) in (b"", b"stop\n"):
        return
    told = json.loads(first)
    with contextlib.suppress(OSError):
        os.chdir(told["cwd"])
    hold = FolderHold(Path(told["folder"]))
    stop, orphaned = threading.Event(), threading.Event()
    watchdog = threading.Thread(
        target=_watch, args=(said, stop, orphaned, hold), name="ddict-parent-watchdog", daemon=True
    )
    watchdog.start()
    code = 1
    try:
        module, _, name = told["entry"].partition(":")
        entry: Entry = getattr(importlib.import_module(module), name)
        entry(told["config"], lambda: control.sendall(b'{"ready": true}\n'), stop)
        code = 0
    except BaseException:
        error = traceback.format_exc()
        print(f"manager {told['manager']} of a dictionary failed:\n{error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            control.sendall(json.dumps({"error": error[-_MOST_ERROR_CHARACTERS:]}).encode() + b"\n")
    if orphaned.is_set():
        _leave(hold)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)  # without tearing down what no one needs any more


def _watch(said: IO[bytes], stop: threading.Event, orphaned: threading.Event, hold: FolderHold) -> None:
    with contextlib.suppress(OSError):
        for _ in said:
            stop.set()
    # The creator is gone: nobody else would end a manager that does not end by itself.
    orphaned.set()
    stop.set()
    time.sleep(_END_GRACE_S)
    _leave(hold)
    os._exit(1)


def _leave(hold: FolderHold) -> None:
    # The last one of all takes the folder away: when the creator is gone, that is a manager.
    hold.close()
    remove_unused(hold.folder, LAST_WORDS_S)
