"""The machines that a program runs on, and groups of processes on them that compute together.

Owns the environment that tells each its rank in `torch.distributed`; the processes are `processes`'.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_flashpoint.ddict.errors import DDictError
from ml_flashpoint.ddict.native.process import Policy, ProcessTemplate
from ml_flashpoint.ddict.native.processes import ProcessGroup
from ml_flashpoint.ddict.native.ray import LOOPBACK, Node, all_nodes, check_node, free_port_on
from ml_flashpoint.format.errors import InvalidArgumentError

RESTARTED_VARIABLE = "FLASHPOINT_RESTARTED"
"""Environment variable: 1 if whoever starts the program starts it again after a failure. torchrun's count of restarts
says the same."""


class System:
    """The machines that the program runs on.

    Raises:
        InvalidArgumentError: an environment variable has no meaning.
    """

    def __init__(self) -> None:
        self._nodes = all_nodes(look_for_gpus=True)

    @property
    def nodes(self) -> list[Node]:
        """The machines; the first is the one that the program was started on."""
        return list(self._nodes)

    @property
    def nnodes(self) -> int:
        """Number of machines."""
        return len(self._nodes)

    @property
    def primary_node(self) -> Node:
        """The machine that the program was started on."""
        return self._nodes[0]

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
        return [Policy((gpu,), number) for number, node in enumerate(self._nodes) for gpu in range(node.num_gpus)]


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

    Raises:
        DDictError: this process was told nothing.
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

    Raises:
        InvalidArgumentError: there are no policies, or `training_fn` cannot be called.
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
        """Make ready to start: who runs where, and the port, are settled now.

        Raises:
            InvalidArgumentError: a policy names a node that is not there.
            DDictError: it was called before.
        """
        if self._is_init:
            raise DDictError("the group was made ready before")
        for template in _templates(self._work, self._policies, self._port):
            self.add_process(1, template)
        super().init()


def _templates(work: ProcessTemplate, policies: Sequence[Policy], port: int | None) -> list[ProcessTemplate]:
    size = len(policies)
    nodes = all_nodes()
    count = len(nodes)
    # Without a word about nodes, they are filled one after the other.
    where = [rank * count // size if policy.node is None else policy.node for rank, policy in enumerate(policies)]
    for node in where:
        check_node(node, count)
    on_node = collections.Counter(where)
    port = free_port_on(where[0]) if port is None else port
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": nodes[where[0]].address, "MASTER_PORT": str(port)}
    if len({node.address for node in nodes}) == 1:
        common["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    placed: collections.Counter[int] = collections.Counter()
    templates = []
    for rank, (policy, node) in enumerate(zip(policies, where, strict=True)):
        threads = max(1, nodes[node].num_cpus // on_node[node])
        env = {
            **common,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "RANK": str(rank),
            "LOCAL_RANK": str(placed[node]),
            "LOCAL_WORLD_SIZE": str(on_node[node]),
            "GROUP_RANK": str(node),
        }
        placed[node] += 1
        here = Policy(policy.gpu_affinity, node)
        templates.append(ProcessTemplate(work.target, work.args, work.kwargs, env=env, policy=here))
    return templates
