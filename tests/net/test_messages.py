"""The bytes of requests and replies: nothing but the message that was sent next is ever accepted."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ml_flashpoint.ddict.errors import REQUESTS
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
from ml_flashpoint.net.messages import HEAD_BYTES
from ml_flashpoint.net.transfers import TRANSFERS

SECRET = b"s" * 32


def test_fields_are_of_the_type_asked_for() -> None:
    fields = {"name": "x", "offset": 5, "flag": True, "below": -1, "nothing": None, "large": 1 << 63, "half": 0.5}
    assert (messages.text(fields, "name"), messages.integer(fields, "offset")) == ("x", 5)
    for name in ("offset", "flag", "nothing", "absent"):
        with pytest.raises(ProtocolError, match=name):
            messages.text(fields, name)
    for name in ("name", "flag", "below", "nothing", "absent", "large", "half"):
        with pytest.raises(ProtocolError, match=name):
            messages.integer(fields, name)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(text=st.binary() | _JSON.map(lambda value: json.dumps(value).encode()), request=st.booleans())
@example(text=b'["a", {}, 1]', request=True)
@example(text=b"[1, {}]", request=True)
@example(text=b'["a", {"a": ' + b"9" * 60_000 + b"}]", request=True)
@example(text=b"[" * 60_000, request=True)
@example(text=b'["a", {"a": "\xff"}]', request=True)
def test_any_text_is_a_message_or_a_typed_error(text: bytes, request: bool) -> None:
    try:
        subject, fields = messages.parse_text(text, request=request)
    except ProtocolError:
        return
    assert isinstance(subject, str) if request else subject is None or isinstance(subject, dict)
    assert isinstance(fields, dict)


def test_a_payload_that_no_memory_can_hold_is_refused() -> None:
    assert TRANSFERS.parse_head(struct.pack(">4sIIQ", b"MLFm", 2, 0, 5)) == (2, 0, 5)
    with pytest.raises(ProtocolError):
        TRANSFERS.parse_head(struct.pack(">4sIIQ", b"MLFm", 2, 0, 2**63))


# ---- handshake --------------------------------------------------------------------------------------------------


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


def test_a_greeting_tells_another_version_from_another_protocol() -> None:
    hello = handshake.greeting(b"n" * 32)
    assert handshake.parse_greeting(hello) == b"n" * 32
    for version in (b"\x01", b"\x63"):
        with pytest.raises(ProtocolError, match="another version"):
            handshake.parse_greeting(hello[:7] + version + hello[8:])
    for other in (b"GET / HTTP/1.1\r\n".ljust(handshake.GREETING_BYTES), b""):
        with pytest.raises(ProtocolError, match="another protocol"):
            handshake.parse_greeting(other)


def test_secrets_are_long_enough_and_never_shown() -> None:
    assert handshake.check_secret(bytearray(b"0123456789abcdef")) == b"0123456789abcdef"
    for secret in (b"", b"hunter2", "0123456789abcdef"):
        with pytest.raises(InvalidArgumentError) as caught:
            handshake.check_secret(secret)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)
        assert "0123" not in str(caught.value)


# ---- errors -----------------------------------------------------------------------------------------------------


def travelled(error: Exception) -> FlashpointError:
    return TRANSFERS.rebuild(TRANSFERS.describe(error))


def test_errors_keep_their_type_and_context() -> None:
    for error_type in (ObjectNotFoundError, DigestMismatchError, JobInUseError, ReplicationError):
        received = travelled(error_type("gone", step=5, rank=3, node="n1", path="/base/x", hint="look elsewhere"))
        assert type(received) is error_type
        assert received.message == "gone"
        assert (received.step, received.rank, received.node) == (5, 3, "n1")
        assert (received.path, received.hint) == ("/base/x", "look elsewhere")
    full = travelled(CapacityError("full", needed_bytes=7, available_bytes=5))
    assert isinstance(full, CapacityError)
    assert (full.needed_bytes, full.available_bytes) == (7, 5)
    for error in (OSError(28, "No space left on device"), ZeroDivisionError()):
        received = travelled(error)
        assert type(received) is ReplicationError, "no travelling type becomes the dialect's own"
        assert type(error).__name__ in received.message


@pytest.mark.parametrize("character", ["x", "\N{SNOWMAN}", "\N{PILE OF POO}", "\x00", "\udcff", '"'])
def test_any_error_text_fits_into_a_message(character: str) -> None:
    long = character * 100_000
    described = TRANSFERS.describe(ReplicationError(long, path=long, hint=long, node=long))
    assert len(TRANSFERS.begin_message(described, {})) <= messages.JSON_BYTES + HEAD_BYTES
    assert TRANSFERS.rebuild(described).message.startswith(character * 1000)


@given(st.dictionaries(st.sampled_from(["error", "message", "manager", "path", "value", "hint", "x"]), _JSON))
@example({"message": ""})
@example({"error": "SystemExit", "message": "x"})
@example({"error": "DDictKeyError", "message": "x", "__class__": "y", "manager": [1], "args": "z"})
def test_any_description_is_an_error_of_ours(described: dict[str, object]) -> None:
    error = REQUESTS.rebuild(described)
    assert isinstance(error, FlashpointError)
    assert isinstance(getattr(error, "manager", None), (int, str, type(None)))
    assert str(error)
    assert type(REQUESTS.rebuild(REQUESTS.describe(error))) is type(error)
