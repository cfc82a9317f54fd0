"""The coordinator of a dictionary, as clients and managers reach it: in the process that made the dictionary.

Owns its server, the meaning of requests, and where managers are. What is committed is `coordinator`'s. Its end is the
dictionary's end: nothing takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from ml_flashpoint.ddict.checkpoints.coordinator import Coordinator
from ml_flashpoint.ddict.checkpoints.writers import Session
from ml_flashpoint.ddict.errors import REQUESTS
from ml_flashpoint.ddict.links import Links, Locator, Place, allow_many_files, locator, own_node
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.ddict.persistence import History
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.requests import Request, Result
from ml_flashpoint.format.errors import ProtocolError
from ml_flashpoint.net.client import Address
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.server import Peer, RequestServer


class CoordinatorServer:
    """See the module. Thread-safe. Serves from construction until :meth:`close`; in a forked child it is closed.

    Args:
        configuration: of the dictionary.
        host: address to serve all nodes on; None: a Unix socket in the dictionary's folder.

    Raises:
        JobInUseError: another live dictionary persists under this name and path.
    """

    def __init__(self, configuration: Configuration, host: str | None = None) -> None:
        allow_many_files()  # each connection is one
        self.places: dict[int, Place] = {}
        here = locator(configuration) if host is None else Locator(own_node(), None, lambda timeout_s: self.places)
        self.links = Links(here, configuration.secret)
        self._history = History(configuration) if configuration.options.persists else None
        if self._history is not None:
            self._history.begin()
        self.coordinator = Coordinator(configuration.options, self._call, self._history)
        unix_path = str(Path(configuration.base, "c.sock")) if host is None else None
        try:
            self._server = RequestServer(configuration.secret, self, REQUESTS, unix_path=unix_path, tcp_host=host)
        except BaseException:
            self.coordinator.close()
            if self._history is not None:
                self._history.close()
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
        if self._history is not None:
            self._history.close()  # last: whoever takes the name over finds none of this at work

    def _call(self, manager: int, request: Request, timeout_s: float) -> Fields:
        return self.links.call(manager, request, deadline=time.monotonic() + timeout_s).fields

    # ---- requests -----------------------------------------------------------------------------------------

    def open(self, peer: Peer) -> Session:
        """See `RequestHandler`."""
        return Session(peer)

    def handle(self, session: Session, operation: str, fields: Fields, blobs: list[bytes]) -> Result:
        """See `RequestHandler`."""
        request, deadline = asked.decode(operation, fields)
        found = _OPERATIONS.get(type(request))
        if found is None:
            raise ProtocolError(f"the coordinator has no operation {operation!a}")
        call = _Call(self, self.coordinator, session, max(0.0, deadline - time.monotonic()))
        return found(call, request) or {}, ()

    def closed(self, session: Session) -> None:
        """See `RequestHandler`."""
        self.coordinator.session_ended(session)

    def note_place(self, told: asked.Here) -> None:
        """Note where a manager is."""
        self.coordinator.check_manager(told.manager)
        self.places[told.manager] = Place(told.node, told.unix, told.host, told.port)


class _Call(NamedTuple):
    """A request's receiver, and its connection."""

    server: CoordinatorServer
    coordinator: Coordinator
    session: Session
    left_s: float


def _watch(call: _Call, request: asked.Watch) -> Fields:
    # Meanwhile the end of either process is noticed by the other.
    until = time.monotonic() + request.seconds
    return {"epoch": call.coordinator.await_epoch(request.epoch, until, call.session.peer.is_gone)}


_Operation: TypeAlias = Callable[[_Call, Any], "Fields | None"]
_OPERATIONS: Final[dict[type[Request], _Operation]] = {
    asked.Hello: lambda call, request: {"manager": COORDINATOR},
    asked.State: lambda call, request: call.coordinator.whole_state(),
    asked.Attach: lambda call, request: call.coordinator.attach(call.session, request.session),
    asked.Watch: _watch,
    asked.Join: lambda call, request: call.coordinator.join(request.account),
    asked.Move: lambda call, its: call.coordinator.move(its.account, its.to, its.onwards, call.left_s),
    asked.GoBack: lambda call, its: call.coordinator.rollback(its.whose, its.session, its.back, call.left_s),
    asked.CatchUp: lambda call, request: call.coordinator.catch_up(request.account, call.left_s),
    asked.Leave: lambda call, request: call.coordinator.leave(request.account),
    asked.Newest: lambda call, request: call.coordinator.newest(request.epoch, call.left_s, call.session.peer.is_gone),
    asked.AwaitCommit: lambda call, its: call.coordinator.await_commit(
        its.account, its.checkpoint_id, its.if_written, call.left_s, call.session.peer.is_gone
    ),
    asked.SetFrozen: lambda call, request: call.coordinator.freeze(request.whose, request.frozen, call.left_s),
    asked.PersistNewest: lambda call, request: {
        "checkpoint_id": call.coordinator.persist_newest(call.left_s, call.session.peer.is_gone)
    },
    asked.PersistedIds: lambda call, request: {"ids": call.coordinator.persisted_ids()},
    asked.Restore: lambda call, its: call.coordinator.restore(its.whose, its.checkpoint_id, call.left_s),
    asked.Here: lambda call, request: call.server.note_place(request),
    asked.Places: lambda call, request: {"places": list(call.server.places.items())},
    asked.Returned: lambda call, request: call.coordinator.returned(request.manager, request.incarnation),
    asked.SealedBy: lambda call, request: {"sealed": call.coordinator.sealed_by(request.manager)},
}
