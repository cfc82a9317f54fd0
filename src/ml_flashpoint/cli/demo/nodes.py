"""Plays the machines of a cluster on this one: an elastic agent and a folder in memory for each node.

Owns starting, killing and cleaning up. Every process is found by a mark in its environment, which is inherited
even by what has lost its parent. What the job prints is passed on line by line.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ml_flashpoint.format.errors import DeadlineError, UnsafePathError
from ml_flashpoint.format.knobs import NODE_ID_VARIABLE
from ml_flashpoint.format.private_folders import open_folder

_HOST = "127.0.0.1"
_SHM = Path("/dev/shm")
_FOLDER = re.compile(r"flashpoint-demo-(\d+)-(\d+)-.+")
_MARK = "FLASHPOINT_DEMO_RUN"
_DEATH_DEADLINE_S = 20.0
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A dead agent is noticed in 5 s, not in torch's 15. With 2 s, one that had no core for a moment took itself for dead
# once the other had completed the round: the other waits for it for a minute then, fails, and closes the rendezvous.
_RENDEZVOUS = {
    "is_host": "0",
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "5",
    "join_timeout": "60",
    "last_call_timeout": "1",
}
# Left by a launcher that the demo itself may run under.
_INHERITED = re.compile(r"(TORCHELASTIC|FLASHPOINT)_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$")


@dataclass(frozen=True, slots=True)
class Line:
    """What was printed on a node; `text` is ``None`` once nothing runs there any more."""

    node: str
    text: str | None


@dataclass(frozen=True, slots=True)
class LostNode:
    """What `Nodes.kill_node` has destroyed.

    Attributes:
        pids: processes that it killed.
        bytes: memory that the node's files took before.
    """

    pids: tuple[int, ...]
    bytes: int


class Nodes:
    """The nodes of one job. As a context manager, leaving it kills them; their folders stay.

    Not thread-safe but for `lines`.

    Args:
        root: folder of all nodes. Node `name` owns ``root/name``, and keeps its checkpoints in ``root/name/job``.
        module: the job, as a module to run.
        args: arguments of the job; ``{base}`` stands for the node's base container.
        count: how many nodes make the job.
        ranks: ranks on each.
        restarts: how often each agent starts its ranks again when one fails.
    """

    def __init__(self, root: Path, module: str, args: Sequence[str], *, count: int, ranks: int, restarts: int) -> None:
        self.root = root
        self.lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._module = module
        self._args = args
        self._count = count
        self._ranks = ranks
        self._restarts = restarts
        self._mark = secrets.token_hex(8)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: dict[str, threading.Thread] = {}
        # Before torch is imported here, so that the agents import it at the same time: they find the socket.
        self._listener = socket.create_server((_HOST, 0))
        self._port = int(self._listener.getsockname()[1])
        self._store: Any = None

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def folder(self, node: str) -> Path:
        """All that a node has in memory."""
        return self.root / node

    def base(self, node: str) -> Path:
        """A node's base container."""
        return self.folder(node) / "job"

    def start(self, names: Sequence[str]) -> None:
        """Start nodes with empty folders."""
        for node in names:
            self._scratch(node).mkdir(parents=True)
            self._agents[node] = subprocess.Popen(
                self._agent_argv(node),
                env=self._environment(node),
                cwd=self.root,  # Python would import what lies around where the demo was started
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the demo, which then kills them
            )
            reader = threading.Thread(target=self._read, args=(node,), name=f"read-{node}", daemon=True)
            reader.start()
            self._readers[node] = reader
        if self._store is None:
            # The rendezvous is not on any node, so that every node may be lost, the first one included. Importing calls
            # back from where exceptions are ignored, Ctrl-C too.
            with _interrupted_later():
                import torch.distributed as dist

            fd = self._listener.detach()
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                _HOST, self._port, is_master=True, wait_for_workers=False, master_listen_fd=fd
            )

    def ended(self, node: str) -> int | None:
        """Exit code of a node's agent, ``None`` while it runs."""
        return self._agents[node].poll()

    def await_output(self, timeout_s: float) -> None:
        """Wait for each agent that has ended until all that it printed is in `lines`, or so long."""
        for node, reader in self._readers.items():
            if self.ended(node) is not None:
                reader.join(timeout_s)

    def kill_rank(self, pid: int) -> bool:
        """Kill one process of this job; returns whether it was running."""
        if not any(process.pid == pid for process in self._running()):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return _await_death(pid, time.monotonic() + _DEATH_DEADLINE_S)

    def kill_node(self, node: str) -> LostNode:
        """Make a machine vanish: SIGKILL to every process on it, then its memory is gone."""
        agent = self._agents[node].pid
        pids = self._kill(node)
        self._agents[node].wait(_DEATH_DEADLINE_S)
        size = sum(file.stat().st_blocks * 512 for file in _distinct_files(self.folder(node)))
        shutil.rmtree(self.folder(node))
        return LostNode(tuple(sorted({agent, *pids})), size)

    def close(self) -> None:
        """Kill whatever is left. Idempotent, and not to be interrupted."""
        with _undisturbed():
            self._kill()
            for agent in self._agents.values():
                agent.wait(_DEATH_DEADLINE_S)
            for reader in self._readers.values():
                reader.join(_DEATH_DEADLINE_S)
            self._store = None
            self._listener.close()

    def _scratch(self, node: str) -> Path:
        return self.folder(node) / "tmp"

    def _agent_argv(self, node: str) -> list[str]:
        options = {
            "nnodes": self._count,
            "nproc-per-node": self._ranks,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{_HOST}:{self._port}",
            "rdzv-id": self._mark,
            "rdzv-conf": ",".join(f"{name}={value}" for name, value in _RENDEZVOUS.items()),
            "local-addr": _HOST,
            "max-restarts": self._restarts,
            "monitor-interval": 0.1,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        args = [argument.replace("{base}", str(self.base(node))) for argument in self._args]
        return [sys.executable, "-m", "torch.distributed.run", *flags, "-m", self._module, *args]

    def _environment(self, node: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not _INHERITED.match(name)}
        return {
            "GLOO_SOCKET_IFNAME": "lo",
            **inherited,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            # torch 2.13 keeps one store over all restarts of ranks, with the addresses of dead ones in it.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # What killed processes leave there goes with the node.
            "TMPDIR": str(self._scratch(node)),
            NODE_ID_VARIABLE: node,
            _MARK: self._mark,
        }

    def _read(self, node: str) -> None:
        stream = self._agents[node].stdout
        assert stream is not None
        with stream:
            for line in stream:
                self.lines.put(Line(node, line.decode(errors="replace").rstrip("\n")))
        self.lines.put(Line(node, None))

    def _running(self, node: str | None = None) -> list[psutil.Process]:
        """The processes of a node, or of all."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = process.environ()
                if environment.get(_MARK) == self._mark and node in (None, environment.get(NODE_ID_VARIABLE)):
                    found.append(process)
        return found

    def _kill(self, node: str | None = None) -> list[int]:
        """Kill the processes of a node, or of all, and whatever they start meanwhile."""
        killed = []
        deadline = time.monotonic() + _DEATH_DEADLINE_S
        while running := self._running(node):
            for process in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for process in running:
                if not _await_death(process.pid, deadline):
                    raise DeadlineError(f"process {process.pid} is alive {_DEATH_DEADLINE_S:.0f} s after SIGKILL")
            killed += [process.pid for process in running]
        return killed


def make_root(*, keep: bool = False) -> Path:
    """Make a folder for a demo, in memory if this machine has a tmpfs where it should.

    Args:
        keep: whether it is to outlive the demo, and the next one's sweep.
    """
    parent = _SHM if _is_tmpfs(_SHM) else Path(tempfile.gettempdir())
    owner = psutil.Process()
    whose = "kept" if keep else f"{owner.pid}-{_started_ms(owner)}"
    return Path(tempfile.mkdtemp(prefix=f"flashpoint-demo-{whose}-", dir=parent))


def remove_root(root: Path) -> None:
    """Remove a demo's folder, not to be interrupted."""
    with _undisturbed():
        shutil.rmtree(root, ignore_errors=True)


def sweep_roots() -> None:
    """Remove the folders of demos of this user that were killed themselves."""
    for folder in {*_SHM.glob("flashpoint-demo-*"), *Path(tempfile.gettempdir()).glob("flashpoint-demo-*")}:
        match = _FOLDER.fullmatch(folder.name)
        if match is None or _runs(pid=int(match[1]), started_ms=int(match[2])):
            continue
        # Everybody may put something by such a name there, or run a demo in a container of another number of processes.
        with contextlib.suppress(OSError, UnsafePathError):
            os.close(open_folder(folder))
            shutil.rmtree(folder, ignore_errors=True)


def _is_tmpfs(path: Path) -> bool:
    mounts = (mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint == str(path))
    return any(mount.fstype == "tmpfs" for mount in mounts) and os.access(path, os.W_OK | os.X_OK)


def _started_ms(process: psutil.Process) -> int:
    return int(process.create_time() * 1000)


def _runs(pid: int, started_ms: int) -> bool:
    # The start time tells a process from a later one with the same id. It is computed from the boot time,
    # which a clock adjustment moves, hence the tolerance.
    try:
        return abs(_started_ms(psutil.Process(pid)) - started_ms) < 60_000
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _distinct_files(folder: Path) -> list[Path]:
    by_inode = {path.lstat().st_ino: path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    return list(by_inode.values())


def _await_death(pid: int, deadline: float) -> bool:
    # Not by psutil, which would reap an agent and so take its exit code from `Popen`.
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        return bool(ready)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back what would interrupt cleaning up halfway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Ignored and not just blocked here: another thread would take the signal, and the handler runs in this one.
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Hold back what would interrupt this, and acts on it then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    previous = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in reversed(previous.items()):  # the one that raises last
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)
