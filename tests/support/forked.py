"""Child processes that start in milliseconds, to be killed by the hundred.

Owns a fork server that has imported everything once, and its children: what they report, how they end, and
what they log. What a child does is a function of a module in tests/workers. Clusters of real launchers are
`tests.support.cluster`'s.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from ml_flashpoint.format.errors import FlashpointError
from tests.support.processes import suspend

DEADLINE_S = 60.0

_PRELOADED = [
    "ml_flashpoint.engine.checkpointer",
    "ml_flashpoint.adapter.pytorch.memory_storage_reader",
    "ml_flashpoint.adapter.pytorch.memory_storage_writer",
    "torch.distributed.checkpoint",
    "torch.utils.serialization.config",
    "numpy.random",
    "ml_flashpoint.flashpoint",
    "tests.support.forked",
]
_QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class ChildError(AssertionError):
    """A child did not do what the test waits for. The message holds what it logged."""


_context: Any = None


def preload(module: str) -> None:
    """Have a module imported in the fork server too; to be called when tests are collected, before it starts."""
    _PRELOADED.append(module)


def _fork_server() -> Any:
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(_PRELOADED)
        # The server inherits its environment from whoever starts it first, and its children from it.
        before = {name: os.environ.get(name) for name in _QUIET}
        os.environ.update(_QUIET)
        try:
            _start(_context)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return _context


def _start(context: Any) -> None:
    first = context.Process(target=_nothing)
    first.start()
    first.join()


def _nothing() -> None: ...


class Child:
    """A process that runs ``function(report, *args)``; ``report(*values)`` sends values to the test, and
    ``report.listen()`` waits for what the test says with :meth:`say`.

    Args:
        function: of a module that can be imported.
        env: more environment, in place before anything else runs.
        label: for the messages of errors.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *args: Any,
        env: Mapping[str, str] | None = None,
        label: str = "",
    ) -> None:
        self.label = label or getattr(function, "__name__", str(function))
        self.reports: list[tuple[Any, ...]] = []
        descriptor, name = tempfile.mkstemp(prefix="mlf-child-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        self._pipe, remote = multiprocessing.Pipe()
        context = _fork_server()
        self._process = context.Process(target=_run, args=(remote, name, dict(env or {}), function, args))
        self._process.start()
        # Its exit code can be read once: not by whatever else starts processes, in another thread.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        remote.close()
        self.pid: int = self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._pipe.close()
        self._log.unlink(missing_ok=True)

    @property
    def log(self) -> str:
        """What the child and its own children have written to stdout and stderr."""
        return self._log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return bool(self._process.is_alive())

    def kill(self) -> None:
        """SIGKILL, with all that it started; it is dead on return. Nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(DEADLINE_S)
        self.look()

    def stop(self) -> None:
        """SIGSTOP: it hangs, with its sockets open."""
        suspend(self.pid)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def look(self) -> None:
        """Have in ``reports`` what it has said until now; nothing of it is taken."""
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll():
                self.reports.append(self._pipe.recv())

    def say(self, *values: Any) -> None:
        """Send values to the child."""
        self._pipe.send(values)

    def next_report(self, *wanted: Any, timeout_s: float = DEADLINE_S) -> tuple[Any, ...]:
        """Wait for a report that begins with these values, among those not yet asked for."""
        give_up = time.monotonic() + timeout_s
        seen = 0
        while True:
            while seen < len(self.reports):
                if self.reports[seen][: len(wanted)] == wanted:
                    found = self.reports[seen]
                    self.reports = self.reports[seen + 1 :]
                    return found
                seen += 1
            left = give_up - time.monotonic()
            try:
                if left <= 0 or not self._pipe.poll(left):
                    raise self.failure(f"no report {wanted} within {timeout_s} s")
                self.reports.append(self._pipe.recv())
            except (EOFError, OSError):
                self._process.join(DEADLINE_S)
                raise self.failure(f"it ended with {self._process.exitcode} before it reported {wanted}") from None

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        """What the function returned, once the child has ended well."""
        (_, value) = self.next_report("result", timeout_s=timeout_s)
        self.join(timeout_s)
        return value

    def join(self, timeout_s: float = DEADLINE_S) -> None:
        """Wait for it to end well."""
        self._process.join(timeout_s)
        if self._process.exitcode != 0:
            state = "did not end" if self._process.exitcode is None else f"ended with {self._process.exitcode}"
            raise self.failure(f"it {state} within {timeout_s} s")
        self.look()

    def wait(self, timeout_s: float = DEADLINE_S) -> int | None:
        """Wait for it to end somehow; the exit code, negative for signals, None if it goes on."""
        self._process.join(timeout_s)
        self.look()
        code: int | None = self._process.exitcode
        return code

    def failure(self, message: str) -> ChildError:
        """An error with the child's log, and its stacks if it still runs."""
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
                os.kill(self.pid, signal.SIGABRT)
            self._process.join(5)
        return ChildError(f"{self.label} (pid {self.pid}): {message}\nreports: {self.reports}\n{self.log[-6000:]}")


def call(function: Callable[..., object], *args: Any, env: Mapping[str, str] | None = None) -> Any:
    """What a function returns in a fresh process."""
    with Child(function, *args, env=env) as child:
        return child.result()


def said(call: Callable[[], Any]) -> Any:
    """What a call returns, or the type and the text of its error."""
    try:
        return call()
    except FlashpointError as error:
        return f"{type(error).__name__}: {error}"


def _run(
    pipe: Connection,
    log: str,
    env: Mapping[str, str],
    function: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    os.setpgid(0, 0)
    gc.freeze()  # what the server has imported need not be looked through again in every child
    with open(log, "ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.enable(sys.stderr)
    os.environ.update(env)
    import logging

    import numpy

    numpy.random.seed()  # the server's was seeded once, for all

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True)
    report = Report(pipe)
    report("result", function(report, *args))


class Report:
    """A child's line to the test. Thread-safe but for ``listen``."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def __call__(self, *values: Any) -> None:
        with self._lock:
            self._pipe.send(values)

    def listen(self) -> tuple[Any, ...]:
        """What the test says next."""
        said: tuple[Any, ...] = self._pipe.recv()
        return said


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Ask again and again, every millisecond, until a condition holds."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise ChildError(f"not within {timeout_s} s: {what}")
        select.select([], [], [], 0.001)


class Team:
    """Ranks of one job, each on a node of its own, in children of the fork server.

    Args:
        function: called as ``function(report, rank, *args)`` once the ranks have a gloo process group.
        root: folder of the job; node ``i`` owns ``root/node-i``.
        args: arguments of all ranks, or a function from the rank to its arguments.
        placement: node of each rank; by default rank ``i`` runs on node ``i``.
    """

    def __init__(
        self,
        function: Callable[..., object],
        root: Path,
        world_size: int,
        *args: Any,
        args_of: Callable[[int], tuple[Any, ...]] | None = None,
        placement: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.placement = tuple(range(world_size) if placement is None else placement)
        self._meeting = Path(tempfile.mkdtemp(prefix="mlf-team-"))
        self.ranks: list[Child] = []
        for rank, node in enumerate(self.placement):
            folder = root / f"node-{node}"
            folder.mkdir(parents=True, exist_ok=True)
            mine = {"FLASHPOINT_NODE_ID": f"node-{node}", "FLASHPOINT_TEST_BASE": str(folder / "job"), **(env or {})}
            own_args = args_of(rank) if args_of is not None else args
            self.ranks.append(
                Child(
                    _join,
                    function,
                    rank,
                    world_size,
                    str(self._meeting / "store"),
                    own_args,
                    env=mine,
                    label=f"rank {rank}",
                )
            )

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        for child in self.ranks:
            child.__exit__(None, None, None)
        shutil.rmtree(self._meeting, ignore_errors=True)

    def __getitem__(self, rank: int) -> Child:
        return self.ranks[rank]

    def results(self, timeout_s: float = DEADLINE_S) -> list[Any]:
        """What the function returned on each rank."""
        try:
            return [child.result(timeout_s) for child in self.ranks]
        except ChildError as error:
            others = [f"--- {child.label}\n{child.log[-3000:]}" for child in self.ranks]
            raise ChildError("\n".join([str(error), *others])) from None


def call_team(
    function: Callable[..., object],
    root: Path,
    world_size: int,
    *args: Any,
    placement: Sequence[int] | None = None,
    timeout_s: float = DEADLINE_S,
) -> list[Any]:
    """What a function returns on each of some ranks in fresh processes."""
    with Team(function, root, world_size, *args, placement=placement) as team:
        return team.results(timeout_s)


def _join(
    report: Callable[..., None],
    function: Callable[..., object],
    rank: int,
    world_size: int,
    meeting: str,
    args: tuple[Any, ...],
) -> object:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size, timeout=timedelta(seconds=DEADLINE_S)
    )
    result = function(report, rank, *args)
    dist.destroy_process_group()
    return result
