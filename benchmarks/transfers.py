"""Fetching from a peer over loopback, beside a plain send/recv pair over the same sockets and buffers."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection

from benchmarks.timing import Result, measure
from ml_flashpoint.format.digest import BLOCK_SIZE, digest_blocks
from ml_flashpoint.format.errors import ObjectNotFoundError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.transfers import BlockChecker, PartName, PeerConnection, TransferService

SIZE = 1 << 30
SECRET = b"only for this benchmark, 32 byte"
PART = PartName(SaveId(1, 1), 0)
_CHUNK = 4 << 20


class _OneObject:
    """A backend that serves one buffer."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def open_part(self, part: PartName) -> AbstractContextManager[memoryview]:
        return nullcontext(self._data)

    def read_manifest(self, part: PartName) -> bytes:
        raise ObjectNotFoundError("not here")

    def receive(self, manifest: Manifest, rider: Fields) -> AbstractContextManager[memoryview | None]:
        return nullcontext()


def _serve(pipe: Connection) -> None:
    data = mmap.mmap(-1, SIZE)
    pattern = os.urandom(1 << 20)
    for at in range(0, SIZE, len(pattern)):
        data[at : at + len(pattern)] = pattern
    view = memoryview(data)
    plain = socket.create_server(("127.0.0.1", 0))
    with TransferService(SECRET, _OneObject(view), host="127.0.0.1") as service:
        digests = digest_blocks(view)
        pipe.send((service.address, plain.getsockname(), digests))
        while True:
            connection, _ = plain.accept()
            with connection:
                if not connection.recv(1):
                    return
                for at in range(0, SIZE, _CHUNK):
                    connection.sendall(view[at : at + _CHUNK])


def results() -> Iterator[Result]:
    """The two, in turn."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    address, plain_address, digests = ours.recv()
    target = mmap.mmap(-1, SIZE)
    into = memoryview(target)
    record = ObjectRecord(SIZE, SIZE, tuple(digests))

    class Plain:
        """Stands where the memcpy stands elsewhere: the ratio is to this."""

        nbytes = SIZE

        def run(self) -> float:
            began = time.perf_counter()
            with socket.create_connection(plain_address) as connection:
                connection.sendall(b"x")
                for at in range(0, SIZE, _CHUNK):
                    piece = into[at : at + _CHUNK]
                    got = 0
                    while got < len(piece):
                        got += connection.recv_into(piece[got:], 0, socket.MSG_WAITALL)
            return time.perf_counter() - began

    def fetch(_: int) -> None:
        with PeerConnection(address, SECRET) as peer, BlockChecker(record, into, "part") as blocks:
            peer.fetch(PART, blocks)

    plain = Plain()
    yield measure(
        "1 GiB over loopback",
        "ours: fetch, verified",
        fetch,
        plain,  # type: ignore[arg-type]
        note=f"ratio to plain send/recv_into; blocks of {BLOCK_SIZE >> 20} MiB",
    )
    with socket.create_connection(plain_address):
        pass
    server.join(10)
