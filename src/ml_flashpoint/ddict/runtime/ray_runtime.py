"""Managers as Ray actors, and the coordinator: the runtime for a cluster.

Owns placing, starting and ending the actors, a manager's life inside of one, and the folder that the managers of a
dictionary share on a Ray node. Ray restarts those that die, on another node if theirs is lost. Data never goes through
Ray: clients ask the actor where the manager listens (`ray_locations`), and talk to that. The coordinator is in the
process that makes the dictionary, or in an actor, for a driver by Ray Client.

The managers of one node are a bundle of a placement group, whose bundles are spread over the nodes. A bundle whose node
is lost goes to another one, which then has two if no node was to spare. Ray is told what the managers' processes need;
what values need is `total_mem`, which users plan for as for their own memory.

Actors belong to the process that makes the dictionary: when that ends, so do they. Their arguments, with the secret in
them, can be had by whoever may run code in the Ray cluster, who could do everything else as well.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ml_flashpoint.ddict.checkpoints.server import CoordinatorServer
from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError
from ml_flashpoint.ddict.manager.manager import Manager
from ml_flashpoint.ddict.options import Configuration
from ml_flashpoint.ddict.runtime.folder import join_folder, remove_unused, runtime_root, sweep
from ml_flashpoint.ddict.runtime.ray_locations import NAMESPACE, Place, actor_name
from ml_flashpoint.ddict.runtime.reaper import Reaper
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError
from ml_flashpoint.format.knobs import NODE_ID_VARIABLE, ddict_keep_folder_s

_log = logging.getLogger(__name__)

_BEGIN_AGAIN_S: Final = 1.0
_COORDINATOR_STOP_S: Final = 5.0
MANAGER_BYTES: Final = 384 << 20  # memory that Ray reserves for a manager's process, its values not included

START_TIMEOUT_S: Final = 120.0
_STOP_S: Final = 20.0
_CALLS_AT_ONCE: Final = 8


def node_base(root: Path, dictionary: str, ray_node: str) -> Path:
    """Folder of a dictionary on one Ray node: several may be on one machine, and must not share it."""
    return root / hashlib.sha256(f"{dictionary}/{ray_node}".encode()).hexdigest()[:12]


class RayManager:
    """An actor with one manager, which serves from construction on.

    When the actor's process dies, Ray makes it anew, here or on another node; then this is constructed again, with the
    same arguments. ``environment``: variables that the creator has set.
    """

    def __init__(self, configuration: Mapping[str, Any], number: int, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own use of what it deprecates
            restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        try:
            self._begin(configuration, number, restarted)
        except Exception as error:
            if not restarted:
                raise
            # An error here would be the end of the actor; the end of the process is not.
            _log.error("manager %d cannot start, and begins again: %s", number, error)
            time.sleep(_BEGIN_AGAIN_S)
            os._exit(1)

    def _begin(self, configuration: Mapping[str, Any], number: int, restarted: bool) -> None:
        node = str(ray.get_runtime_context().get_node_id())
        host = str(ray.util.get_node_ip_address())
        root = runtime_root()
        self._lock = threading.Lock()
        self._stopped = False
        self._reaper: Reaper | None = None
        self._hold = join_folder(node_base(root, str(configuration["dictionary"]), node))
        try:
            sweep(root)  # not before: the folder to come back to may be held by nobody
            self._reaper = Reaper(self._hold.folder, ddict_keep_folder_s(), str(number))
            self._manager = Manager(
                {
                    "configuration": {**configuration, "base": str(self._hold.folder)},
                    "manager": number,
                    "incarnation": secrets.token_hex(8),
                    "restarted": restarted,
                    "host": host,
                    "place": node,
                }
            )
        except BaseException:
            # What is in the folder is for the next one that comes back. The reaper sees to its end: this one's or, if
            # there is none yet, that of the process before, or else a sweep does.
            if not restarted:
                self._leave_folder()
            raise
        unix, tcp = self._manager.server.addresses
        assert len(tcp) == 3
        self._place = Place(node, unix[1], tcp[1], tcp[2])
        atexit.register(self.stop)

    def place(self) -> dict[str, Any]:
        """Where the manager listens, a `Place` as plain JSON."""
        return dataclasses.asdict(self._place)

    def stop(self) -> None:
        """End the manager, and remove its node's folder with the last one there. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            try:
                self._manager.close()
            except FlashpointError as error:
                _log.error("a manager did not end orderly: %s", error)
            finally:
                self._leave_folder()

    def _leave_folder(self) -> None:
        self._hold.close()
        if self._reaper is not None:
            self._reaper.dismiss()
        remove_unused(self._hold.folder)


class RayCoordinator:
    """An actor with the coordinator. It ends with the process that made it, and is not restarted."""

    def __init__(self, configuration: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._server = CoordinatorServer(Configuration.from_json(configuration), str(ray.util.get_node_ip_address()))

    def address(self) -> list[Any]:
        """Where it listens."""
        return list(self._server.address)

    def stop(self) -> None:
        """End it."""
        self._server.close()


def start_coordinator(
    configuration: Configuration, environment: Mapping[str, str]
) -> tuple[list[Any], Callable[[], None]]:
    """Start the coordinator of a new dictionary. Returns its address, and what ends it. Raises `DDictError`: it did not
    start."""
    if not ray.util.client.ray.is_connected():
        server = CoordinatorServer(configuration, str(ray.util.get_node_ip_address()))
        return list(server.address), server.close
    # This process is no part of the cluster, which may not reach it.
    actor = ray.remote(RayCoordinator).options(num_cpus=0).remote(configuration.to_json(), dict(environment))

    def stop() -> None:
        with contextlib.suppress(RayError):
            ray.get(actor.stop.remote(), timeout=_COORDINATOR_STOP_S)
        ray.kill(actor, no_restart=True)

    try:
        return list(ray.get(actor.address.remote(), timeout=START_TIMEOUT_S)), stop
    except RayError as error:
        stop()
        raise DDictError(f"the coordinator did not start: {error}") from error


class RayRuntime:
    """The managers of one dictionary. Thread-safe. Raises `InvalidArgumentError`: the cluster has fewer nodes than
    asked for; `DDictError`: the managers cannot be placed or started. None is left then; `DDictTimeoutError`: they were
    not ready in time. None is left then."""

    def __init__(self, configuration: Configuration) -> None:
        if not ray.is_initialized():
            raise InvalidArgumentError(
                "needs a Ray cluster", argument="runtime", value="ray", hint="call ray.init() before"
            )
        environment = _environment()
        address, self._stop_coordinator = start_coordinator(configuration, environment)
        self.configuration = configuration = dataclasses.replace(
            configuration, runtime={**configuration.runtime, "coordinator": address}
        )
        """With what clients need to find the coordinator and the managers."""
        self._lock = threading.Lock()
        self._stopped = False
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        try:
            self._group = _place(configuration)
            for manager, node in enumerate(configuration.options.nodes):
                self._actors.append(_start(configuration, manager, node, self._group, environment))
            places = self._await_places()
            _check_spread(configuration, [str(place["node"]) for place in places])
            self.configuration = dataclasses.replace(configuration, runtime={**configuration.runtime, "places": places})
        except BaseException:
            self.stop()
            raise
        _runtimes.add(self)

    def _await_places(self) -> list[dict[str, Any]]:
        asked = [actor.place.remote() for actor in self._actors]
        try:
            ray.wait(asked, num_returns=len(asked), timeout=START_TIMEOUT_S)
            found: list[dict[str, Any]] = ray.get(asked, timeout=1.0)
        except GetTimeoutError:
            raise DDictTimeoutError(
                f"no start of all managers within {START_TIMEOUT_S:g} s", hint="see the logs of Ray's workers"
            ) from None
        except (ActorDiedError, RayError) as error:
            raise DDictError(f"a manager did not start: {error}") from error
        return found

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """End all managers, and with them their folders. Nothing happens the second time, or in a forked child.
        ``timeout_s``: seconds that managers get to end by themselves; then they are killed."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        _runtimes.discard(self)
        with contextlib.suppress(Exception):  # whatever it says, there is nothing else to be done
            self._stop_coordinator()
        if not ray.is_initialized():
            return  # they ended with this process's connection to Ray
        with contextlib.suppress(RayError):
            asked = [actor.stop.remote() for actor in self._actors]
            if asked:
                ray.wait(asked, num_returns=len(asked), timeout=timeout_s, fetch_local=False)
        for actor in self._actors:
            with contextlib.suppress(Exception):  # whatever it says, there is nothing else to be done
                ray.kill(actor, no_restart=True)
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)

    def _abandon(self) -> None:
        self._stopped = True
        self._lock = threading.Lock()


def _place(configuration: Configuration) -> PlacementGroup:
    nodes = max(configuration.options.nodes) + 1
    alive = sum(bool(node["Alive"]) for node in ray.nodes())
    if nodes > alive:
        raise InvalidArgumentError(f"the Ray cluster has {alive} nodes", argument="n_nodes", value=nodes)
    bundles = [{"memory": float(MANAGER_BYTES * configuration.options.nodes.count(node))} for node in range(nodes)]
    # Not strictly: with as many nodes as the cluster has, a bundle whose node is lost could go nowhere.
    group = placement_group(bundles, strategy="SPREAD", name=f"{NAMESPACE}-{configuration.dictionary}")
    if not group.wait(START_TIMEOUT_S):
        remove_placement_group(group)
        raise DDictTimeoutError(
            f"Ray found no place for the managers within {START_TIMEOUT_S:g} s",
            hint=f"each takes {MANAGER_BYTES} bytes of the memory that Ray may give away on a node",
        )
    return group


def _start(
    configuration: Configuration, manager: int, node: int, group: PlacementGroup, environment: dict[str, str]
) -> Any:
    actor = ray.remote(RayManager).options(
        name=actor_name(configuration.dictionary, manager),
        namespace=NAMESPACE,
        num_cpus=0,
        memory=MANAGER_BYTES,
        max_restarts=-1,
        max_concurrency=_CALLS_AT_ONCE,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
    )
    return actor.remote(configuration.to_json(), manager, environment)


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("FLASHPOINT_") and name != NODE_ID_VARIABLE  # that is the creator's node
    }


def _check_spread(configuration: Configuration, ray_nodes: list[str]) -> None:
    wanted = max(configuration.options.nodes) + 1
    if len(set(ray_nodes)) == wanted:
        return
    said = f"Ray put the managers of {wanted} nodes on {len(set(ray_nodes))}, as others have no memory to give away"
    if configuration.options.replicated:
        raise DDictError(f"{said}: the loss of one could lose every copy", hint="take fewer n_nodes")
    _log.warning("%s", said)


_runtimes: weakref.WeakSet[RayRuntime] = weakref.WeakSet()


def _stop_all() -> None:
    for runtime in list(_runtimes):
        runtime.stop()


def _abandon_all() -> None:
    for runtime in list(_runtimes):
        runtime._abandon()
    _runtimes.clear()


atexit.register(_stop_all)  # before Ray's own, which was registered before
os.register_at_fork(after_in_child=_abandon_all)
