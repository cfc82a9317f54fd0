"""The coordinator of a dictionary, as clients and managers reach it: in the process that made the dictionary.

Owns its server, what the requests to it mean, and where managers are. What is committed is `coordinator`'s. Its end is
the dictionary's end: nothing takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.checkpoints.coordinator import Coordinator
from ml_flashpoint.ddict.checkpoints.writers import Session
from ml_flashpoint.ddict.errors import REQUESTS
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.ddict.persistence import History
from ml_flashpoint.ddict.wire.fields import Result, asking
from ml_flashpoint.ddict.wire.links import Links, Place, Places, locator, own_node
from ml_flashpoint.ddict.wire.open_files import allow_many_files
from ml_flashpoint.format.errors import ProtocolError
from ml_flashpoint.net.client import Address
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.server import Peer, RequestServer


class CoordinatorServer:
    """See the module. Thread-safe. Serves from construction until :meth:`close`; in a forked child it is closed.
    ``host``: address to serve all nodes on; None: a Unix socket in the dictionary's folder. Raises `JobInUseError`:
    another live dictionary persists under this name and path."""

    def __init__(self, configuration: Configuration, host: str | None = None) -> None:
        allow_many_files()  # each connection is one
        self.places: dict[int, Place] = {}
        here = locator(configuration) if host is None else Places(own_node(), None, lambda timeout_s: self.places)
        self.links = Links(here, configuration.secret)
        history = History(configuration) if configuration.options.persists else None
        if history is not None:
            history.begin()
        self.coordinator = Coordinator(configuration.options, self._call, history)
        unix_path = str(Path(configuration.base, "c.sock")) if host is None else None
        try:
            self._server = RequestServer(configuration.secret, self, REQUESTS, unix_path=unix_path, tcp_host=host)
        except BaseException:
            self.coordinator.close()
            raise

    @property
    def address(self) -> Address:
        """The address that it listens at."""
        return self._server.addresses[0]

    def close(self) -> None:
        """Commit and answer nothing more. Idempotent."""
        self.coordinator.close()
        self._server.close()
        self.links.close()

    def _call(self, manager: int, operation: str, fields: Fields, timeout_s: float) -> Fields:
        return self.links.call(manager, operation, dict(fields), deadline=time.monotonic() + timeout_s).fields

    # ---- requests -----------------------------------------------------------------------------------------

    def open(self, peer: Peer) -> Session:
        """See `RequestHandler`."""
        return Session(peer)

    def handle(self, session: Session, operation: str, fields: Fields, blobs: list[bytes]) -> Result:
        """See `RequestHandler`."""
        found = _OPERATIONS.get(operation)
        if found is None:
            raise ProtocolError(f"the coordinator has no operation {operation!a}")
        return found(self, session, fields, blobs)

    def closed(self, session: Session) -> None:
        """See `RequestHandler`."""
        self.coordinator.session_ended(session)

    def hello(self) -> Fields:
        """Say who this is."""
        return {"manager": COORDINATOR}

    def here(self, manager: int, node: str, addresses: list[Any]) -> None:
        """A manager has begun, and says where it is: by Unix socket, and by TCP."""
        self.coordinator.check_manager(manager)
        if [kind for kind, *_ in addresses] != ["unix", "tcp"]:
            raise ProtocolError(f"these are not the addresses of a manager: {addresses!a}")
        (_, unix), (_, host, port) = addresses
        self.places[manager] = Place(node, unix, host, port)

    def where(self) -> list[tuple[int, Place]]:
        """Return the addresses of all managers that have said so."""
        return list(self.places.items())


_OPERATIONS: dict[str, Callable[[CoordinatorServer, Session, Fields, list[bytes]], Result]] = {
    **{name: asking(name) for name in ("hello", "here")},
    **{
        name: asking(f"coordinator.{name}")
        for name in ("attach", "await_commit", "catch_up", "freeze", "join", "leave", "move", "newest", "restore")
    },
    "go_back": asking("coordinator.rollback"),
    "persist_newest": asking("coordinator.persist_newest", gives="checkpoint_id"),
    "persisted_ids": asking("coordinator.persisted_ids", gives="ids"),
    "places": asking("where", gives="places"),
    "returned": asking("coordinator.returned"),
    "sealed": asking("coordinator.sealed_by", gives="sealed"),
    "state": asking("coordinator.whole_state"),
    # Answered when time is up, or an epoch begins. Meanwhile the end of either process is noticed by the other.
    "watch": asking("coordinator.await_epoch", gives="epoch"),
}
