"""The helper process that managers are forked from, and what a manager does before and after its own work.

Owns forking, and telling how what was forked has ended. It imports the managers' code once, so that a fork takes
milliseconds; it stays free of threads, so that a fork is safe. When and what to fork is the `supervisor`'s, in the
process that made the dictionary. What a manager does is an *entry*, a function that is named to it.

A request comes with two sockets, and nothing else: on the *line*, the fork server answers with the manager's process
and, when that has ended, its exit code; the *control* is the manager's own, and leads to the creator. What is said on
it is JSON, a line each: the creator's first line is all that the manager needs to know, any other tells it to stop. The
manager says that it is ready, or why it failed. It ends when the creator does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ml_flashpoint.ddict.runtime.folder import LAST_WORDS_S, FolderHold, remove_unused

Entry: TypeAlias = "Callable[[dict[str, Any], Callable[[], None], threading.Event], None]"
"""What a manager process runs: ``run(config, ready, stop)``. It calls ``ready()`` once it serves, and returns soon
after ``stop`` is set."""

MANAGER_ENTRY = "ml_flashpoint.ddict.manager.served:run"
END_GRACE_S = 10.0
"""Seconds that managers get to end by themselves when their creator is gone, or stops them."""

_RECEIVED = 1 << 16
_MOST_ERROR_CHARACTERS = 20_000


# ---- the fork server ----------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Fork managers until the creator is gone."""
    # Ctrl-C is for the creator: when it ends, so does all this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    creator = socket.socket(fileno=descriptor)
    creator.set_inheritable(False)
    with contextlib.suppress(Exception):  # told by the manager that needs it
        _load(MANAGER_ENTRY)
    gc.collect()
    gc.freeze()  # a collection in a manager would copy all pages of what was imported here
    lines: dict[int, tuple[int, socket.socket]] = {}  # by a descriptor of the process: its id, and who is told
    events = select.poll()
    events.register(creator, select.POLLIN)
    while True:
        for found, _ in events.poll():
            if found != creator.fileno():
                events.unregister(found)
                _tell_end(found, *lines.pop(found))
                continue
            data, sockets, _, _ = socket.recv_fds(creator, 1, 2)
            if not data:
                os._exit(0)  # without tearing down what was imported for the managers
            if len(sockets) < 2:  # no descriptors left: closing the line says so
                for descriptor in sockets:
                    os.close(descriptor)
                continue
            line, control = (socket.socket(fileno=each) for each in sockets)
            forked = _fork(line, control, [creator, *(other for _, other in lines.values())], list(lines))
            if forked is not None:
                lines[forked[0]] = forked[1], line
                events.register(forked[0], select.POLLIN)


def _fork(
    line: socket.socket, control: socket.socket, sockets: list[socket.socket], descriptors: list[int]
) -> tuple[int, int] | None:
    """A descriptor of the new process, and its id. In the process itself, this does not return.

    Args:
        sockets, descriptors: whatever would hide the end of other processes if a manager kept it open.
    """
    try:
        with warnings.catch_warnings():
            # Threads that a library keeps for its computations are not seen by the managers and not needed by them.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            for each in (line, *sockets):
                each.close()
            for descriptor in descriptors:
                os.close(descriptor)
            _become_manager(control)
        try:
            watched = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        socket.send_fds(line, [json.dumps({"pid": pid}).encode()], [watched])
        return watched, pid
    except OSError as error:
        with contextlib.suppress(OSError):
            line.send(json.dumps({"error": str(error)}).encode())
        line.close()
        return None
    finally:
        control.close()


def _tell_end(watched: int, pid: int, line: socket.socket) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(watched)
    with line, contextlib.suppress(OSError):
        line.send(json.dumps({"code": code}).encode())


def _load(entry: str) -> Entry:
    module, _, name = entry.partition(":")
    loaded: Entry = getattr(importlib.import_module(module), name)
    return loaded


# ---- a manager ------------------------------------------------------------------------------------------------------


def _become_manager(control: socket.socket) -> None:
    code = 1
    try:
        code = _run(control)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _run(control: socket.socket) -> int:
    said = b""
    while b"\n" not in said:
        if not (data := control.recv(_RECEIVED)):
            return 1
        said += data
    line, _, rest = said.partition(b"\n")
    if line == b"stop":
        return 0
    told = json.loads(line)
    sys.path[:] = told["sys_path"]
    for name in [name for name in os.environ if name.startswith("FLASHPOINT_")]:
        del os.environ[name]
    os.environ.update(told["env"])
    with contextlib.suppress(OSError):
        os.chdir(told["cwd"])
    hold = FolderHold(Path(told["folder"]))
    stop, orphaned = threading.Event(), threading.Event()
    if rest:
        stop.set()
    threading.Thread(
        target=_watch, args=(control, stop, orphaned, hold), name="ddict-parent-watchdog", daemon=True
    ).start()
    code = 1
    try:
        _load(told["entry"])(told["config"], lambda: control.sendall(b'{"ready": true}\n'), stop)
        code = 0
    except BaseException:
        error = traceback.format_exc()
        print(f"manager {told['manager']} of a dictionary failed:\n{error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            control.sendall(json.dumps({"error": error[-_MOST_ERROR_CHARACTERS:]}).encode() + b"\n")
    if orphaned.is_set():
        _leave(hold)
    return code


def _watch(control: socket.socket, stop: threading.Event, orphaned: threading.Event, hold: FolderHold) -> None:
    with contextlib.suppress(OSError):
        while control.recv(_RECEIVED):
            stop.set()
    # The creator is gone: nobody else would end a manager that does not end by itself.
    orphaned.set()
    stop.set()
    time.sleep(END_GRACE_S)
    _leave(hold)
    os._exit(1)


def _leave(hold: FolderHold) -> None:
    # The last one of all takes the folder away: when the creator is gone, that is a manager.
    hold.close()
    remove_unused(hold.folder, LAST_WORDS_S)
