"""A manager's process: it serves until its creator tells it to stop, or is gone.

The creator and the manager have the two ends of a pipe, the *control*. The manager says who it is: a descriptor of its
process, and its id. Then it is told all that it needs to know, its ``config``, and the ``folder`` and ``cwd`` that it
is to have, and says that it is ready, or why it failed. Any other message tells it to stop.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path

from ml_flashpoint.ddict.errors import REQUESTS
from ml_flashpoint.ddict.runtime.folder import LAST_WORDS_S, FolderHold, remove_unused

END_GRACE_S = 10.0
"""Seconds that managers get to end by themselves when their creator is gone, or stops them."""

READY = "ready"


def main(*controls: int) -> None:
    """Fork a manager for each of these descriptors, and reap them. They outlive this process: Ray kills the children of
    an actor that ends, and the last manager is yet to remove the folder then."""
    importlib.import_module("ml_flashpoint.ddict.manager.manager")  # once for all
    gc.freeze()  # a collection in a manager would copy all pages of what was imported
    for control in controls:
        if not os.fork():
            for other in set(controls) - {control}:
                os.close(other)
            _begin(control)
    for control in controls:
        os.close(control)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)  # without tearing down what was imported for the managers


def _begin(control: int) -> None:
    """Run a manager, and end the process."""
    with contextlib.suppress(OSError):  # unless standard error is closed
        os.dup2(2, 1)
    code = 1
    try:
        code = _run(Connection(control))
    except (EOFError, ConnectionError):
        pass  # the creator is gone already
    except OSError:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _run(control: Connection) -> int:
    me = os.getpid()
    send_handle(control, os.pidfd_open(me), me)
    control.send(me)
    told = control.recv()
    hold, stop, orphaned = None, threading.Event(), threading.Event()
    try:
        with contextlib.suppress(OSError):
            os.chdir(told["cwd"])
        hold = FolderHold(Path(told["folder"]))
        watch = (control, stop, orphaned, hold)
        threading.Thread(target=_watch, args=watch, name="ddict-parent-watchdog", daemon=True).start()
        from ml_flashpoint.ddict.manager.manager import Manager  # the creator, which imports this module, needs none

        with contextlib.closing(Manager(told["config"])):
            control.send(READY)
            stop.wait()
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
