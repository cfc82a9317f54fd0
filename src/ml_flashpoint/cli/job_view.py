"""What the nodes of a job say of it, as far as they answer: the one whose base container this is, and the others.

Owns asking them, all at a time, and putting together what they say. How they are asked is `core.watching`'s. This
node is looked at from outside, so it is seen when its processes are gone; others answer while they run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_flashpoint.cli.losses import Loss, losses_of_job
from ml_flashpoint.cli.status import RankView, read_losses
from ml_flashpoint.core.watching import NodeConnection, NodeReport, Watch, memory_of, read_watch
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.status import RankStatus

TIMEOUT_S = 2.0
_MOST_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of a job.

    Attributes:
        node: its id; "" if it is this one, and nothing here says how it is called.
        here: whether it is this one.
        ranks: of it, by number.
        time_s: when it said so, by its clock.
        arena_bytes: memory that checkpoints take there.
        available_bytes: what is left for more.
        error: why it does not answer; None if it does.
    """

    node: str
    here: bool
    ranks: tuple[RankView, ...] = ()
    time_s: float = 0.0
    arena_bytes: int = 0
    available_bytes: int = 0
    error: str | None = None

    @property
    def told(self) -> list[RankStatus]:
        """What its ranks say: those that run, or if none does, those that ran last."""
        saying = [rank for rank in self.ranks if rank.status is not None]
        running = [rank for rank in saying if rank.pid is not None] or saying
        return [rank.status for rank in running if rank.status is not None]

    @property
    def state(self) -> str:
        """The worst of its ranks', or ``no answer``."""
        if self.error is not None:
            return "no answer"
        states = {rank.state for rank in self.ranks}
        return next((state for state in ("degraded", "ended", "silent", "ok") if state in states), "silent")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        memory = {"arena_bytes": self.arena_bytes, "available_bytes": self.available_bytes}
        ranks = [rank.to_json() for rank in self.ranks]
        about = {"node": self.node, "here": self.here, "state": self.state, "error": self.error}
        return {**about, "time_s": self.time_s, **memory, "ranks": ranks}


@dataclass(frozen=True, slots=True)
class JobView:
    """A job.

    Attributes:
        base: its base container on this node.
        nodes: this one first, then the others by name.
        losses: what the loss of each would cost.
    """

    base: str
    nodes: tuple[NodeView, ...]
    losses: tuple[Loss, ...]

    @property
    def ranks(self) -> Iterator[RankView]:
        """Of all nodes that answer."""
        return (rank for node in self.nodes for rank in node.ranks)

    @property
    def is_degraded(self) -> bool:
        """Whether something is amiss on a node, or one does not answer."""
        return any(node.state in ("degraded", "no answer") for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        nodes, losses = [node.to_json() for node in self.nodes], [loss.to_json() for loss in self.losses]
        return {"base": self.base, "time_s": time.time(), "nodes": nodes, "losses": losses}


class JobWatch:
    """Looks at a job, again and again. A context manager; for one thread.

    Args:
        base: its base container on this node.
        timeout_s: for which the others have to answer.
    """

    def __init__(self, base: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.base = base
        self._timeout_s = timeout_s
        self._watch: Watch | None = None
        self._connections: dict[str, NodeConnection] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> JobWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self) -> JobView:
        """All of it, now.

        Raises:
            NotABaseContainerError: there is none.
        """
        ranks, alone = read_losses(self.base)
        arenas, left = memory_of(Path(self.base))
        name = next((rank.status.node for rank in ranks if rank.status is not None), "")
        here = NodeView(name, True, tuple(ranks), time.time(), arenas, left)
        others = self._ask(name)
        answering = {node.node: node.told for node in others if node.error is None}
        silent = [node.node for node in others if node.error is not None]
        found = losses_of_job(alone, here.told, answering, silent) if others else alone
        return JobView(self.base, (here, *others), tuple(found))

    def _ask(self, here: str) -> list[NodeView]:
        watch = read_watch(Path(self.base))
        if watch != self._watch:  # another run
            self._hang_up()
            self._watch = watch
            if watch is not None:
                self._connections = {
                    each.node: NodeConnection(each, watch.token, timeout_s=self._timeout_s) for each in watch.nodes
                }
        asked = [connection for node, connection in sorted(self._connections.items()) if node != here]
        if asked and self._pool is None:
            self._pool = ThreadPoolExecutor(min(_MOST_AT_A_TIME, len(asked)))
        return list(self._pool.map(_ask, asked)) if asked and self._pool is not None else []

    def _hang_up(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}


def _ask(connection: NodeConnection) -> NodeView:
    node = connection.address.node
    try:
        said: NodeReport = connection.ask()
    except FlashpointError as error:
        return NodeView(node, False, error=error.message)
    ranks = [RankView(told.rank, told.pid if running else None, told) for told, running in said.ranks]
    memory = (said.arena_bytes, said.available_bytes)
    return NodeView(node, False, tuple(sorted(ranks, key=lambda rank: rank.rank)), said.time_s, *memory)
