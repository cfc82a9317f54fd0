"""The bytes of requests and replies, and of errors in them. What is no message is a `ProtocolError`.

Nothing in a message is pickled. It is::

    head (20): magic, length of the JSON (4), number of blobs (4), length of the payload (8)
    lengths  : of each blob (4 each)
    JSON     : [subject, fields]
    blobs    : raw bytes, one after the other
    payload  : raw bytes

The subject of a request is the name of an operation. That of a reply is null, or an object that describes an error.
Nothing is encrypted or signed after the handshake: whoever can alter packets between nodes is out of scope.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, NamedTuple

from ml_flashpoint.format.errors import DeadlineError, FlashpointError, InvalidArgumentError, ProtocolError

_MAGIC: Final = b"MLFm"
_HEAD: Final = struct.Struct(">4sIIQ")
HEAD_BYTES: Final = _HEAD.size
JSON_BYTES: Final = 64 << 20
BLOBS: Final = 65_536
BLOB_BYTES: Final = 1 << 31
"""A receiver takes no more JSON and blobs in a message, and no longer blob."""
_MOST_PAYLOAD: Final = (1 << 63) - 1
_MOST_TEXT: Final = 64 << 10
_encode_json = json.JSONEncoder(separators=(",", ":")).encode
_decode_json = json.JSONDecoder().decode

Fields = dict[str, Any]
"""Values that JSON can hold, by name."""


class Message(NamedTuple):
    """A message. `payload_bytes` says how many raw bytes follow it on the connection."""

    subject: str | dict[str, Any] | None
    fields: Fields
    blobs: list[bytes]
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Dialect:
    """The agreement of the two sides of a connection, beside the layout.

    ``purpose`` is that of `handshake.proved_secret`. ``errors`` travel with their types, or the nearest base type;
    others arrive as ``failure``. Another side that takes too long is a ``timeout``.
    """

    purpose: bytes
    errors: Mapping[str, type[FlashpointError]]
    failure: type[FlashpointError]
    timeout: type[DeadlineError] = DeadlineError

    def begin_message(
        self, subject: str | dict[str, Any] | None, fields: Fields, sizes: Sequence[int] = (), payload_bytes: int = 0
    ) -> bytes:
        """Return all of a message that comes before its blobs, which have these sizes in bytes. Raise an
        `InvalidArgumentError` if the fields are not JSON, or if it would be more than a receiver takes."""
        try:
            text = _encode_json((subject, fields)).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"cannot be sent: {error}", argument="fields", value=fields) from error
        if len(text) > JSON_BYTES:
            raise InvalidArgumentError(f"fields of {len(text)} bytes are too many to send", argument="fields")
        if len(sizes) > BLOBS or (sizes and max(sizes) > BLOB_BYTES):
            raise InvalidArgumentError(
                f"a message takes at most {BLOBS} blobs of at most {BLOB_BYTES} bytes each", argument="blobs"
            )
        return _HEAD.pack(_MAGIC, len(text), len(sizes), payload_bytes) + struct.pack(f">{len(sizes)}I", *sizes) + text

    def parse_head(self, data: bytes) -> tuple[int, int, int]:
        """Return length of the JSON, number of blobs and length of the payload, from the start of a message."""
        magic, length, count, payload_bytes = _HEAD.unpack_from(data)
        if magic != _MAGIC or length > JSON_BYTES or count > BLOBS or payload_bytes > _MOST_PAYLOAD:
            raise ProtocolError("not the start of a message")
        return length, count, payload_bytes

    def parse_lengths(self, data: bytes, count: int) -> tuple[int, ...]:
        """Return the lengths of so many blobs, from the start of a message."""
        lengths: tuple[int, ...] = struct.unpack_from(f">{count}I", data, HEAD_BYTES)
        if lengths and max(lengths) > BLOB_BYTES:
            raise ProtocolError(f"a blob of {max(lengths):,} bytes, over the {BLOB_BYTES:,} allowed")
        return lengths

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Return an error as the subject of a reply."""
        kinds = (each.__name__ for each in type(error).__mro__ if self.errors.get(each.__name__) is each)
        kind = next(kinds, None)
        message = str(getattr(error, "message", error))
        if kind is None:
            kind, message = self.failure.__name__, f"{type(error).__name__}: {message}"
        described: dict[str, Any] = {"error": kind, "message": message[:_MOST_TEXT]}
        for name in _ATTRIBUTES:
            value = getattr(error, name, None)
            if isinstance(value, (str, int)):
                described[name] = value[:_MOST_TEXT] if isinstance(value, str) else value
        return described

    def rebuild(self, described: dict[str, Any]) -> FlashpointError:
        """Return the error that a reply describes; `failure` if its type is not known here."""
        name, message = described.get("error"), described.get("message")
        kind = self.errors.get(name) if isinstance(name, str) else None
        error = (kind or self.failure)((isinstance(message, str) and message) or "the other side gave no reason")
        for attribute in _ATTRIBUTES:
            value = described.get(attribute)
            if isinstance(value, (str, int)) and hasattr(error, attribute):
                setattr(error, attribute, value)
        return error


_ATTRIBUTES: Final = (
    "step", "rank", "node", "path", "hint", "manager", "checkpoint_id", "needed_bytes", "available_bytes", "argument",
    "value", "retryable",
)  # fmt: skip


def errors_of(*modules: ModuleType) -> dict[str, type[FlashpointError]]:
    """Return the errors that modules have, by name."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, FlashpointError)
    }


def parse_text(text: bytes, *, request: bool) -> tuple[Any, Fields]:
    """Return subject and fields from the JSON of a message."""
    try:
        content = _decode_json(text.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"what should be JSON is not: {error}") from error
    if type(content) is list and len(content) == 2 and type(content[1]) is dict:
        subject = content[0]
        if type(subject) is str if request else (subject is None or type(subject) is dict):
            return subject, content[1]
    raise ProtocolError("JSON that is not of the form of this protocol")


def integer(fields: Fields, name: str, least: int = 0) -> int:
    """Return a field that is an integer from ``least``. Raise a `ProtocolError`, as the next ones do, if it is not."""
    value = fields.get(name)
    if type(value) is not int or not least <= value < 1 << 63:
        raise ProtocolError(f"field {name!r} must be an integer from {least}")
    return value


def number(fields: Fields, name: str) -> float:
    """Return a field that is an integer or a float."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ProtocolError(f"field {name!r} must be a number")
    return value


def text(fields: Fields, name: str) -> str:
    """Return a field that is a text of 1000 characters at most."""
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > 1000:
        raise ProtocolError(f"field {name!r} must be a short text")
    return value


def list_of(fields: Fields, name: str) -> list[Any]:
    """Return a field that is a list."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise ProtocolError(f"field {name!r} must be a list")
    return value
