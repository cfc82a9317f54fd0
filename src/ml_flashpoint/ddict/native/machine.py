"""The machine, or the nodes of the Ray cluster, that a program runs on."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ml_flashpoint.ddict.native.processes import Policy
from ml_flashpoint.ddict.native.ray import is_on_ray, ray_nodes
from ml_flashpoint.format.errors import InvalidArgumentError

GPUS_VARIABLE = "FLASHPOINT_NUM_GPUS"
"""Environment variable: number of GPUs of each node, in place of the CUDA devices that torch sees. For tests, and to
share or reserve devices."""

RESTARTED_VARIABLE = "FLASHPOINT_RESTARTED"
"""Environment variable: 1 if whoever starts the program starts it again after a failure. torchrun's count of restarts
says the same."""


@dataclass(frozen=True)
class Node:
    """A machine.

    Attributes:
        hostname: its name.
        num_cpus: cores that this process may use.
        num_gpus: CUDA devices, or what `GPUS_VARIABLE` says; 0 where there are none.
    """

    hostname: str
    num_cpus: int
    num_gpus: int


class System:
    """The machines that the program runs on.

    Raises:
        InvalidArgumentError: an environment variable has no meaning.
    """

    def __init__(self) -> None:
        if is_on_ray():
            self._nodes = [Node(n.hostname, n.num_cpus, _said_gpus(n.num_gpus)) for n in ray_nodes()]
        else:
            self._nodes = [Node(socket.gethostname(), len(os.sched_getaffinity(0)), _said_gpus(None))]

    @property
    def nodes(self) -> list[Node]:
        """All machines; the first is the one that the program was started on."""
        return list(self._nodes)

    @property
    def nnodes(self) -> int:
        """How many machines there are."""
        return len(self._nodes)

    @property
    def primary_node(self) -> Node:
        """The machine that the program was started on."""
        return self._nodes[0]

    @property
    def restarted(self) -> bool:
        """Whether the program was started again after a failure: `RESTARTED_VARIABLE`, or torchrun says so."""
        said = os.environ.get(RESTARTED_VARIABLE, "")
        if said not in ("", "0", "1"):
            raise InvalidArgumentError("must be 0 or 1", argument=RESTARTED_VARIABLE, value=said)
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return said == "1" or (count.isdigit() and int(count) > 0)

    def gpu_policies(self) -> list[Policy]:
        """A policy for each GPU, node by node: a process of its own, which sees that GPU only. Empty without GPUs."""
        return [Policy((gpu,), number) for number, node in enumerate(self._nodes) for gpu in range(node.num_gpus)]


def _said_gpus(found: int | None) -> int:
    said = os.environ.get(GPUS_VARIABLE)
    if said is not None:
        if not said.isdigit():
            raise InvalidArgumentError("must be a number", argument=GPUS_VARIABLE, value=said)
        return int(said)
    if found is not None:
        return found
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()  # unlike is_available(), it does not initialise CUDA
