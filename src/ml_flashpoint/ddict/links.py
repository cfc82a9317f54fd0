"""Connections of one process to the managers of a dictionary and its coordinator, and the one loop that asks again
while one is away. What requests mean is the caller's."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from ml_flashpoint.ddict.errors import REQUESTS, DDictDestroyedError, DDictManagerLostError, DDictTimeoutError
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.ddict.wire.requests import Hello, Places, Request, encode
from ml_flashpoint.format.errors import AuthenticationError, ProtocolError
from ml_flashpoint.net.channel import ConnectionLostError
from ml_flashpoint.net.client import Address, Connection, Reply, RequestLostError, check_address

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Found = TypeVar("_Found")
GRACE_S = 0.5  # what a request may take more than the manager is told, so that its own error comes first

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
_KEPT_IDLE: Final = 8
_CONNECT_S: Final = 10.0


def allow_many_files() -> int:
    """Let this process have as many files open as it may: each connection and each slot is one. Return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Place(NamedTuple):
    """The place of a manager: its Ray node, its Unix socket for processes there, host and port for all others. On one
    machine the node has no name, and there are no others."""

    node: str
    unix: str
    host: str
    port: int


class Locator:
    """Finds managers and the coordinator. Each manager says to that where it is, and it tells all others.

    Args:
        node: of this process; empty: none of Ray's.
        coordinator: its address.
        ask: has it tell, within so many seconds.
        known: what is known before.
    """

    def __init__(
        self,
        node: str,
        coordinator: Address | None,
        ask: Callable[[float], Mapping[int, Place]],
        known: Mapping[int, Place] | None = None,
    ) -> None:
        self._node, self._coordinator, self._ask = node, coordinator, ask
        self._known: Mapping[int, Place] = known or {}

    def find(self, manager: int, timeout_s: float, *, anew: bool) -> Address | None:
        """Return the address of one; None: it is nowhere at the moment. ``anew``: it was not where this said last."""
        if anew or not (manager == COORDINATOR or manager in self._known):
            self._known = self._ask(timeout_s)
        if manager == COORDINATOR:
            return self._coordinator
        if (place := self._known.get(manager)) is None:
            return None
        return ("unix", place.unix) if place.node == self._node else ("tcp", place.host, place.port)

    def is_local(self, manager: int) -> bool:
        """Return True if a manager is, or was when it was last heard of, on the node of this process."""
        with contextlib.suppress(ConnectionLostError):
            self.find(manager, _CONNECT_S, anew=False)
        return manager in self._known and self._known[manager].node == self._node


def locator(configuration: Configuration, node: str | None = None) -> Locator:
    """Return what finds the managers of a dictionary. ``node``: Ray node of this process, where that is known."""
    if configuration.coordinator is None:
        return _locator_here(configuration)
    coordinator = check_address(configuration.coordinator)

    def ask(timeout_s: float) -> dict[int, Place]:
        # Not by `Links`, which this is a part of; and not often.
        try:
            with Connection(coordinator, configuration.secret, REQUESTS, connect_timeout_s=timeout_s) as line:
                told = line.request(*encode(Places(), timeout_s), timeout_s=timeout_s).fields["places"]
        except (AuthenticationError, ProtocolError, DDictTimeoutError) as error:
            raise ConnectionLostError(f"the coordinator is not at its address any more: {error}") from error
        except ConnectionLostError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):  # there is nobody, and nothing takes its place
                raise DDictDestroyedError(f"it was destroyed, or its creator ended: {error.message}") from error
            raise
        return {manager: Place(*its) for manager, its in told}

    return Locator(own_node() if node is None else node, coordinator, ask)


def _locator_here(configuration: Configuration) -> Locator:
    base = Path(configuration.base)
    places = {each: Place("", str(base / f"m-{each}.sock"), "", 0) for each in range(configuration.managers)}
    path = str(base / "c.sock")

    def look(timeout_s: float) -> dict[int, Place]:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(BlockingIOError):
            probe.setblocking(False)  # a coordinator that is stopped accepts nothing
            try:
                probe.connect(path)
            except (ConnectionRefusedError, FileNotFoundError) as error:
                raise DDictDestroyedError(f"it was destroyed, or its creator ended: {error}") from error
        return places

    return Locator("", ("unix", path), look, places)


def own_node() -> str:
    """Return the id of the Ray node that this process is on; empty: it is on none."""
    ray = sys.modules.get("ray")  # not imported for this: where it is not, it is not initialized
    if ray is None or not ray.is_initialized() or ray.util.client.ray.is_connected():
        return ""
    return str(ray.get_runtime_context().get_node_id())


class Exchange:
    """Requests over one connection, all of which must be done by ``deadline``."""

    def __init__(self, connection: Connection, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline
        self.local = connection.local  # the manager is on this node, so that its memory can be mapped
        self.late = -1  # the newest cut that a write of this came late for; see `Written`

    @property
    def is_broken(self) -> bool:
        """True if a request was not answered: it may still be carried out."""
        return self._connection.closed

    def request(self, request: Request, *blobs: Buffer) -> Reply:
        """Make one request; see `Connection.request`."""
        left = max(round(self._deadline - time.monotonic(), 3), 0.0)
        reply = self._connection.request(*encode(request, left), blobs, timeout_s=left + GRACE_S)
        self.late = max(self.late, reply.fields.get("late", -1))
        return reply


class Links:
    """See the module. Thread-safe. Of no use in a forked child."""

    def __init__(self, locator: Locator, secret: bytes) -> None:
        self.locator = locator
        self._secret = secret
        self._idle: defaultdict[int, list[Connection]] = defaultdict(list)  # each change is one step
        self._doubtful: set[int] = set()  # those that were not, or may not be, where they were said to be
        self._closed = False

    def call(self, manager: int, request: Request, *blobs: Buffer, deadline: float) -> Reply:
        """Ask a manager one thing; see `attempt`."""
        return self.attempt(manager, lambda exchange: exchange.request(request, *blobs), deadline=deadline)

    def attempt(
        self, manager: int, action: Callable[[Exchange], _Found], *, deadline: float, again: bool = True
    ) -> _Found:
        """Return what ``action`` returns, with one connection to a manager for its requests. Begin anew while the
        manager is away. ``again``: requests may be carried out twice: the connection can break after the manager has.

        Raises:
            DDictManagerLostError, DDictTimeoutError: it was away all the time; it did not answer in time.
            FlashpointError: what it, or ``action``, refused with.
        """
        pause = _FIRST_PAUSE_S
        while True:
            if self._closed:
                raise DDictDestroyedError("the dictionary was destroyed, or this handle detached")
            try:
                link = self._take(manager, max(deadline - time.monotonic(), 0.05))
                try:
                    return action(Exchange(link, deadline))
                finally:
                    # After an error of the manager's own, too: the connection is as good as before then.
                    self._give_back(manager, link)
            except ConnectionLostError as error:
                self._drop_idle(manager)
                left = deadline - time.monotonic()
                if left <= pause or (isinstance(error, RequestLostError) and not again):
                    raise _away(manager, error) from error
            time.sleep(min(pause, left))  # it is being started anew; there is no event to wait for from outside
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _take(self, manager: int, timeout_s: float) -> Connection:
        idle = self._idle[manager]
        with contextlib.suppress(IndexError):  # another thread has taken the last one
            while idle:
                if not (link := idle.pop()).closed:
                    return link
        return self.connect(manager, timeout_s)

    def connect(self, manager: int, timeout_s: float) -> Connection:
        """Return a new connection, which is in no pool."""
        deadline = time.monotonic() + timeout_s
        address = self.locator.find(manager, timeout_s, anew=manager in self._doubtful)
        self._doubtful.add(manager)  # until it answers
        if address is None:
            raise ConnectionLostError(f"manager {manager} is not anywhere")
        left = max(deadline - time.monotonic(), 0.05)
        try:
            connection = Connection(address, self._secret, REQUESTS, connect_timeout_s=min(left, _CONNECT_S))
        except (AuthenticationError, ProtocolError, DDictTimeoutError) as error:
            if (address[0] == "tcp" or isinstance(error, DDictTimeoutError)) and time.monotonic() < deadline:
                # It may be stopped for a while; the machine may be gone, or the port somebody else's by now.
                raise ConnectionLostError(f"manager {manager} is not at its address any more: {error}") from error
            if isinstance(error, AuthenticationError):
                raise DDictDestroyedError(f"another dictionary is at the address of this one: {error}") from error
            raise
        try:
            left = max(deadline - time.monotonic(), 0.05)
            if connection.request(*encode(Hello(), left), timeout_s=left).fields["manager"] != manager:
                raise ConnectionLostError(f"manager {manager} is not at its address any more")
            self._doubtful.discard(manager)
            return connection
        except BaseException:
            connection.close()
            raise

    def _give_back(self, manager: int, link: Connection) -> None:
        if link.closed or len(self._idle[manager]) >= _KEPT_IDLE:
            link.close()
            return
        self._idle[manager].append(link)
        if self._closed:
            self.close()  # which has not seen it

    def _drop_idle(self, manager: int) -> None:
        """Drop the others, which lead to the same process, which is gone."""
        self._doubtful.add(manager)
        idle = self._idle[manager]
        with contextlib.suppress(IndexError):  # another thread has taken the last one
            while idle:
                idle.pop().close()

    def close(self) -> None:
        """Close all connections; requests under way fail. Idempotent."""
        self._closed = True
        for manager in list(self._idle):
            self._drop_idle(manager)


def _away(manager: int, error: ConnectionLostError) -> DDictManagerLostError:
    who, hint = f"manager {manager}", "call again: with replication it comes back; without, its values are gone"
    if manager == COORDINATOR:
        who, hint = "the coordinator", "it is in the process that made the dictionary, which ends with that"
    return DDictManagerLostError(f"{who} is not there: {error.message}", manager=manager, hint=hint)
