"""TCP ports for what starts later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000  # `ray start` gives its workers 10002 to 19999
_TRIES = 20


def free_port(host: str = "") -> int:
    """A port that nothing listens at now, and that the system hands out to nobody: a process that starts before it is
    used could get it otherwise.

    Args:
        host: address of an interface of this machine; all of them by default.
    """
    # Not what a program has seeded: another one with the same seed would look at the same ports at the same time.
    below = range(_LOWEST, _first_ephemeral())
    for port in [*random.SystemRandom().sample(below, min(_TRIES, len(below))), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError("there is no free port")


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
