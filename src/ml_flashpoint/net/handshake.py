"""The proof of two sides of a connection to each other that they know a secret, as bytes without sockets::

    client -> server   hello      magic (8)  client nonce (32)
    server -> client   challenge  magic (8)  server nonce (32)
    client -> server   proof      HMAC-SHA256(secret, "client proof" + both nonces)
    server -> client   proof      HMAC-SHA256(secret, "server proof" + both nonces), or `REFUSED`

The client proves first: an unauthenticated one learns nothing. Role, nonces and purpose are part of what is signed: no
proof can be reflected, replayed, or used at a server of another kind.
"""

from __future__ import annotations

import hmac
from typing import Final

from ml_flashpoint.format.errors import InvalidArgumentError, ProtocolError

MIN_SECRET_BYTES: Final = 16
"""Shortest secret accepted; shorter ones can be guessed offline from one recorded handshake."""
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
PROTOCOL_VERSION: Final = 3
REFUSED: Final = bytes(MAC_BYTES)
"""Answer to a client with another secret, so that it can tell this from a server that died just now."""

_MAGIC = b"MLFLASH" + bytes([PROTOCOL_VERSION])
GREETING_BYTES: Final = len(_MAGIC) + NONCE_BYTES
"""Size of a hello and of a challenge."""


def check_secret(secret: bytes) -> bytes:
    """Return a secret as bytes, or raise `InvalidArgumentError`, which never shows it."""
    if not isinstance(secret, (bytes, bytearray)):
        raise InvalidArgumentError(f"secret must be bytes, not {type(secret).__name__}")
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidArgumentError(
            f"secret has {len(secret)} bytes, and needs {MIN_SECRET_BYTES} or more",
            hint="make one with secrets.token_bytes(32) and give the same one to every rank of the job",
        )
    return bytes(secret)


def proved_secret(secret: bytes, purpose: bytes) -> bytes:
    """Return what is proved in a handshake of a purpose. Raise `InvalidArgumentError` if the secret is too short."""
    return hmac.digest(check_secret(secret), purpose, "sha256")


def greeting(nonce: bytes) -> bytes:
    """Return the hello of a client or the challenge of a server, `GREETING_BYTES` long."""
    return _MAGIC + nonce


def parse_greeting(data: bytes) -> bytes:
    """Return the nonce in a hello or challenge. Raise a `ProtocolError` for another protocol or version."""
    if len(data) != GREETING_BYTES or not data.startswith(_MAGIC):
        if data[:7] != _MAGIC[:7]:
            raise ProtocolError("the peer speaks another protocol")
        hint = "run the same release of this package everywhere"
        raise ProtocolError("the peer speaks another version of this protocol", hint=hint)
    return bytes(data[len(_MAGIC) :])


def client_proof(secret: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what the client sends to show that it knows the secret; compare with `hmac.compare_digest`."""
    return hmac.digest(secret, _MAGIC + b"client proof\0" + client_nonce + server_nonce, "sha256")


def server_proof(secret: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what the server sends to show that it knows the secret; compare with `hmac.compare_digest`."""
    return hmac.digest(secret, _MAGIC + b"server proof\0" + client_nonce + server_nonce, "sha256")
