"""The work of one process of a group: its function, number and environment, and its end with its creator."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from ml_flashpoint.format.errors import InvalidArgumentError

PUID_VARIABLE = "FLASHPOINT_PUID"
_MOST_REPORT_CHARACTERS = 10_000  # which fit into a pipe: nobody reads it before the end of the process


@dataclass(frozen=True)
class Policy:
    """The place that a process runs at.

    Attributes:
        gpu_affinity: CUDA devices that it sees; empty: all.
        node: number of the node; ``None``: any.
    """

    gpu_affinity: tuple[int, ...] = ()
    node: int | None = None


@dataclass(frozen=True)
class ProcessTemplate:
    """A function to run in a process, and its arguments.

    They travel by cloudpickle, so a function of the running script will do, with the globals that it uses; the script
    must still be guarded by ``if __name__ == "__main__"``. `DDict` handles and `Barrier`s may be arguments; queues and
    locks of `multiprocessing` may not.

    Args:
        target: function.
        args: positional arguments.
        kwargs: keyword arguments.
        cwd: folder to run in; by default the current one.
        env: more environment.
        policy: where to run.

    Raises:
        InvalidArgumentError: `target` cannot be called.
    """

    target: Callable[..., object]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    policy: Policy | None = None

    def __post_init__(self) -> None:
        if not callable(self.target):
            raise InvalidArgumentError("must be a function", argument="target", value=self.target)


class ThisProcess:
    """The process's own account of itself."""

    @property
    def my_puid(self) -> int:
        """Number of this process, unlike that of any other process that the same program starts in groups."""
        pid, _, puid = os.environ.get(PUID_VARIABLE, "").partition(":")
        return int(puid) if pid == str(os.getpid()) else os.getpid()  # children inherit the environment, not the number


this_process = ThisProcess()


def run_work(puid: int, env: Mapping[str, str], cwd: str | None, work: bytes) -> tuple[int, str]:
    """Run what a member of a group is there for. Return its exit code, and the text of its error."""
    try:
        # Before the function is unpickled, and with it its imports.
        os.environ.update(env)
        os.environ[PUID_VARIABLE] = f"{os.getpid()}:{puid}"
        if cwd is not None:
            os.chdir(cwd)
        # Its creator's own, which came as this process's arguments do, by multiprocessing or Ray: as trusted as code.
        target, args, kwargs = pickle.loads(work)
        target(*args, **kwargs)
        return 0, ""
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0, ""
        error = str(end.code)
    except BaseException:
        error = traceback.format_exc()
    print(error, file=sys.stderr, flush=True)
    return 1, error[-_MOST_REPORT_CHARACTERS:]


def run_child(puid: int, env: Mapping[str, str], cwd: str, report: Connection, work: bytes) -> None:
    """Run a member that is a child process. ``env``: all of its environment. ``report``: gets the text of an error."""
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the creator, which ends its groups
    threads = env.get("OMP_NUM_THREADS", "")
    # The variable is read when torch is imported, which may have been before this process was.
    if "torch" in sys.modules and threads.isdigit() and int(threads):
        sys.modules["torch"].set_num_threads(int(threads))
    # The watchdog takes no signal that the function's threads wait for: any thread's default action ends all.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=_end_with_creator, name="ddict-parent-watchdog", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code, error = run_work(puid, env, cwd, work)
    if error:
        with report:
            report.send_bytes(error.encode(errors="replace"))
    if code:  # else it returns: what ends by an exception has failed, and what it wrote last does not count
        sys.exit(code)


def _end_with_creator() -> None:
    creator = multiprocessing.parent_process()
    assert creator is not None
    wait_for([creator.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
