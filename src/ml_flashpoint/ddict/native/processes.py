"""Groups of processes.

Owns their start, the watch over them and their end: child processes on one machine, or actors where the program has a
Ray cluster (`ray`). What happens inside of each is `process`'s.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from typing import Any

from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError, ProcessFailedError
from ml_flashpoint.ddict.native.barrier import Barrier
from ml_flashpoint.ddict.native.process import ProcessTemplate, run_child, this_process
from ml_flashpoint.ddict.native.ray import RayMember, is_on_ray, start_on_ray
from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)

TERMINATION_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL when a group is ended."""

_REPORT_TIMEOUT_S = 1.0
_END_TIMEOUT_S = 30.0
_PRELOADED = ("numpy", "torch", "cloudpickle", "ml_flashpoint.ddict", "ml_flashpoint.ddict.native.process")

_numbers = itertools.count(1)


@dataclass(eq=False)
class _Member:
    puid: int
    template: ProcessTemplate
    process: _Child | RayMember | None = None
    exit_code: int | None = None
    error: str = ""
    dismissed: bool = False
    """Told to end by this group, so that its exit code says nothing."""
    signals: set[int] = field(default_factory=set)
    """Sent by this group, but for SIGTERM to end it: to end by one of them is no failure."""

    @property
    def runs(self) -> bool:
        return self.process is not None and self.exit_code is None

    def send(self, signal_number: int) -> bool:
        """Send a signal, if it was started; whether it still ran."""
        return self.process is not None and self.process.send(signal_number)

    @property
    def has_failed(self) -> bool:
        code = self.exit_code or 0
        if self.dismissed and code != -signal.SIGKILL:  # somebody else's kill had come before
            return False
        return code != 0 and -code not in self.signals

    @property
    def how(self) -> str:
        code = self.exit_code or 0
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class ProcessGroup:
    """Processes that are started together and waited for together. Thread-safe but for its start.

    When a member fails, barriers that are arguments of members break, and the other members are ended. Members never
    outlive the process that started them.

    Args:
        ignore_error_on_exit: whether members may fail: the others go on, and `join` raises nothing.
    """

    def __init__(self, *, ignore_error_on_exit: bool = False) -> None:
        self._ignore_errors = ignore_error_on_exit
        self._members: list[_Member] = []
        self._failed: list[_Member] = []
        self._changed = threading.Condition()
        self._is_init = self._is_started = False

    def add_process(self, nproc: int, template: ProcessTemplate) -> None:
        """Add members.

        Args:
            nproc: how many.
            template: what each runs.

        Raises:
            InvalidArgumentError: `nproc` is no positive number, or `template` none.
            DDictError: the group was started.
        """
        checked_integer("nproc", nproc, 1)
        if not isinstance(template, ProcessTemplate):
            raise InvalidArgumentError("must be a ProcessTemplate", argument="template", value=template)
        self._check_not_started()
        # Numbers unlike all others of this program, also of groups that a member starts.
        numbers = [(this_process.my_puid << 16) + next(_numbers) for _ in range(nproc)]
        self._members += [_Member(number, template) for number in numbers]

    def init(self) -> None:
        """Make ready to start, so that `start` is fast: the fork server imports what members need.

        Raises:
            InvalidArgumentError: the group has no members.
            DDictError: it was started.
        """
        self._check_not_started()
        if not self._members:
            raise InvalidArgumentError("has no processes", argument="ProcessGroup", value=self)
        self._is_init = True
        if not is_on_ray():
            _fork_server()

    def start(self) -> None:
        """Start all members. `init` is called if it was not.

        Raises:
            InvalidArgumentError: on Ray, a policy names a node that is not there; none runs then.
            DDictError: the group was started before, or a process cannot be started; none runs then.
        """
        if not self._is_init:
            self.init()
        self._check_not_started()
        self._is_started = True
        _started.add(self)
        try:
            for member, process in zip(self._members, _started_all(self._works()), strict=True):
                member.process = process
                threading.Thread(target=self._note_end, args=(member, process), name="ddict-group", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def join(self, timeout: float | None = None) -> None:
        """Wait until all members have ended.

        Args:
            timeout: seconds; by default without end.

        Raises:
            ProcessFailedError: a member failed; the others have been ended. It is raised once.
            DDictTimeoutError: some still run.
            DDictError: the group was not started.
        """
        if not self._is_started:
            raise DDictError("the group was not started")
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, timeout):
                puids = [member.puid for member in self._running]
                raise DDictTimeoutError(f"processes {puids} still run after {timeout} s")
            failed, self._failed = self._failed, []
        if failed:
            # Of those that have ended together, a signal is the cause, and an exit code may be its consequence.
            first = min(failed, key=lambda member: (member.exit_code or 0) >= 0)
            name = getattr(first.template.target, "__qualname__", "?")
            text = f":\n{first.error.strip()}" if first.error else ""
            message = f"a process of the group, in {name}, {first.how}{text}"
            raise ProcessFailedError(message, puid=first.puid, exit_code=first.exit_code)

    def kill(self, signal_number: int = 9) -> None:
        """Send a signal to all members that run, by default SIGKILL. Those that end by it do not count as failed."""
        for member in self._running:
            member.signals.add(signal_number)
            member.send(signal_number)

    def stop(self) -> None:
        """End all members that still run: SIGTERM, then SIGKILL. All have ended on return."""
        self._dismiss()
        with self._changed:
            self._changed.wait_for(lambda: not self._running, _END_TIMEOUT_S)

    def close(self) -> None:
        """Stop; the group cannot be started any more. Nothing happens the second time."""
        self._is_started = True
        self.stop()

    @property
    def puids(self) -> list[int]:
        """Numbers of the members that run, or are to be started."""
        return [member.puid for member in self._members if member.exit_code is None]

    @property
    def inactive_puids(self) -> list[tuple[int, int]]:
        """Number and exit code of the members that have ended, in the order of their numbers."""
        return [(member.puid, member.exit_code) for member in self._members if member.exit_code is not None]

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the members that run, by number."""
        return {member.puid: member.process.pid for member in self._running if member.process is not None}

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _running(self) -> list[_Member]:
        return [member for member in self._members if member.runs]

    def _check_not_started(self) -> None:
        if self._is_started:
            raise DDictError("the group was started before, or closed")

    def _works(self) -> list[tuple[int, ProcessTemplate, bytes]]:
        import cloudpickle

        pickled = {}
        for one in {id(member.template): member.template for member in self._members}.values():
            pickled[id(one)] = cloudpickle.dumps((one.target, tuple(one.args), dict(one.kwargs or {})))
        return [(member.puid, member.template, pickled[id(member.template)]) for member in self._members]

    def _note_end(self, member: _Member, process: _Child | RayMember) -> None:
        code, error = process.wait()
        with self._changed:
            member.exit_code, member.error = code, error
            failed = member.has_failed
            if failed and not self._ignore_errors:
                self._failed.append(member)
            self._changed.notify_all()
        if not failed:
            return
        # The end of the others first: it waits for nobody, and a barrier may be one that does not answer.
        if self._ignore_errors:
            _log.warning("process %d %s", member.puid, member.how)
        else:
            threading.Thread(target=self._dismiss, name="ddict-group-end", daemon=True).start()
        templates = [member.template for member in self._members]
        arguments = [each for one in templates for each in (*one.args, *(one.kwargs or {}).values())]
        for barrier in {each for each in arguments if isinstance(each, Barrier)}:
            with contextlib.suppress(DDictError):
                barrier.abort(f"process {member.puid} {member.how}")

    def _dismiss(self) -> None:
        """SIGTERM to all that run, SIGKILL to those who do not heed it."""
        with self._changed:
            running = self._running
            for member in running:
                member.dismissed = member.send(signal.SIGTERM) or member.dismissed
            self._changed.wait_for(lambda: not any(member.runs for member in running), TERMINATION_GRACE_S)
            for member in running:
                if member.runs:
                    member.signals.add(signal.SIGKILL)
                    member.send(signal.SIGKILL)


_started: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # What is imported there need not be imported again by each member: torch takes a second of a core. What this
    # program has not imported is no business of its members either.
    context.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    from multiprocessing import forkserver

    forkserver.ensure_running()
    return context


def _started_all(works: Sequence[tuple[int, ProcessTemplate, bytes]]) -> Iterable[_Child | RayMember]:
    """Their processes: all at once on Ray, else each when it is asked for."""
    if is_on_ray():
        return start_on_ray(works)
    context = _fork_server()
    return (_Child(context, *work) for work in works)


class _Child:
    """A member that is a child process."""

    def __init__(self, context: Any, puid: int, template: ProcessTemplate, work: bytes) -> None:
        env = {**os.environ, **(template.env or {})}
        if template.policy is not None and template.policy.gpu_affinity:
            env["CUDA_VISIBLE_DEVICES"] = _visible_devices(template.policy.gpu_affinity)
        self._report, remote = context.Pipe(duplex=False)
        with remote:
            args = (puid, env, template.cwd or os.getcwd(), remote, work)
            self._process = context.Process(target=run_child, args=args, name=f"puid-{puid}", daemon=False)
            self._process.start()
        # Its exit code can be read once: not by `active_children` or the start of another process, in other threads.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        self.pid: int = self._process.pid

    def send(self, signal_number: int) -> bool:
        """Send a signal; whether it still ran."""
        # The fork server reaps it only when it has ended, and the sentinel then says so at once.
        if wait_for([self._process.sentinel], 0):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal_number)
        return True

    def wait(self) -> tuple[int, str]:
        """Exit code, negative for the number of a signal, and text of the error, once it has ended. For one thread."""
        self._process.join()
        code: int = self._process.exitcode
        with self._report, contextlib.suppress(EOFError, OSError):
            if code and self._report.poll(_REPORT_TIMEOUT_S):
                return code, self._report.recv_bytes().decode()
        return code, ""


def _visible_devices(gpus: Sequence[int]) -> str:
    # The numbers count the devices that this process sees, which may be a choice itself.
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(seen[gpu] if gpu < len(seen) else str(gpu) for gpu in gpus)


def _dismiss_all() -> None:
    for group in list(_started):
        group._dismiss()


# Registered after multiprocessing's own, so it runs before: that one would wait for members without end.
atexit.register(_dismiss_all)
os.register_at_fork(after_in_child=_started.clear)
