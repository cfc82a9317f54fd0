"""What a `TransferService` and its clients agree on.

Owns the dialect, the time that transfers may take, and which errors travel. A client asks

* ``ping``;
* ``manifest`` of a part: the reply has it as a blob;
* ``fetch`` bytes of an object: they are the reply's payload;
* ``push`` a part, whose manifest is a blob. Unless the reply is that it is ``held`` already, ``data`` follows, with all
  bytes of its objects as payload, and is answered once they are verified and committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, TypeAlias

from ml_flashpoint.format import errors
from ml_flashpoint.format.manifest import MAX_MANIFEST_BYTES
from ml_flashpoint.net.messages import Dialect

Address: TypeAlias = tuple[str, int]
"""Host and port."""

DEFAULT_DEADLINE_S: Final = 30.0
"""A transfer that makes no progress for so long is given up."""
CONNECT_TIMEOUT_S: Final = 10.0
"""Time for connecting and authenticating, seen from the client."""
IDLE_DEADLINE_S: Final = 300.0
"""An authenticated connection without any request for so long is closed by the server."""
WORK_LIMIT_S: Final = 600.0
"""Longest that a server says that it is at work (allocating, verifying, committing)."""
MAX_CONNECTIONS: Final = 256
"""Authenticated connections served at once."""

_TRAVELLING = (
    errors.CapacityError,
    errors.DeadlineError,
    errors.DigestMismatchError,
    errors.JobInUseError,
    errors.ManifestError,
    errors.ObjectFormatError,
    errors.ObjectNotFoundError,
    errors.ProtocolError,
    errors.ReplicationError,
    errors.UnreadableError,
)

TRANSFERS: Final = Dialect(
    purpose=b"ml_flashpoint.replication transfers",
    errors={error.__name__: error for error in _TRAVELLING},
    failure=errors.ReplicationError,
    json_bytes=64 << 10,
    blobs=1,
    blob_bytes=MAX_MANIFEST_BYTES,
)
"""The blob is a manifest: of some 50 TB of objects at most."""


@contextlib.contextmanager
def error_context(*, step: int | None, rank: int | None = None, node: str | None = None) -> Iterator[None]:
    """Have the errors raised inside name the step, rank and node concerned, unless they name some already."""
    try:
        yield
    except errors.FlashpointError as exc:
        exc.step = step if exc.step is None else exc.step
        exc.rank = rank if exc.rank is None else exc.rank
        exc.node = node if exc.node is None else exc.node
        raise
