"""Copies of this rank's parts at its holders, and of other ranks' parts here.

A push carries the pusher's verdict. The holder adopts the verdict first, then retains what the verdict lists, and so
has a free slot for the copy whenever the pusher may push one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from ml_flashpoint.engine.rounds import Verdict
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    FlashpointError,
    ManifestError,
    ObjectNotFoundError,
    ReplicationError,
    as_ours,
    is_transient,
    retrying,
)
from ml_flashpoint.format.knobs import recovery_deadline_s, transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, encode
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.capacity import most_bytes
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.memory.slot import PAGE, Slot, State, no_room
from ml_flashpoint.net.messages import Fields, integer
from ml_flashpoint.net.server import reachable_host
from ml_flashpoint.net.transfers import Address, BlockChecker, PartName, PeerConnection, TransferService, push_to_all
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.strategies import ReplicationStrategy

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ROOM_S = 5.0
"""Seconds that a copy waits for a slot: long enough for this rank to hear a verdict that its peer has heard."""

Failures = list[tuple[str, FlashpointError]]
"""The node and the error of each failed attempt, in order."""


class Copies:
    """The copies that other nodes hold, those that this rank holds, and the parts that nodes give each other: a
    `TransferBackend`. Collective to construct. Thread-safe.

    Serves the parts of this node from construction on, and takes copies in from `serve` on. A job on a single node
    serves nothing.

    ``held`` are pools for the copies that this rank holds, by the rank whose parts they are. ``addresses`` are those of
    each rank's service; None for a rank that serves nothing.

    Raises:
        ReplicationError: a rank cannot serve its peers. On all ranks.
    """

    def __init__(
        self, ranks: RankGroup, strategy: ReplicationStrategy, container: BaseContainer, held: Mapping[int, Pool]
    ) -> None:
        self._ranks, self._container, self._held = ranks, container, held
        self._run = 0  # the run that is served
        self._changed = threading.Condition()
        self._has_ended = False
        self._hear: Callable[[Verdict], None] = lambda verdict: None
        self._retained: Callable[[], Collection[SaveId]] = frozenset
        self._heard: dict[int, int] = {}  # rank -> number of the verdict of its newest push
        self._receiving: set[int] = set()  # ranks whose copies are being received
        self._service: TransferService | None = None
        self._holders: dict[int, PeerConnection] = {}

        def listen() -> None:
            if len(ranks.topology.node_order) > 1:
                try:
                    host = reachable_host()
                    self._service = TransferService(ranks.secret, self, host=host, deadline_s=transfer_deadline_s())
                except OSError as error:
                    raise ReplicationError(f"peers cannot reach this host: {error}", rank=ranks.rank) from error

        try:
            ranks.together(listen, ReplicationError, "serving peers")
            mine = None if self._service is None else self._service.address
            found = [json.loads(blob) for blob in ranks.gather(json.dumps(mine).encode())]
        except BaseException:
            self.close()
            raise
        self.addresses: tuple[Address | None, ...] = tuple(each and (each[0], each[1]) for each in found)
        for rank in strategy.copies_of(ranks.rank, ranks.topology):
            self._holders[rank] = self.connection(rank)

    def connection(self, rank: int) -> PeerConnection:
        """Return a connection to a rank's service. Raise a `ReplicationError` if the rank serves nothing."""
        if (address := self.addresses[rank]) is None:
            raise ReplicationError("the rank serves nothing, because the job runs on a single node", rank=rank)
        node, deadline_s = self._ranks.topology.node_of(rank), transfer_deadline_s()
        return PeerConnection(address, self._ranks.secret, node=node, deadline_s=deadline_s)

    def close(self) -> None:
        """Break off what is under way and stop serving. Safe to call twice."""
        for connection in self._holders.values():
            connection.close()
        if self._service is not None:
            self._service.close()

    # ---- giving and fetching parts ---------------------------------------------------------------------------

    def push(self, save: SaveId, run: int, verdict: Verdict, pool: Pool) -> int:
        """Give all holders of this rank, at once, a copy of a committed part of its pool, with the newest verdict that
        this rank knows in a run. Return the part's bytes when all have it. Raise a `FlashpointError` if a holder has no
        copy."""
        manifest = pool.container.read_manifest(save, self._ranks.rank)
        rider = {"run": run, "verdict": verdict}
        with pool.reading(save) as slot, slot.buffer[: manifest.record.size] as view:
            push_to_all(list(self._holders), lambda rank: self._holders[rank].push(manifest, view, rider))
        return manifest.record.size

    def fetch_part(
        self,
        save: SaveId,
        rank: int,
        nodes: Sequence[str],
        pool: Pool,
        retained: Collection[SaveId],
        *,
        until: float,
        failures: Failures,
    ) -> Manifest:
        """Bring a part here from nodes, in order of preference: into a slot of the rank's pool, checked, committed.
        Where a node breaks off, the next one goes on after the last good block.

        Args:
            retained: saves whose slots are not taken; a part of ``save`` that is here already is damaged, and replaced.
            until: time (`time.monotonic`) to give up at. At least one attempt is made.
            failures: failed attempts are appended here.

        Raises:
            FlashpointError: no node gives the part, or there is no room for it.
        """
        part = PartName(save, rank)
        manifest = self._ask(nodes, part, lambda peer: peer.read_manifest(part), until, failures)

        def fetch() -> None:
            slot = _taken(pool, manifest, retained)
            with _committing(pool, manifest, slot) as view, BlockChecker(manifest.record, view, str(part)) as blocks:
                self._ask(nodes, part, lambda peer: peer.fetch(part, blocks), until, failures)

        retrying(fetch, until, f"fetching {part}", also=(CapacityError,))
        return manifest

    def manifest_of(self, save: SaveId, rank: int, nodes: Sequence[str]) -> Manifest:
        """Return the manifest of a part that some nodes have. Raise a `FlashpointError` if none gives it."""
        part = PartName(save, rank)
        return self._ask(nodes, part, lambda peer: peer.read_manifest(part), time.monotonic() + recovery_deadline_s())

    def read_blocks(
        self, save: SaveId, manifest: Manifest, first_block: int, buffer: memoryview, nodes: Sequence[str]
    ) -> None:
        """Fill a buffer with whole blocks of a part's object, checked, from ``first_block`` on. Raise a
        `FlashpointError` if none of the nodes gives the blocks."""
        part, until = PartName(save, manifest.rank), time.monotonic() + recovery_deadline_s()
        with BlockChecker(manifest.record, buffer, str(part), first_block) as blocks:
            self._ask(nodes, part, lambda peer: peer.fetch(part, blocks), until)

    def _ask(
        self,
        nodes: Sequence[str],
        part: PartName,
        ask: Callable[[PeerConnection], _T],
        until: float,
        failures: Failures | None = None,
    ) -> _T:
        """Return the first answer of a node. Nodes that cannot answer just now are asked again, after the others."""
        topology = self._ranks.topology
        left = [node for node in nodes if node != self._ranks.node and node in topology.node_order]
        errors: dict[str, FlashpointError] = {}

        def ask_all() -> _T:
            for node in tuple(left):
                of_node = topology.ranks_of(node)  # they share the load
                try:
                    with self.connection(of_node[part.rank % len(of_node)]) as peer:
                        return ask(peer)
                except (FlashpointError, OSError) as caught:
                    errors[node] = error = as_ours(caught)
                if failures is not None:
                    failures.append((node, error))
                if not is_transient(error):
                    _log.warning("node %s cannot give %s: %s", node, part, error)
                    left.remove(node)
            # A node that could not answer may have the part: the others' answers are not the last word then.
            nobody = ObjectNotFoundError(f"no node of this job has {part}", rank=part.rank)
            raise next((errors[node] for node in left), next(iter(errors.values()), nobody))

        return retrying(ask_all, until, f"asking for {part}")

    # ---- what peers ask for, and push ------------------------------------------------------------------------

    def serve(self, run: int, hear: Callable[[Verdict], None], retained: Callable[[], Collection[SaveId]]) -> None:
        """Take in the copies that are pushed in a run. For each push, ``hear`` is called with its verdict, and then
        ``retained``, which returns the saves whose copies are retained."""
        with self._changed:
            self._run, self._hear, self._retained, self._has_ended = run, hear, retained, False
            self._heard.clear()
            self._changed.notify_all()

    def end(self) -> None:
        """Take in no more copies of the run: this rank retains by another run's verdicts soon."""
        with self._changed:
            self._has_ended = True

    @contextlib.contextmanager
    def open_part(self, part: PartName) -> Iterator[memoryview]:
        """See `TransferBackend`."""
        with self._container.open_part(*part) as opened:
            yield opened.buffer

    def read_manifest(self, part: PartName) -> bytes:
        """See `TransferBackend`."""
        return encode(self._container.read_manifest(*part))

    @contextlib.contextmanager
    def receive(self, manifest: Manifest, rider: Fields) -> Iterator[memoryview | None]:
        """See `TransferBackend`."""
        verdict, part = Verdict.parsed(rider.get("verdict")), PartName.of(manifest)
        with self._in_turn(part.rank, integer(rider, "run", 1), verdict.number) as hear:
            hear(verdict)
            pool = self._pool_for(manifest)
            if self._is_held(pool, part.save, manifest):
                yield None
                return
            until = time.monotonic() + ROOM_S
            try:
                slot = retrying(
                    lambda: _taken(pool, manifest, self._retained()),
                    until,
                    f"making room for a copy of {part}",
                    also=(CapacityError,),
                )
                with _committing(pool, manifest, slot) as view:
                    yield view
            except CapacityError as error:
                # The save is lost only where no slot could be had later, either: slots that are read are free again
                # soon, and the filesystem may be full for a moment.
                lasting = pool.shortage(manifest.record.file_size, self._retained())
                raise lasting or ReplicationError(f"no copy can be taken in just now: {error}") from error

    @contextlib.contextmanager
    def _in_turn(self, rank: int, run: int, number: int) -> Iterator[Callable[[Verdict], None]]:
        """Receive one push of a rank at a time, of this run and of no earlier round: what is left of a connection that
        the rank has given up could take the slot of a newer push. Yield what is to hear the verdict of this run."""
        with self._changed:
            # Ranks begin a run together, but not at one instant. A push whose connection broke ends soon.
            self._changed.wait_for(lambda: run <= self._run and rank not in self._receiving, ROOM_S)
            if run != self._run or self._has_ended:
                text = f"the push is of run {run}, and this rank is in run {self._run}"
                raise ReplicationError(f"{text}, which has ended on this rank" if self._has_ended else text)
            if rank in self._receiving:
                raise ReplicationError("another copy of this rank is still being received", rank=rank)
            if number < (newest := self._heard.get(rank, 0)):
                raise ReplicationError(f"the push is of round {number}, after one of round {newest}", rank=rank)
            self._heard[rank] = number
            self._receiving.add(rank)
            hear = self._hear
        try:
            yield hear
        finally:
            with self._changed:
                self._receiving.remove(rank)
                self._changed.notify_all()

    def _pool_for(self, manifest: Manifest) -> Pool:
        """Return the pool for a part that is pushed; refuse what cannot be right."""
        rank, size, pool = manifest.rank, manifest.record.file_size, self._held.get(manifest.rank)
        if pool is None or pool.owner.world_size != manifest.world_size:
            raise ReplicationError(f"this rank holds no copies of rank {rank} of {manifest.world_size}", rank=rank)
        if size <= 0 or size % PAGE:
            raise ManifestError(f"no slot has {size} bytes", rank=rank)
        most = most_bytes(self._container.base)
        if size > most:
            raise no_room("a part that is larger than the filesystem of its holder", size, self._container.base, most)
        return pool

    def _is_held(self, pool: Pool, save: SaveId, manifest: Manifest) -> bool:
        slot = pool.slot_of(save)
        if slot is None or slot.state is not State.COMMITTED:
            return False
        try:
            return self._container.read_manifest(save, manifest.rank) == manifest
        except (ObjectNotFoundError, DamagedError):
            return False


def _taken(pool: Pool, manifest: Manifest, retained: Collection[SaveId]) -> Slot:
    """Take a slot of just the size in a manifest; raise `CapacityError` if there is none now."""
    size, save = manifest.record.file_size, PartName.of(manifest).save
    slot = pool.take(size, SlotRequest(save, frozenset(retained) - {save}), exact=True)
    if slot is None:
        raise no_room("one more slot, and no other is free (a stopped reader keeps one)", size, pool.container.base)
    return slot


@contextlib.contextmanager
def _committing(pool: Pool, manifest: Manifest, slot: Slot) -> Iterator[memoryview]:
    """Yield the bytes of a part's object in a slot, to be filled, and commit the part; if that fails, free the slot."""
    try:
        with slot.buffer[: manifest.record.size] as view:
            yield view
    except BaseException:
        pool.free(slot)
        raise
    pool.commit(slot, manifest)
