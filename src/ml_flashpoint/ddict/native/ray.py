"""The machines of a program, those of its Ray cluster if it has one; free ports there; and processes that are actors.

Each member of a group is an actor, which Ray places, watches, and ends with the program that made it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ml_flashpoint.ddict.errors import DDictError
from ml_flashpoint.ddict.native.process import Policy, ProcessTemplate, run_work
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError

LOOPBACK = "127.0.0.1"
GPUS_VARIABLE = "FLASHPOINT_NUM_GPUS"
"""Environment variable: number of GPUs of each node, in place of the CUDA devices that torch sees. For tests, and to
share or reserve devices."""

# `ray start` gives its workers the ports below; Linux gives those from 32768 to whoever connects to anything.
_PORTS = range(20_000, 32_768)
_TRIES = 20
_START_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 1.0
DIED = 255  # exit code of a member whose end Ray tells, but not how it came


def free_port() -> int:
    """A port that nothing listens at now, and that the system hands out to nobody: a process that starts before it is
    used could get it otherwise."""
    # Not what a program has seeded: another one with the same seed would look at the same ports at the same time.
    for port in [*random.SystemRandom().sample(_PORTS, _TRIES), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError("there is no free port")


def is_on_ray() -> bool:
    """Return True if this program has a Ray cluster: ``ray.init`` was called, or this is a worker of one."""
    ray = sys.modules.get("ray")  # not imported for this: where it is not, it is not initialized
    return ray is not None and bool(ray.is_initialized())


def _ray() -> Any:
    # Its types are not strict, and it is an optional dependency.
    import ray

    return ray


@dataclass(frozen=True)
class Node:
    """A machine.

    Attributes:
        hostname: its name.
        num_cpus: cores that this process may use; on Ray, that the node has for all.
        num_gpus: CUDA devices, or what `GPUS_VARIABLE` says; 0 where there are none.
        address: where processes on all machines reach it.
        ray_id: of the node in its cluster; empty: there is none.
    """

    hostname: str
    num_cpus: int
    num_gpus: int
    address: str = LOOPBACK
    ray_id: str = ""


def all_nodes(*, look_for_gpus: bool = False) -> list[Node]:
    """The machines of the program, those of a Ray cluster that are alive: first the one that this process runs on, then
    by id."""
    said = os.environ.get(GPUS_VARIABLE)
    if said is not None and not said.isdigit():
        raise InvalidArgumentError("must be a number", argument=GPUS_VARIABLE, value=said)
    if not is_on_ray():
        gpus = int(said) if said is not None else _gpus_here() if look_for_gpus else 0
        return [Node(socket.gethostname(), len(os.sched_getaffinity(0)), gpus)]
    own = _ray().get_runtime_context().get_node_id()
    alive = [node for node in _ray().nodes() if node["Alive"]]
    return [
        Node(
            node["NodeManagerHostname"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0) if said is None else said),
            node["NodeManagerAddress"],
            node["NodeID"],
        )
        for node in sorted(alive, key=lambda node: (node["NodeID"] != own, str(node["NodeID"])))
    ]


def _gpus_here() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()  # unlike is_available(), it does not initialise CUDA


def check_node(node: int, count: int) -> None:
    """Raise `InvalidArgumentError` if a node is not there."""
    if not 0 <= node < count:
        there = f"the cluster has {count}" if count > 1 else "there is one"
        raise InvalidArgumentError(
            f"there is no such node: {there}, and they count from 0", argument="node", value=node
        )


def _placed(node: int | None) -> dict[str, Any]:
    if node is None:
        return {"scheduling_strategy": "SPREAD"}
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = all_nodes()
    check_node(node, len(nodes))
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[node].ray_id, soft=False)}


def free_port_on(node: int) -> int:
    """The same of a node, as it is at this moment."""
    if not is_on_ray():
        return free_port()
    found = _ray().remote(free_port).options(num_cpus=0, **_placed(node)).remote()
    return int(_ray().get(found, timeout=_START_TIMEOUT_S))


class _Runner:
    """The actor of a member. Its only long call runs on the process's main thread, as in a program."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, *work: Any) -> tuple[int, str]:
        return run_work(*work)


class RayMember:
    """A member that is an actor. See `processes._Child`."""

    def __init__(self, actor: Any, pid: int, result: Any) -> None:
        self._actor, self.pid, self._result = actor, pid, result
        self._sent = 0

    def send(self, signal_number: int) -> bool:
        """End it: whatever the signal, an actor at work hears nothing else."""
        self._sent = signal_number
        _kill(self._actor)
        return True

    def wait(self) -> tuple[int, str]:
        """Exit code and text of the error, once it has ended."""
        ray = _ray()
        while ray.is_initialized():  # else it was shut down, and with it all members
            try:
                code, error = ray.get(self._result, timeout=_LOOK_EVERY_S)
            except ray.exceptions.GetTimeoutError:
                continue
            except Exception as lost:
                return (-self._sent, "") if self._sent else (DIED, str(lost))
            _kill(self._actor)  # an actor lives as long as its handle; this one has done its work
            return code, error
        return DIED, "Ray is gone"


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # Ray may be gone, and the actor with it
        _ray().kill(actor)


def start_on_ray(works: Sequence[tuple[int, ProcessTemplate, bytes]]) -> list[RayMember]:
    """Start members, all at once: number, template and work of each."""
    ray = _ray()
    ours = {name: value for name, value in os.environ.items() if name.startswith("FLASHPOINT_")}
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    actors: list[Any] = []
    try:
        for _, template, _ in works:
            policy = template.policy or Policy()
            gpus = len(policy.gpu_affinity) if has_gpus else 0  # counted: Ray chooses which
            options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, **_placed(policy.node)}
            actors.append(ray.remote(_Runner).options(**options).remote())
        pids = ray.get([actor.pid.remote() for actor in actors], timeout=_START_TIMEOUT_S)
    except Exception as error:
        for actor in actors:
            _kill(actor)
        if isinstance(error, FlashpointError):
            raise
        raise DDictError(f"not all processes could be started on Ray: {error}") from error
    return [
        RayMember(actor, pid, actor.run.remote(puid, {**ours, **(template.env or {})}, template.cwd, work))
        for actor, pid, (puid, template, work) in zip(actors, pids, works, strict=True)
    ]


def own_host() -> str:
    """Return the address of this process's node, for what listens here."""
    if _ray().util.client.ray.is_connected():
        raise DDictError("a client of a Ray cluster cannot be reached by it", hint="make this in a task or an actor")
    return str(_ray().util.get_node_ip_address())
