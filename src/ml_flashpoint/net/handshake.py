"""How two sides of a connection prove to each other that they know a secret, as bytes without sockets.

Owns the challenge-response and the keys that come of it::

    client -> server   hello      magic (8)  client nonce (32)
    server -> client   challenge  magic (8)  server nonce (32)
    client -> server   proof      HMAC-SHA256(secret, "client proof" + both nonces)
    server -> client   proof      HMAC-SHA256(secret, "server proof" + both nonces), or `REFUSED`

The client proves first, so an unauthenticated one learns nothing from a server. The role is part of what is signed,
so a proof cannot be reflected, and both nonces are, so a recorded session cannot be replayed. What the connection is
for is part of the secret (`proved_secret`), so that no server can be taken for one of another kind. Each direction then
has a key of its own, derived from the secret and the nonces.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final

from ml_flashpoint.format.errors import AuthenticationError, InvalidArgumentError, ProtocolError

MIN_SECRET_BYTES: Final = 16
"""Shortest secret accepted; shorter ones can be guessed offline from one recorded handshake."""
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
PROTOCOL_VERSION: Final = 2
REFUSED: Final = bytes(MAC_BYTES)
"""Said to a client with another secret, so that it can tell this from a server that died just now."""

_MAGIC = b"MLFLASH" + bytes([PROTOCOL_VERSION])
GREETING_BYTES: Final = len(_MAGIC) + NONCE_BYTES
"""Size of a hello and of a challenge."""


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


def proved_secret(secret: bytes, purpose: bytes) -> bytes:
    """What is proved in a handshake of that purpose. Raises `InvalidArgumentError` for a secret that is too short."""
    return hmac.digest(check_secret(secret), purpose, "sha256")


def greeting(nonce: bytes) -> bytes:
    """The hello of a client or the challenge of a server, `GREETING_BYTES` long."""
    return _MAGIC + nonce


def parse_greeting(data: bytes) -> bytes:
    """The nonce in a hello or challenge.

    Raises:
        ProtocolError: the sender speaks something else, or another version of this protocol.
    """
    if len(data) != GREETING_BYTES or not data.startswith(_MAGIC):
        same_family = data[:7] == _MAGIC[:7]
        raise ProtocolError(
            "the peer speaks another version of this protocol" if same_family else "the peer speaks another protocol",
            hint="run the same release of this package everywhere" if same_family else None,
        )
    return bytes(data[len(_MAGIC) :])


def _derive(secret: bytes, purpose: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + purpose + b"\0" + client_nonce + server_nonce, "sha256")


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
        secret: what is to be proved, see `proved_secret`.
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
            raise AuthenticationError(f"{self._peer} does not know the secret")
        self.keys = session_keys(self._secret, *nonces)
        return server_proof(self._secret, *nonces)
