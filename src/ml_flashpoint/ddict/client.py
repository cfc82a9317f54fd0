"""A process's side of a dictionary: its connections, its lease, and how values get to managers and back.

Owns what all handles of a process share. One of these exists for each dictionary in a process; a forked child gets one
of its own. What handles do with checkpoints is `handle`'s.

The lease is a connection to the main manager that a thread keeps up: as long as it lasts, the handles of this process
count as attached, and when the main manager comes back after a death, they are attached again at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ml_flashpoint.ddict import value_files, value_objects, values
from ml_flashpoint.ddict.configuration import Configuration
from ml_flashpoint.ddict.errors import (
    DDictDestroyedError,
    DDictManagerLostError,
    DDictTimeoutError,
    StaleValueError,
)
from ml_flashpoint.ddict.links import Exchange, Links
from ml_flashpoint.ddict.locations import is_local, locator
from ml_flashpoint.ddict.messages import rebuild_error
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.client import Reply

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ml_flashpoint.ddict.values import Encoded

INLINE_LIMIT = 256 << 10
"""Values whose encoding is smaller live in the manager's memory, others in an arena of their own."""

_log = logging.getLogger(__name__)

_WATCH_S = 20
_LONGEST_PAUSE_S = 1.0
_LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a write.

    Attributes:
        done: false: the key was not as expected.
        sequence: of the new entry.
        incarnation: of the manager that took it.
    """

    done: bool
    sequence: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Found:
    """A value that was read, and the sequence number of its entry."""

    value: Any
    sequence: int


class Client:
    """See the module. Thread-safe.

    Args:
        configuration: of the dictionary.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.links = Links(locator(configuration), configuration.secret)
        self.is_local = is_local(configuration)
        self.lease = Lease(self.links)
        self._writer = value_files.ValueWriter()
        self._finalizer = weakref.finalize(self, _close, self.lease, self.links, self._writer)

    # ---- one value ----------------------------------------------------------------------------------------

    def put(
        self,
        manager: int,
        key: bytes,
        encoded: Encoded,
        fields: dict[str, Any],
        *,
        until: float,
        expected: str | None,
    ) -> Written:
        """Write a key at one manager.

        Args:
            fields: checkpoint, writer and flags, as operation ``put`` has them.
            expected: see `Links.attempt`.
        """
        again = "x" not in fields  # a conditional write that was done would fail the second time
        if encoded.nbytes < INLINE_LIMIT:
            blobs = (key, values.to_inline(encoded))
            answer = self.links.call(manager, "put", fields, blobs, until=until, again=again, expected=expected)
            return Written(answer.fields["ok"], answer.fields.get("s", 0), answer.incarnation)

        def send(exchange: Exchange) -> dict[str, Any]:
            write = self._put_mapped if exchange.local else self._put_streamed
            return write(exchange, key, encoded, fields)

        while True:
            try:
                reply, incarnation = self.links.attempt(manager, send, until=until, again=again, expected=expected)
                return Written(reply["ok"], reply.get("s", 0), incarnation)
            except StaleValueError:
                # The manager was replaced after it had given the room.
                if time.monotonic() >= until:
                    raise DDictTimeoutError("the manager changes all the time", manager=manager) from None

    def _put_mapped(self, exchange: Exchange, key: bytes, encoded: Encoded, fields: dict[str, Any]) -> dict[str, Any]:
        with _room_for(exchange, encoded, fields) as room, self._writer.writing(room["path"], room["v"]) as slot:
            slot.write(encoded)
            return exchange.request("put", {**fields, "v": room["v"]}, (key,)).fields

    def _put_streamed(self, exchange: Exchange, key: bytes, encoded: Encoded, fields: dict[str, Any]) -> dict[str, Any]:
        with _room_for(exchange, encoded, fields) as room:
            blobs = value_objects.object_blobs(encoded, room["size"], room["v"])
            return exchange.request("put", {**fields, "v": room["v"]}, (key, *blobs)).fields

    def get(self, manager: int, key: bytes, fields: dict[str, Any], *, until: float, copy: bool) -> Found:
        """Read a key at one manager."""

        def ask(exchange: Exchange) -> Reply:
            return exchange.request("get", _fields_of_get(exchange, fields), (key,))

        while True:
            answer, _ = self.links.attempt(manager, ask, until=until)
            try:
                return Found(self._decode(answer.fields, answer.blobs, copy), answer.fields["s"])
            except StaleValueError:
                # It was written anew between the answer and the look at it.
                if time.monotonic() >= until:
                    raise DDictTimeoutError("the value changes faster than it can be read", manager=manager) from None

    def _decode(self, fields: dict[str, Any], blobs: Sequence[bytes], copy: bool) -> Any:
        if "path" in fields:
            return value_files.read_value(fields["path"], fields["v"], copy=copy)
        if "v" in fields:
            return value_objects.read_object(blobs[0], fields["v"], copy=copy, file_size=fields["size"])
        return values.from_inline(blobs[0], copy=copy)

    # ---- many ---------------------------------------------------------------------------------------------

    def get_many(
        self, manager: int, keys: Sequence[bytes], fields: dict[str, Any], *, until: float, copy: bool
    ) -> list[Found | FlashpointError]:
        """Read keys of one manager, each with its own outcome."""

        def ask(exchange: Exchange) -> Reply:
            one = ["get", _fields_of_get(exchange, fields), 1]
            return exchange.request("many", {"ops": [one] * len(keys)}, list(keys))

        answer, _ = self.links.attempt(manager, ask, until=until)
        found: list[Found | FlashpointError] = []
        at = 0
        for key, (error, own, count) in zip(keys, answer.fields["outcomes"], strict=True):
            blobs = answer.blobs[at : at + count]
            at += count
            if error is not None:
                found.append(_error_of(error))
                continue
            try:
                found.append(Found(self._decode(own, blobs, copy), own["s"]))
            except StaleValueError:
                found.append(self.get(manager, key, fields, until=until, copy=copy))
        return found

    def put_many(
        self,
        manager: int,
        items: Sequence[tuple[bytes, bytes]],
        fields: dict[str, Any],
        *,
        until: float,
        expected: str | None,
    ) -> str:
        """Write small values (their inline forms) at one manager. Returns its incarnation.

        Raises:
            FlashpointError: the first that one of them was refused with; others may be written.
        """
        blobs: list[Buffer] = [part for item in items for part in item]
        ops = {"ops": [["put", fields, 2] for _ in items]}
        answer = self.links.call(manager, "many", ops, blobs, until=until, expected=expected)
        for error, _, _ in answer.fields["outcomes"]:
            if error is not None:
                raise _error_of(error)
        return answer.incarnation

    def close(self) -> None:
        """Let go of everything; also done when the last handle of the process is gone."""
        self._finalizer()


@contextlib.contextmanager
def _room_for(exchange: Exchange, encoded: Encoded, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Room for a large value, which the manager gets back if it is not put."""
    size = value_objects.object_size(encoded)
    room = exchange.request("allocate", {"n": size, "c": fields["c"]}).fields
    try:
        yield room
    except BaseException:
        with contextlib.suppress(FlashpointError):  # when the connection is gone, the manager knows
            exchange.request("abandon", {"v": room["v"]})
        raise


def _close(lease: Lease, links: Links, writer: value_files.ValueWriter) -> None:
    lease.close()
    links.close()
    writer.close()


def _fields_of_get(exchange: Exchange, fields: dict[str, Any]) -> dict[str, Any]:
    """What is asked of this manager: one elsewhere, which it may be since a moment ago, sends large values along."""
    return fields if exchange.local else {**fields, "remote": True}


def _error_of(described: Any) -> FlashpointError:
    """The error of one operation of many."""
    return rebuild_error(described)


class Lease:
    """Keeps the writing handles of a process attached. Thread-safe. It begins with the first of them.

    Args:
        links: to the managers.
    """

    def __init__(self, links: Links) -> None:
        self.id = secrets.token_hex(8)
        self._links = links
        self._lock = threading.Lock()
        self._attached = threading.Event()
        self._closed = threading.Event()
        self._joins: dict[str, Callable[[], dict[str, Any]]] = {}
        self._gone: queue.SimpleQueue[tuple[str, Callable[[], dict[str, Any]]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def add(self, handle: str, join: Callable[[], dict[str, Any]], until: float) -> dict[str, Any]:
        """Attach a handle. Returns where the dictionary is.

        Args:
            join: gives the fields of its request ``join`` at any time.

        Raises:
            DDictManagerLostError: the main manager is not there.
        """
        with self._lock:
            self._joins[handle] = join
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._run, name="ddict-lease", daemon=True),
                    threading.Thread(target=self._run_leaving, name="ddict-leave", daemon=True),
                ]
                for thread in self._threads:
                    thread.start()
        if not self._attached.wait(max(0.0, until - time.monotonic())):
            raise DDictManagerLostError("the main manager is not there", manager=0)
        if self._closed.is_set():
            raise DDictDestroyedError("the dictionary was destroyed")
        return self._links.call(0, "join", join(), until=until).fields

    def remove(self, handle: str) -> None:
        """Detach a handle, which has told the main manager."""
        with self._lock:
            self._joins.pop(handle, None)

    def forget(self, handle: str, leave: Callable[[], dict[str, Any]]) -> None:
        """Detach a handle that was garbage collected: from any thread at any moment, so it takes no lock.

        Args:
            leave: gives the fields of its request ``leave``.
        """
        self._gone.put((handle, leave))

    def _run_leaving(self) -> None:
        while (gone := self._gone.get()) is not None:
            handle, leave = gone
            # Until the main manager has heard of it, also one that takes over has to: of what it wrote.
            while not self._closed.is_set():
                try:
                    self._links.call(0, "leave", leave(), until=time.monotonic() + _LEAVE_S)
                    break
                except FlashpointError:
                    self._closed.wait(_LONGEST_PAUSE_S)
                except Exception:  # without this thread, handles that are forgotten would hold up commits
                    _log.exception("a handle that is gone could not be detached")
                    break
            self.remove(handle)

    def _run(self) -> None:
        pause = 0.01
        while not self._closed.is_set():
            try:
                link = self._links.connect(0, 5.0)
                try:
                    until = time.monotonic() + 60.0
                    with self._lock:
                        joins = dict(self._joins)
                    Exchange(link.connection, until).request("lease", {"lease": self.id, "handles": list(joins)})
                    for handle, join in joins.items():
                        Exchange(link.connection, until).request("join", join())
                        with self._lock:
                            has_left = handle not in self._joins
                        if has_left:  # meanwhile, and another main manager may have heard of that
                            Exchange(link.connection, until).request("leave", join())
                    self._attached.set()
                    pause = 0.01
                    while not self._closed.is_set():
                        Exchange(link.connection, time.monotonic() + 2 * _WATCH_S).request("watch", {"s": _WATCH_S})
                finally:
                    if not self._closed.is_set():
                        self._attached.clear()
                    link.connection.close()
            except DDictDestroyedError:
                self.close()
            except FlashpointError:
                self._closed.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            except Exception:  # without this thread, commits would go on without the handles of this process
                _log.exception("the connection that keeps handles attached failed")
                self._closed.wait(_LONGEST_PAUSE_S)

    def close(self) -> None:
        """Detach all. Does not wait."""
        self._closed.set()
        self._attached.set()  # for those who wait for what will not come
        self._gone.put(None)


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
