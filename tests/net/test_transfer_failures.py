"""Peers that hang, die or vanish: every wait ends in time, and nothing is left behind."""

from __future__ import annotations

import contextlib
import logging
import mmap
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ml_flashpoint.format.errors import (
    DeadlineError,
    FlashpointError,
    ReplicationError,
)
from ml_flashpoint.net import channel as channels
from ml_flashpoint.net import handshake
from ml_flashpoint.net.channel import Channel, ConnectionLostError, TransferCancelledError
from ml_flashpoint.net.transfers import TRANSFERS, PeerConnection, TransferService
from tests.net.support import (
    BLOCK,
    LARGE,
    PART,
    SECRET,
    SLACK_S,
    VERSION,
    MemoryStore,
    begin_push,
    channel_to,
    connection_to,
    ends_within,
    fetch,
    impostor,
    manifest_of,
    pattern,
    push,
    raw,
    record_of,
    refusal_to,
    serve_transfers,
    serving,
    transfer,
)
from tests.support.forked import Child
from tests.support.netns import two_namespaces
from tests.support.processes import REPOSITORY, child_environment

pytestmark = pytest.mark.slow

# --- Waiting ------------------------------------------------------------------------------------------------


def as_server(answer: Callable[[Channel], None]) -> Callable[[socket.socket], None]:
    """An impostor's answer after a proper handshake."""

    def authenticate_and_answer(sock: socket.socket) -> None:
        channel = Channel(sock, TRANSFERS, peer="the client", stall_s=10)
        channel.handshake_as_server(handshake.proved_secret(SECRET, TRANSFERS.purpose), time.monotonic() + 10)
        with contextlib.suppress(FlashpointError):
            answer(channel)

    return authenticate_and_answer


def test_a_peer_that_falls_silent_is_given_up() -> None:
    def silent(channel: Channel) -> None:
        channel.receive(request=True)

    def halfway(channel: Channel) -> None:
        channel.receive(request=True)
        channel.send(None, {}, payload_bytes=BLOCK)
        channel.send_payload(memoryview(bytes(1000)))

    with impostor(lambda sock: None) as address:
        peer = PeerConnection(address, SECRET, node="n2", deadline_s=30, connect_timeout_s=0.5)
        with ends_within(0.5 + SLACK_S), pytest.raises(DeadlineError) as caught:
            peer.ping()
    assert caught.value.node == "n2"
    record = record_of(pattern(BLOCK))
    for answer in (silent, halfway):
        with impostor(as_server(answer)) as address:
            peer = PeerConnection(address, SECRET, node="n2", deadline_s=1)
            with ends_within(1 + SLACK_S), pytest.raises(DeadlineError) as caught:
                fetch(peer, record, bytearray(BLOCK))
            peer.close()
        assert (caught.value.step, caught.value.rank, caught.value.node) == (5, 3, "n2")


def test_a_client_that_falls_silent_is_given_up_and_its_part_aborted() -> None:
    store = MemoryStore()
    with serving(store, deadline_s=1) as service:
        channel = channel_to(service)
        assert begin_push(channel, manifest_of(record_of(pattern(4 * BLOCK)))).fields == {"held": False}
        channel.send("data", {}, payload_bytes=4 * BLOCK)
        channel.send_payload(memoryview(pattern(BLOCK)))
        with ends_within(1 + SLACK_S):
            assert isinstance(refusal_to(channel), DeadlineError)
        channel.close()
    assert store.aborted == [VERSION]


def test_idle_connections_are_closed_after_a_deadline_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(idle_s=0.2, deadline_s=60) as service:
        channel = channel_to(service)
        with ends_within(0.2 + SLACK_S), pytest.raises(ConnectionLostError):
            channel.receive(request=False)
        channel.close()
    with serving(idle_s=60, deadline_s=1) as service, connection_to(service) as peer:
        threading.Event().wait(1.5)
        peer.ping()
    assert caplog.records == []  # nothing is wrong with being idle


def test_a_peer_may_work_on_a_push_for_longer_the_larger_the_part() -> None:
    data = mmap.mmap(-1, 4 * LARGE)  # 4 s more
    store = MemoryStore()
    release = threading.Event()
    store.on_begin = store.on_commit = lambda: release.wait(1.5) and None
    with serving(store) as service, connection_to(service, deadline_s=1) as peer:
        peer.push(manifest_of(record_of(data, block_size=16 << 20)), memoryview(data))
        store.on_begin = lambda: release.wait(60) and None
        with ends_within(1 + SLACK_S), pytest.raises(DeadlineError):
            push(peer, b"x")
        release.set()
    assert len(store.committed) == 1


def test_a_process_that_was_held_up_does_not_blame_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 50.0, 150.0, 151.0, 152.0, 160.0, 161.0, 200.0, 300.0, 310.0, 400.0])
    monkeypatch.setattr(channels, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    channel: Any = SimpleNamespace(_slice_s=1.0, _stall_s=5.0, too_late=DeadlineError)
    wait, silent_s = channels._Wait(channel, None), []
    for count in (0, 0, 5, 0):
        assert wait.slice_s() == 1.0
        wait.note(count)
        silent_s.append(wait._silent_s)
    assert silent_s == [1.0, 3.0, 0.0, 1.0], "the time between two waits counts for nothing, and a long one for little"
    for _ in range(2):
        wait.slice_s()
        with pytest.raises(DeadlineError) if wait._silent_s == 3.0 else contextlib.nullcontext():
            wait.note(0)


def test_a_transfer_is_broken_off_when_cancelled() -> None:
    data = pattern(LARGE)
    store = MemoryStore({PART: data})
    record = record_of(data)
    manifest = manifest_of(record)
    asked = 0

    def soon() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with serving(store) as service:
        with connection_to(service) as peer, pytest.raises(TransferCancelledError):
            peer.push(manifest, memoryview(data), cancelled=soon)
        assert store.ended.wait(SLACK_S)
        assert (store.committed, store.aborted) == ([], [VERSION])
        into = memoryview(bytearray(len(data)))
        asked = 0
        with connection_to(service) as peer, pytest.raises(TransferCancelledError):
            fetch(peer, record, into, cancelled=soon)


# --- Processes that die -------------------------------------------------------------------------------------


def test_a_pusher_killed_midway_leaves_no_part_behind() -> None:
    store = MemoryStore()
    with serving(store, deadline_s=60) as service:
        with Child(transfer, "push", service.address, 60.0) as pusher:
            pusher.next_report("midway")
            pusher.kill()
            assert store.ended.wait(SLACK_S)
        assert (store.committed, store.aborted) == ([], [VERSION])
        with connection_to(service) as peer:
            peer.ping()


def test_a_frozen_peer_is_given_up() -> None:
    with Child(serve_transfers, "127.0.0.1", 10.0) as frozen:
        (_, address) = frozen.next_report("address")
        with Child(transfer, "push", address, 1.0) as pusher:
            pusher.next_report("midway")
            frozen.stop()
            pusher.say("go on")
            with ends_within(1 + SLACK_S):
                assert pusher.next_report("outcome")[1:] == ("DeadlineError", 5, 3, "n2")


@pytest.mark.netns
@pytest.mark.parametrize("role", ["fetch", "push"])
def test_a_vanished_machine_is_noticed_within_the_deadline(role: str) -> None:
    deadline_s = 2.0
    with (
        two_namespaces() as (here, there),
        Child(serve_transfers, there.address, deadline_s, there.namespace) as server,
    ):
        (_, address) = server.next_report("address")
        with Child(transfer, role, address, deadline_s, here.namespace) as client:
            client.next_report("midway")
            there.pull_cable()
            client.say("go on")
            with ends_within(deadline_s + SLACK_S):
                assert client.next_report("outcome")[1:] == ("DeadlineError", 5, 3, "n2")
            if role == "push":
                with ends_within(deadline_s + SLACK_S):
                    assert server.next_report("ended")[1:] == (0, 1)


# --- Beginning and end --------------------------------------------------------------------------------------


def test_closing_breaks_transfers_off_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    store = MemoryStore()
    with serving(store, deadline_s=60) as service, raw(("tcp", *service.address)):
        with pytest.raises(ReplicationError, match="cannot listen"):
            TransferService(SECRET, MemoryStore(), host="127.0.0.1", port=service.address[1])
        channel = channel_to(service)
        assert begin_push(channel, manifest_of(record_of(pattern(4 * BLOCK)))).fields == {"held": False}
        with ends_within(SLACK_S):
            service.close()
    channel.close()
    assert store.aborted == [VERSION]
    assert set(threading.enumerate()) <= before


def test_a_process_exits_cleanly_in_the_middle_of_transfers() -> None:
    argv = [sys.executable, "-c", "from tests.net.support import exit_amid_transfers as end; end()"]
    for _ in range(2):
        done = subprocess.run(argv, cwd=REPOSITORY, env=child_environment(), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
