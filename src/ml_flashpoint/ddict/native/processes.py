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
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError, ProcessFailedError
from ml_flashpoint.ddict.native.barrier import Barrier, barriers_in_pickles
from ml_flashpoint.ddict.native.process import run_member, this_process
from ml_flashpoint.ddict.native.ray import RayProcess, Start, is_on_ray, start_on_ray
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)

TERMINATION_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL when a group is ended."""

_REPORT_TIMEOUT_S = 1.0
_END_TIMEOUT_S = 30.0
_BARRIERS_S = 2.0
_PRELOADED = ("numpy", "torch", "cloudpickle", "ml_flashpoint.ddict", "ml_flashpoint.ddict.native.process")

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Policy:
    """Where a process runs.

    Attributes:
        gpu_affinity: CUDA devices that it sees; empty: all.
        node: number of the node; ``None``: any.
    """

    gpu_affinity: tuple[int, ...] = ()
    node: int | None = None


@dataclass(frozen=True)
class ProcessTemplate:
    """What to run in a process: a function and its arguments.

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


@dataclass(eq=False)
class _Member:
    puid: int
    template: ProcessTemplate
    process: Any = None
    report: Connection | None = None
    exit_code: int | None = None
    ended: bool = False
    dismissed: bool = False
    """Ended by this group, so that its exit code says nothing."""
    signals: set[int] = field(default_factory=set)
    """Sent by `ProcessGroup.kill`: to end by one of them is no failure."""

    @property
    def has_failed(self) -> bool:
        """Once it has ended: whether the group did not bring it about."""
        code = self.process.exitcode
        if self.dismissed or code == 0:
            return False
        # An actor is killed whatever the signal, and nobody says how it ended.
        return not self.signals if isinstance(self.process, RayProcess) else -code not in self.signals


class ProcessGroup:
    """Processes that are started together and waited for together. Thread-safe but for its start.

    When a member fails, barriers that the members were given break, and the other members are ended. Members never
    outlive the process that started them.

    Args:
        ignore_error_on_exit: whether members may fail: the others go on, and `join` raises nothing.
    """

    def __init__(self, *, ignore_error_on_exit: bool = False) -> None:
        self._ignore_errors = ignore_error_on_exit
        self._members: list[_Member] = []
        self._barriers: list[Barrier] = []
        self._failed: _Member | None = None
        self._failure_text = ""
        self._changed = threading.Condition()
        self._watch: threading.Thread | None = None
        self._is_init = self._closed = False

    def add_process(self, nproc: int, template: ProcessTemplate) -> None:
        """Add members.

        Args:
            nproc: how many.
            template: what each runs.

        Raises:
            InvalidArgumentError: `nproc` is no positive number, or `template` none.
            DDictError: the group was started.
        """
        if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
            raise InvalidArgumentError("must be a positive number of processes", argument="nproc", value=nproc)
        if not isinstance(template, ProcessTemplate):
            raise InvalidArgumentError("must be a ProcessTemplate", argument="template", value=template)
        self._check_not_started()
        self._members += [_Member(_next_puid(), template) for _ in range(nproc)]

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
        _running.add(self)
        try:
            works = [(member, work) for work, members in self._pickled_works() for member in members]
            if is_on_ray():
                _start_on_ray(works)
            else:
                context = _fork_server()
                for member, work in works:
                    _start_member(context, member, work)
        except BaseException:
            self.close()
            raise
        self._watch = threading.Thread(target=self._watch_over, name="ddict-group", daemon=True)
        self._watch.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until all members have ended.

        Args:
            timeout: seconds; by default without end.

        Raises:
            ProcessFailedError: a member failed; the others have been ended. It is raised once.
            DDictTimeoutError: some still run.
            DDictError: the group was not started.
        """
        if self._watch is None:
            raise DDictError("the group was not started")
        with self._changed:
            done = self._changed.wait_for(lambda: all(member.ended for member in self._members), timeout)
            failed, self._failed = (self._failed, None) if done else (None, self._failed)
            running = [member.puid for member in self._members if not member.ended]
        if not done:
            raise DDictTimeoutError(f"processes {running} still run after {timeout} s")
        if failed is not None:
            name = getattr(failed.template.target, "__qualname__", "?")
            text = f":\n{self._failure_text.strip()}" if self._failure_text else ""
            message = f"a process of the group, in {name}, {_how(failed.exit_code)}{text}"
            raise ProcessFailedError(message, puid=failed.puid, exit_code=failed.exit_code)

    def kill(self, signal_number: int = 9) -> None:
        """Send a signal to all members that run, by default SIGKILL. Those that end by it do not count as failed."""
        for member in self._members:
            if member.process is not None and not member.ended:
                member.signals.add(signal_number)
                _send(member, signal_number)

    def stop(self) -> None:
        """End all members that still run: SIGTERM, then SIGKILL. All have ended on return."""
        self._dismiss()
        if self._watch is not None:
            self._watch.join(_END_TIMEOUT_S)

    def close(self) -> None:
        """Stop, and let go of everything but what is known of the members. Nothing happens the second time."""
        self.stop()
        self._closed = True
        _running.discard(self)
        for member in self._members:
            if member.process is not None and self._watch is None:
                member.process.join()  # the start failed: nobody else reaps them
            if member.report is not None:
                member.report.close()
                member.report = None

    @property
    def puids(self) -> list[int]:
        """Numbers of the members that run, or are to be started."""
        return [member.puid for member in self._members if not member.ended]

    @property
    def inactive_puids(self) -> list[tuple[int, int]]:
        """Number and exit code of the members that have ended, in the order of their numbers."""
        members = self._members
        return [(member.puid, member.exit_code) for member in members if member.ended and member.exit_code is not None]

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the members that run, by number."""
        return {m.puid: m.process.pid for m in self._members if m.process is not None and not m.ended}

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_not_started(self) -> None:
        if self._watch is not None or self._closed:
            raise DDictError("the group was started before, or closed")

    def _pickled_works(self) -> list[tuple[bytes, list[_Member]]]:
        import cloudpickle

        works = []
        with barriers_in_pickles() as barriers:
            for _, same in itertools.groupby(self._members, key=lambda member: id(member.template)):
                members = list(same)
                template = members[0].template
                work = (template.target, tuple(template.args), dict(template.kwargs or {}))
                works.append((cloudpickle.dumps(work), members))
        self._barriers = barriers
        return works

    def _watch_over(self) -> None:
        """Note how members end, until all have."""
        running = {member.process.sentinel: member for member in self._members}
        while running:
            ended = [running.pop(sentinel) for sentinel in wait_for(list(running))]
            for member in ended:
                member.process.join()
            # Of those that have ended meanwhile, a signal is the cause, and an exit code may be its consequence.
            for member in sorted(ended, key=lambda member: member.process.exitcode >= 0):
                failed = member.has_failed
                text = _report_of(member) if failed else ""
                with self._changed:
                    member.exit_code, member.ended = member.process.exitcode, True
                    if failed and self._failed is None and not self._ignore_errors:
                        self._failed, self._failure_text = member, text
                    self._changed.notify_all()
                if failed:
                    self._heed_failure(member)
        _running.discard(self)

    def _heed_failure(self, member: _Member) -> None:
        # The end of the others first: it waits for nobody, and a barrier may be one that does not answer.
        if self._ignore_errors:
            _log.warning("process %d %s", member.puid, _how(member.exit_code))
        else:
            threading.Thread(target=self._dismiss, name="ddict-group-end", daemon=True).start()
        self._tell_barriers(f"process {member.puid} {_how(member.exit_code)}")

    def _tell_barriers(self, reason: str) -> None:
        def tell_all() -> None:
            for barrier in self._barriers:
                with contextlib.suppress(DDictError):
                    barrier.abort(reason)

        if self._barriers:
            telling = threading.Thread(target=tell_all, name="ddict-group-barriers", daemon=True)
            telling.start()
            telling.join(_BARRIERS_S)  # the ends of the other members are to be noted, too

    def _dismiss(self) -> None:
        """SIGTERM to all that run, SIGKILL to those who do not heed it; returns when all are known to have ended."""
        running = [member for member in self._members if member.process is not None and not member.ended]
        for member in running:
            member.dismissed = True
            _send(member, 15)
        give_up = time.monotonic() + TERMINATION_GRACE_S
        late = {member.process.sentinel: member for member in running}
        while late and (left := give_up - time.monotonic()) > 0:
            for sentinel in wait_for(list(late), left):
                late.pop(sentinel)
        for member in late.values():
            _send(member, 9)


_running: set[ProcessGroup] = set()


def _next_puid() -> int:
    # Unlike all others of this program, also of groups that a member starts.
    return (this_process.my_puid << 16) + next(_numbers)


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # What is imported there need not be imported again by each member: torch takes a second of a core. What this
    # program has not imported is no business of its members either.
    context.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    from multiprocessing import forkserver

    forkserver.ensure_running()
    return context


def _start_member(context: Any, member: _Member, work: bytes) -> None:
    template = member.template
    env = {**os.environ, **(template.env or {})}
    if template.policy is not None and template.policy.gpu_affinity:
        env["CUDA_VISIBLE_DEVICES"] = _visible_devices(template.policy.gpu_affinity)
    member.report, remote = context.Pipe(duplex=False)
    with remote:
        args = (member.puid, env, template.cwd or os.getcwd(), remote, work)
        process = context.Process(target=run_member, args=args, name=f"puid-{member.puid}", daemon=False)
        process.start()
        # Its exit code can be read once: not by `active_children` or the start of another process, in other threads.
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    member.process = process


def _start_on_ray(works: Sequence[tuple[_Member, bytes]]) -> None:
    ours = {name: value for name, value in os.environ.items() if name.startswith("FLASHPOINT_")}
    starts = []
    for member, work in works:
        template, policy = member.template, member.template.policy or Policy()
        env = {**ours, **(template.env or {})}
        starts.append(Start(member.puid, env, template.cwd, policy.node, len(policy.gpu_affinity), work))
    for (member, _), process in zip(works, start_on_ray(starts), strict=True):
        member.process = process


def _visible_devices(gpus: Sequence[int]) -> str:
    # The numbers count the devices that this process sees, which may be a choice itself.
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(seen[gpu] if gpu < len(seen) else str(gpu) for gpu in gpus)


def _send(member: _Member, signal_number: int) -> None:
    # The fork server reaps a member only when it has ended, and the sentinel then says so at once.
    if isinstance(member.process, RayProcess):
        member.process.kill()  # whatever the signal: an actor at work hears nothing else
    elif not wait_for([member.process.sentinel], 0):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.process.pid, signal_number)


def _report_of(member: _Member) -> str:
    if isinstance(member.process, RayProcess):
        return member.process.text
    assert member.report is not None
    try:
        return member.report.recv_bytes().decode() if member.report.poll(_REPORT_TIMEOUT_S) else ""
    except (EOFError, OSError):
        return ""


def _how(exit_code: int | None) -> str:
    code = exit_code or 0
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _dismiss_all() -> None:
    for group in list(_running):
        group._dismiss()


def _forget_all() -> None:
    _running.clear()


# Registered after multiprocessing's own, so it runs before: that one would wait for members without end.
atexit.register(_dismiss_all)
os.register_at_fork(after_in_child=_forget_all)
