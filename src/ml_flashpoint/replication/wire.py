"""The bytes of the transfer protocol: handshake, frames, and errors as they travel between peers.

Owns every constant, layout and check of the protocol, as pure functions and small state machines over bytes.
Sockets, deadlines and threads belong to `channel`; what a request means belongs to `transfer_service` and
`transfer_client`.

A connection begins with a mutual challenge-response over the job's secret::

    client -> server   hello      magic (8)  client nonce (32)
    server -> client   challenge  magic (8)  server nonce (32)
    client -> server   proof      HMAC-SHA256(secret, "client proof" + both nonces)
    server -> client   proof      HMAC-SHA256(secret, "server proof" + both nonces)

The client proves first, so an unauthenticated one learns nothing from a server. The role is part of what is signed,
so a proof cannot be reflected, and both nonces are, so a recorded session cannot be replayed. Each direction then
has a key of its own, derived from the secret and the nonces, and carries frames::

    preamble (24): magic, version, kind, reserved, header length, body length, payload length
    code     (32): HMAC-SHA256(key of the direction, sequence number + preamble + header + body)
    header       : a JSON object of scalars
    body         : bytes, only in the frames that carry a manifest
    payload      : `payload_bytes` raw bytes of objects, not covered by the code

A frame that is forged, replayed, reordered or left out therefore fails its code. Payloads are checked against
the block digests of the (authenticated) manifest instead, which costs a fraction of a MAC: those detect every
accident but are not cryptographic, and nothing is encrypted. Someone who can alter packets between nodes is
out of scope.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from ml_flashpoint.format.errors import (
    AuthenticationError,
    CapacityError,
    DeadlineError,
    DigestMismatchError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    ManifestError,
    ObjectFormatError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
    UnreadableError,
)
from ml_flashpoint.format.manifest import MAX_MANIFEST_BYTES

# --- Knobs --------------------------------------------------------------------------------------------------

MIN_SECRET_BYTES = 16
"""Shortest secret accepted; shorter ones can be guessed offline from one recorded handshake."""
MAX_HEADER_BYTES = 64 << 10
"""Longest JSON header of a frame."""
MAX_BODY_BYTES = MAX_MANIFEST_BYTES
"""Longest manifest that travels (that of some 50 TB of objects)."""
SEND_CHUNK_BYTES = 16 << 20
"""Most bytes given to one `send`. Each call gives up the GIL and must win it back, which takes up to 5 ms while
training holds it, so few large calls are worth more than a warm cache."""
RECEIVE_CHUNK_BYTES = 8 << 20
"""Most bytes asked of one `recv_into`: half a block, as the kernel opens the window for the sender less often
within a longer call. While the GIL is held by others, 8 MiB are 1.4 times as fast as 4."""
DEFAULT_DEADLINE_S = 30.0
"""A transfer that makes no progress for so long is given up."""
CONNECT_TIMEOUT_S = 10.0
"""Time for a TCP connection, and again for the handshake on it, seen from the client."""
HANDSHAKE_DEADLINE_S = 5.0
"""Time for the whole handshake, seen from the server."""
IDLE_DEADLINE_S = 300.0
"""An authenticated connection without any request for so long is closed by the server."""
WORK_LIMIT_S = 600.0
"""Longest that a server keeps sending keepalives while it is at work (allocating, verifying, committing)."""
MAX_CONNECTIONS = 256
"""Authenticated connections served at once."""
MAX_HANDSHAKES = 128
"""Connections in the handshake at once; the oldest of the host that has most is dropped for a newcomer."""
ACCEPT_BACKLOG = 1024
"""Connections that wait to be accepted. What finds no place there comes back after a second."""

# --- Layout -------------------------------------------------------------------------------------------------

NONCE_BYTES = 32
MAC_BYTES = 32
PROTOCOL_VERSION = 1
_HANDSHAKE_MAGIC = b"MLFLASH" + bytes([PROTOCOL_VERSION])
_FRAME_MAGIC = b"MLFt"
_PREAMBLE = struct.Struct(">4sBBHIIQ")
_SEQUENCE = struct.Struct(">Q")

GREETING_BYTES = len(_HANDSHAKE_MAGIC) + NONCE_BYTES
"""Size of a hello and of a challenge."""
PREAMBLE_BYTES = _PREAMBLE.size
FRAME_START_BYTES = PREAMBLE_BYTES + MAC_BYTES
"""What is read before the lengths of the rest are known."""

_MAX_FIELDS = 32
_MAX_INTEGER = (1 << 63) - 1

Scalar: TypeAlias = "str | int | bool | None"


class FrameKind(enum.IntEnum):
    """What a frame says. A client asks PING, GET_MANIFEST, GET or PUSH (then DATA); a server answers."""

    PING = 1
    PONG = 2
    GET_MANIFEST = 3
    MANIFEST = 4
    GET = 5
    DATA = 6
    PUSH = 7
    READY = 8
    ACK = 9
    NACK = 10
    KEEPALIVE = 11


_WITH_BODY = frozenset({FrameKind.MANIFEST, FrameKind.PUSH})
_WITH_PAYLOAD = frozenset({FrameKind.DATA})


@dataclass(frozen=True, slots=True)
class Preamble:
    """The fixed start of a frame: its kind and how many bytes follow, each within its cap."""

    kind: FrameKind
    header_bytes: int
    body_bytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `payload_bytes` announces how many raw bytes follow it on the connection."""

    kind: FrameKind
    fields: Mapping[str, Scalar] = field(default_factory=dict)
    body: bytes = b""
    payload_bytes: int = 0

    def text(self, name: str) -> str:
        """The field ``name``, which must be a string.

        Raises:
            ProtocolError: it is missing or of another type.
        """
        value = self.fields.get(name)
        if not isinstance(value, str):
            self._refuse(name, "a string")
        return value

    def integer(self, name: str) -> int:
        """The field ``name``, which must be an integer in [0, 2**63).

        Raises:
            ProtocolError: it is missing, of another type or out of range.
        """
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INTEGER:
            self._refuse(name, "a non-negative 63-bit integer")
        return value

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        raise ProtocolError(f"{self.kind.name} frame: field {name!r} must be {wanted}")


# --- Handshake ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """One key a direction, good for one connection. Not shown by `repr`."""

    client_to_server: bytes = field(repr=False)
    server_to_client: bytes = field(repr=False)


def check_secret(secret: bytes) -> bytes:
    """Return ``secret`` as bytes, or raise `InvalidArgumentError` (which never shows it)."""
    if not isinstance(secret, (bytes, bytearray)):
        raise InvalidArgumentError(f"secret must be bytes, not {type(secret).__name__}")
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidArgumentError(
            f"secret has {len(secret)} bytes, and needs {MIN_SECRET_BYTES} or more",
            hint="make one with secrets.token_bytes(32) and give the same one to every rank of the job",
        )
    return bytes(secret)


def greeting(nonce: bytes) -> bytes:
    """The hello of a client or the challenge of a server, `GREETING_BYTES` long."""
    return _HANDSHAKE_MAGIC + nonce


def parse_greeting(data: bytes) -> bytes:
    """The nonce in a hello or challenge.

    Raises:
        ProtocolError: the sender speaks something else, or another version of this protocol.
    """
    if len(data) != GREETING_BYTES or not data.startswith(_HANDSHAKE_MAGIC):
        same_family = data[:7] == _HANDSHAKE_MAGIC[:7]
        raise ProtocolError("the peer speaks another version" if same_family else "the peer speaks another protocol")
    return bytes(data[len(_HANDSHAKE_MAGIC) :])


def _derive(secret: bytes, purpose: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(secret, _HANDSHAKE_MAGIC + purpose + b"\0" + client_nonce + server_nonce, "sha256")


def client_proof(secret: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """What the client sends to show that it knows the secret; compare with `hmac.compare_digest`."""
    return _derive(secret, b"client proof", client_nonce, server_nonce)


def server_proof(secret: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """What the server sends to show that it knows the secret; compare with `hmac.compare_digest`."""
    return _derive(secret, b"server proof", client_nonce, server_nonce)


def session_keys(secret: bytes, client_nonce: bytes, server_nonce: bytes) -> SessionKeys:
    """The keys of the connection on which these nonces were exchanged."""
    return SessionKeys(
        client_to_server=_derive(secret, b"client to server key", client_nonce, server_nonce),
        server_to_client=_derive(secret, b"server to client key", client_nonce, server_nonce),
    )


class ServerHandshake:
    """The server's side of a handshake, from bytes to bytes.

    Args:
        secret: the job's.
        peer: how errors name the other side.

    Attributes:
        awaited_bytes: how many bytes the peer is to send next.
        keys: of the connection, once the peer has proved that it knows the secret.
    """

    def __init__(self, secret: bytes, peer: str) -> None:
        self._secret = secret
        self._peer = peer
        self._server_nonce = b""
        self._client_nonce = b""
        self.awaited_bytes = GREETING_BYTES
        self.keys: SessionKeys | None = None

    def answer(self, data: bytes) -> bytes:
        """What to answer to the awaited bytes: a challenge to the first, our own proof to the second.

        Raises:
            ProtocolError: the peer speaks something else.
            AuthenticationError: it does not know the secret.
        """
        if not self._server_nonce:
            self._client_nonce = parse_greeting(data)
            self._server_nonce = secrets.token_bytes(NONCE_BYTES)
            self.awaited_bytes = MAC_BYTES
            return greeting(self._server_nonce)
        nonces = self._client_nonce, self._server_nonce
        if not hmac.compare_digest(data, client_proof(self._secret, *nonces)):
            raise AuthenticationError(f"{self._peer} does not know the job's secret")
        self.keys = session_keys(self._secret, *nonces)
        return server_proof(self._secret, *nonces)


# --- Frames -------------------------------------------------------------------------------------------------


def parse_preamble(data: bytes) -> Preamble:
    """Parse the first `PREAMBLE_BYTES` of a frame, distrusting them.

    Raises:
        ProtocolError: anything about them is not allowed, lengths over their caps included.
    """
    if len(data) != PREAMBLE_BYTES:
        raise ProtocolError(f"a frame starts with {PREAMBLE_BYTES} bytes, not {len(data)}")
    magic, version, number, reserved, header_bytes, body_bytes, payload_bytes = _PREAMBLE.unpack(data)
    if magic != _FRAME_MAGIC or version != PROTOCOL_VERSION or reserved != 0:
        raise ProtocolError("not the start of a frame of this protocol")
    try:
        kind = FrameKind(number)
    except ValueError:
        raise ProtocolError(f"unknown kind of frame: {number}") from None
    if header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"{kind.name} frame: header of {header_bytes:,} bytes, over the {MAX_HEADER_BYTES:,} allowed"
        )
    if body_bytes > (MAX_BODY_BYTES if kind in _WITH_BODY else 0):
        raise ProtocolError(f"{kind.name} frame: body of {body_bytes:,} bytes is not allowed")
    if payload_bytes > (_MAX_INTEGER if kind in _WITH_PAYLOAD else 0):
        raise ProtocolError(f"{kind.name} frame: payload of {payload_bytes:,} bytes is not allowed")
    return Preamble(kind, header_bytes, body_bytes, payload_bytes)


def parse_fields(data: bytes) -> dict[str, Scalar]:
    """Parse the JSON header of a frame: one object of at most 32 strings, integers, booleans and nulls.

    Raises:
        ProtocolError: it is anything else, repeats a name, or holds an integer of 64 bits or more.
    """
    try:
        decoded = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_fields)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError("frame header is not JSON of the form this protocol uses") from exc
    if not isinstance(decoded, dict):
        raise ProtocolError("frame header is not a JSON object")
    return decoded


def _unique_fields(pairs: list[tuple[str, object]]) -> dict[str, Scalar]:
    fields: dict[str, Scalar] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError("repeated field")
        if value is not None and not isinstance(value, (str, int)):
            raise ValueError("field that is not a scalar")
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise ValueError("integer out of range")
        fields[name] = value
    if len(fields) > _MAX_FIELDS:
        raise ValueError("too many fields")
    return fields


class _FrameCode:
    """The code of each frame of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def next(self, *parts: bytes) -> bytes:
        code = hmac.new(self._key, _SEQUENCE.pack(self._sequence), hashlib.sha256)
        self._sequence += 1
        for part in parts:
            code.update(part)
        return code.digest()


class FrameEncoder:
    """Turns the frames of one direction of one connection into bytes, in order. Not thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._code = _FrameCode(key)

    def encode(self, frame: Frame) -> bytes:
        """All of the frame but its payload.

        Raises:
            ProtocolError: the frame is one that the receiver would refuse.
        """
        header = json.dumps(dict(frame.fields), separators=(",", ":")).encode("utf-8")
        try:
            preamble = _PREAMBLE.pack(
                _FRAME_MAGIC,
                PROTOCOL_VERSION,
                frame.kind,
                0,
                len(header),
                len(frame.body),
                frame.payload_bytes,
            )
        except struct.error as exc:
            raise ProtocolError(f"{frame.kind.name} frame is too long") from exc
        parse_preamble(preamble)
        return b"".join((preamble, self._code.next(preamble, header, frame.body), header, frame.body))


class FrameDecoder:
    """Checks and parses the frames of one direction of one connection. Not thread-safe.

    After an error the connection is of no more use: what follows cannot be told apart from an attack.
    """

    def __init__(self, key: bytes) -> None:
        self._code = _FrameCode(key)

    def decode(self, start: bytes, rest: bytes) -> Frame:
        """Parse one frame from its first `FRAME_START_BYTES` and the header and body that those announce.

        Raises:
            AuthenticationError: the code is not that of the next frame of this direction.
            ProtocolError: the frame is not one of this protocol.
        """
        if len(start) != FRAME_START_BYTES:
            raise ProtocolError(f"a frame starts with {FRAME_START_BYTES} bytes, not {len(start)}")
        preamble_bytes, code = start[:PREAMBLE_BYTES], start[PREAMBLE_BYTES:]
        preamble = parse_preamble(preamble_bytes)
        if len(rest) != preamble.header_bytes + preamble.body_bytes:
            raise ProtocolError(f"{preamble.kind.name} frame: its length is not the one announced")
        if not hmac.compare_digest(code, self._code.next(preamble_bytes, rest)):
            raise AuthenticationError("a frame was forged, altered, replayed or lost")
        fields = parse_fields(rest[: preamble.header_bytes])
        return Frame(preamble.kind, fields, rest[preamble.header_bytes :], preamble.payload_bytes)


# --- Errors -------------------------------------------------------------------------------------------------

_TRAVELLING_ERRORS: Mapping[str, type[FlashpointError]] = {
    error.__name__: error
    for error in (
        CapacityError,
        DeadlineError,
        DigestMismatchError,
        JobInUseError,
        ManifestError,
        ObjectFormatError,
        ObjectNotFoundError,
        ProtocolError,
        ReplicationError,
        UnreadableError,
    )
}
_MAX_TEXT = 1000  # characters; a header has room for four such texts even when each takes 12 bytes of JSON


def error_frame(error: Exception) -> Frame:
    """The NACK that reports ``error`` to a peer. Errors of other packages travel as their name and text."""
    fields: dict[str, Scalar] = {"error": type(error).__name__}
    if isinstance(error, FlashpointError):
        fields.update(message=error.message[:_MAX_TEXT], step=error.step, rank=error.rank)
        for name in ("node", "path", "hint"):
            text: str | None = getattr(error, name)
            fields[name] = None if text is None else text[:_MAX_TEXT]
    else:
        fields["message"] = str(error)[:_MAX_TEXT]
    if isinstance(error, CapacityError):
        fields.update(needed_bytes=error.needed_bytes, available_bytes=error.available_bytes)
    return Frame(FrameKind.NACK, fields)


def error_of_frame(frame: Frame) -> FlashpointError:
    """The error that a NACK reports: of its own type where that type travels, else a `ReplicationError`.

    Raises:
        ProtocolError: the frame is not a well-formed NACK.
    """
    name, message = frame.text("error"), frame.text("message")
    error_type = _TRAVELLING_ERRORS.get(name)
    if error_type is None:
        error_type, message = ReplicationError, f"{name}: {message}"
    error = error_type(
        f"the peer refused: {message}",
        step=_optional_integer(frame, "step"),
        rank=_optional_integer(frame, "rank"),
        node=_optional_text(frame, "node"),
        path=_optional_text(frame, "path"),
        hint=_optional_text(frame, "hint"),
    )
    if isinstance(error, CapacityError):
        error.needed_bytes = _optional_integer(frame, "needed_bytes")
        error.available_bytes = _optional_integer(frame, "available_bytes")
    return error


def _optional_integer(frame: Frame, name: str) -> int | None:
    return None if frame.fields.get(name) is None else frame.integer(name)


def _optional_text(frame: Frame, name: str) -> str | None:
    return None if frame.fields.get(name) is None else frame.text(name)
