"""Child processes whose output is read as it comes, and which can be killed with everything they started.

Owns single processes; who talks to whom is `tests.support.cluster`'s.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from tests.support import warm

REPOSITORY = Path(__file__).parents[2]
KILL_DEADLINE_S = 20.0
_LAST_LINES_S = 10.0


# What all ranks of a cluster have. Programs that have other variables that are read at import have other templates.
OF_RANKS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}


def child_environment(**more: str) -> dict[str, str]:
    """The environment of this process, for a child that imports `tests`; with ``more``."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def suspend(pid: int) -> None:
    """SIGSTOP; on return the process does nothing any more, or has ended."""
    os.kill(pid, signal.SIGSTOP)
    give_up = time.monotonic() + KILL_DEADLINE_S
    while not all(_is_still(task) for task in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < give_up, f"{pid} does not stop"
        time.sleep(0.001)  # the kernel tells only the parent


def _is_still(stat: Path) -> bool:
    try:
        state = stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "TtZX"


class CapturedProcess:
    """A child in a session of its own, with stdout and stderr collected together, line by line.

    `on_change` is called, from other threads, after every line and after the end. One that is not `cold` is forked by
    a template of `tests.support.warm`, which has imported the modules of `preload`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_change: Callable[[], None],
        *,
        cold: bool = True,
        preload: Sequence[str] = (),
    ) -> None:
        self._on_change = on_change
        self._lines: list[str] = []
        self.arrived: list[float] = []  # when each line came
        self.killed = False
        self.returncode: int | None = None
        self._process: subprocess.Popen[bytes] | warm.WarmProcess
        if cold or warm.ALL_COLD:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            self._process = warm.popen(argv, env, preload)
        self.pid = self._process.pid
        # A hung process is ended by SIGABRT, for the stacks that it then prints; its core is of no use.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (0, 0))
        self._reader = threading.Thread(target=self._read, name=f"read-{self.pid}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True)
        self._reader.start()
        self._waiter.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self.arrived.append(time.monotonic())
                self._lines.append(line.decode(errors="replace"))
                self._on_change()

    def _wait(self) -> None:
        returncode = self._process.wait()
        # A grandchild may hold the pipe open for longer than this process lives.
        self._reader.join(timeout=_LAST_LINES_S)
        self.returncode = returncode
        self._on_change()

    @property
    def lines(self) -> list[str]:
        """The lines so far, with their line ends."""
        return list(self._lines)

    @property
    def output(self) -> str:
        """The output so far."""
        return "".join(self._lines)

    @property
    def ended(self) -> bool:
        """Whether the process has ended and its output is complete."""
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.killed = True
        self._process.send_signal(number)

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the process and of its output; returns whether it came."""
        self._waiter.join(timeout_s)
        return self.ended


def marked_processes(**variables: str) -> list[psutil.Process]:
    """The live processes that were started with all these environment variables.

    Unlike a walk down the tree, this finds orphans too: the environment is inherited, parents are lost.
    """
    found = []
    for pid in psutil.pids():  # `process_iter` remembers processes, and would not kill a new one of an old number
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            environment = warm.environment_of(pid)
            if environment is None:
                environment = process.environ()
            if process.pid != os.getpid() and all(environment.get(k) == v for k, v in variables.items()):
                found.append(process)
    return found


def kill_marked(**variables: str) -> int:
    """Kills all that `marked_processes` finds, and whatever they start meanwhile; returns how many."""
    killed = 0
    deadline = time.monotonic() + KILL_DEADLINE_S
    while processes := marked_processes(**variables):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in processes:
            _await_death(process.pid, deadline)
        killed += len(processes)
    return killed


def _await_death(pid: int, deadline: float) -> None:
    # Not by psutil, which would reap a child of ours and so take its exit code from `CapturedProcess`.
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ending = select.poll()  # `select` takes no descriptor above 1,023, of which megatron-core's groups leave enough
        ending.register(descriptor, select.POLLIN)
        ready = ending.poll(1000 * max(0.0, deadline - time.monotonic()))
    finally:
        os.close(descriptor)
    if not ready:
        raise TimeoutError(f"process {pid} is alive {KILL_DEADLINE_S} s after SIGKILL")
