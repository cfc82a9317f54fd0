"""Managers on the nodes of a Ray cluster, and the coordinator.

Each node has an actor, beside which its managers run as they do beside the creator elsewhere (`embedded`). Ray starts
the actor again, on another node if its own is lost: the managers of a node are a bundle of a placement group, which
then has two bundles on one node if none was to spare. Data never goes through Ray: managers say to the coordinator
where they listen, and that tells clients.

Actors belong to the process that makes the dictionary: when that ends, so do they. Their arguments, with the secret in
them, can be had by whoever may run code in the Ray cluster, who could do everything else as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError
from ml_flashpoint.ddict.native.ray import own_host
from ml_flashpoint.ddict.options import Configuration
from ml_flashpoint.ddict.runtime.embedded import EmbeddedRuntime, Runtime
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.knobs import NODE_ID_VARIABLE

_log = logging.getLogger(__name__)

NAMESPACE: Final = "ml_flashpoint.ddict"  # of the actors' names
MANAGER_BYTES: Final = 384 << 20  # memory that Ray reserves for a manager's process, its values not included
START_TIMEOUT_S: Final = 120.0

_BEGIN_AGAIN_S: Final = 1.0


def actor_name(dictionary: str, node: int) -> str:
    """Name of the actor of a node in `NAMESPACE`."""
    return f"{dictionary}-{node}"


class RayNode(EmbeddedRuntime):
    """An actor with the managers of one node, which serve from construction on.

    When the actor's process dies, they end, and Ray makes it anew, here or on another node; then this is constructed
    again, with the same arguments. ``environment``: variables that the creator has set.
    """

    def __init__(self, configuration: Mapping[str, Any], managers: list[int], environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own use of what it deprecates
            restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        try:
            super().__init__(detached=True)
            here = {
                "configuration": {**configuration, "base": str(self.base)},
                "host": own_host(),
                "place": str(ray.get_runtime_context().get_node_id()),
            }
            self.start([{**here, "manager": number} for number in managers], restarted=restarted)
        except Exception as error:
            if not restarted:
                raise
            # An error here would be the end of the actor; the end of the process is not.
            _log.error("managers %s cannot start, and begin again: %s", managers, error)
            time.sleep(_BEGIN_AGAIN_S)
            os._exit(1)

    def place(self) -> dict[str, Any]:
        """The node that this is on, the folder there, and the managers' process ids, by number."""
        node = str(ray.get_runtime_context().get_node_id())
        return {"node": node, "folder": str(self.base), "pids": self.pids()}


class RayRuntime(Runtime):
    """The managers of one dictionary. Thread-safe. Raises `InvalidArgumentError`: the cluster has fewer nodes than
    asked for; `DDictError`: the managers cannot be placed or started. None is left then; `DDictTimeoutError`: they were
    not ready in time. None is left then."""

    def __init__(self, configuration: Configuration) -> None:
        if not ray.is_initialized():
            raise InvalidArgumentError(
                "needs a Ray cluster", argument="runtime", value="ray", hint="call ray.init() before"
            )
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("FLASHPOINT_") and name != NODE_ID_VARIABLE  # that is the creator's node
        }
        self._coordinator = Coordinator(configuration, own_host())
        self.configuration = configuration = dataclasses.replace(configuration, coordinator=self._coordinator.address)
        """With what clients need to find the coordinator, which knows where the managers are."""
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        super().__init__()  # at the end of this process before Ray's own, which was registered before
        try:
            self._group = _place(configuration)
            for node in range(configuration.options.n_nodes):
                self._actors.append(_start(configuration, node, self._group, environment))
            _check_spread(configuration, self._await_nodes())
        except BaseException:
            self.stop()
            raise

    def _await_nodes(self) -> list[str]:
        """The nodes that the managers are on, once all are ready."""
        asked = [actor.place.remote() for actor in self._actors]
        try:
            ray.wait(asked, num_returns=len(asked), timeout=START_TIMEOUT_S)
            return [str(place["node"]) for place in ray.get(asked, timeout=1.0)]
        except GetTimeoutError:
            raise DDictTimeoutError(
                f"no start of all managers within {START_TIMEOUT_S:g} s", hint="see the logs of Ray's workers"
            ) from None
        except RayError as error:
            raise DDictError(f"a manager did not start: {error}") from error

    def _end(self, timeout_s: float) -> None:
        with contextlib.suppress(Exception):  # whatever it says, there is nothing else to be done
            self._coordinator.close()
        if not ray.is_initialized():
            return  # they ended with this process's connection to Ray
        with contextlib.suppress(RayError):
            asked = [actor.stop.remote(timeout_s) for actor in self._actors]
            if asked:
                ray.wait(asked, num_returns=len(asked), timeout=timeout_s, fetch_local=False)
        for actor in self._actors:
            with contextlib.suppress(Exception):  # whatever it says, there is nothing else to be done
                ray.kill(actor, no_restart=True)
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)


def _place(configuration: Configuration) -> PlacementGroup:
    options = configuration.options
    alive = sum(bool(node["Alive"]) for node in ray.nodes())
    if options.n_nodes > alive:
        raise InvalidArgumentError(f"the Ray cluster has {alive} nodes", argument="n_nodes", value=options.n_nodes)
    bundles = [{"memory": float(MANAGER_BYTES * options.managers_per_node)}] * options.n_nodes
    # Not strictly: with as many nodes as the cluster has, a bundle whose node is lost could go nowhere.
    group = placement_group(bundles, strategy="SPREAD", name=f"{NAMESPACE}-{configuration.dictionary}")
    if not group.wait(START_TIMEOUT_S):
        remove_placement_group(group)
        raise DDictTimeoutError(
            f"Ray found no place for the managers within {START_TIMEOUT_S:g} s",
            hint=f"each takes {MANAGER_BYTES} bytes of the memory that Ray may give away on a node",
        )
    return group


def _start(configuration: Configuration, node: int, group: PlacementGroup, environment: dict[str, str]) -> Any:
    managers = [manager for manager, its in enumerate(configuration.options.nodes) if its == node]
    actor = ray.remote(RayNode).options(
        name=actor_name(configuration.dictionary, node),
        namespace=NAMESPACE,
        num_cpus=0,
        memory=MANAGER_BYTES * len(managers),
        max_restarts=-1,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
    )
    return actor.remote(configuration.to_json(), managers, environment)


def _check_spread(configuration: Configuration, ray_nodes: list[str]) -> None:
    wanted = configuration.options.n_nodes
    if len(set(ray_nodes)) == wanted:
        return
    said = f"Ray put the managers of {wanted} nodes on {len(set(ray_nodes))}, as others have no memory to give away"
    if configuration.options.replicated:
        raise DDictError(f"{said}: the loss of one could lose every copy", hint="take fewer n_nodes")
    _log.warning("%s", said)
