"""Tunables that environment variables set. They are read when they are used."""

from __future__ import annotations

import os

from ml_flashpoint.format.digest import BLOCK_SIZE
from ml_flashpoint.format.errors import InvalidArgumentError


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InvalidArgumentError("must be a positive number", argument=name, value=text)
    return value


def _integer(name: str, lowest: int, highest: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if not lowest <= value <= highest:
        raise InvalidArgumentError(f"must be a whole number from {lowest} to {highest}", argument=name, value=text)
    return value


def transfer_deadline_s() -> float:
    """Seconds without progress after which a transfer to or from a peer is given up."""
    return _number("FLASHPOINT_TRANSFER_DEADLINE_S", 30.0)


def collective_deadline_s() -> float:
    """Seconds that a rank waits for the others when they recover or agree."""
    return _number("FLASHPOINT_COLLECTIVE_DEADLINE_S", 600.0)


def late_s() -> float:
    """Seconds that rank 0 waits for the answers to a round before it names the ranks that are missing."""
    return _number("FLASHPOINT_LATE_S", 10.0)


def recovery_deadline_s() -> float:
    """Seconds for which what cannot be read just now is tried again, before an older version is taken or none."""
    return _number("FLASHPOINT_RECOVERY_DEADLINE_S", 60.0)


def seal_deadline_s() -> float:
    """Seconds that a save may take from its stage to its commit before its slot is taken back."""
    return _number("FLASHPOINT_SEAL_DEADLINE_S", 600.0)


def call_deadline_s() -> float:
    """Seconds that a function given to a queue of asynchronous calls may run before a blocking wait gives it up."""
    return _number("FLASHPOINT_CALL_DEADLINE_S", 3600.0)


def lock_deadline_s() -> float:
    """Seconds that a starting rank waits for its dying predecessor to let go of the base container."""
    return _number("FLASHPOINT_LOCK_DEADLINE_S", 30.0)


def exit_deadline_s() -> float:
    """Seconds that an exiting process gives to replication still under way."""
    return _number("FLASHPOINT_EXIT_DEADLINE_S", 10.0)


def copy_threads() -> int | None:
    """Threads that copy at once, at most; None for as many as help."""
    return _integer("FLASHPOINT_COPY_THREADS", 1, 999)


def events_file() -> str:
    """File that events are appended to, with ``{rank}`` and ``{node}`` replaced; empty for none."""
    return os.environ.get("FLASHPOINT_EVENTS", "")


BLOCK_BYTES_VARIABLE = "FLASHPOINT_TEST_BLOCK_BYTES"
"""For tests only: makes the blocks of new objects small, so that states of tests have many."""


def block_bytes() -> int:
    """Bytes of the blocks by which new objects are digested. Readers go by the manifest of an object."""
    value = _integer(BLOCK_BYTES_VARIABLE, 4096, 2**30) or BLOCK_SIZE
    if value & (value - 1):
        raise InvalidArgumentError("must be a power of two", argument=BLOCK_BYTES_VARIABLE, value=value)
    return value


NODE_ID_VARIABLE = "FLASHPOINT_NODE_ID"
"""Names the failure domain of this process, where the host is not it (several nodes on one machine)."""
