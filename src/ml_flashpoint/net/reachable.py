"""The address at which the other hosts of a job reach this one."""

from __future__ import annotations

import logging
import os
import socket

_log = logging.getLogger(__name__)


def reachable_host() -> str:
    """Return ``FLASHPOINT_HOST`` if that is set, else the source address of the route to ``MASTER_ADDR``."""
    given = os.environ.get("FLASHPOINT_HOST")
    if given:
        return given
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        _log.warning("cannot find the route to MASTER_ADDR=%s (%s): using this host's name", master, error)
        return socket.gethostbyname(socket.gethostname())
