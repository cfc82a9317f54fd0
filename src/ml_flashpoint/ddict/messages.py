"""What clients, managers and the coordinator of a dictionary agree on: their dialect, operations, and fields.

Owns the registry of a manager's operations and checking fields: a peer that knows the secret may still be wrong.
Layout, handshake and connections are those of `ml_flashpoint.net`; on a Unix socket each side also checks that the
other runs as the same user, on TCP each message carries a code.

What operations do is `data_operations`' and `operations`'. Each is a function ``(manager, session, fields, blobs) ->
(fields, blobs)``. Times are in seconds; ``t`` is what is left to the client. ``c`` is a checkpoint, ``w`` the writing
handle, ``e`` the epoch, ``v`` a value id; the key is the first blob.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from ml_flashpoint.ddict import errors as ddict_errors
from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError
from ml_flashpoint.format import errors as core_errors
from ml_flashpoint.format.errors import ProtocolError
from ml_flashpoint.net.messages import Dialect, Fields, errors_of, integer, list_of, number, text

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ml_flashpoint.ddict.manager import Manager, Session

__all__ = ["Fields", "integer", "list_of", "number", "text"]

REQUESTS: Final = Dialect(
    purpose=b"ml_flashpoint.ddict requests",
    errors=errors_of(core_errors, ddict_errors),
    failure=DDictError,
    timeout=DDictTimeoutError,
)

describe_error = REQUESTS.describe
rebuild_error = REQUESTS.rebuild

Result: TypeAlias = "tuple[Fields, Sequence[Buffer]]"
Operation: TypeAlias = "Callable[[Manager, Session, Fields, list[bytes]], Result]"

OPERATIONS: dict[str, Operation] = {}
"""By name; filled by the modules that define them."""

PERSISTENT, BROADCAST = 1, 2
"""Flags of a put, field ``f``."""

LONGEST_S = 1e6
"""Longest time that a client may say it has."""


def operation(function: Operation) -> Operation:
    """Enter a function under its name, without the underscore."""
    OPERATIONS[function.__name__.lstrip("_")] = function
    return function


def left_of(fields: Fields) -> float:
    """Seconds that the client has left. Raises `ProtocolError`, as all of these do, if the field is wrong."""
    left = fields.get("t")
    if not isinstance(left, (int, float)) or not 0 <= left <= LONGEST_S:
        raise ProtocolError("field 't' must be the seconds that are left")
    return float(left)


def until_of(fields: Fields) -> float:
    """When its time is up, by ``time.monotonic()``."""
    return time.monotonic() + left_of(fields)


def integers(fields: Fields, name: str) -> list[int]:
    """A field that must be a list of integers."""
    value = list_of(fields, name)
    if not all(type(each) is int for each in value):
        raise ProtocolError(f"field {name!r} must be a list of integers")
    return value
