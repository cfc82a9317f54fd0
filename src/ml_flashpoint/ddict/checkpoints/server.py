"""The coordinator of a dictionary, as clients and managers reach it: in the process that made the dictionary.

Owns its server, what the requests to it mean, and the run that checkpoints are persisted under. What is committed is
`coordinator`'s. Its end is the dictionary's end: nothing takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ml_flashpoint.ddict.checkpoints.coordinator import Coordinator
from ml_flashpoint.ddict.checkpoints.writers import Session
from ml_flashpoint.ddict.client.links import Links, locator
from ml_flashpoint.ddict.errors import REQUESTS, DDictPersistError
from ml_flashpoint.ddict.manager.arenas import allow_many_files
from ml_flashpoint.ddict.manager.requests import Result, deadline_of, left_of
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.ddict.persistence.persister import new_run_id
from ml_flashpoint.ddict.persistence.queue import PersistedRun
from ml_flashpoint.format.errors import ProtocolError
from ml_flashpoint.net.client import Address
from ml_flashpoint.net.messages import Fields, integer, text
from ml_flashpoint.net.server import Peer, RequestServer

_Operation: TypeAlias = "Callable[[CoordinatorServer, _Session, Fields], Fields]"


@dataclass(eq=False, slots=True)
class _Session:
    """One connection of a client or a manager, and the name of the handles' session that it keeps alive."""

    peer: Peer
    name: str | None = None


class CoordinatorServer:
    """See the module. Thread-safe. Serves from construction until :meth:`close`; in a forked child it is closed.
    ``host``: address to serve all nodes on; None: a Unix socket in the dictionary's folder. Raises `JobInUseError`:
    another live dictionary persists under this name and path."""

    def __init__(self, configuration: Configuration, host: str | None = None) -> None:
        allow_many_files()  # each connection is one
        self.configuration = configuration
        self.run = PersistedRun(configuration)
        self.links = Links(locator(configuration), configuration.secret)
        self.frozen = False
        self.run.begin()
        self.coordinator = Coordinator(
            configuration.options,
            self._call,
            self.run.complete,
            unpersist=self.run.remove_above,
            describe=lambda: {"run": self.run.fields(), "frozen": self.frozen},
        )
        unix_path = str(Path(configuration.base, "c.sock")) if host is None else None
        try:
            self._server = RequestServer(configuration.secret, self, REQUESTS, unix_path=unix_path, tcp_host=host)
        except BaseException:
            self.coordinator.close()
            raise

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._server.addresses[0]

    def close(self) -> None:
        """Commit and answer nothing more. Idempotent."""
        self.coordinator.close()
        self._server.close()
        self.links.close()
        self.run.persister.close()

    def _call(self, manager: int, operation: str, fields: Fields, timeout_s: float) -> Fields:
        return self.links.call(manager, operation, dict(fields), deadline=time.monotonic() + timeout_s).fields

    # ---- requests -----------------------------------------------------------------------------------------

    def open(self, peer: Peer) -> _Session:
        """See `RequestHandler`."""
        return _Session(peer)

    def handle(self, session: _Session, operation: str, fields: Fields, blobs: list[bytes]) -> Result:
        """See `RequestHandler`."""
        if operation in _ASKED:
            method, names = _ASKED[operation]
            return method(self.coordinator, *(_ARGUMENTS[name](session, fields) for name in names.split())) or {}, ()
        found = _OPERATIONS.get(operation)
        if found is None:
            raise ProtocolError(f"the coordinator has no operation {operation!a}")
        return found(self, session, fields), ()

    def closed(self, session: _Session) -> None:
        """See `RequestHandler`."""
        if session.name is not None:
            self.coordinator.session_ended(session.name, session)


# ---- what is asked ----------------------------------------------------------------------------------------

_ARGUMENTS: dict[str, Callable[[_Session, Fields], Any]] = {
    "checkpoint_id": lambda session, fields: integer(fields, "checkpoint_id", -1),
    "epoch": lambda session, fields: integer(fields, "e"),
    "handle": lambda session, fields: text(fields, "w"),
    "if_written": lambda session, fields: fields.get("if_written") is True,
    "is_gone": lambda session, fields: session.peer.is_gone,
    "need": lambda session, fields: integer(fields, "need", -1),
    "onwards": lambda session, fields: fields.get("onwards") is True,
    "position": lambda session, fields: integer(fields, "c"),
    "session": lambda session, fields: text(fields, "session"),
    "session_if_attached": lambda session, fields: None if fields.get("session") is None else text(fields, "session"),
    "timeout_s": lambda session, fields: left_of(fields),
}

_ASKED: dict[str, tuple[Callable[..., Fields | None], str]] = {
    "join": (Coordinator.join, "handle session position epoch"),
    "move": (Coordinator.move, "handle session position epoch timeout_s onwards"),
    "go_back": (Coordinator.rollback, "handle session_if_attached position epoch timeout_s"),
    "leave": (Coordinator.leave, "handle need epoch"),
    "catch_up": (Coordinator.catch_up, "handle position need epoch timeout_s"),
    "newest": (Coordinator.newest, "epoch timeout_s is_gone"),
    "await_commit": (Coordinator.await_commit, "handle checkpoint_id epoch timeout_s is_gone if_written"),
}
"""What handles ask the coordinator, and the arguments of that, in order."""


def _attach(server: CoordinatorServer, session: _Session, fields: Fields) -> Fields:
    """Keep the handles alive that join with this session, for as long as this connection lasts."""
    session.name = text(fields, "session")
    server.coordinator.attach(session.name, Session(session, session.peer.text, session.peer.is_gone))
    return {}


def _watch(server: CoordinatorServer, session: _Session, fields: Fields) -> Fields:
    """Answer when time is up, or an epoch begins. Meanwhile the end of either process is noticed by the other."""
    deadline = time.monotonic() + integer(fields, "s")
    return {"epoch": server.coordinator.await_epoch(integer(fields, "e"), deadline, session.peer.is_gone)}


def _state(server: CoordinatorServer, session: _Session, fields: Fields) -> Fields:
    return {**server.coordinator.state(), **server.coordinator.persisting_state(), "frozen": server.frozen}


def _manager(server: CoordinatorServer, fields: Fields) -> int:
    number = integer(fields, "manager")
    if not number < server.configuration.managers:
        raise ProtocolError("there is no such manager")
    return number


def _returned(server: CoordinatorServer, session: _Session, fields: Fields) -> Fields:
    """A manager was started anew, and waits for an epoch to begin."""
    server.coordinator.returned(_manager(server, fields), text(fields, "incarnation"))
    return {}


def _freeze(server: CoordinatorServer, session: _Session, fields: Fields) -> Fields:
    """Have all managers refuse writes, or take them again."""
    deadline = deadline_of(fields)
    frozen = server.frozen = bool(fields.get("frozen"))
    for manager in range(server.configuration.managers):
        server.links.call(manager, "freeze", {"frozen": frozen}, deadline=deadline)
    return {}


def _persist_newest(server: CoordinatorServer, session: _Session, fields: Fields) -> Fields:
    if not server.run.persister.persists:
        raise DDictPersistError("this dictionary was made without a persister", hint="pass persister_class")
    return {"checkpoint_id": server.coordinator.persist_newest(left_of(fields), session.peer.is_gone)}


def _restore(server: CoordinatorServer, session: _Session, fields: Fields) -> Fields:
    """Bring back a persisted checkpoint on all managers; see `Coordinator.restore`."""
    deadline, checkpoint_id, by = deadline_of(fields), integer(fields, "checkpoint_id"), text(fields, "w")
    checkpoint, run_id = server.run.persister.locate(checkpoint_id), new_run_id()

    def begin_run() -> None:
        server.run.begin(run_id, checkpoint)

    left = max(0.1, deadline - time.monotonic())
    return server.coordinator.restore(checkpoint_id, checkpoint.to_fields(), left, begin_run, by)


_OPERATIONS: dict[str, _Operation] = {
    "hello": lambda server, session, fields: {"manager": COORDINATOR},
    "attach": _attach,
    "watch": _watch,
    "state": _state,
    # What a manager has sealed, for the one that comes after it.
    "sealed": lambda server, session, fields: {"sealed": server.coordinator.sealed_by(_manager(server, fields))},
    "returned": _returned,
    "freeze": _freeze,
    "persist_newest": _persist_newest,
    "persisted_ids": lambda server, session, fields: {"ids": server.run.persister.ids()},
    "restore": _restore,
}
