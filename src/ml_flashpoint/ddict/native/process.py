"""What runs in a process of a group, before and after the function that it is there for.

Owns the process's number, its environment, its end when its creator is gone, and the report of what went wrong.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for

PUID_VARIABLE = "FLASHPOINT_PUID"
_MOST_REPORT_CHARACTERS = 20_000


class ThisProcess:
    """What a process knows of itself."""

    @property
    def my_puid(self) -> int:
        """Number of this process, unlike that of any other process that the same program starts in groups.

        Outside of groups it is the process id.
        """
        said = os.environ.get(PUID_VARIABLE, "").split(":")
        # The environment is inherited, the number is not.
        return int(said[1]) if len(said) == 2 and said[0] == str(os.getpid()) else os.getpid()


this_process = ThisProcess()


def announce_puid(puid: int) -> None:
    """Make a number this process's own."""
    os.environ[PUID_VARIABLE] = f"{os.getpid()}:{puid}"


def prepare(puid: int, env: Mapping[str, str], cwd: str) -> None:
    """Take over number, environment and folder. Runs before the function is unpickled, and with it its imports."""
    os.environ.clear()
    os.environ.update(env)
    announce_puid(puid)
    os.chdir(cwd)
    # Ctrl-C is for the creator, which ends its groups.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads = env.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        _set_threads(int(threads))
    parent = multiprocessing.parent_process()
    if parent is not None:
        watchdog = threading.Thread(
            target=_end_with, args=(parent.sentinel,), name="ddict-parent-watchdog", daemon=True
        )
        # It takes no signal that the function's own threads block or wait for: any thread's default action ends all.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            watchdog.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _set_threads(count: int) -> None:
    # The variable is read when torch is imported, which may have been before this process was.
    if "torch" in sys.modules and count > 0:
        sys.modules["torch"].set_num_threads(count)


def _end_with(creator: int) -> None:
    wait_for([creator])
    os.kill(os.getpid(), signal.SIGKILL)


def run_member(puid: int, env: Mapping[str, str], cwd: str, report: Connection, work: bytes) -> None:
    """Run a member; the target of its process. ``puid``: its number. ``env``: all of its environment. ``cwd``: folder
    to run in. ``report``: gets the text of an error. ``work``: function, arguments and keyword arguments, by
    cloudpickle: functions of a script travel with the globals that they use."""
    try:
        prepare(puid, env, cwd)
        target, args, kwargs = pickle.loads(work)
        target(*args, **kwargs)
    except SystemExit:
        raise
    except BaseException:
        text = traceback.format_exc()
        with contextlib.suppress(OSError):
            report.send_bytes(text[-_MOST_REPORT_CHARACTERS:].encode(errors="replace"))
        raise
