"""The bytes of requests and replies between clients and managers, and of errors in them.

Owns the layout of a message and every check of it, without sockets, deadlines or threads: those are
`connection`'s. Nothing in a message is pickled. A message is::

    head (12): magic, length of the JSON (4), number of blobs (4)
    lengths  : of each blob (4 each)
    JSON     : [subject, fields]
    blobs    : raw bytes, one after the other
    code (32): only between nodes: HMAC-SHA256(key of the direction, sequence number + all of the above)

The subject of a request is the name of an operation, that of a reply null, or an object that describes an error.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ml_flashpoint.ddict import errors as ddict_errors
from ml_flashpoint.ddict.errors import DDictError
from ml_flashpoint.format import errors as core_errors
from ml_flashpoint.format.errors import AuthenticationError, FlashpointError, InvalidArgumentError, ProtocolError

MAX_JSON_BYTES: Final = 16 << 20
"""Longest JSON of a message."""
MAX_BLOB_BYTES: Final = 1 << 31
"""Longest blob."""
MAX_BLOBS: Final = 65_536
"""Most blobs in a message."""
CODE_BYTES: Final = 32
"""Length of the code that ends a message between nodes."""

_MAGIC: Final = b"MLFd"
_HEAD: Final = struct.Struct(">4sII")
HEAD_BYTES: Final = _HEAD.size
_LENGTHS: Final = tuple(struct.Struct(f">{count}I") for count in range(5))
_SEQUENCE: Final = struct.Struct(">Q")
_encode_json = json.JSONEncoder(separators=(",", ":")).encode

Fields = dict[str, Any]
"""Whatever JSON can hold, by name."""


class Message(NamedTuple):
    """A message. Of a request, `subject` is the operation; of a reply, None or an error."""

    subject: str | dict[str, Any] | None
    fields: Fields
    blobs: list[bytes]


def lengths_struct(count: int) -> struct.Struct:
    """How the lengths of so many blobs are laid out."""
    return _LENGTHS[count] if count < len(_LENGTHS) else struct.Struct(f">{count}I")


def begin_message(subject: str | dict[str, Any] | None, fields: Fields, sizes: Sequence[int]) -> bytes:
    """All of a message that comes before its blobs, which have these sizes in bytes.

    Raises:
        InvalidArgumentError: the fields are not JSON, or it would be more than a receiver takes.
    """
    try:
        text = _encode_json((subject, fields)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"cannot be sent: {error}", argument="fields", value=fields) from error
    if len(text) > MAX_JSON_BYTES:
        raise InvalidArgumentError(f"fields of {len(text)} bytes are too many to send", argument="fields")
    if len(sizes) > MAX_BLOBS or (sizes and max(sizes) > MAX_BLOB_BYTES):
        raise InvalidArgumentError(
            f"a message takes at most {MAX_BLOBS} blobs of at most {MAX_BLOB_BYTES} bytes each", argument="blobs"
        )
    return _HEAD.pack(_MAGIC, len(text), len(sizes)) + lengths_struct(len(sizes)).pack(*sizes) + text


def parse_head(data: bytes) -> tuple[int, int]:
    """``(length of the JSON, number of blobs)`` from the first `HEAD_BYTES` of a message.

    Raises:
        ProtocolError: no message starts like this.
    """
    magic, length, count = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("not the start of a message")
    if length > MAX_JSON_BYTES:
        raise ProtocolError(f"JSON of {length:,} bytes, over the {MAX_JSON_BYTES:,} allowed")
    if count > MAX_BLOBS:
        raise ProtocolError(f"{count:,} blobs, over the {MAX_BLOBS:,} allowed")
    return length, count


def parse_lengths(data: bytes, count: int) -> tuple[int, ...]:
    """The lengths of so many blobs, from a message's start.

    Raises:
        ProtocolError: one is longer than allowed.
    """
    lengths: tuple[int, ...] = lengths_struct(count).unpack_from(data, HEAD_BYTES)
    if lengths and max(lengths) > MAX_BLOB_BYTES:
        raise ProtocolError(f"a blob of {max(lengths):,} bytes, over the {MAX_BLOB_BYTES:,} allowed")
    return lengths


def parse_text(text: bytes, *, request: bool) -> tuple[Any, Fields]:
    """``(subject, fields)`` from the JSON of a message.

    Raises:
        ProtocolError: it is something else.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"what should be JSON is not: {error}") from error
    if type(content) is list and len(content) == 2 and type(content[1]) is dict:
        kind = type(content[0])
        if kind is str if request else (kind is dict or content[0] is None):
            return content[0], content[1]
    raise ProtocolError("JSON that is not of the form of this protocol")


class MessageCode:
    """The codes of the messages of one direction of one connection, in order. Not thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def next(self, parts: Sequence[Any]) -> bytes:
        """The code of the next message, of which these are all bytes."""
        code = hmac.new(self._key, _SEQUENCE.pack(self._sequence), hashlib.sha256)
        self._sequence += 1
        for part in parts:
            code.update(part)
        return code.digest()

    def check(self, parts: Sequence[Any], received: bytes) -> None:
        """Raise `AuthenticationError` unless this is the code of the next message."""
        if not hmac.compare_digest(self.next(parts), received):
            raise AuthenticationError("a message is not what the other side sent next")


# ---- errors ---------------------------------------------------------------------------------------------------

_TRAVELLING: Final[dict[str, type[FlashpointError]]] = {
    name: value
    for module in (core_errors, ddict_errors)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, FlashpointError)
}
_MAX_TEXT: Final = 64 << 10
_ATTRIBUTES: Final = (
    "step", "rank", "node", "path", "hint", "manager", "checkpoint_id", "needed_bytes", "available_bytes", "argument",
    "value", "retryable",
)  # fmt: skip


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as the subject of a reply. Types of `format.errors` and `ddict.errors` arrive as they are, subclasses
    of theirs as what they derive from, and all others as `DDictError`."""
    if not isinstance(error, FlashpointError):
        return {"error": "DDictError", "message": f"the manager failed: {type(error).__name__}: {error}"[:_MAX_TEXT]}
    kind = next(each.__name__ for each in type(error).__mro__ if _TRAVELLING.get(each.__name__) is each)
    found = {name: getattr(error, name, None) for name in _ATTRIBUTES}
    kept = {
        name: value[:_MAX_TEXT] if isinstance(value, str) else value
        for name, value in found.items()
        if isinstance(value, (str, int))
    }
    return {"error": kind, "message": str(error.message)[:_MAX_TEXT], **kept}


def rebuild_error(described: dict[str, Any]) -> FlashpointError:
    """The error that a reply describes; `DDictError` if its type is not known here."""
    name, message = described.get("error"), described.get("message")
    kind = _TRAVELLING.get(name) if isinstance(name, str) else None
    error = (kind or DDictError)(message if isinstance(message, str) else "the manager gave no reason")
    for attribute in _ATTRIBUTES:
        value = described.get(attribute)
        if isinstance(value, (str, int)) and hasattr(error, attribute):
            setattr(error, attribute, value)
    return error
