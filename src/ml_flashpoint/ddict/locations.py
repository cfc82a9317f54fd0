"""Where the managers of a dictionary and its coordinator are, by the runtime that they run in.

Owns finding them, and whether one is on this machine. Starting and stopping them is the runtimes'.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ml_flashpoint.ddict.configuration import COORDINATOR, Configuration
from ml_flashpoint.ddict.links import Locate
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.net.client import Address


def locator(configuration: Configuration) -> Locate:
    """Finds the managers of a dictionary.

    Raises:
        InvalidArgumentError: the runtime is not known.
    """
    kind = configuration.runtime.get("kind")
    if kind == "embedded":
        base = Path(configuration.base)

        def locate(manager: int, timeout_s: float, *, anew: bool) -> Address | None:
            return "unix", str(base / ("c.sock" if manager == COORDINATOR else f"m-{manager}.sock"))

        return locate
    if kind == "ray":
        from ml_flashpoint.ddict.ray_locations import locations_of

        return locations_of(configuration).find
    raise InvalidArgumentError("no such runtime", argument="runtime", value=kind)


def is_local(configuration: Configuration) -> Callable[[int], bool]:
    """Tells whether a manager is on this node, as far as this process knows."""
    if configuration.runtime.get("kind") == "ray":
        from ml_flashpoint.ddict.ray_locations import locations_of

        return locations_of(configuration).is_local
    return lambda manager: True
