"""A Ray cluster of several nodes on this machine, of which one can be lost with all that runs and lies there.

Owns the processes of Ray and where they keep their files. Importing this imports Ray.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

STORE_BYTES = 80 << 20
NODE_BYTES = 6 << 30  # what Ray may give away on a node: the same on all, whatever else the machine does meanwhile
START_S = 120.0

# A node is known to be lost after about 2 s, not after 15.
_SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


class RayCluster:
    """A cluster that this process is connected to, at its head.

    Args:
        nodes: their number, the head included.
        environment: returns what the processes of a node, by number from 0, have in their environment besides.
    """

    def __init__(self, nodes: int, environment: Callable[[int], dict[str, str]] = lambda number: {}) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mlf-ray-", dir=os.environ.get("RAY_TMPDIR")))  # short, for sockets
        # Ray notes its address there, and makes the folder only for clusters that have their files in it.
        Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
        self._size, self._environment, self._made = nodes, environment, 0
        self._cluster = Cluster()
        try:
            self._add(_system_config=_SYSTEM, include_dashboard=False, temp_dir=str(self._folder))
            self.fill()
            ray.init(address=self._cluster.address, log_to_driver=False)
        except BaseException:
            self.close()
            raise

    def _add(self, **options: Any) -> None:
        options |= {"num_cpus": 2, "memory": NODE_BYTES, "object_store_memory": STORE_BYTES}
        self._cluster.add_node(env_vars=self._environment(self._made), **options)
        self._made += 1

    @property
    def address(self) -> str:
        """For other drivers."""
        return str(self._cluster.address)

    @property
    def head(self) -> str:
        """Id of the node that this process is on."""
        return str(self._cluster.head_node.node_id)

    @property
    def others(self) -> list[str]:
        """Ids of the other nodes."""
        return [str(node.node_id) for node in self._cluster.worker_nodes]

    @property
    def nodes(self) -> list[str]:
        """Ids of all nodes, the head first."""
        return [self.head, *self.others]

    def fill(self) -> None:
        """Have as many nodes as at first, with new ones for those that were lost."""
        while len(self.nodes) < self._size:
            self._add()
        self._cluster.wait_for_nodes(START_S)

    def lose(self, node_id: str) -> None:
        """Kill all processes of a node, at once."""
        node = next(node for node in self._cluster.worker_nodes if node.node_id == node_id)
        doomed = processes_of(node)
        self._cluster.remove_node(node, allow_graceful=False)
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        """End Ray's processes and remove its files."""
        doomed = [each for node in self._cluster.list_all_nodes() for each in processes_of(node)]
        ray.shutdown()
        self._cluster.shutdown()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


def processes_of(node: Any) -> list[psutil.Process]:
    """The processes of a node of a cluster, workers included."""
    found = []
    for each in node.all_processes.values():
        for info in each:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(info.process.pid)
                found += [process, *process.children(recursive=True)]
    return found


@contextlib.contextmanager
def ray_cluster(nodes: int, environment: Callable[[int], dict[str, str]] = lambda number: {}) -> Iterator[RayCluster]:
    """A cluster for the length of a block."""
    cluster = RayCluster(nodes, environment)
    try:
        yield cluster
    finally:
        cluster.close()


def run_on(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """A task on one node, which is not repeated if it fails. Returns its reference."""
    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=1, max_retries=0, scheduling_strategy=pinned).remote(*args)
