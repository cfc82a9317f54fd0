"""Tunables that environment variables set. They are read when they are used."""

from __future__ import annotations

import os
from functools import partial

from ml_flashpoint.format.digest import BLOCK_SIZE
from ml_flashpoint.format.errors import InvalidArgumentError

NODE_ID_VARIABLE = "FLASHPOINT_NODE_ID"
"""Names the failure domain of this process, where the host is not it (several nodes on one machine)."""

BLOCK_BYTES_VARIABLE = "FLASHPOINT_TEST_BLOCK_BYTES"
"""For tests only: makes the blocks of new objects small, so that states of tests have many."""


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InvalidArgumentError("must be a positive number", argument=name, value=text)
    return value


def _integer(name: str, lowest: int, highest: int, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if not lowest <= value <= highest:
        raise InvalidArgumentError(f"must be a whole number from {lowest} to {highest}", argument=name, value=text)
    return value


transfer_deadline_s = partial(_seconds, "FLASHPOINT_TRANSFER_DEADLINE_S", 30.0)
"""Seconds without progress after which a transfer to or from a peer is given up."""

collective_deadline_s = partial(_seconds, "FLASHPOINT_COLLECTIVE_DEADLINE_S", 600.0)
"""Seconds that a rank waits for the others when they recover or agree."""

late_s = partial(_seconds, "FLASHPOINT_LATE_S", 10.0)
"""Seconds that rank 0 waits for the answers to a round, and any rank for agreement on a new structure, before it names
the ranks that are missing."""

recovery_deadline_s = partial(_seconds, "FLASHPOINT_RECOVERY_DEADLINE_S", 60.0)
"""Seconds for which what cannot be read just now is tried again, before an older version is taken or none."""

seal_deadline_s = partial(_seconds, "FLASHPOINT_SEAL_DEADLINE_S", 600.0)
"""Seconds that a save may take from its stage to its commit before its slot is taken back."""

call_deadline_s = partial(_seconds, "FLASHPOINT_CALL_DEADLINE_S", 3600.0)
"""Seconds that a function given to a queue of asynchronous calls may run before a blocking wait gives it up."""

lock_deadline_s = partial(_seconds, "FLASHPOINT_LOCK_DEADLINE_S", 30.0)
"""Seconds that a starting rank waits for its dying predecessor to let go of the base container."""

exit_deadline_s = partial(_seconds, "FLASHPOINT_EXIT_DEADLINE_S", 10.0)
"""Seconds that an exiting process gives to replication, and to asynchronous calls, still under way."""

copy_threads = partial(_integer, "FLASHPOINT_COPY_THREADS", 1, 999, 0)
"""Threads that copy at once, at most; 0 for as many as help."""

block_bytes = partial(_integer, BLOCK_BYTES_VARIABLE, 4096, 2**30, BLOCK_SIZE)
"""Bytes of the blocks by which new objects are digested. Readers go by the manifest of an object."""
