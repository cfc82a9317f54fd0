"""Servers, stores and peers of all kinds for the tests of connections, also in processes of their own."""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.errors import REQUESTS, DDictCheckpointRetiredError, DDictKeyError
from ml_flashpoint.format.digest import digest_blocks
from ml_flashpoint.format.errors import CapacityError, FlashpointError, InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, encode
from ml_flashpoint.format.names import SaveId, object_name
from ml_flashpoint.net import client
from ml_flashpoint.net.channel import Channel
from ml_flashpoint.net.client import Address, Connection
from ml_flashpoint.net.messages import Fields, Message
from ml_flashpoint.net.server import Peer, RequestServer
from ml_flashpoint.net.transfers import TRANSFERS, BlockChecker, PartName, PeerConnection, TransferService
from tests.support.forked import Report
from tests.support.netns import enter

SECRET = b"the secret of the job that tests"
SAVE = SaveId(7, 5)
VERSION = SAVE.version
PART = PartName(SAVE, 3)
NAME = object_name(3, SAVE.text)
BLOCK = 512 << 10
"""Small enough for quick tests, large enough to be verified by a thread of its own."""
LARGE = 64 << 20
"""More than two sockets hold, so that a transfer of it that is stopped is stopped midway."""
DEADLINE_S = 20.0
SLACK_S = 15.0
"""What a busy machine may add to a deadline. Far below the default deadlines, which no test may wait for."""


# ---- requests ---------------------------------------------------------------------------------------------------


class Echo:
    """Answers with what it was asked, and does a few other things."""

    def __init__(self, report: Callable[..., None] | None = None) -> None:
        self.report = report
        self.condition = threading.Condition()
        self.opened: list[Peer] = []
        self.closed_sessions: list[int] = []
        self.handled: list[tuple[int, str]] = []
        self.go_on = threading.Event()

    def open(self, peer: Peer) -> int:
        with self.condition:
            self.opened.append(peer)
            return len(self.opened) - 1

    def handle(
        self, session: int, op: str, fields: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], Sequence[Any]]:
        with self.condition:
            self.handled.append((session, op))
            self.condition.notify_all()
        if op == "wait":
            if self.report is not None:
                self.report("waits")
            assert self.go_on.wait(DEADLINE_S)
        elif op == "retired":
            raise DDictCheckpointRetiredError("too old", checkpoint_id=7, manager=2, hint="read a newer one")
        elif op == "full":
            raise CapacityError("no room", needed_bytes=10, available_bytes=3)
        elif op == "bad argument":
            raise InvalidArgumentError("no", argument="timeout", value=-1)
        elif op == "own error":
            raise OwnError("a subclass")
        elif op == "bug":
            raise ZeroDivisionError("a bug")
        elif op == "not json":
            return {"x": {1, 2}}, []
        return fields, blobs

    def closed(self, session: int) -> None:
        with self.condition:
            self.closed_sessions.append(session)
            self.condition.notify_all()

    def wait_for(self, what: Callable[[], bool]) -> bool:
        with self.condition:
            return self.condition.wait_for(what, DEADLINE_S)


class OwnError(DDictKeyError):
    """No type that a client knows."""


def connect(address: Address, secret: bytes = SECRET) -> Connection:
    return Connection(address, secret, REQUESTS, connect_timeout_s=DEADLINE_S)


def raw(address: Address) -> socket.socket:
    """A connected socket, without handshake, that is reset when it is closed."""
    if address[0] == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(DEADLINE_S)
        sock.connect(str(address[1]))
    else:
        sock = socket.create_connection(address[1:], timeout=DEADLINE_S)  # type: ignore[arg-type]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\0" * 8)
    return sock


def last_words(sock: socket.socket) -> bytes | None:
    """What the other side sends until it closes the connection; None if it does not close it in time."""
    said = b""
    try:
        while data := sock.recv(1 << 16):
            said += data
    except ConnectionError:
        pass
    except TimeoutError:
        return None
    return said


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other side closes the connection, whatever it sends before."""
    return last_words(sock) is not None


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    return sock.recv(count, socket.MSG_WAITALL)


# ---- transfers --------------------------------------------------------------------------------------------------


def record_of(data: bytes | mmap.mmap, block_size: int = BLOCK) -> ObjectRecord:
    return ObjectRecord(len(data), len(data), digest_blocks(data, block_size=block_size), block_size)


def manifest_of(record: ObjectRecord, rank: int = 3) -> Manifest:
    return Manifest(SAVE, rank, 4, "n1", record)


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes of which no two blocks are alike."""
    unit = 4096
    return b"".join((seed * 1_000_003 + at).to_bytes(8, "big") * (unit // 8) for at in range(0, size, unit))[:size]


@dataclass
class MemoryStore:
    """A transfer backend in memory, which records what it is asked."""

    objects: dict[PartName, bytes | mmap.mmap] = field(default_factory=dict)
    manifests: dict[PartName, bytes] = field(default_factory=dict)
    held: bool = False
    on_begin: Callable[[], None] | None = None
    on_commit: Callable[[], None] | None = None
    on_open: Callable[[], None] | None = None
    calls: list[str] = field(default_factory=list)
    riders: list[Fields] = field(default_factory=list)
    committed: list[bytes] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def open_part(self, part: PartName) -> Iterator[memoryview]:
        self.calls.append(f"open {part}")
        if self.on_open is not None:
            self.on_open()
        if part not in self.objects:
            raise ObjectNotFoundError("no such object here")
        with memoryview(self.objects[part]) as view:
            yield view.toreadonly()

    def read_manifest(self, part: PartName) -> bytes:
        self.calls.append(f"manifest {part}")
        try:
            return self.manifests[part]
        except KeyError:
            raise ObjectNotFoundError("no such part here", rank=part.rank) from None

    @contextlib.contextmanager
    def receive(self, manifest: Manifest, rider: Fields) -> Iterator[memoryview | None]:
        self.calls.append(f"receive {PartName.of(manifest)}")
        self.riders.append(rider)
        if self.on_begin is not None:
            self.on_begin()
        if self.held:
            yield None
            return
        size = manifest.record.size
        # As a slot that goes back to its pool would: fails if the transfer still holds on to the memory.
        with mmap.mmap(-1, max(1, size)) as memory:
            try:
                with memoryview(memory) as view, view[:size] as buffer:
                    yield buffer
                if self.on_commit is not None:
                    self.on_commit()
                self.committed.append(memory[:size])
            except BaseException:
                self.aborted.append(manifest.save.version)
                raise
            finally:
                self.ended.set()


@contextlib.contextmanager
def serving(store: MemoryStore | None = None, **options: Any) -> Iterator[TransferService]:
    options = {"host": "127.0.0.1", "deadline_s": 10.0, **options}
    with TransferService(SECRET, store or MemoryStore(), **options) as service:
        yield service


def connection_to(service: TransferService, **options: Any) -> PeerConnection:
    return PeerConnection(service.address, SECRET, node="n2", **{"deadline_s": 10.0, **options})


def push(peer: PeerConnection, data: bytes, rider: Fields | None = None, *, damage: int | None = None) -> bool:
    sent = bytearray(data)
    if damage is not None:
        sent[damage] ^= 1
    return peer.push(manifest_of(record_of(data)), memoryview(sent), rider)


def fetch(
    peer: PeerConnection,
    data: bytes | ObjectRecord,
    into: bytearray | memoryview,
    part: PartName = PART,
    **options: Any,
) -> None:
    """Fetch an object whose bytes should be these."""
    record = data if isinstance(data, ObjectRecord) else record_of(data)
    with memoryview(into) as view, BlockChecker(record, view, f"{VERSION}/{NAME}") as blocks:
        peer.fetch(part, blocks, **options)


def channel_to(service: TransferService) -> Channel:
    return client.connect(("tcp", *service.address), SECRET, TRANSFERS, within_s=10, stall_s=10)


def begin_push(channel: Channel, manifest: Manifest | bytes) -> Message:
    """Ask to push, as a client would; return the answer."""
    blob = manifest if isinstance(manifest, bytes) else encode(manifest)
    channel.send("push", {"rider": {}}, [blob])
    return channel.receive(request=False)


def refusal_to(channel: Channel) -> FlashpointError:
    """What is answered, which must be an error."""
    subject = channel.receive(request=False).subject
    assert isinstance(subject, dict)
    return TRANSFERS.rebuild(subject)


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@contextlib.contextmanager
def impostor(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A server that does `answer` with the first connection, and keeps it open."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            accepted.append(listener.accept()[0])
            answer(accepted[0])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for sock in (listener, *accepted):
            sock.close()


class Proxy:
    """Passes connections on to a service, recording what clients send, until told to break them."""

    def __init__(self, target: tuple[str, int], *, break_after: int | None = None) -> None:
        self._target = target
        self._break_after = break_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.recorded = bytearray()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target)
                for source, sink, up in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pass_on, args=(source, sink, up), daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def _pass_on(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                if not up and self._break_after is not None:
                    data = data[: self._break_after - passed]
                if up:
                    self.recorded += data
                sink.sendall(data)
                passed += len(data)
                if not up and passed == self._break_after:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


# ---- in children ------------------------------------------------------------------------------------------------


def serve_requests(report: Report, folder: str) -> None:
    """A server of requests, until it is killed."""
    options = {"unix_path": str(Path(folder, "s")), "tcp_host": "127.0.0.1"}
    with RequestServer(SECRET, Echo(report), REQUESTS, **options) as server:  # type: ignore[arg-type]
        report("addresses", server.addresses)
        report.listen()


def serve_transfers(report: Report, host: str, deadline_s: float, namespace: str | None = None) -> None:
    """A service that has a large object of zeros; it tells how the first push to it has ended."""
    if namespace is not None:
        enter(namespace)
    store = MemoryStore({PART: mmap.mmap(-1, LARGE)})
    with TransferService(SECRET, store, host=host, deadline_s=deadline_s) as service:
        report("address", service.address)
        store.ended.wait()
        report("ended", len(store.committed), len(store.aborted))
        report.listen()


def transfer(
    report: Report, role: str, address: tuple[str, int], deadline_s: float, namespace: str | None = None
) -> None:
    """A client that stops midway, and goes on when it is told to; it tells how that has ended."""
    if namespace is not None:
        enter(namespace)
    data = mmap.mmap(-1, LARGE if role == "fetch" else 4 * LARGE)
    record = record_of(data, block_size=1 << 20)
    asked = 0

    def midway() -> bool:
        nonlocal asked
        asked += 1
        # The first questions are asked while waiting for the peer's consent.
        if asked == 5:
            report("midway")
            report.listen()
        return False

    try:
        with PeerConnection(address, SECRET, node="n2", deadline_s=deadline_s) as peer:
            if role == "push":
                peer.push(manifest_of(record), memoryview(data), cancelled=midway)
            else:
                fetch(peer, record, memoryview(data), cancelled=midway)
        report("outcome", "none", None, None, None)
    except FlashpointError as exc:
        report("outcome", type(exc).__name__, exc.step, exc.rank, exc.node)


def exit_amid_transfers() -> None:
    """End the main thread, and so the process, while others fetch."""
    data = mmap.mmap(-1, LARGE)
    record = record_of(data, block_size=1 << 20)
    service = TransferService(SECRET, MemoryStore({PART: data}), host="127.0.0.1")
    busy = threading.Barrier(4)

    def fetch_on_and_on() -> None:
        with contextlib.suppress(FlashpointError), connection_to(service) as peer:
            for count in range(1_000_000):
                fetch(peer, record, bytearray(LARGE))
                if count == 0:
                    busy.wait()

    for _ in range(3):
        threading.Thread(target=fetch_on_and_on, daemon=True).start()
    busy.wait()
