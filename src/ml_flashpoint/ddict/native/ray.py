"""Processes and barriers on a Ray cluster, and free ports.

Owns the actors behind them. Each member of a group is an actor, which Ray places, watches, and ends with the program
that made it; `processes` sees it as it sees a child process, and decides what a group does with its members.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.errors import DDictError
from ml_flashpoint.ddict.native.process import announce_puid
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000  # `ray start` gives its workers 10002 to 19999
_TRIES = 20


_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 1.0
_MOST_REPORT_CHARACTERS = 20_000
DIED = 255  # exit code of a member whose end Ray tells, but not how it came


def free_port(host: str = "") -> int:
    """A port that nothing listens at now, and that the system hands out to nobody: a process that starts before it is
    used could get it otherwise. ``host``: address of an interface of this machine; all of them by default."""
    # Not what a program has seeded: another one with the same seed would look at the same ports at the same time.
    below = range(_LOWEST, _first_ephemeral())
    for port in [*random.SystemRandom().sample(below, min(_TRIES, len(below))), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError("there is no free port")


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def is_on_ray() -> bool:
    """Whether this program has a Ray cluster: ``ray.init`` was called, or this is a worker of one."""
    ray = sys.modules.get("ray")  # not imported for this: where it is not, it is not initialized
    return ray is not None and bool(ray.is_initialized())


def _ray() -> Any:
    # Its types are not strict, and it is an optional dependency.
    import ray

    return ray


@dataclass(frozen=True)
class RayNode:
    """A live node of the cluster."""

    node_id: str
    address: str
    hostname: str
    num_cpus: int
    num_gpus: int


def ray_nodes() -> list[RayNode]:
    """The live nodes: first the one that this process runs on, then by id."""
    ray = _ray()

    own = ray.get_runtime_context().get_node_id()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"]))
    return [
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in sorted(alive, key=lambda node: node["NodeID"] != own)
    ]


def _placed(node: int | None) -> dict[str, Any]:
    if node is None:
        return {"scheduling_strategy": "SPREAD"}
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = ray_nodes()
    check_node(node, len(nodes))
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[node].node_id, soft=False)}


def check_node(node: int, count: int) -> None:
    """Make sure that a node is there. Raises `InvalidArgumentError`: it is not."""
    if not 0 <= node < count:
        there = f"the cluster has {count}" if count > 1 else "there is one"
        raise InvalidArgumentError(
            f"there is no such node: {there}, and they count from 0", argument="node", value=node
        )


def free_port_on(node: int) -> int:
    """A TCP port that is free on a node at this moment."""
    ray = _ray()

    found = ray.remote(free_port).options(num_cpus=0, **_placed(node)).remote()
    return int(ray.get(found, timeout=_START_TIMEOUT_S))


# -- members ----------------------------------------------------------------------------------------------------


class _Member:
    """What the actor of a member does. Its only long call runs on the process's main thread, as in a program."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, puid: int, env: Mapping[str, str], cwd: str | None, work: bytes) -> tuple[int, str]:
        """Exit code and error text."""
        try:
            os.environ.update(env)
            announce_puid(puid)
            if cwd is not None:
                os.chdir(cwd)
            target, args, kwargs = pickle.loads(work)
            target(*args, **kwargs)
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0, ""
            return 1, str(end.code)
        except BaseException:
            text = traceback.format_exc()
            print(text, file=sys.stderr, flush=True)
            return 1, text[-_MOST_REPORT_CHARACTERS:]
        finally:
            # Its process is killed next, which is no death to those who wait for others.
            if native_barrier := sys.modules.get("ml_flashpoint.ddict.native.barrier"):
                native_barrier.say_farewell()
        return 0, ""


class RayProcess:
    """An actor with the face of a child process: ``pid``, ``sentinel``, ``exitcode``, ``join``.

    Attributes:
        pid: process id on its node.
        sentinel: a descriptor that is ready to be read when it has ended.
        exitcode: None while it runs; `DIED` if it was killed.
        text: of its error.
    """

    def __init__(self, actor: Any, pid: int, result: Any) -> None:
        self.actor, self.pid, self.result = actor, pid, result
        self.exitcode: int | None = None
        self.text = ""
        self.sentinel, self._end = os.pipe()

    def join(self) -> None:
        """Its end is known when `sentinel` is ready."""

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(Exception):  # Ray may be gone, and the actor with it
            _ray().kill(self.actor)

    def note_end(self, exitcode: int, text: str) -> None:
        """Make its end known."""
        self.exitcode, self.text = exitcode, text
        os.close(self._end)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.sentinel)


@dataclass(frozen=True)
class Start:
    """What is needed to start a member; `gpus` are counted, Ray chooses which."""

    puid: int
    env: Mapping[str, str]
    cwd: str | None
    node: int | None
    gpus: int
    work: bytes


def start_on_ray(starts: Sequence[Start]) -> list[RayProcess]:
    """Start members, all at once. Raises `InvalidArgumentError`: there is no such node; `DDictError`: an actor cannot
    be made or placed; none is left then."""
    ray = _ray()

    cluster_gpus = ray.cluster_resources().get("GPU", 0)
    actors: list[Any] = []
    try:
        for start in starts:
            options = {"num_cpus": 0, "num_gpus": start.gpus if cluster_gpus else 0, "max_restarts": 0}
            actors.append(ray.remote(_Member).options(**options, **_placed(start.node)).remote())
        pids = ray.get([actor.pid.remote() for actor in actors], timeout=_START_TIMEOUT_S)
    except Exception as error:
        for actor in actors:
            ray.kill(actor)
        if isinstance(error, FlashpointError):
            raise
        raise DDictError(f"not all processes could be started on Ray: {error}") from error
    processes = []
    for start, actor, pid in zip(starts, actors, pids, strict=True):
        processes.append(RayProcess(actor, pid, actor.run.remote(start.puid, start.env, start.cwd, start.work)))
    threading.Thread(target=_await_ends, args=(processes,), name="ddict-ray-group", daemon=True).start()
    return processes


def _await_ends(processes: Sequence[RayProcess]) -> None:
    ray = _ray()

    running = {process.result: process for process in processes}
    while running:
        try:
            done, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK_EVERY_S)
        except Exception as error:  # Ray was shut down, and with it the members
            for process in running.values():
                process.note_end(DIED, f"Ray is gone: {error}")
            return
        for result in done:
            process = running.pop(result)
            try:
                process.note_end(*ray.get(result))
            except Exception as error:
                process.note_end(DIED, str(error))
            # An actor lives as long as its handle; this one has done its work.
            with contextlib.suppress(Exception):
                ray.kill(process.actor)


# -- barriers ---------------------------------------------------------------------------------------------------


def own_host() -> str:
    """Address of this process's node."""
    return str(_ray().util.get_node_ip_address())


def is_client() -> bool:
    """Whether this program is a client of a Ray cluster, ``ray://``, which processes of the cluster cannot reach."""
    return is_on_ray() and bool(_ray().util.client.ray.is_connected())


class _BarrierActor:
    """Where a barrier lives that no process of the cluster has made."""

    def __init__(self, parties: int) -> None:
        from ml_flashpoint.ddict.native.barrier import BarrierServer

        self._server = BarrierServer(parties, None, own_host())

    def where(self) -> tuple[Any, bytes]:
        return self._server.address, self._server.secret


def make_barrier(parties: int) -> tuple[Any, tuple[Any, bytes]]:
    """An actor that is a barrier, and its address and secret. It lives as long as the program that made it."""
    ray = _ray()

    actor = ray.remote(_BarrierActor).options(num_cpus=0).remote(parties)
    return actor, ray.get(actor.where.remote(), timeout=_START_TIMEOUT_S)


def end_barrier(actor: Any) -> None:
    """End a barrier."""
    ray = _ray()

    with contextlib.suppress(Exception):
        ray.kill(actor)
