"""Transfers between peers: what arrives is what was sent, and what is refused says why."""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash

from ml_flashpoint.format import digest
from ml_flashpoint.format.errors import (
    CapacityError,
    DigestMismatchError,
    InvalidArgumentError,
    ManifestError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.manifest import ObjectRecord, encode
from ml_flashpoint.net.block_verifier import BlockTarget, BlockVerifier
from ml_flashpoint.net.channel import ConnectionLostError
from ml_flashpoint.net.messages import WORKING
from ml_flashpoint.net.transfer_client import Holder, PeerConnection, fetch_object_from_holders
from ml_flashpoint.net.transfer_service import TransferService
from tests.net.transfer_support import (
    ATTEMPT,
    BLOCK,
    NAME,
    SECRET,
    SLACK_S,
    VERSION,
    MemoryStore,
    Proxy,
    channel_to,
    connection_to,
    manifest_of,
    pattern,
    push,
    record_of,
    refusal_to,
    serving,
)

# --- What arrives -------------------------------------------------------------------------------------------


def test_a_pushed_part_is_committed_as_it_was() -> None:
    objects = (pattern(5 * BLOCK + 17), b"", b"small", pattern(BLOCK, seed=7))
    store = MemoryStore()
    with serving(store) as service, connection_to(service) as peer:
        assert push(peer, *objects)
        assert push(peer, b"another over the same connection")
    assert [list(part.values()) for part in store.committed] == [
        list(objects),
        [b"another over the same connection"],
    ]
    assert store.aborted == []


def test_a_part_that_is_held_already_is_not_sent() -> None:
    store = MemoryStore(held=True)
    with serving(store) as service, Proxy(service.address) as proxy:
        with PeerConnection(proxy.address, SECRET) as peer:
            assert not push(peer, pattern(8 * BLOCK))
        assert len(proxy.recorded) < BLOCK
    assert (store.committed, store.aborted) == ([], [])


def test_a_part_without_bytes_is_committed() -> None:
    store = MemoryStore()
    with serving(store) as service, connection_to(service) as peer:
        push(peer)
        push(peer, b"", b"")
    assert [len(part) for part in store.committed] == [0, 2]


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_a_fetched_object_is_what_is_held(size: int) -> None:
    data = pattern(size)
    into = bytearray(size)
    with serving(MemoryStore({NAME: data})) as service, connection_to(service) as peer:
        peer.fetch_object(VERSION, record_of(data), memoryview(into))
    assert into == data


def test_any_range_can_be_fetched() -> None:
    data = pattern(100_000)
    with serving(MemoryStore({NAME: data})) as service, connection_to(service) as peer:
        for begin, end in ((0, 100_000), (0, 0), (99_999, 100_000), (100_000, 100_000), (4095, 70_001)):
            into = bytearray(end - begin)
            peer.fetch(VERSION, NAME, begin, memoryview(into))
            assert into == data[begin:end]
        for offset in (100_000, 2**63 - 1):
            with pytest.raises(ProtocolError, match="100000") as caught:
                peer.fetch(VERSION, NAME, offset, memoryview(bytearray(1)))
            assert (caught.value.step, caught.value.node) == (5, "n2")


def test_buffers_of_other_element_types_are_taken_as_bytes() -> None:
    data = pattern(BLOCK)
    store = MemoryStore({NAME: data})
    into = memoryview(bytearray(BLOCK)).cast("d")
    manifest = manifest_of(record_of(data))
    with serving(store) as service, connection_to(service) as peer:
        peer.fetch_object(VERSION, record_of(data), into)
        assert into.tobytes() == data
        peer.push(manifest, encode(manifest), [into])
    assert store.committed == [{NAME: data}]


def test_a_manifest_is_given_byte_for_byte() -> None:
    manifest = encode(manifest_of(record_of(b"x")))
    with serving(MemoryStore(manifests={(3, ATTEMPT): manifest})) as service, connection_to(service) as peer:
        assert peer.read_manifest(VERSION, 3, ATTEMPT) == manifest
        with pytest.raises(ObjectNotFoundError) as caught:
            peer.read_manifest(VERSION, 4, ATTEMPT)
        assert (caught.value.step, caught.value.rank, caught.value.node) == (5, 4, "n2")
        peer.ping()


def test_many_peers_are_served_at_once() -> None:
    objects = {f"{n}-{NAME}": pattern(3 * BLOCK, seed=n) for n in range(8)}
    store = MemoryStore(dict(objects))
    all_here = threading.Barrier(8)
    store.on_open = lambda: [all_here.wait(20)].clear()

    def fetch(name: str) -> bytes:
        into = bytearray(3 * BLOCK)
        with connection_to(service) as peer:
            peer.fetch_object(VERSION, record_of(objects[name], name), memoryview(into))
        return bytes(into)

    with serving(store) as service, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(fetch, objects)) == list(objects.values())


# --- Damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [0, 40 * BLOCK - 1])
def test_a_damaged_push_is_aborted_and_reported_as_such(damage: int) -> None:
    store = MemoryStore()
    with serving(store) as service:
        for _ in range(5):  # the news may come while the sender is still sending, or after
            with connection_to(service) as peer, pytest.raises(DigestMismatchError) as caught:
                push(peer, pattern(40 * BLOCK), damage=damage)
            assert f"block {damage // BLOCK}," in str(caught.value)
            assert (caught.value.step, caught.value.rank, caught.value.node) == (5, 3, "n2")
            assert caught.value.path == f"{VERSION}/0-{NAME}"
    assert store.committed == []
    assert len(store.aborted) == 5


def test_a_push_ends_at_its_first_damaged_block() -> None:
    blocks = 400
    store = MemoryStore()
    with serving(store) as service:
        channel = channel_to(service)
        manifest = encode(manifest_of(record_of(b"x" * BLOCK * blocks)))
        channel.send("push", {"patience_ms": 10_000}, [manifest])
        assert channel.receive_reply().fields == {"held": False}
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


def test_verifying_ends_before_the_buffer_is_given_back() -> None:
    memory = mmap.mmap(-1, 128 << 20)
    record = ObjectRecord(NAME, len(memory), len(memory), ("0" * 16,), len(memory))
    with memoryview(memory) as into, BlockTarget(record, into, NAME) as target, BlockVerifier() as verifier:
        verifier.submit(target, 0)
        threading.Event().wait(0.01)  # enough for it to begin, not to end
    memory.close()


def test_verifying_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may not start one just now recovers nevertheless, and is not told that damage is sound."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("flashpoint-digest"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(digest, "_pool", None)
    data = pattern(3 * BLOCK + 1)
    damaged = bytearray(data)
    damaged[2 * BLOCK] ^= 1
    into = bytearray(len(data))
    with serving(MemoryStore({NAME: data})) as service, connection_to(service) as peer:
        peer.fetch_object(VERSION, record_of(data), memoryview(into))
    assert into == data
    store = MemoryStore({NAME: bytes(damaged)})
    with serving(store) as service, connection_to(service) as peer, pytest.raises(DigestMismatchError):
        peer.fetch_object(VERSION, record_of(data), memoryview(into))


def test_a_damaged_object_is_not_fetched() -> None:
    data = pattern(6 * BLOCK)
    damaged = bytearray(data)
    damaged[4 * BLOCK + 3] ^= 0x80
    memory = mmap.mmap(-1, len(data))
    with serving(MemoryStore({NAME: bytes(damaged)})) as service, connection_to(service) as peer:
        with memoryview(memory) as into, pytest.raises(DigestMismatchError) as caught:
            peer.fetch_object(VERSION, record_of(data), into, rank=3)
        # The caller still holds the error, and must be able to give the memory back nevertheless.
        memory.close()
    assert f"block 4, bytes {4 * BLOCK} to {5 * BLOCK}" in str(caught.value)
    assert (caught.value.step, caught.value.rank, caught.value.node) == (5, 3, "n2")


def test_a_small_damaged_object_is_not_fetched() -> None:
    store = MemoryStore({NAME: b"hexlo"})
    with serving(store) as service, connection_to(service) as peer, pytest.raises(DigestMismatchError):
        peer.fetch_object(VERSION, record_of(b"hello"), memoryview(bytearray(5)))


# --- Several holders ----------------------------------------------------------------------------------------


def test_a_broken_fetch_goes_on_at_the_next_holder_after_the_last_good_block() -> None:
    data = pattern(20 * BLOCK + 99)
    into = bytearray(len(data))
    store = MemoryStore({NAME: data})
    with serving(store) as service, Proxy(service.address, break_after=7 * BLOCK + BLOCK // 2) as proxy:
        holders = [Holder("n1", proxy.address), Holder("n2", service.address)]
        report = fetch_object_from_holders(holders, SECRET, VERSION, record_of(data), memoryview(into))
    assert into == data
    assert report.received_bytes == {"n1": 7 * BLOCK, "n2": 13 * BLOCK + 99}
    ((node, error),) = report.failures
    assert node == "n1"
    assert isinstance(error, ConnectionLostError)


def test_a_single_holder_whose_connections_break_is_asked_again_while_it_gets_on() -> None:
    data = pattern(20 * BLOCK)
    into = bytearray(len(data))
    with (
        serving(MemoryStore({NAME: data})) as service,
        Proxy(service.address, break_after=3 * BLOCK + BLOCK // 2) as proxy,
    ):
        holders = [Holder("n1", proxy.address)]
        report = fetch_object_from_holders(holders, SECRET, VERSION, record_of(data), memoryview(into), attempts=1)
    assert into == data
    assert report.received_bytes == {"n1": len(data)}
    assert len(report.failures) == 6


def test_a_holder_that_gets_nowhere_is_given_up() -> None:
    data = pattern(BLOCK)
    with (
        serving(MemoryStore({NAME: data})) as service,
        Proxy(service.address, break_after=BLOCK // 2) as proxy,
        pytest.raises(ReplicationError, match="n1") as caught,
    ):
        fetch_object_from_holders(
            [Holder("n1", proxy.address)], SECRET, VERSION, record_of(data), memoryview(bytearray(BLOCK)), rank=3
        )
    assert (caught.value.step, caught.value.rank) == (5, 3)


def test_only_the_damaged_blocks_are_fetched_from_another_holder() -> None:
    data = pattern(9 * BLOCK)
    damaged = bytearray(data)
    for block in (0, 4, 5, 8):
        damaged[block * BLOCK] ^= 1
    into = bytearray(len(data))
    with serving(MemoryStore({NAME: bytes(damaged)})) as bad, serving(MemoryStore({NAME: data})) as good:
        holders = [Holder("n1", bad.address), Holder("n2", good.address)]
        report = fetch_object_from_holders(holders, SECRET, VERSION, record_of(data), memoryview(into))
    assert into == data
    assert report.received_bytes == {"n1": 9 * BLOCK, "n2": 4 * BLOCK}
    assert [(node, type(error)) for node, error in report.failures] == [("n1", DigestMismatchError)]


def test_an_object_that_nobody_holds_intact_is_reported_as_what_it_is() -> None:
    data = pattern(BLOCK)
    record = record_of(data)
    wrong = {NAME: bytes(BLOCK)}
    with serving(MemoryStore(wrong)) as damaged, serving(MemoryStore(wrong)) as also, serving() as empty:

        def fetch(*services: TransferService) -> None:
            holders = [Holder(f"n{n}", service.address) for n, service in enumerate(services)]
            fetch_object_from_holders(holders, SECRET, VERSION, record, memoryview(bytearray(BLOCK)))

        with pytest.raises(DigestMismatchError, match=r"n0.*n1"):
            fetch(damaged, also)
        with pytest.raises(ObjectNotFoundError):
            fetch(empty)
        with pytest.raises(ReplicationError, match=r"no such object.*digest"):
            fetch(empty, damaged)
    with pytest.raises(ReplicationError, match="connect"):
        fetch(damaged)
    with pytest.raises(InvalidArgumentError):
        fetch()


# --- Refusals -----------------------------------------------------------------------------------------------


def test_a_refused_push_keeps_its_type_and_the_connection() -> None:
    store = MemoryStore()

    def full() -> None:
        raise CapacityError("no room", needed_bytes=9, available_bytes=4, node="n2")

    with serving(store) as service, connection_to(service) as peer:
        store.on_begin = full
        with pytest.raises(CapacityError) as caught:
            push(peer, pattern(BLOCK))
        assert (caught.value.needed_bytes, caught.value.available_bytes, caught.value.step) == (9, 4, 5)
        store.on_begin = None
        push(peer, b"x")
    assert len(store.committed) == 1


def test_a_failing_backend_is_reported_and_survived() -> None:
    store = MemoryStore({NAME: b"x"})

    def fail() -> None:
        raise ZeroDivisionError("oh no")

    with serving(store) as service, connection_to(service) as peer:
        store.on_begin = store.on_open = store.on_commit = fail
        with pytest.raises(ReplicationError, match=r"ZeroDivisionError: oh no"):
            push(peer, b"x")
        with pytest.raises(ReplicationError, match=r"ZeroDivisionError: oh no"):
            peer.fetch(VERSION, NAME, 0, memoryview(bytearray(1)))
        store.on_begin = store.on_open = None
        peer.fetch(VERSION, NAME, 0, memoryview(bytearray(1)))
        with pytest.raises(ReplicationError, match=r"ZeroDivisionError: oh no"):
            push(peer, b"x")
        assert store.aborted == [VERSION]
        store.on_commit = None
        with connection_to(service) as another:
            push(another, b"x")
    assert len(store.committed) == 1


def test_a_push_of_other_sizes_than_the_manifest_says_is_refused() -> None:
    manifest = manifest_of(record_of(b"four"))
    with serving() as service, connection_to(service) as peer:
        for buffers in ([], [memoryview(b"three")], [memoryview(b"four")] * 2):
            with pytest.raises(InvalidArgumentError):
                peer.push(manifest, encode(manifest), buffers)


def test_a_payload_other_than_the_announced_one_is_refused() -> None:
    store = MemoryStore()
    with serving(store) as service:
        for op, payload_bytes in (("data", 5), ("ping", 0)):
            channel = channel_to(service)
            channel.send("push", {"patience_ms": 1000}, [encode(manifest_of(record_of(b"four")))])
            assert channel.receive_reply().fields == {"held": False}
            channel.send(op, {}, payload_bytes=payload_bytes)
            assert isinstance(refusal_to(channel), ProtocolError)
            channel.close()
    assert len(store.aborted) == 2


def test_answers_are_not_requests() -> None:
    with serving() as service:
        for subject in (None, {"error": "ReplicationError"}):
            channel = channel_to(service)
            channel.send(subject, {})
            with pytest.raises(ConnectionLostError):
                channel.receive(request=False)
            channel.close()
        for subject in ("data", WORKING):
            channel = channel_to(service)
            channel.send(subject, {})
            assert isinstance(refusal_to(channel), ProtocolError)
            channel.close()


def test_a_payload_that_nobody_asked_for_ends_the_connection() -> None:
    with serving() as service:
        channel = channel_to(service)
        channel.send("ping", {}, payload_bytes=3)
        channel.send_payload(memoryview(b"abc"))
        with pytest.raises(ConnectionLostError):
            channel.receive(request=False)
        channel.close()


def test_more_connections_than_allowed_are_refused_until_one_ends() -> None:
    with serving(max_connections=2) as service:
        with connection_to(service) as first, connection_to(service) as second:
            first.ping()
            second.ping()
            with connection_to(service) as third, pytest.raises(ReplicationError, match="try again"):
                third.ping()
        until = time.monotonic() + SLACK_S
        while True:
            try:
                with connection_to(service) as fourth:
                    fourth.ping()
                break
            except ReplicationError:
                assert time.monotonic() < until, "the ended connections still count"


# --- Names --------------------------------------------------------------------------------------------------

EVIL_NAMES = ["..", ".", "", "/etc/passwd", "../x", "a/b", "a\0b", "x" * 256, "\udcff"]
EVIL_VERSIONS = [
    *EVIL_NAMES,
    "step-05_ckpt",
    "step--1_ckpt",
    "step-5_ckpt/..",
    "step-5_ckpt\n",
    ".flashpoint",
]


def test_names_that_leave_their_directory_never_reach_the_backend() -> None:
    store = MemoryStore(dict.fromkeys(EVIL_NAMES, b"x"))
    into = memoryview(bytearray(1))
    with serving(store) as service, connection_to(service) as peer:
        for name in EVIL_NAMES:
            with pytest.raises(ReplicationError, match="InvalidNameError"):
                peer.fetch(VERSION, name, 0, into)
            with pytest.raises(ReplicationError, match="InvalidNameError"):
                peer.read_manifest(VERSION, 3, name)
        for version in EVIL_VERSIONS:
            with pytest.raises(ReplicationError, match="InvalidNameError"):
                peer.fetch(version, NAME, 0, into)
            with pytest.raises(ReplicationError, match="InvalidNameError"):
                peer.read_manifest(version, 3, ATTEMPT)
        with pytest.raises(ProtocolError):
            peer.read_manifest(VERSION, -1, ATTEMPT)
        peer.ping()
    assert store.calls == []


def altered_manifest(**changes: object) -> bytes:
    """A manifest that `encode` would not make, with a checksum that is right nevertheless."""
    header, body = encode(manifest_of(record_of(b"x"))).split(b"\n", 1)
    content = json.loads(body)
    for name, value in changes.items():
        (content["objects"][0] if name in content["objects"][0] else content)[name] = value
    altered = json.dumps(content).encode() + b"\n"
    magic = header.rsplit(b" ", 1)[0]
    return magic + b" " + xxhash.xxh3_128_hexdigest(altered).encode() + b"\n" + altered


def test_a_manifest_with_such_names_or_sizes_never_reaches_the_backend() -> None:
    store = MemoryStore()
    manifest = manifest_of(record_of(b"x"))
    attacks: list[dict[str, object]] = [
        *({"name": name} for name in EVIL_NAMES),
        *({"version": version} for version in EVIL_VERSIONS),
        {"size": 2**62},
        {"size": -1},
        {"block_size": 0},
        {"rank": 4},
        {"digests": []},
    ]
    with serving(store) as service, connection_to(service) as peer:
        peer.push(manifest, altered_manifest(labels={"a": "b"}), [memoryview(b"x")])
        for changes in attacks:
            with pytest.raises(ManifestError):
                peer.push(manifest, altered_manifest(**changes), [memoryview(b"x")])
    assert store.calls == [f"begin {VERSION} 3"]
