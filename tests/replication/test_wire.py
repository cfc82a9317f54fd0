"""The transfer protocol's bytes: nothing but the frame that was sent next is ever accepted."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.format.errors import (
    AuthenticationError,
    CapacityError,
    DigestMismatchError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.replication import wire
from ml_flashpoint.replication.wire import Frame, FrameDecoder, FrameEncoder, FrameKind

KEY = b"k" * 32
SECRET = b"s" * 32
REFUSALS = (ProtocolError, AuthenticationError)

scalars = st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.text(max_size=40)
fields = st.dictionaries(st.text(max_size=20), scalars, max_size=8)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(FrameKind))
    body = draw(st.binary(max_size=200)) if kind in (FrameKind.MANIFEST, FrameKind.PUSH) else b""
    payload_bytes = draw(st.integers(0, 2**63 - 1)) if kind is FrameKind.DATA else 0
    return Frame(kind, draw(fields), body, payload_bytes)


def decode(decoder: FrameDecoder, data: bytes) -> Frame:
    return decoder.decode(data[: wire.FRAME_START_BYTES], data[wire.FRAME_START_BYTES :])


def preamble(**changes: int | bytes) -> bytes:
    values: dict[str, int | bytes] = {
        "magic": b"MLFt",
        "version": wire.PROTOCOL_VERSION,
        "kind": FrameKind.DATA,
        "reserved": 0,
        "header": 2,
        "body": 0,
        "payload": 5,
        **changes,
    }
    return struct.pack(">4sBBHIIQ", *values.values())


# --- Frames -------------------------------------------------------------------------------------------------


@given(st.lists(frames(), min_size=1, max_size=5))
def test_frames_arrive_as_they_were_sent(sent: list[Frame]) -> None:
    encoder, decoder = FrameEncoder(KEY), FrameDecoder(KEY)
    assert [decode(decoder, encoder.encode(frame)) for frame in sent] == sent


def test_every_flipped_bit_and_every_truncation_is_refused() -> None:
    data = FrameEncoder(KEY).encode(Frame(FrameKind.PUSH, {"patience_ms": 5}, body=b"manifest"))
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            with pytest.raises(REFUSALS):
                decode(FrameDecoder(KEY), bytes(altered))
        with pytest.raises(REFUSALS):
            decode(FrameDecoder(KEY), data[:position])
    with pytest.raises(REFUSALS):
        decode(FrameDecoder(KEY), data + b"\0")
    assert decode(FrameDecoder(KEY), data).body == b"manifest"


def test_replayed_reordered_and_missing_frames_are_refused() -> None:
    encoder = FrameEncoder(KEY)
    first, second, third = (encoder.encode(Frame(FrameKind.GET, {"offset": n})) for n in range(3))
    for order in ((first, first), (second,), (first, third), (first, second, first)):
        decoder = FrameDecoder(KEY)
        for data in order[:-1]:
            decode(decoder, data)
        with pytest.raises(AuthenticationError):
            decode(decoder, order[-1])


def test_frames_of_another_direction_secret_or_session_are_refused() -> None:
    nonces = b"c" * 32, b"s" * 32
    keys = wire.session_keys(SECRET, *nonces)
    data = FrameEncoder(keys.client_to_server).encode(Frame(FrameKind.PING))
    others = (
        keys.server_to_client,
        wire.session_keys(SECRET, *reversed(nonces)).client_to_server,
        wire.session_keys(SECRET, b"C" * 32, nonces[1]).client_to_server,
        wire.session_keys(b"t" * 32, *nonces).client_to_server,
    )
    for key in others:
        with pytest.raises(AuthenticationError):
            decode(FrameDecoder(key), data)
    assert decode(FrameDecoder(keys.client_to_server), data) == Frame(FrameKind.PING)


@given(st.binary(max_size=200))
def test_garbage_is_never_a_frame(data: bytes) -> None:
    with pytest.raises(REFUSALS):
        decode(FrameDecoder(KEY), data)


@given(st.binary(min_size=wire.PREAMBLE_BYTES, max_size=wire.PREAMBLE_BYTES))
def test_garbage_is_never_a_preamble(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.parse_preamble(b"X" + data[1:])


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"MLFT"},
        {"version": 2},
        {"kind": 0},
        {"kind": 99},
        {"reserved": 1},
        {"header": wire.MAX_HEADER_BYTES + 1},
        {"header": 2**32 - 1},
        {"body": 1},
        {"kind": FrameKind.PUSH, "body": wire.MAX_BODY_BYTES + 1, "payload": 0},
        {"kind": FrameKind.PUSH, "payload": 1},
        {"payload": 2**63},
        {"payload": 2**64 - 1},
    ],
)
def test_preambles_over_any_cap_are_refused(changes: dict[str, int | bytes]) -> None:
    wire.parse_preamble(preamble())
    with pytest.raises(ProtocolError):
        wire.parse_preamble(preamble(**changes))


def test_a_frame_that_the_receiver_would_refuse_is_not_sent() -> None:
    unsendable = (
        Frame(FrameKind.PING, body=b"x"),
        Frame(FrameKind.GET, payload_bytes=1),
        Frame(FrameKind.DATA, payload_bytes=2**63),
        Frame(FrameKind.DATA, payload_bytes=-1),
        Frame(FrameKind.GET, {"name": "x" * wire.MAX_HEADER_BYTES}),
    )
    for frame in unsendable:
        encoder = FrameEncoder(KEY)
        with pytest.raises(ProtocolError):
            encoder.encode(frame)
        # It did not use up a sequence number either.
        assert decode(FrameDecoder(KEY), encoder.encode(Frame(FrameKind.PING))).kind is FrameKind.PING


# --- Headers ------------------------------------------------------------------------------------------------

json_values = st.recursive(
    scalars | st.floats(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10
)


@given(json_values)
def test_a_header_is_a_flat_object_or_refused(value: object) -> None:
    data = json.dumps(value).encode()
    flat = isinstance(value, dict) and all(v is None or isinstance(v, (str, int)) for v in value.values())
    if flat:
        assert wire.parse_fields(data) == value
    else:
        with pytest.raises(ProtocolError):
            wire.parse_fields(data)


@given(st.binary(max_size=300))
def test_garbage_headers_are_refused_or_flat(data: bytes) -> None:
    try:
        parsed = wire.parse_fields(data)
    except ProtocolError:
        return
    assert all(value is None or isinstance(value, (str, int)) for value in parsed.values())


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": 1.0}',
        b'{"a": 9223372036854775808}',
        b'{"a": ' + b"9" * 60_000 + b"}",
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        json.dumps({str(n): n for n in range(33)}).encode(),
        b"null",
        b"",
    ],
    ids=lambda data: ascii(data[:20]),
)
def test_crafted_headers_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.parse_fields(data)


def test_fields_are_of_the_type_asked_for() -> None:
    frame = Frame(FrameKind.GET, {"name": "x", "offset": 5, "flag": True, "below": -1, "nothing": None})
    assert (frame.text("name"), frame.integer("offset")) == ("x", 5)
    for name in ("offset", "flag", "nothing", "absent"):
        with pytest.raises(ProtocolError, match=name):
            frame.text(name)
    for name in ("name", "flag", "below", "nothing", "absent"):
        with pytest.raises(ProtocolError, match=name):
            frame.integer(name)


# --- Handshake ----------------------------------------------------------------------------------------------


def test_a_proof_is_good_for_one_role_one_session_and_one_secret() -> None:
    nonces = b"c" * 32, b"s" * 32
    proofs = {
        wire.client_proof(SECRET, *nonces),
        wire.server_proof(SECRET, *nonces),
        wire.client_proof(SECRET, *reversed(nonces)),
        wire.client_proof(b"t" * 32, *nonces),
        wire.session_keys(SECRET, *nonces).client_to_server,
        wire.session_keys(SECRET, *nonces).server_to_client,
    }
    assert len(proofs) == 6
    assert all(len(proof) == wire.MAC_BYTES for proof in proofs)


@given(st.binary(max_size=60))
def test_garbage_is_no_greeting(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.parse_greeting(data)


def test_a_greeting_tells_another_version_from_another_protocol() -> None:
    hello = wire.greeting(b"n" * 32)
    assert wire.parse_greeting(hello) == b"n" * 32
    with pytest.raises(ProtocolError, match="version"):
        wire.parse_greeting(hello[:7] + b"\x63" + hello[8:])
    with pytest.raises(ProtocolError, match="another protocol"):
        wire.parse_greeting(b"GET / HTTP/1.1\r\n".ljust(wire.GREETING_BYTES))


def test_secrets_are_long_enough_and_never_shown() -> None:
    assert wire.check_secret(bytearray(b"0123456789abcdef")) == b"0123456789abcdef"
    for secret in (b"", b"hunter2", "0123456789abcdef"):
        with pytest.raises(InvalidArgumentError) as caught:
            wire.check_secret(secret)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)
        assert "0123" not in str(caught.value)
    assert "=" not in repr(wire.session_keys(SECRET, b"c" * 32, b"s" * 32))


# --- Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error_type", [ObjectNotFoundError, DigestMismatchError, JobInUseError, ReplicationError])
def test_errors_keep_their_type_and_context(error_type: type[FlashpointError]) -> None:
    sent = error_type("gone", step=5, rank=3, node="n1", path="/base/x", hint="look elsewhere")
    received = wire.error_of_frame(wire.error_frame(sent))
    assert type(received) is error_type
    assert received.message == "the peer refused: gone"
    assert (received.step, received.rank, received.node) == (5, 3, "n1")
    assert (received.path, received.hint) == ("/base/x", "look elsewhere")


def test_capacity_errors_keep_their_numbers() -> None:
    received = wire.error_of_frame(wire.error_frame(CapacityError("full", needed_bytes=7, available_bytes=5)))
    assert isinstance(received, CapacityError)
    assert (received.needed_bytes, received.available_bytes) == (7, 5)


def test_errors_of_no_travelling_type_become_replication_errors() -> None:
    for error in (OSError(28, "No space left on device"), InvalidArgumentError("odd"), ZeroDivisionError()):
        received = wire.error_of_frame(wire.error_frame(error))
        assert type(received) is ReplicationError
        assert type(error).__name__ in received.message


@pytest.mark.parametrize("character", ["x", "\N{SNOWMAN}", "\N{PILE OF POO}", "\x00", "\udcff", '"'])
def test_any_error_text_fits_into_a_frame(character: str) -> None:
    long = character * 100_000
    frame = wire.error_frame(ReplicationError(long, path=long, hint=long, node=long))
    decoded = decode(FrameDecoder(KEY), FrameEncoder(KEY).encode(frame))
    assert wire.error_of_frame(decoded).message.startswith(f"the peer refused: {character * 1000}")


@given(st.dictionaries(st.sampled_from(["error", "message", "step", "rank", "node", "path", "hint"]), scalars))
@settings(max_examples=200)
def test_malformed_refusals_are_protocol_errors(content: dict[str, str | int | bool | None]) -> None:
    try:
        error = wire.error_of_frame(Frame(FrameKind.NACK, content))
    except ProtocolError:
        return
    assert isinstance(error, FlashpointError)
    assert isinstance(content["message"], str)
