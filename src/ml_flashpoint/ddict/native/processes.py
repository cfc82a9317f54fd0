"""The machines that a program runs on, and groups of processes: their start, the watch over them and their end.

Members are child processes on one machine, or actors where the program has a Ray cluster (`ray`).
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from typing import Any

from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError, ProcessFailedError
from ml_flashpoint.ddict.native.barrier import Barrier
from ml_flashpoint.ddict.native.process import Policy, ProcessTemplate, run_child, this_process
from ml_flashpoint.ddict.native.ray import (
    LOOPBACK,
    Node,
    RayMember,
    all_nodes,
    check_node,
    free_port_on,
    is_on_ray,
    start_on_ray,
)
from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)

TERMINATION_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL when a group is ended."""
RESTARTED_VARIABLE = "FLASHPOINT_RESTARTED"
"""Environment variable: 1 if whoever starts the program starts it again after a failure. torchrun's count of restarts
says the same."""

_REPORT_TIMEOUT_S = 1.0
_END_TIMEOUT_S = 30.0
_PRELOADED = ("numpy", "torch", "cloudpickle", "ml_flashpoint.ddict", "ml_flashpoint.ddict.native.process")

_numbers = itertools.count(1)


class _Child:
    """A member that is a child process."""

    def __init__(self, puid: int, template: ProcessTemplate, work: bytes) -> None:
        context = _fork_server()
        env = {**os.environ, **(template.env or {})}
        if template.policy is not None and template.policy.gpu_affinity:
            # The numbers count the devices that this process sees, which may be a choice itself.
            seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            its = (seen[gpu] if gpu < len(seen) else str(gpu) for gpu in template.policy.gpu_affinity)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(its)
        self._report, remote = context.Pipe(duplex=False)
        with remote:
            args = (puid, env, template.cwd or os.getcwd(), remote, work)
            self._process = context.Process(target=run_child, args=args, name=f"puid-{puid}", daemon=False)
            self._process.start()
        # Its exit code can be read once: not by `active_children` or the start of another process, in other threads.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        self.pid: int = self._process.pid

    def send(self, signal_number: int) -> bool:
        """Send a signal. Return True if it still ran."""
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


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # What is imported there need not be imported again by each member: torch takes a second of a core. What this
    # program has not imported is no business of its members either.
    context.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    from multiprocessing import forkserver

    forkserver.ensure_running()
    return context


@dataclass(eq=False)
class _Member:
    puid: int
    template: ProcessTemplate
    process: _Child | RayMember | None = None
    exit_code: int | None = None
    error: str = ""
    was_told: bool = False  # to end, by this group while it ran, so that its exit code says nothing

    @property
    def runs(self) -> bool:
        return self.process is not None and self.exit_code is None

    def send(self, signal_number: int) -> None:
        if self.process is not None and self.process.send(signal_number):
            self.was_told = True

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
        """Add so many members, which run ``template``. Raise `DDictError` if the group was started."""
        checked_integer("nproc", nproc, 1)
        if not isinstance(template, ProcessTemplate):
            raise InvalidArgumentError("must be a ProcessTemplate", argument="template", value=template)
        self._check_not_started()
        # Numbers unlike all others of this program, also of groups that a member starts.
        numbers = [(this_process.my_puid << 16) + next(_numbers) for _ in range(nproc)]
        self._members += [_Member(number, template) for number in numbers]

    def init(self) -> None:
        """Make ready to start, so that `start` is fast: the fork server imports what members need. Raise `DDictError`
        if the group was started."""
        self._check_not_started()
        if not self._members:
            raise InvalidArgumentError("has no processes", argument="ProcessGroup", value=self)
        self._is_init = True
        if not is_on_ray():
            _fork_server()

    def start(self) -> None:
        """Start all members. `init` is called if it was not. Raise `InvalidArgumentError` if a policy names a node that
        is not there, and `DDictError` if the group was started before, or a process cannot be started: none runs then.
        """
        if not self._is_init:
            self.init()
        self._check_not_started()
        self._is_started = True
        _started.add(self)
        try:
            for member, process in zip(self._members, self._processes(), strict=True):
                member.process = process
                threading.Thread(target=self._note_end, args=(member, process), name="ddict-group", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def join(self, timeout: float | None = None) -> None:
        """Wait until all members have ended, by default without end.

        Raises:
            ProcessFailedError: a member failed; the others have been ended. It is raised once.
            DDictTimeoutError: some still run.
            DDictError: the group was not started.
        """
        if not self._is_started:
            raise DDictError("the group was not started")
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, timeout):
                raise DDictTimeoutError(
                    f"processes {[each.puid for each in self._running]} still run after {timeout} s"
                )
            failed, self._failed = self._failed, []
        if failed:
            # Of those that have ended together, a signal is the cause, and an exit code may be its consequence.
            first = min(failed, key=lambda member: (member.exit_code or 0) >= 0)
            name = getattr(first.template.target, "__qualname__", "?")
            text = f":\n{first.error.strip()}" if first.error else ""
            message = f"a process of the group, in {name}, {first.how}{text}"
            raise ProcessFailedError(message, puid=first.puid, exit_code=first.exit_code)

    def kill(self, signal_number: int = 9) -> None:
        """Send a signal to all members that run, by default SIGKILL. However they end then, they have not failed."""
        for member in self._running:
            member.send(signal_number)

    def stop(self) -> None:
        """End all members that still run: SIGTERM, then SIGKILL. All have ended on return."""
        self._end()
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

    def _processes(self) -> Iterable[_Child | RayMember]:
        """Start all at once on Ray, else each when it is asked for."""
        import cloudpickle

        pickled = {}
        for one in {id(member.template): member.template for member in self._members}.values():
            pickled[id(one)] = cloudpickle.dumps((one.target, tuple(one.args), dict(one.kwargs or {})))
        works = [(member.puid, member.template, pickled[id(member.template)]) for member in self._members]
        return start_on_ray(works) if is_on_ray() else (_Child(*work) for work in works)

    def _note_end(self, member: _Member, process: _Child | RayMember) -> None:
        code, error = process.wait()
        with self._changed:
            member.exit_code, member.error = code, error
            failed = code != 0 and not member.was_told
            if failed and not self._ignore_errors:
                self._failed.append(member)
            self._changed.notify_all()
        if not failed:
            return
        # The end of the others first: it waits for nobody, and a barrier may be one that does not answer.
        if self._ignore_errors:
            _log.warning("process %d %s", member.puid, member.how)
        else:
            threading.Thread(target=self._end, name="ddict-group-end", daemon=True).start()
        templates = [member.template for member in self._members]
        arguments = [each for one in templates for each in (*one.args, *(one.kwargs or {}).values())]
        for barrier in {each for each in arguments if isinstance(each, Barrier)}:
            with contextlib.suppress(DDictError):
                barrier.abort(f"process {member.puid} {member.how}")

    def _end(self) -> None:
        """SIGTERM to all that run, SIGKILL to those who do not heed it."""
        with self._changed:
            running = self._running
            for member in running:
                member.send(signal.SIGTERM)
            self._changed.wait_for(lambda: not any(member.runs for member in running), TERMINATION_GRACE_S)
            for member in running:
                if member.runs:
                    member.send(signal.SIGKILL)


_started: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _end_all() -> None:
    for group in list(_started):
        group._end()


# Registered after multiprocessing's own, so it runs before: that one would wait for members without end.
atexit.register(_end_all)
os.register_at_fork(after_in_child=_started.clear)


class System:
    """The machines that the program runs on: ``nodes``, of which the first, ``primary_node``, is the one that it was
    started on, and their number, ``nnodes``. Raises `InvalidArgumentError` for an environment variable without a
    meaning."""

    def __init__(self) -> None:
        self.nodes: list[Node] = all_nodes(look_for_gpus=True)
        self.nnodes = len(self.nodes)
        self.primary_node = self.nodes[0]

    @property
    def restarted(self) -> bool:
        """True if the program was started again after a failure: `RESTARTED_VARIABLE`, or torchrun says so."""
        said = os.environ.get(RESTARTED_VARIABLE, "")
        if said not in ("", "0", "1"):
            raise InvalidArgumentError("must be 0 or 1", argument=RESTARTED_VARIABLE, value=said)
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return said == "1" or (count.isdigit() and int(count) > 0)

    def gpu_policies(self) -> list[Policy]:
        """A policy for each GPU, node by node: a process of its own, which sees that GPU only. Empty without GPUs."""
        return [Policy((gpu,), number) for number, node in enumerate(self.nodes) for gpu in range(node.num_gpus)]


class RankInfo:
    """The place of a process in a `CollectiveGroup`, or among those that torchrun started.

    Attributes:
        my_rank: from 0, below `world_size`.
        my_local_rank: from 0, on its node.
        my_local_world_size: ranks on its node.
        my_node_rank: number of its node.
        world_size: number of ranks.
        master_addr: where rank 0 can be reached.
        master_port: port there.
    """

    def __init__(self) -> None:
        self.my_rank = _told("RANK")
        self.my_local_rank = _told("LOCAL_RANK")
        self.my_local_world_size = _told("LOCAL_WORLD_SIZE")
        self.my_node_rank = _told("GROUP_RANK")
        self.world_size = _told("WORLD_SIZE")
        self.master_addr = os.environ.get("MASTER_ADDR", LOOPBACK)
        self.master_port = _told("MASTER_PORT")


def _told(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError) as error:
        raise DDictError(
            f"this process has no rank: {name} is not set", hint="start it by a CollectiveGroup, or torchrun"
        ) from error


class CollectiveGroup(ProcessGroup):
    """Processes, one a policy, each with the environment that `torch.distributed` expects.

    Set are RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; CUDA_VISIBLE_DEVICES
    where a policy names devices; and, unless they are set already, OMP_NUM_THREADS, so that all ranks together have as
    many threads as there are cores, and GLOO_SOCKET_IFNAME, if all ranks are on this machine.

    Args:
        training_fn: function that every rank runs; see `ProcessTemplate`.
        training_args: its arguments.
        training_kwargs: its keyword arguments.
        policies: one for each rank.
        port: MASTER_PORT; by default one that is free.
    """

    def __init__(
        self,
        training_fn: Callable[..., object],
        training_args: Sequence[Any] = (),
        training_kwargs: Mapping[str, Any] | None = None,
        policies: Sequence[Policy] = (),
        port: int | None = None,
    ) -> None:
        if not policies or not all(isinstance(policy, Policy) for policy in policies):
            raise InvalidArgumentError("must be a policy for each rank", argument="policies", value=policies)
        super().__init__()
        self._work = ProcessTemplate(training_fn, tuple(training_args), training_kwargs)
        self._policies = list(policies)
        self._port = port

    def init(self) -> None:
        """Make ready to start: who runs where, and the port, are settled now. Raise `InvalidArgumentError` if a policy
        names a node that is not there, and `DDictError` if this was called before."""
        if self._is_init:
            raise DDictError("the group was made ready before")
        for template in _templates(self._work, self._policies, self._port):
            self.add_process(1, template)
        super().init()


def _templates(work: ProcessTemplate, policies: Sequence[Policy], port: int | None) -> list[ProcessTemplate]:
    size, nodes = len(policies), all_nodes()
    # Without a word about nodes, they are filled one after the other.
    where = [rank * len(nodes) // size if its.node is None else its.node for rank, its in enumerate(policies)]
    for node in where:
        check_node(node, len(nodes))
    port = free_port_on(where[0]) if port is None else port
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": nodes[where[0]].address, "MASTER_PORT": str(port)}
    if len({node.address for node in nodes}) == 1:
        common["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    on_node = collections.Counter(where)
    templates = []
    for rank, (policy, node) in enumerate(zip(policies, where, strict=True)):
        threads = max(1, nodes[node].num_cpus // on_node[node])
        env = {
            **common,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "RANK": str(rank),
            "LOCAL_RANK": str(where[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(on_node[node]),
            "GROUP_RANK": str(node),
        }
        here = Policy(policy.gpu_affinity, node)
        templates.append(ProcessTemplate(work.target, work.args, work.kwargs, env=env, policy=here))
    return templates
