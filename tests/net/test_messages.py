"""The bytes of requests and replies: nothing but the message that was sent next is ever accepted."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import (
    CapacityError,
    DigestMismatchError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.net import handshake, messages
from ml_flashpoint.net.messages import HEAD_BYTES, parse_text
from ml_flashpoint.net.transfers import TRANSFERS

SECRET = b"s" * 32


def head(**changes: int | bytes) -> bytes:
    values: dict[str, int | bytes] = {"magic": b"MLFm", "json": 2, "blobs": 0, "payload": 5, **changes}
    return struct.pack(">4sIIQ", *values.values())


# --- Messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"MLFd"},
        {"json": messages.JSON_BYTES + 1},
        {"json": 2**32 - 1},
        {"blobs": messages.BLOBS + 1},
        {"payload": 2**63},
        {"payload": 2**64 - 1},
    ],
)
def test_heads_over_any_cap_are_refused(changes: dict[str, int | bytes]) -> None:
    assert TRANSFERS.parse_head(head()) == (2, 0, 5)
    with pytest.raises(ProtocolError):
        TRANSFERS.parse_head(head(**changes))


def test_blobs_over_the_cap_are_refused() -> None:
    for length in (messages.BLOB_BYTES + 1, 2**32 - 1):
        with pytest.raises(ProtocolError):
            TRANSFERS.parse_lengths(head(blobs=1) + struct.pack(">I", length), 1)


def test_what_the_receiver_would_refuse_is_not_sent() -> None:
    for fields, sizes in (
        ({"x": "x" * messages.JSON_BYTES}, []),
        ({}, [1] * (messages.BLOBS + 1)),
        ({}, [messages.BLOB_BYTES + 1]),
    ):
        with pytest.raises(InvalidArgumentError):
            TRANSFERS.begin_message("push", fields, sizes)


@pytest.mark.parametrize(
    "data",
    [
        b'["a", 1]',
        b'["a", {}, 1]',
        b"[1, {}]",
        b'["a", {"a": ' + b"9" * 60_000 + b"}]",
        b"[" * 60_000,
        b'["a", {"a": "\xff"}]',
        b'\xef\xbb\xbf["a", {}]',
        b"null",
        b"",
    ],
    ids=lambda data: ascii(data[:20]),
)
def test_crafted_texts_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_text(data, request=True)


def test_fields_are_of_the_type_asked_for() -> None:
    fields = {"name": "x", "offset": 5, "flag": True, "below": -1, "nothing": None, "large": 1 << 63, "half": 0.5}
    assert (messages.text(fields, "name"), messages.integer(fields, "offset")) == ("x", 5)
    for name in ("offset", "flag", "nothing", "absent"):
        with pytest.raises(ProtocolError, match=name):
            messages.text(fields, name)
    for name in ("name", "flag", "below", "nothing", "absent", "large", "half"):
        with pytest.raises(ProtocolError, match=name):
            messages.integer(fields, name)


# --- Handshake ----------------------------------------------------------------------------------------------


def test_a_proof_is_good_for_one_role_one_session_and_one_secret() -> None:
    nonces = b"c" * 32, b"s" * 32
    proofs = {
        handshake.client_proof(SECRET, *nonces),
        handshake.server_proof(SECRET, *nonces),
        handshake.client_proof(SECRET, *reversed(nonces)),
        handshake.client_proof(b"t" * 32, *nonces),
    }
    assert len(proofs) == 4
    assert all(len(proof) == handshake.MAC_BYTES for proof in proofs)


@given(st.binary(max_size=60))
def test_garbage_is_no_greeting(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        handshake.parse_greeting(data)


def test_a_greeting_tells_another_version_from_another_protocol() -> None:
    hello = handshake.greeting(b"n" * 32)
    assert handshake.parse_greeting(hello) == b"n" * 32
    for version in (b"\x01", b"\x63"):
        with pytest.raises(ProtocolError, match="another version"):
            handshake.parse_greeting(hello[:7] + version + hello[8:])
    with pytest.raises(ProtocolError, match="another protocol"):
        handshake.parse_greeting(b"GET / HTTP/1.1\r\n".ljust(handshake.GREETING_BYTES))


def test_secrets_are_long_enough_and_never_shown() -> None:
    assert handshake.check_secret(bytearray(b"0123456789abcdef")) == b"0123456789abcdef"
    for secret in (b"", b"hunter2", "0123456789abcdef"):
        with pytest.raises(InvalidArgumentError) as caught:
            handshake.check_secret(secret)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)
        assert "0123" not in str(caught.value)


# --- Errors -------------------------------------------------------------------------------------------------


def travelled(error: Exception) -> FlashpointError:
    return TRANSFERS.rebuild(TRANSFERS.describe(error))


@pytest.mark.parametrize("error_type", [ObjectNotFoundError, DigestMismatchError, JobInUseError, ReplicationError])
def test_errors_keep_their_type_and_context(error_type: type[FlashpointError]) -> None:
    received = travelled(error_type("gone", step=5, rank=3, node="n1", path="/base/x", hint="look elsewhere"))
    assert type(received) is error_type
    assert received.message == "gone"
    assert (received.step, received.rank, received.node) == (5, 3, "n1")
    assert (received.path, received.hint) == ("/base/x", "look elsewhere")


def test_capacity_errors_keep_their_numbers() -> None:
    received = travelled(CapacityError("full", needed_bytes=7, available_bytes=5))
    assert isinstance(received, CapacityError)
    assert (received.needed_bytes, received.available_bytes) == (7, 5)


def test_errors_of_no_travelling_type_become_the_dialects_own() -> None:
    for error in (OSError(28, "No space left on device"), ZeroDivisionError()):
        received = travelled(error)
        assert type(received) is ReplicationError
        assert type(error).__name__ in received.message


@pytest.mark.parametrize("character", ["x", "\N{SNOWMAN}", "\N{PILE OF POO}", "\x00", "\udcff", '"'])
def test_any_error_text_fits_into_a_message(character: str) -> None:
    long = character * 100_000
    described = TRANSFERS.describe(ReplicationError(long, path=long, hint=long, node=long))
    assert len(TRANSFERS.begin_message(described, {})) <= messages.JSON_BYTES + HEAD_BYTES
    assert TRANSFERS.rebuild(described).message.startswith(character * 1000)
