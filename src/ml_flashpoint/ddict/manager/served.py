"""The process of a manager on this machine: what it does once the `fork_server` has forked it. Owns its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ml_flashpoint.ddict.manager.manager import Manager


def run(config: dict[str, Any], ready: Callable[[], None], stop: threading.Event) -> None:
    """Be a manager until told to stop; see `fork_server.Entry`."""
    manager = Manager(config)
    try:
        ready()
        stop.wait()
    finally:
        manager.close()
