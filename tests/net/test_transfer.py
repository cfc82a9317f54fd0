"""Transfers between peers: what arrives is what was sent, and what is refused says why."""

from __future__ import annotations

import contextlib
import json
import mmap
import threading

import pytest

from ml_flashpoint.format.errors import (
    CapacityError,
    DigestMismatchError,
    ManifestError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.manifest import ObjectRecord, encode, encode_record
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.net import transfers
from ml_flashpoint.net.channel import ConnectionLostError
from ml_flashpoint.net.transfers import BlockChecker, PeerConnection
from tests.net.support import (
    BLOCK,
    NAME,
    PART,
    SECRET,
    VERSION,
    MemoryStore,
    Proxy,
    begin_push,
    channel_to,
    connection_to,
    fetch,
    manifest_of,
    pattern,
    push,
    record_of,
    refusal_to,
    serving,
)

# --- What arrives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, BLOCK, 5 * BLOCK + 17])
def test_a_pushed_part_is_committed_as_it_was_and_fetched_as_it_is(size: int) -> None:
    data, into = pattern(size), bytearray(size)
    store = MemoryStore({PART: data})
    with serving(store) as service, connection_to(service) as peer:
        assert push(peer, data, {"of": ["the", "caller"]})
        assert push(peer, b"another over the same connection")
        fetch(peer, data, into)
        assert peer.connections == 1
    assert into == data
    assert store.committed == [data, b"another over the same connection"]
    assert store.riders == [{"of": ["the", "caller"]}, {}]
    assert store.aborted == []


def test_a_part_that_is_held_already_is_not_sent() -> None:
    store = MemoryStore(held=True)
    with serving(store) as service, Proxy(service.address) as proxy:
        with PeerConnection(proxy.address, SECRET) as peer:
            assert not push(peer, pattern(8 * BLOCK))
        assert len(proxy.recorded) < BLOCK
    assert (store.committed, store.aborted) == ([], [])


def test_any_run_of_blocks_can_be_fetched_into_any_buffer() -> None:
    data = pattern(3 * BLOCK + 8)
    with serving(MemoryStore({PART: data})) as service, connection_to(service) as peer:
        for first, end in ((0, 4), (0, 1), (3, 4), (1, 3)):
            expected = data[first * BLOCK : end * BLOCK]
            into = bytearray(len(expected))
            with memoryview(into).cast("d") as view, BlockChecker(record_of(data), view, NAME, first) as blocks:
                peer.fetch(PART, blocks)
            assert into == expected
        longer = data + bytes(BLOCK)
        with pytest.raises(ProtocolError, match=f"{len(data)}") as caught:
            fetch(peer, longer, bytearray(len(longer)))
        assert (caught.value.step, caught.value.rank, caught.value.node) == (5, 3, "n2")


def test_a_manifest_is_that_of_the_part_that_was_asked_for() -> None:
    manifest, later = manifest_of(record_of(b"x")), PART._replace(save=SaveId(8, 5))
    manifests = {PART: manifest, later: manifest, PART._replace(rank=0): manifest_of(record_of(b"x"), rank=2)}
    store = MemoryStore(manifests={part: encode(each) for part, each in manifests.items()})
    with serving(store) as service, connection_to(service) as peer:
        assert peer.read_manifest(PART) == manifest
        for other in [*manifests][1:]:
            with pytest.raises(ManifestError) as caught:
                peer.read_manifest(other)
            assert (caught.value.step, caught.value.rank, caught.value.node) == (5, other.rank, "n2")
        with pytest.raises(ObjectNotFoundError):
            peer.read_manifest(PART._replace(rank=4))
        peer.ping()
        assert peer.connections == 1


def test_a_connection_that_broke_while_it_was_idle_is_made_anew_once() -> None:
    store = MemoryStore()
    with serving(store) as service, connection_to(service) as peer:
        push(peer, b"x")
        service.close()
        with serving(store, port=service.address[1]):
            push(peer, b"y")
            assert peer.connections == 2
        with pytest.raises(ConnectionLostError):
            push(peer, b"z")
        with serving(store, port=service.address[1]):
            push(peer, b"z")
    assert store.committed == [b"x", b"y", b"z"]


# --- Damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [0, 40 * BLOCK - 1])
def test_a_damaged_push_is_aborted_and_reported_as_such(damage: int) -> None:
    store = MemoryStore()
    with serving(store) as service:
        for _ in range(3):  # the news may come while the sender is still sending, or after
            with connection_to(service) as peer, pytest.raises(DigestMismatchError) as caught:
                push(peer, pattern(40 * BLOCK), damage=damage)
            assert f"block {damage // BLOCK}," in str(caught.value)
            assert (caught.value.step, caught.value.rank, caught.value.node) == (5, 3, "n2")
            assert caught.value.path == str(PART)
    assert store.committed == []
    assert len(store.aborted) == 3


def test_a_push_ends_at_its_first_damaged_block() -> None:
    blocks = 400
    store = MemoryStore()
    with serving(store) as service:
        channel = channel_to(service)
        assert begin_push(channel, manifest_of(record_of(b"x" * BLOCK * blocks))).fields == {"held": False}
        channel.send("data", {}, payload_bytes=BLOCK * blocks)
        sent = 0
        with contextlib.suppress(ConnectionLostError):
            while sent < blocks and not store.ended.wait(0.02):
                channel.send_payload(memoryview(bytes(BLOCK)))
                sent += 1
        assert sent < blocks // 2
        assert isinstance(refusal_to(channel), DigestMismatchError)
        channel.close()
    assert store.aborted == [VERSION]


def test_checking_ends_before_the_buffer_is_given_back() -> None:
    memory = mmap.mmap(-1, 128 << 20)
    record = ObjectRecord(len(memory), len(memory), ("0" * 16,), len(memory))
    with memoryview(memory) as into, BlockChecker(record, into, NAME) as blocks:
        blocks.submit(0)
        threading.Event().wait(0.01)  # enough for it to begin, not to end
    memory.close()


@pytest.mark.parametrize("threads", [True, False])
def test_a_damaged_object_is_not_fetched_and_the_buffer_is_free_again(
    threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may not start a thread just now recovers nevertheless, and is not told that damage is sound."""
    if not threads:
        monkeypatch.setattr(transfers, "run_on_pool", lambda job: None)
    data = pattern(6 * BLOCK)
    damaged = bytearray(data)
    damaged[4 * BLOCK + 3] ^= 0x80
    store = MemoryStore({PART: bytes(damaged)})
    memory = mmap.mmap(-1, len(data))
    with serving(store) as service, connection_to(service) as peer:
        with memoryview(memory) as into, pytest.raises(DigestMismatchError) as caught:
            fetch(peer, data, into)
        assert f"block 4, bytes {4 * BLOCK} to {5 * BLOCK}" in str(caught.value)
        assert (caught.value.step, caught.value.rank, caught.value.node) == (5, 3, "n2")
        store.objects[PART] = data
        with memoryview(memory) as into:
            fetch(peer, data, into)
        assert memory[:] == data
        memory.close()  # although the caller still holds the error


def test_a_broken_fetch_goes_on_after_the_last_good_block_and_damaged_blocks_are_fetched_from_another_peer() -> None:
    data = pattern(20 * BLOCK + 99)
    damaged = bytearray(data)
    for block in (0, 3, 4):
        damaged[block * BLOCK] ^= 1
    into, record = bytearray(len(data)), record_of(data)
    bad, good = MemoryStore({PART: bytes(damaged)}), MemoryStore({PART: data})
    with (
        serving(bad) as first,
        serving(good) as second,
        Proxy(first.address, break_after=7 * BLOCK + BLOCK // 2) as proxy,
        memoryview(into) as view,
        BlockChecker(record, view, NAME) as blocks,
    ):
        with PeerConnection(proxy.address, SECRET) as peer, pytest.raises(DigestMismatchError):
            peer.fetch(PART, blocks)
        assert blocks.missing() == [range(1), range(3, 5), range(7, 21)]
        with connection_to(second) as peer:
            peer.fetch(PART, blocks)
        assert blocks.missing() == []
    assert into == data
    assert len(good.calls) == 3


# --- Refusals -----------------------------------------------------------------------------------------------


def test_a_failing_backend_is_reported_and_survived() -> None:
    store = MemoryStore({PART: b"x"})

    def fail() -> None:
        raise ZeroDivisionError("oh no")

    def full() -> None:
        raise CapacityError("no room", needed_bytes=9, available_bytes=4, node="n2")

    with serving(store) as service, connection_to(service) as peer:
        store.on_begin = full
        with pytest.raises(CapacityError) as caught:
            push(peer, pattern(BLOCK))
        assert (caught.value.needed_bytes, caught.value.available_bytes, caught.value.step) == (9, 4, 5)
        store.on_begin = store.on_open = fail
        for call in (lambda: push(peer, b"x"), lambda: fetch(peer, b"x", bytearray(1))):
            with pytest.raises(ReplicationError, match=r"ZeroDivisionError: oh no"):
                call()
        store.on_begin = store.on_open = None
        fetch(peer, b"x", bytearray(1))
        assert peer.connections == 1
        store.on_commit = fail
        with pytest.raises(ReplicationError, match=r"ZeroDivisionError: oh no"):
            push(peer, b"x")
        assert store.aborted == [VERSION]
        store.on_commit = None
        with connection_to(service) as another:
            push(another, b"x")
    assert len(store.committed) == 1


def test_a_payload_other_than_the_announced_one_is_refused() -> None:
    store = MemoryStore()
    with serving(store) as service:
        for op, payload_bytes in (("data", 5), ("ping", 0)):
            channel = channel_to(service)
            assert begin_push(channel, manifest_of(record_of(b"four"))).fields == {"held": False}
            channel.send(op, {}, payload_bytes=payload_bytes)
            assert isinstance(refusal_to(channel), ProtocolError)
            channel.close()
    assert len(store.aborted) == 2


# --- Names --------------------------------------------------------------------------------------------------

EVIL_NAMES = ["..", ".", "", "/etc/passwd", "../x", "a/b", "a\0b", "x" * 256, "\udcff"]
EVIL_VERSIONS = [*EVIL_NAMES, "step-05_ckpt", "step--1_ckpt", "step-5_ckpt/..", "step-5_ckpt\n", ".flashpoint"]


def test_names_that_leave_their_directory_never_reach_the_backend() -> None:
    store, part = MemoryStore(), {**PART.to_fields(), "offset": 0, "length": 1}
    evil = [{"run": name} for name in EVIL_NAMES] + [{"step": name} for name in EVIL_VERSIONS] + [{"rank": -1}]
    with serving(store) as service:
        channel = channel_to(service)
        for changes in evil:
            for op in ("fetch", "manifest"):
                channel.send(op, {**part, **changes})
                assert isinstance(refusal_to(channel), ProtocolError)
        channel.close()
    assert store.calls == []


def altered_manifest(**changes: object) -> bytes:
    """A manifest that `encode` would not make, with a digest that is right nevertheless."""
    record = json.loads(encode(manifest_of(record_of(b"x"))))
    content = record["content"]
    for name, value in changes.items():
        (content["object"] if name in content["object"] else content)[name] = value
    return encode_record(record["kind"], content)


def test_a_manifest_with_such_names_or_sizes_never_reaches_the_backend() -> None:
    store = MemoryStore()
    attacks: list[dict[str, object]] = [
        *({"node": name} for name in EVIL_NAMES),
        *({name: version} for name in ("run", "step") for version in EVIL_VERSIONS),
        {"size": 2**62},
        {"size": -1},
        {"block_size": 0},
        {"rank": 4},
        {"digests": []},
        {"object": []},
    ]
    with serving(store) as service:
        channel = channel_to(service)
        for changes in attacks:
            subject = begin_push(channel, altered_manifest(**changes)).subject
            assert isinstance(subject, dict)
            assert subject["error"] == "ManifestError"
        assert begin_push(channel, altered_manifest(labels={"a": "b"})).fields == {"held": False}
        channel.close()
    assert store.calls == [f"receive {PART}"]
