"""The process of a manager, whoever started it.

Owns putting the manager and its server together, and their end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.client.links import locator
from ml_flashpoint.ddict.manager import peer_requests  # noqa: F401 (it fills OPERATIONS)
from ml_flashpoint.ddict.manager.arenas import allow_many_files
from ml_flashpoint.ddict.manager.manager import Manager
from ml_flashpoint.ddict.manager.requests import REQUESTS
from ml_flashpoint.ddict.options import Configuration
from ml_flashpoint.net.server import RequestServer


class ServedManager:
    """A manager that serves from construction until :meth:`close`.

    Args:
        config: ``configuration`` as JSON, number of the ``manager``, whether it was ``restarted``, its ``incarnation``
            and, where other machines are to reach it, its ``host`` and ``place``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        allow_many_files()
        configuration = Configuration.from_json(config["configuration"])
        number = int(config["manager"])
        host = config.get("host")
        self.manager = Manager(
            configuration,
            number,
            locator(configuration),
            incarnation=str(config["incarnation"]),
            restarted=config.get("restarted") is True,
            host=host or "127.0.0.1",
            place=config.get("place"),
        )
        try:
            self.server = RequestServer(
                configuration.secret,
                self.manager,
                REQUESTS,
                unix_path=str(Path(configuration.base, f"m-{number}.sock")),
                tcp_host=host,
            )
        except BaseException:
            self.manager.close()
            raise
        self.manager.start()

    def close(self) -> None:
        """Stop serving."""
        self.manager.ended.set()
        self.server.close()
        self.manager.close()


def run(config: dict[str, Any], ready: Callable[[], None], stop: threading.Event) -> None:
    """Be a manager until told to stop; see `fork_server.Entry`."""
    served = ServedManager(config)
    try:
        ready()
        stop.wait()
    finally:
        served.close()
