"""The coordinator of a dictionary on Ray: in the process that makes it, or in an actor, for a driver by Ray Client.

Owns starting and ending it there, and its address, which all processes of the cluster are told.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from ml_flashpoint.ddict.configuration import Configuration
from ml_flashpoint.ddict.coordinator_server import CoordinatorServer
from ml_flashpoint.ddict.errors import DDictError

_START_S = 120.0
_STOP_S = 5.0


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
    """Start the coordinator of a new dictionary.

    Returns:
        Its address, and what ends it.

    Raises:
        DDictError: it did not start.
    """
    if not ray.util.client.ray.is_connected():
        server = CoordinatorServer(configuration, str(ray.util.get_node_ip_address()))
        return list(server.address), server.close
    # This process is no part of the cluster, which may not reach it.
    actor = ray.remote(RayCoordinator).options(num_cpus=0).remote(configuration.to_json(), dict(environment))

    def stop() -> None:
        with contextlib.suppress(RayError):
            ray.get(actor.stop.remote(), timeout=_STOP_S)
        ray.kill(actor, no_restart=True)

    try:
        return list(ray.get(actor.address.remote(), timeout=_START_S)), stop
    except RayError as error:
        stop()
        raise DDictError(f"the coordinator did not start: {error}") from error
