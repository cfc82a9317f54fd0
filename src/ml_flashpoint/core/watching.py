"""How those who may read a base container can ask all nodes of its job how saving goes there.

Owns the file that says where the nodes answer and what proves that one may ask, what is asked, and who answers: one
rank of each node. The token of the file is of no other use: who answers knows one request, and changes nothing. It is
derived from the job's secret, which it does not tell, and is another one for each run. What is told of a rank is
`format.status`'s. A job on one node needs none of this. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR, RANK_NAME
from ml_flashpoint.checkpoint_object_manager.capacity import available_bytes
from ml_flashpoint.format.errors import FlashpointError, ProtocolError
from ml_flashpoint.format.private_folders import open_own
from ml_flashpoint.format.status import RankStatus, read_status
from ml_flashpoint.net.client import Connection
from ml_flashpoint.net.messages import Dialect, Fields, integer, list_of, number, text
from ml_flashpoint.net.reachable import reachable_host
from ml_flashpoint.net.server import Peer, RequestServer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ml_flashpoint.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)

NAME: Final = "watch.json"
SCHEMA: Final = 1

_PURPOSE: Final = b"ml_flashpoint.core watching"
_MOST_BYTES: Final = 16 << 20
_MOST_CONNECTIONS: Final = 16
_IDLE_S: Final = 120.0
_ARENA: Final = "arena-"
_STAT_BLOCK: Final = 512

WATCHING: Final = Dialect(purpose=_PURPOSE, errors={}, failure=FlashpointError, blobs=0, blob_bytes=0)


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node of a job answers.

    Attributes:
        node: its id.
        host, port: of the rank that answers for it.
    """

    node: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Watch:
    """What a base container says of how to ask the nodes of its job.

    Attributes:
        nodes: where they answer.
        token: what proves that one may ask.
    """

    nodes: tuple[NodeAddress, ...]
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node says.

    Attributes:
        node: its id.
        time_s: when, by its clock.
        ranks: what the ranks there said last, and whether their processes run.
        arena_bytes: memory that checkpoints take there, own and copies.
        available_bytes: what is left for more.
    """

    node: str
    time_s: float
    ranks: tuple[tuple[RankStatus, bool], ...]
    arena_bytes: int
    available_bytes: int


# ---- in the job -------------------------------------------------------------------------------------------------


class Watched:
    """Answers for this node, and says in its base container where all nodes answer. Collective to construct; raises
    nothing on its own account: a node that cannot answer is not in the file.

    Args:
        base: the base container on this node.
        ranks: of the job.
    """

    def __init__(self, base: Path, ranks: RankGroup) -> None:
        self._path = base / PRIVATE_DIR / NAME
        self._server: RequestServer | None = None
        self._written = False
        if len(ranks.topology.node_order) < 2:
            if ranks.is_node_leader:
                _remove(self._path)  # of an earlier run on more nodes
            return
        token = hmac.digest(ranks.secret, _PURPOSE, "sha256")
        address = self._serve(base, ranks, token) if ranks.is_node_leader else b""
        told = [json.loads(blob) for blob in ranks.gather(address) if blob]
        if ranks.is_node_leader:
            self._write({"schema": SCHEMA, "token": token.hex(), "nodes": told})

    def _serve(self, base: Path, ranks: RankGroup, token: bytes) -> bytes:
        try:
            host = reachable_host()
            self._server = RequestServer(
                token,
                _Answers(base, ranks.node),
                WATCHING,
                tcp_host=host,
                max_connections=_MOST_CONNECTIONS,
                idle_s=_IDLE_S,
            )
        except (OSError, RuntimeError, FlashpointError) as error:
            _log.warning("flashpoint top cannot ask this node from others: %s", error)
            return b""
        return json.dumps({"node": ranks.node, "host": host, "port": self._server.addresses[0][-1]}).encode()

    def _write(self, content: dict[str, Any]) -> None:
        new = self._path.with_name(f"{NAME}.new")
        _remove(new)  # whatever lies there: a file that is made anew has the mode that it should
        try:
            with open(open_own(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(new, self._path)
            self._written = True
        except (OSError, FlashpointError) as error:
            _log.warning("flashpoint top can see this node only: %s", error)

    def close(self) -> None:
        """Answer no more. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._written:
            self._written = False
            _remove(self._path)


class _Answers:
    """See `net.server.RequestHandler`. There is one request, and nothing that it could change."""

    def __init__(self, base: Path, node: str) -> None:
        self._base, self._node = base, node

    def open(self, peer: Peer) -> None:
        pass

    def closed(self, session: None) -> None:
        pass

    def handle(self, session: None, op: str, fields: Fields, blobs: list[bytes]) -> tuple[Fields, Sequence[Buffer]]:
        if op != "status":
            raise ProtocolError(f"there is no request {op!a} for those who watch")
        found = [status for folder in _rank_folders(self._base) if (status := read_status(folder)) is not None]
        ranks = [[each.to_json(), _is_running(each.pid)] for each in found if each.node == self._node]
        arenas, left = memory_of(self._base)
        told = {"node": self._node, "time_s": time.time(), "ranks": ranks}
        return {**told, "arena_bytes": arenas, "available_bytes": left}, ()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _rank_folders(base: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(base / PRIVATE_DIR))
    except OSError:
        return []
    return [base / PRIVATE_DIR / name for name in names if RANK_NAME.fullmatch(name)]


def memory_of(base: Path) -> tuple[int, int]:
    """Bytes that checkpoints take in a base container, own parts and copies, and bytes that are left for more."""
    try:
        left = available_bytes(base)
    except OSError:
        left = 0
    return sum(map(_arena_bytes, _rank_folders(base))), left


def _arena_bytes(folder: Path) -> int:
    found = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_ARENA):
                with contextlib.suppress(OSError):
                    found += entry.stat(follow_symlinks=False).st_blocks * _STAT_BLOCK
    return found


def _is_running(pid: int) -> bool:
    # Not by the rank's lock: to close another descriptor of this process's own would let go of it.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # somebody else's, then it is there
    return True


# ---- outside of it ----------------------------------------------------------------------------------------------


def read_watch(base: Path) -> Watch | None:
    """How to ask the nodes of the job that a base container is of; None if it does not say."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(os.open(base / PRIVATE_DIR / NAME, flags), "rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
        if found["schema"] != SCHEMA:
            return None
        nodes = found["nodes"]
        addresses = tuple(NodeAddress(text(each, "node"), text(each, "host"), integer(each, "port")) for each in nodes)
        return Watch(addresses, bytes.fromhex(found["token"]))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError, ProtocolError):
        return None


class NodeConnection:
    """Asks a node again and again. For one thread at a time.

    Args:
        address: where it answers.
        token: see `Watch`.
        timeout_s: for an answer.
    """

    def __init__(self, address: NodeAddress, token: bytes, *, timeout_s: float) -> None:
        self.address = address
        self._token = token
        self._timeout_s = timeout_s
        self._connection: Connection | None = None

    def ask(self) -> NodeReport:
        """What the node says now.

        Raises:
            FlashpointError: it does not answer, or not as it should.
        """
        connection = self._connection
        if connection is None or connection.closed:
            where = ("tcp", self.address.host, self.address.port)
            connection = Connection(where, self._token, WATCHING, connect_timeout_s=self._timeout_s)
            self._connection = connection
        return _parse_report(connection.request("status", {}, timeout_s=self._timeout_s).fields, self.address.node)

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()


def _parse_report(fields: Fields, node: str) -> NodeReport:
    if text(fields, "node") != node:
        raise ProtocolError(f"another node answers, {fields['node']!a}", node=node)
    ranks = []
    for each in list_of(fields, "ranks"):
        match each:
            case [str(told), bool(running)] if (status := RankStatus.from_json(told)) is not None:
                ranks.append((status, running))
            case _:
                raise ProtocolError("what it says of a rank cannot be read", node=node)
    arenas, left = integer(fields, "arena_bytes"), integer(fields, "available_bytes")
    return NodeReport(node, number(fields, "time_s"), tuple(ranks), arenas, left)
