"""The helper process that managers are forked from, and what a manager does before and after its own work.

Owns forking. It imports the managers' code once, so that a fork takes milliseconds; it stays free of threads, so that a
fork is safe. When and what to fork is `embedded`'s, in the process that made the dictionary. What a manager does
is an *entry*, a function that is named to it.

A request comes with one end of a pipe, the *control*, which is the manager's own and leads to the creator; its answer
is the process id, or 0, and why there is none. The first message on the control is all that the manager needs to know:
its number, its ``entry`` and the ``config`` for that, and the ``folder``, ``env``, ``cwd`` and ``sys_path`` that it is
to have. Any other tells it to stop. It says that it is ready, or why it failed, and ends when the creator does.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from ml_flashpoint.ddict.errors import REQUESTS
from ml_flashpoint.ddict.runtime.folder import LAST_WORDS_S, FolderHold, remove_unused

Entry: TypeAlias = "Callable[[dict[str, Any], Callable[[], None], threading.Event], None]"
"""What a manager process runs: ``run(config, ready, stop)``. It calls ``ready()`` once it serves, and returns soon
after ``stop`` is set."""

MANAGER_ENTRY = "ml_flashpoint.ddict.runtime.fork_server:run_manager"
END_GRACE_S = 10.0
"""Seconds that managers get to end by themselves when their creator is gone, or stops them."""

READY = "ready"


# ---- the fork server ----------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Fork managers until the creator is gone."""
    # Ctrl-C is for the creator: when it ends, so does all this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the creator watches them, and nobody has to wait for them
    with contextlib.suppress(OSError):  # unless it is closed
        os.dup2(2, 1)
    creator = socket.socket(fileno=descriptor)
    creator.set_inheritable(False)
    with contextlib.suppress(Exception):  # told by the manager that needs it
        importlib.import_module("ml_flashpoint.ddict.manager.manager")
    gc.collect()
    gc.freeze()  # a collection in a manager would copy all pages of what was imported here
    while True:
        data, descriptors, _, _ = socket.recv_fds(creator, 1, 1)
        if not data:
            os._exit(0)  # without tearing down what was imported for the managers
        pid, error = 0, os.strerror(errno.EMFILE)  # where none was left for this one
        if descriptors:
            with Connection(descriptors[0]) as control:
                pid, error = _fork(creator, control)
        with contextlib.suppress(OSError):
            creator.send(json.dumps([pid, error]).encode())


def _fork(creator: socket.socket, control: Connection) -> tuple[int, str]:
    """Fork a manager. In the process itself, this does not return."""
    try:
        with warnings.catch_warnings():
            # Threads that a library keeps for its computations are not seen by the managers and not needed by them.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError as error:
        return 0, str(error)
    if pid:
        return pid, ""
    code = 1
    try:
        creator.close()  # it would hide the end of the creator from others
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = _run(control)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


# ---- a manager ------------------------------------------------------------------------------------------------------


def _run(control: Connection) -> int:
    try:
        told = control.recv()
    except EOFError:
        return 1
    hold, stop, orphaned = None, threading.Event(), threading.Event()
    try:
        sys.path[:] = told["sys_path"]
        for name in [name for name in os.environ if name.startswith("FLASHPOINT_")]:
            del os.environ[name]
        os.environ.update(told["env"])
        with contextlib.suppress(OSError):
            os.chdir(told["cwd"])
        hold = FolderHold(Path(told["folder"]))
        watch = (control, stop, orphaned, hold)
        threading.Thread(target=_watch, args=watch, name="ddict-parent-watchdog", daemon=True).start()
        entry: Entry = pkgutil.resolve_name(told["entry"])
        entry(told["config"], lambda: control.send(READY), stop)
        return 0
    except BaseException as error:
        print(f"manager {told['config']['manager']} of a dictionary failed:", file=sys.stderr)
        traceback.print_exc()
        with contextlib.suppress(OSError):
            control.send(REQUESTS.describe(error))
        return 1
    finally:
        if hold is not None and orphaned.is_set():
            _leave(hold)


def run_manager(config: dict[str, Any], ready: Callable[[], None], stop: threading.Event) -> None:
    """Run a manager until told to stop; see `Entry`."""
    from ml_flashpoint.ddict.manager.manager import Manager  # not where only names of entries are needed

    with contextlib.closing(Manager(config)):
        ready()
        stop.wait()


def _watch(control: Connection, stop: threading.Event, orphaned: threading.Event, hold: FolderHold) -> None:
    with contextlib.suppress(OSError, EOFError):
        while control.recv():
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
