"""Plays a cluster on one machine: several nodes, each with its folder in memory, and the ranks on them.

Owns starting, watching and killing; what a rank does is a script in tests/workers, and folders are the
fixtures'. Ranks are plain processes by default, which start fast and stay dead when killed; with
`torchrun=True` each node gets a real elastic agent, which starts its ranks again. Usage:

    with Cluster(tmpfs, "train", nodes=2, ranks_per_node=2, args=["--steps", "5"]) as cluster:
        cluster.wait_for_report(rank=3, step=2)
        cluster.kill_node(1)
        cluster.start_node(1)
        cluster.wait(timeout_s=60)
        assert cluster.reports(0)[-1]["loss"] < 1
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.support import warm
from tests.support.processes import OF_RANKS, REPOSITORY, CapturedProcess, kill_marked, marked_processes
from tests.support.tmpfs import remove_folder
from tests.support.worker import REPORT_PREFIX

WORKERS = REPOSITORY / "tests" / "workers"
DEFAULT_TIMEOUT_S = 60.0

_HOST = "127.0.0.1"
_NOT_EPHEMERAL = range(20_000, 32_768)  # net.ipv4.ip_local_port_range begins there, unless somebody has changed it
_MARK = "FLASHPOINT_TEST_CLUSTER"
_RANK_PREFIX = re.compile(r"\[rank(\d+)\]:")
_SHOWN_CHARACTERS = 8_000
_STACKS_DEADLINE_S = 5.0
_PEERS_DEADLINE_S = 5.0
# A dead agent is noticed in 5 s, not in torch's 15; with 2 s, one that had no core for a moment counted as dead.
_RENDEZVOUS = {
    "is_host": "0",
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "5",
    "join_timeout": "60",
    "last_call_timeout": "1",
}
# Left by a launcher that the tests themselves may run under.
_INHERITED = re.compile(
    r"(TORCHELASTIC|FLASHPOINT)_(?!TEST_BLOCK_BYTES$)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$"
)

_T = TypeVar("_T")


class ClusterError(AssertionError):
    """A cluster did not do what the test waits for. The message holds the output of every rank."""


def contiguous(world_size: int, nodes: int) -> tuple[int, ...]:
    """The node of each rank when ranks fill one node after the other, as evenly as possible."""
    return tuple(rank * nodes // world_size for rank in range(world_size))


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, and that the kernel gives nobody who asks for any:
    whoever it is for binds it later, and gloo's groups of other jobs would have it by then."""
    for port in random.SystemRandom().sample(_NOT_EPHEMERAL, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port
    raise OSError("there is no free port")


def _agrees(report: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(name in report and report[name] == value for name, value in values.items())


def _named(rank: int | None) -> str:
    return "any rank" if rank is None else f"rank {rank}"


class Cluster:
    """Nodes and ranks on this machine, started by `start()` or by entering the context.

    Args:
        root: Folder of this cluster, best from the `tmpfs` fixture. Node `i` owns `root/node-i`. A second
            cluster on the same root is the same machines after a restart.
        worker: Name of a script in tests/workers without its suffix, or the path of any script.
        nodes: How many nodes to play.
        ranks_per_node: Ranks on each.
        placement: The node of each rank, in place of the two above, for ranks that are not contiguous on
            nodes or nodes of unequal size. With torchrun, ranks are the launcher's to give out: only how
            many there are on each node is heeded.
        args: Arguments of the script.
        env: More environment for every rank.
        torchrun: Whether each node runs a torchrun agent.
        max_restarts: How often the agents start their ranks again when one of them fails.
        cold: Whether every process starts as a user starts it, which takes seconds of imports. Otherwise a template
            forks them; see `tests.support.warm` for what is different then.
        preload: Modules that the template imports, for its programs to start fast.

    Every rank finds in its environment what torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT), FLASHPOINT_NODE_ID (`node-<i>`) and FLASHPOINT_TEST_BASE (`base_of(i)`).
    """

    def __init__(
        self,
        root: Path,
        worker: str | Path,
        *,
        nodes: int = 1,
        ranks_per_node: int = 1,
        placement: Sequence[int] | None = None,
        args: Sequence[object] = (),
        env: Mapping[str, str] | None = None,
        torchrun: bool = False,
        max_restarts: int = 0,
        cold: bool = False,
        preload: Sequence[str] = (),
    ) -> None:
        self.root = Path(root)
        self.placement = contiguous(nodes * ranks_per_node, nodes) if placement is None else tuple(placement)
        self.world_size = len(self.placement)
        self.nodes = tuple(sorted(set(self.placement)))
        self._script = WORKERS / f"{worker}.py" if isinstance(worker, str) else Path(worker)
        if not self._script.is_file():
            raise FileNotFoundError(self._script)
        self._args = [str(argument) for argument in args]
        self._env = dict(env or {})
        self._torchrun = torchrun
        self._max_restarts = max_restarts
        self._cold = cold
        self._preload = tuple(preload)
        self._mark = uuid.uuid4().hex
        self._port = 0
        self._store: Any = None
        self._changed = threading.Condition()
        # One entry a process that was ever started: (node, rank, process); rank is None for an agent.
        self._started: list[tuple[int, int | None, CapturedProcess]] = []

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- folders ---------------------------------------------------------------------------------------------

    def node_folder(self, node: int) -> Path:
        """All that node `node` has in memory."""
        return self.root / f"node-{node}"

    def base_of(self, node: int) -> Path:
        """The base container of the job on node `node`."""
        return self.node_folder(node) / "job"

    # -- starting --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all nodes."""
        if self._torchrun:
            # The rendezvous lives here, so that every node may be killed, the first one included.
            from torch.distributed import TCPStore

            self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
            self._port = self._store.port
        else:
            self._port = free_port()
        for node in self.nodes:
            self.start_node(node)

    def start_node(self, node: int) -> None:
        """Starts the ranks of a node, or its agent; after `kill_node`, that is a new machine in its place."""
        self.node_folder(node).mkdir(parents=True, exist_ok=True)
        ranks = [rank for rank, where in enumerate(self.placement) if where == node]
        if self._torchrun:
            self._launch(node, None, self._agent_argv(len(ranks)), self._node_env(node))
            return
        for local_rank, rank in enumerate(ranks):
            env = self._node_env(node) | {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(len(ranks)),
                "MASTER_ADDR": _HOST,
                "MASTER_PORT": str(self._port),
            }
            self._launch(node, rank, [sys.executable, str(self._script), *self._args], env)

    def _launch(self, node: int, rank: int | None, argv: Sequence[str], env: Mapping[str, str]) -> None:
        process = CapturedProcess(argv, env, self._notify, cold=self._cold, preload=self._preload)
        self._started.append((node, rank, process))

    def _node_env(self, node: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not _INHERITED.match(name)}
        return {
            "GLOO_SOCKET_IFNAME": "lo",
            **inherited,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), inherited.get("PYTHONPATH")])),
            **OF_RANKS,
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]:",
            # torch 2.13 keeps one store over all restarts of ranks, with the addresses of dead ones in it.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "FLASHPOINT_NODE_ID": f"node-{node}",
            "FLASHPOINT_TEST_BASE": str(self.base_of(node)),
            _MARK: self._mark,
            **self._env,
        }

    def _agent_argv(self, ranks: int) -> list[str]:
        options = {
            "nnodes": len(self.nodes),
            "nproc-per-node": ranks,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{_HOST}:{self._port}",
            "rdzv-id": self._mark,
            "rdzv-conf": ",".join(f"{name}={value}" for name, value in _RENDEZVOUS.items()),
            "local-addr": _HOST,
            "max-restarts": self._max_restarts,
            "monitor-interval": 0.1,
            # Through files and back, so that lines are whole and say whose they are.
            "tee": 3,
            "log-dir": self.root / "logs",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "torch.distributed.run", *flags, str(self._script), *self._args]

    # -- watching --------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _await(self, ready: Callable[[], _T | None], what: str, timeout_s: float) -> _T:
        found: list[_T] = []

        def look() -> bool:
            result = ready()
            if result is not None:
                found.append(result)
            return bool(found)

        with self._changed:
            self._changed.wait_for(look, timeout_s)
        if not found:
            self._make_ranks_show_stacks()
            raise self._error(f"no {what} within {timeout_s} s")
        return found[0]

    def wait(self, timeout_s: float = DEFAULT_TIMEOUT_S, *, check: bool = True) -> list[int | None]:
        """Waits for every process to end, and returns the exit codes in the order of starting.

        Processes are ranks, or agents with torchrun. Raises `ClusterError` with all output on a timeout and,
        if `check`, soon after one fails, unless this object killed it.
        """

        def is_over() -> bool | None:
            ended = all(process.ended for _, _, process in self._started)
            return ended or (check and bool(self._failed())) or None

        self._await(is_over, "end of all processes", timeout_s)
        if check and self._failed():
            # Peers of the failed rank mostly fail too, a moment later; their last words help.
            self._join_all(_PEERS_DEADLINE_S)
            raise self._error(", ".join(f"{name} failed with {code}" for name, code in self._failed()))
        return [process.returncode for _, _, process in self._started]

    def wait_for_output(
        self, pattern: str, *, rank: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> re.Match[str]:
        """Waits until the output of a rank, or of any, matches a regular expression somewhere."""
        compiled = re.compile(pattern, re.MULTILINE)

        def matched() -> re.Match[str] | None:
            found = (compiled.search(text) for r, text in self.outputs().items() if rank in (None, r))
            return self._found_or_failed(next(filter(None, found), None))

        return self._await(matched, f"output {pattern!r} of rank {'any' if rank is None else rank}", timeout_s)

    def wait_for_report(
        self, *, rank: int | None = None, nth: int = 1, timeout_s: float = DEFAULT_TIMEOUT_S, **values: Any
    ) -> dict[str, Any]:
        """Waits until a rank, or any, has reported at least these values `nth` times; returns that report."""

        def reported() -> dict[str, Any] | None:
            ranks = range(self.world_size) if rank is None else [rank]
            every = (report for r in ranks for report in self.reports(r))
            fitting = [report for report in every if _agrees(report, values)]
            return self._found_or_failed(fitting[nth - 1] if len(fitting) >= nth else None)

        return self._await(reported, f"report {values} of {_named(rank)}", timeout_s)

    def _found_or_failed(self, found: _T | None) -> _T | None:
        if found is None and self._started and all(process.ended for _, _, process in self._started):
            raise self._error("all processes have ended, and what the test waits for did not come")
        return found

    def outputs(self) -> dict[int, str]:
        """All that each rank has written so far, stdout and stderr together, over all its restarts."""
        outputs = dict.fromkeys(range(self.world_size), "")
        agents: list[tuple[float, str]] = []
        for _, rank, process in self._started:
            if rank is not None:
                outputs[rank] += process.output
            else:
                agents += zip(process.arrived, process.lines, strict=False)  # while more come
        # In the order in which they came: torchrun gives a node that comes back other ranks than it had.
        for _, line in sorted(agents, key=lambda each: each[0]):
            if (prefix := _RANK_PREFIX.match(line)) is not None:
                outputs[int(prefix[1])] += line[prefix.end() :]
        return outputs

    def reports(self, rank: int) -> list[dict[str, Any]]:
        """What `tests.support.worker.report` was given in a rank so far."""
        lines = self.outputs()[rank].splitlines()
        return [json.loads(line[len(REPORT_PREFIX) :]) for line in lines if line.startswith(REPORT_PREFIX)]

    def agent_output(self, node: int) -> str:
        """What the agents of a node have written themselves; empty without torchrun."""
        agents = (process for where, rank, process in self._started if where == node and rank is None)
        return "".join(line for agent in agents for line in agent.lines if not _RANK_PREFIX.match(line))

    def _failed(self) -> list[tuple[str, int]]:
        return [
            (f"the agent of node {node}" if rank is None else _named(rank), process.returncode)
            for node, rank, process in self._started
            if process.returncode and not process.killed
        ]

    def _error(self, message: str) -> ClusterError:
        texts = {f"rank {rank}": text for rank, text in self.outputs().items()}
        if self._torchrun:
            texts |= {f"agent of node {node}": self.agent_output(node) for node in self.nodes}
        shown = [f"--- {name} ---\n{text[-_SHOWN_CHARACTERS:]}" for name, text in texts.items()]
        return ClusterError("\n".join([message, *shown]))

    def processes(self) -> list[psutil.Process]:
        """All that runs on all nodes, whatever it was started by."""
        return marked_processes(**{_MARK: self._mark})

    # -- killing ---------------------------------------------------------------------------------------------

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> int:
        """Sends a signal to the process of a rank, not to its children, and returns its process id."""
        if not self._torchrun:
            process = next(p for _, r, p in reversed(self._started) if r == rank)
            process.send_signal(number)
            return process.pid
        parents = {process.pid for _, _, process in self._started} | warm.pids()
        for process in marked_processes(RANK=str(rank), **{_MARK: self._mark}):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() in parents:
                    process.send_signal(number)
                    return process.pid
        raise self._error(f"rank {rank} does not run")

    def kill_node(self, node: int, *, delete_folder: bool = True) -> None:
        """Makes a node vanish: SIGKILL to every process on it, then its memory is gone.

        All of them are dead on return, whatever they had started included.
        """
        lost = [process for where, _, process in self._started if where == node and not process.ended]
        for process in lost:
            process.killed = True
        kill_marked(FLASHPOINT_NODE_ID=f"node-{node}", **{_MARK: self._mark})
        for process in lost:
            process.join(_PEERS_DEADLINE_S)
        if delete_folder:
            remove_folder(self.node_folder(node))

    def close(self) -> None:
        """Kills whatever is left of all nodes. Folders stay, for the next cluster on them or the fixture."""
        for _, _, process in self._started:
            process.killed = process.killed or not process.ended
        kill_marked(**{_MARK: self._mark})
        self._join_all(_PEERS_DEADLINE_S)
        self._store = None

    def _join_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for _, _, process in self._started:
            process.join(max(0.0, deadline - time.monotonic()))

    def _make_ranks_show_stacks(self) -> None:
        agents = {process.pid for _, rank, process in self._started if rank is None}
        ranks = {process.pid for _, rank, process in self._started if rank is not None}
        parents = agents | warm.pids()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid in ranks or (process.pid not in agents and process.ppid() in parents):
                    process.send_signal(signal.SIGABRT)
        self._join_all(_STACKS_DEADLINE_S)


def run_ranks(
    root: Path,
    worker: str | Path,
    world_size: int,
    *,
    nodes: int = 1,
    placement: Sequence[int] | None = None,
    args: Sequence[object] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    cold: bool = False,
) -> list[list[dict[str, Any]]]:
    """Runs a script on `world_size` ranks to the end, and returns the reports of each rank.

    See `Cluster` for the arguments. Raises `ClusterError` with all output if a rank fails or takes too long.
    """
    placement = contiguous(world_size, nodes) if placement is None else placement
    with Cluster(root, worker, placement=placement, args=args, env=env, cold=cold) as cluster:
        cluster.wait(timeout_s)
        return [cluster.reports(rank) for rank in range(world_size)]
