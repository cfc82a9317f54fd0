"""What the transfer tests share: a store in plain memory, and peers of all kinds.

Run as a program, it is such a peer, see `PeerProcess`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.errors import FlashpointError, ObjectNotFoundError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, encode
from ml_flashpoint.format.names import SaveId, object_name
from ml_flashpoint.net import handshake
from ml_flashpoint.net.channel import Channel
from ml_flashpoint.net.client import connect
from ml_flashpoint.net.messages import Fields, Message
from ml_flashpoint.net.transfers import TRANSFERS, BlockChecker, PartName, PeerConnection, TransferService
from tests.support.processes import suspend

SECRET = b"the secret of the job that tests"
SAVE = SaveId(7, 5)
VERSION = SAVE.version
PART = PartName(SAVE, 3)
NAME = object_name(3, SAVE.text)
BLOCK = 512 << 10
"""Small enough for quick tests, large enough to be verified by a thread of its own."""
REPOSITORY = Path(__file__).resolve().parents[2]
LARGE = 64 << 20
"""More than two sockets hold, so that a transfer of it that is stopped is stopped midway."""
SLACK_S = 15.0
"""What a busy machine may add to a deadline. Far below the default deadlines, which no test may wait for."""


def record_of(data: bytes | mmap.mmap, block_size: int = BLOCK) -> ObjectRecord:
    with memoryview(data) as view:
        size = len(view)
        digests = tuple(digest_block(view[at : at + block_size]) for at in range(0, size, block_size))
    return ObjectRecord(size, size, digests, block_size)


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
def serving(store: MemoryStore | None = None, secret: bytes = SECRET, **options: Any) -> Iterator[TransferService]:
    options.setdefault("deadline_s", 10.0)
    with TransferService(secret, store or MemoryStore(), host="127.0.0.1", **options) as service:
        yield service


def connection_to(service: TransferService, secret: bytes = SECRET, **options: Any) -> PeerConnection:
    options.setdefault("deadline_s", 10.0)
    return PeerConnection(service.address, secret, node="n2", **options)


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


def begin_push(channel: Channel, manifest: Manifest | bytes) -> Message:
    """Ask to push, as a client would; return the answer."""
    blob = manifest if isinstance(manifest, bytes) else encode(manifest)
    channel.send("push", {"rider": {}}, [blob])
    return channel.receive(request=False)


def raw_connection(service: TransferService) -> socket.socket:
    sock = socket.create_connection(service.address, timeout=10)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\0" * 8)
    return sock


def channel_to(service: TransferService, deadline_s: float = 10.0) -> Channel:
    return connect(("tcp", *service.address), SECRET, TRANSFERS, within_s=10, stall_s=deadline_s)


def refusal_to(channel: Channel) -> FlashpointError:
    """What is answered, which must be an error."""
    subject = channel.receive(request=False).subject
    assert isinstance(subject, dict)
    return TRANSFERS.rebuild(subject)


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other side hangs up within the socket's timeout, saying at most that it refuses us."""
    try:
        return sock.recv(handshake.MAC_BYTES, socket.MSG_WAITALL) in (b"", handshake.REFUSED) and sock.recv(1) == b""
    except ConnectionResetError:
        return True


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    return sock.recv(count, socket.MSG_WAITALL)


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


# --- Peers in processes of their own ------------------------------------------------------------------------


class PeerProcess:
    """This module as a program: `serve`, `fetch` or `push`, telling what happens as lines of JSON on stdout.

    A transfer that it makes stops midway, says `{"midway": true}` and goes on when told to.
    """

    def __init__(self, *arguments: str, command: Callable[[Sequence[str]], list[str]] = list) -> None:
        self._process = subprocess.Popen(
            command([sys.executable, "-m", "tests.net.transfer_support", *arguments]),
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.communicate(timeout=20)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)

    def stop(self) -> None:
        """Freeze it: it stays connected and does nothing."""
        suspend(self._process.pid)

    def tell(self) -> Any:
        """The next thing that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the peer ended: {self._process.communicate(timeout=20)[1]}")
        return json.loads(line)

    def go_on(self) -> None:
        """Let it continue."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait(self) -> tuple[int, str]:
        """Its return code and what it wrote to stderr."""
        errors = self._process.communicate(timeout=60)[1]
        return self._process.returncode, errors


def _say(**values: Any) -> None:
    os.write(1, (json.dumps(values) + "\n").encode())


def _main(role: str, host: str, port: str, deadline_s: str) -> None:
    data = mmap.mmap(-1, LARGE if role != "push" else 4 * LARGE)
    record = record_of(data, block_size=1 << 20)
    store = MemoryStore({PART: data})
    if role == "serve":
        with TransferService(SECRET, store, host=host, deadline_s=float(deadline_s)) as service:
            _say(port=service.address[1])
            store.ended.wait()
            _say(committed=len(store.committed), aborted=len(store.aborted))
            sys.stdin.readline()
        return
    if role == "exit":
        _exit_amid_transfers(store, record)
        return
    asked = 0

    def midway() -> bool:
        nonlocal asked
        asked += 1
        # The first questions are asked while waiting for the peer's consent.
        if asked == 5:
            _say(midway=True)
            sys.stdin.readline()
        return False

    try:
        with PeerConnection((host, int(port)), SECRET, node="n2", deadline_s=float(deadline_s)) as peer:
            if role == "push":
                peer.push(manifest_of(record), memoryview(data), cancelled=midway)
            else:
                fetch(peer, record, memoryview(data), cancelled=midway)
        _say(error=None)
    except FlashpointError as exc:
        _say(error=type(exc).__name__, text=str(exc), step=exc.step, rank=exc.rank, node=exc.node)


def _exit_amid_transfers(store: MemoryStore, record: ObjectRecord) -> None:
    service = TransferService(SECRET, store, host="127.0.0.1")
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


if __name__ == "__main__":
    _main(*sys.argv[1:])
