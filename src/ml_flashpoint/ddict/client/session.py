"""A process's side of a dictionary: its connections, and how values get to managers and back.

Owns what all handles of a process share. One of these exists for each dictionary in a process; a forked child gets one
of its own. What handles do with checkpoints is `handle`'s, that they are there is said by `keepalive`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ml_flashpoint.ddict.client import codec, objects, shared_memory
from ml_flashpoint.ddict.client.keepalive import Keepalive
from ml_flashpoint.ddict.client.links import Exchange, Links, is_local, locator
from ml_flashpoint.ddict.errors import DDictTimeoutError, StaleValueError
from ml_flashpoint.ddict.manager.requests import rebuild_error
from ml_flashpoint.ddict.options import Configuration
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.client import Reply

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ml_flashpoint.ddict.client.codec import Encoded


@dataclass(frozen=True, slots=True)
class Found:
    """A value that was read, and the sequence number of its entry."""

    value: Any
    sequence: int


class Client:
    """See the module. Thread-safe."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.links = Links(locator(configuration), configuration.secret)
        self.is_local = is_local(configuration)
        self.keepalive = Keepalive(self.links)
        self._writer = shared_memory.ValueWriter()
        self._finalizer = weakref.finalize(self, _close, self.keepalive, self._writer)

    # ---- one value ----------------------------------------------------------------------------------------

    def put(self, manager: int, key: bytes, encoded: Encoded, fields: dict[str, Any], *, deadline: float) -> bool:
        """Write a key at one manager. Returns false if it was not as expected.

        Args:
            fields: checkpoint, epoch, writer and flags, as operation ``put`` has them.
        """
        again = "x" not in fields  # a conditional write that was done would fail the second time
        if encoded.inline:
            blobs = (key, codec.to_inline(encoded))
            return bool(self.links.call(manager, "put", fields, blobs, deadline=deadline, again=again).fields["ok"])

        def send(exchange: Exchange) -> dict[str, Any]:
            write = self._put_mapped if exchange.local else self._put_streamed
            return write(exchange, key, encoded, fields)

        while True:
            try:
                return bool(self.links.attempt(manager, send, deadline=deadline, again=again)["ok"])
            except StaleValueError:
                # The manager was replaced after it had given the reservation.
                if time.monotonic() >= deadline:
                    raise DDictTimeoutError("the manager changes all the time", manager=manager) from None

    def _put_mapped(self, exchange: Exchange, key: bytes, encoded: Encoded, fields: dict[str, Any]) -> dict[str, Any]:
        with (
            _reserved(exchange, encoded, fields) as reservation,
            self._writer.writing(reservation["path"], reservation["v"]) as slot,
        ):
            slot.write(encoded)
            return exchange.request("put", {**fields, "v": reservation["v"]}, (key,)).fields

    def _put_streamed(self, exchange: Exchange, key: bytes, encoded: Encoded, fields: dict[str, Any]) -> dict[str, Any]:
        with _reserved(exchange, encoded, fields) as reservation:
            blobs = objects.object_blobs(encoded, reservation["size"], reservation["v"])
            return exchange.request("put", {**fields, "v": reservation["v"]}, (key, *blobs)).fields

    def get(self, manager: int, key: bytes, fields: dict[str, Any], *, deadline: float, copy: bool) -> Found:
        """Read a key at one manager."""

        def ask(exchange: Exchange) -> Reply:
            return exchange.request("get", _fields_of_get(exchange, fields), (key,))

        while True:
            answer = self.links.attempt(manager, ask, deadline=deadline)
            try:
                return Found(self._decode(answer.fields, answer.blobs, copy), answer.fields["s"])
            except StaleValueError:
                # It was written anew between the answer and the look at it.
                if time.monotonic() >= deadline:
                    raise DDictTimeoutError("the value changes faster than it can be read", manager=manager) from None

    def _decode(self, fields: dict[str, Any], blobs: Sequence[bytes], copy: bool) -> Any:
        if "path" in fields:
            return shared_memory.read_value(fields["path"], fields["v"], copy=copy)
        if "v" in fields:
            return objects.read_object(blobs[0], fields["v"], copy=copy, file_size=fields["size"])
        return codec.from_inline(blobs[0], copy=copy)

    # ---- many ---------------------------------------------------------------------------------------------

    def get_many(
        self, manager: int, keys: Sequence[bytes], fields: dict[str, Any], *, deadline: float, copy: bool
    ) -> list[Found | FlashpointError]:
        """Read keys of one manager, each with its own outcome."""

        def ask(exchange: Exchange) -> Reply:
            one = ["get", _fields_of_get(exchange, fields), 1]
            return exchange.request("many", {"ops": [one] * len(keys), "e": fields["e"]}, list(keys))

        answer = self.links.attempt(manager, ask, deadline=deadline)
        found: list[Found | FlashpointError] = []
        at = 0
        for key, (error, own, count) in zip(keys, answer.fields["outcomes"], strict=True):
            blobs = answer.blobs[at : at + count]
            at += count
            if error is not None:
                found.append(rebuild_error(error))
                continue
            try:
                found.append(Found(self._decode(own, blobs, copy), own["s"]))
            except StaleValueError:
                found.append(self.get(manager, key, fields, deadline=deadline, copy=copy))
        return found

    def put_many(
        self, manager: int, items: Sequence[tuple[bytes, bytes]], fields: dict[str, Any], *, deadline: float
    ) -> None:
        """Write small values (their inline forms) at one manager.

        Raises:
            FlashpointError: the first that one of them was refused with; others may be written.
        """
        blobs: list[Buffer] = [part for item in items for part in item]
        ops = {"ops": [["put", fields, 2] for _ in items], "e": fields["e"]}
        answer = self.links.call(manager, "many", ops, blobs, deadline=deadline)
        for error, _, _ in answer.fields["outcomes"]:
            if error is not None:
                raise rebuild_error(error)

    def close(self) -> None:
        """Let go of everything; also done when the last handle of the process is gone."""
        self.keepalive.close()
        self._finalizer()


@contextlib.contextmanager
def _reserved(exchange: Exchange, encoded: Encoded, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A reservation for a large value, which the manager gets back if it is not put."""
    size = objects.object_size(encoded)
    reservation = exchange.request("allocate", {"n": size, "c": fields["c"], "e": fields["e"]}).fields
    try:
        yield reservation
    except BaseException:
        with contextlib.suppress(FlashpointError):  # when the connection is gone, the manager knows
            exchange.request("abandon", {"v": reservation["v"]})
        raise


def _close(keepalive: Keepalive, writer: shared_memory.ValueWriter) -> None:
    keepalive.close_later()
    writer.close()


def _fields_of_get(exchange: Exchange, fields: dict[str, Any]) -> dict[str, Any]:
    """What is asked of this manager: one elsewhere, which it may be since a moment ago, sends large values along."""
    return fields if exchange.local else {**fields, "remote": True}


_clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
_clients_lock = threading.Lock()


def client_of(configuration: Configuration) -> Client:
    """This process's client for a dictionary, made if there is none."""
    with _clients_lock:
        client = _clients.get(configuration.dictionary)
        if client is None:
            client = _clients[configuration.dictionary] = Client(configuration)
        return client


def _after_fork() -> None:
    global _clients_lock
    _clients_lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)
