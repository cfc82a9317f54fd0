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
from itertools import chain
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
    pauses,
    retrying,
)
from ml_flashpoint.format.knobs import recovery_deadline_s, transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, encode
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.capacity import most_bytes
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.memory.slot import PAGE, Slot, State
from ml_flashpoint.net.messages import Fields, integer
from ml_flashpoint.net.reachable import reachable_host
from ml_flashpoint.net.transfers import Address, BlockChecker, PartName, PeerConnection, TransferService, push_to_all
from ml_flashpoint.ranks.rank_group import RankGroup, boot_id
from ml_flashpoint.ranks.strategies import ReplicationStrategy

_log = logging.getLogger(__name__)

ROOM_S = 5.0
"""Seconds that a copy waits for a slot: long enough for this rank to hear a verdict that its peer has heard."""

Failures = list[tuple[str, FlashpointError]]
"""The node and the error of each failed attempt, in order."""

_T = TypeVar("_T")


class Copies:
    """The copies that other nodes hold, and the parts that they can give. Collective to construct. Thread-safe.

    Serves what ``held`` has from construction on. A job on a single node serves nothing.

    Args:
        ranks: ranks of the job.
        strategy: who holds copies of whose parts.
        held: the parts of this node.
        host: address that peers reach this process at; by default `reachable_host`.

    Attributes:
        addresses: address of each rank's service; None for a rank that serves nothing.

    Raises:
        TopologyError: two machines have the same node id. On all ranks.
        ReplicationError: a rank cannot serve its peers. On all ranks.
    """

    def __init__(
        self, ranks: RankGroup, strategy: ReplicationStrategy, held: HeldCopies, *, host: str | None = None
    ) -> None:
        ranks.check_nodes(boot_id(), "a machine")
        self._ranks, self._held = ranks, held
        self._service: TransferService | None = None
        self._holders: dict[int, PeerConnection] = {}

        def serve() -> None:
            if len(ranks.topology.node_order) > 1:
                try:
                    address = host or reachable_host()
                    self._service = TransferService(ranks.secret, held, host=address, deadline_s=transfer_deadline_s())
                except OSError as error:
                    raise ReplicationError(f"peers cannot reach this host: {error}", rank=ranks.rank) from error

        try:
            text = "another rank cannot serve its peers; its log says why"
            ranks.together(serve, ReplicationError(text, rank=ranks.rank))
            mine = None if self._service is None else self._service.address
            found = [json.loads(blob) for blob in ranks.gather(json.dumps(mine).encode())]
        except BaseException:
            self.close()
            raise
        self.addresses: tuple[Address | None, ...] = tuple(each and (each[0], each[1]) for each in found)
        for rank in strategy.copies_of(ranks.rank, ranks.topology):
            self._holders[rank] = self._connection(rank)

    def address_of(self, rank: int) -> Address:
        """Return the address of a rank's service. Raise a `ReplicationError` if the rank serves nothing."""
        address = self.addresses[rank]
        if address is None:
            raise ReplicationError("the rank serves nothing, because the job runs on a single node", rank=rank)
        return address

    def _connection(self, rank: int) -> PeerConnection:
        node, deadline_s = self._ranks.topology.node_of(rank), transfer_deadline_s()
        return PeerConnection(self.address_of(rank), self._ranks.secret, node=node, deadline_s=deadline_s)

    def push(self, save: SaveId, verdict: Verdict, pool: Pool) -> int:
        """Give all holders of this rank, at once, a copy of a committed part of its pool, with the newest verdict that
        this rank knows. Return the part's bytes when all have it. Raise a `FlashpointError` if a holder has no copy.
        """
        manifest = pool.container.read_manifest(save, self._ranks.rank)
        rider = {"run": self._held.run, "verdict": verdict}
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
        failures: Failures | None = None,
    ) -> Manifest:
        """Bring a part here: into a slot, checked, committed. Where a node breaks off, the next one goes on after the
        last good block.

        Args:
            save, rank: of the part.
            nodes: nodes that have the part, in order of preference.
            pool: pool of the rank on this node.
            retained: saves whose slots are not taken; a part of ``save`` that is here already is damaged, and replaced.
            until: time (`time.monotonic`) to give up at. At least one attempt is made.
            failures: failed attempts are appended here.

        Raises:
            FlashpointError: no node gives the part, or there is no room for it.
        """
        failures = [] if failures is None else failures
        manifest = self.read_manifest(save, rank, nodes, until=until, failures=failures)
        record, part = manifest.record, PartName.of(manifest)
        request = SlotRequest(save, frozenset(retained) - {save})

        def fetch() -> None:
            slot = _taken(pool, manifest, request)
            with _committing(pool, manifest, slot) as view, BlockChecker(record, view, str(part)) as blocks:
                self._ask(nodes, part, lambda peer: peer.fetch(part, blocks), until, failures)

        retrying(fetch, until, f"fetching {part}", also=(CapacityError,))
        return manifest

    def read_manifest(
        self,
        save: SaveId,
        rank: int,
        nodes: Sequence[str],
        *,
        until: float | None = None,
        failures: Failures | None = None,
    ) -> Manifest:
        """Return the manifest of a part. For arguments and errors see `fetch_part`; by default until
        ``FLASHPOINT_RECOVERY_DEADLINE_S`` have passed."""
        part = PartName(save, rank)
        return self._ask(nodes, part, lambda peer: peer.read_manifest(part), until, failures)

    def read_blocks(
        self, save: SaveId, manifest: Manifest, first_block: int, buffer: memoryview, nodes: Sequence[str]
    ) -> None:
        """Fill a buffer with whole blocks of a part's object, checked, from ``first_block`` on. Raise a
        `FlashpointError` if none of the nodes gives the blocks."""
        part = PartName(save, manifest.rank)
        with BlockChecker(manifest.record, buffer, str(part), first_block) as blocks:
            self._ask(nodes, part, lambda peer: peer.fetch(part, blocks), None, None)

    def _ask(
        self,
        nodes: Sequence[str],
        part: PartName,
        ask: Callable[[PeerConnection], _T],
        until: float | None,
        failures: Failures | None,
    ) -> _T:
        """Return the first answer of a node. Nodes that cannot answer just now are asked again, after the others."""
        topology = self._ranks.topology
        left = [node for node in nodes if node != self._ranks.node and node in topology.node_order]
        last: dict[str, FlashpointError] = {}
        for _ in chain((None,), pauses(time.monotonic() + recovery_deadline_s() if until is None else until)):
            for node in tuple(left):
                of_node = topology.ranks_of(node)  # they share the load
                try:
                    with self._connection(of_node[part.rank % len(of_node)]) as peer:
                        return ask(peer)
                except (FlashpointError, OSError) as caught:
                    error = as_ours(caught)
                if node not in last:
                    _log.warning("node %s cannot give %s: %s", node, part, error)
                last[node] = error
                if failures is not None:
                    failures.append((node, error))
                if not is_transient(error):
                    left.remove(node)
            if not left:
                break
        # A node that could not answer may have the part: the others' answers are not the last word then.
        undecided = [error for error in last.values() if is_transient(error)]
        nobody = ObjectNotFoundError(f"no node of this job has {part}", rank=part.rank)
        raise next(iter(undecided or last.values()), nobody)

    def close(self) -> None:
        """Break off what is under way and stop serving. Safe to call twice."""
        for connection in self._holders.values():
            connection.close()
        if self._service is not None:
            self._service.close()


class HeldCopies:
    """The parts of this node, which peers read (a `TransferBackend`), and the copies that this rank takes in from
    `serve` on. Thread-safe.

    Args:
        container: base container of this node.
        pools: pools for the copies that this rank holds, by the rank whose parts they are.

    Attributes:
        run: number of the run that is served; 0 before.
    """

    def __init__(self, container: BaseContainer, pools: Mapping[int, Pool]) -> None:
        self.run = 0
        self._container, self._pools = container, pools
        self._changed = threading.Condition()
        self._has_ended = False
        self._hear: Callable[[Verdict], None] = lambda verdict: None
        self._retained: Callable[[], Collection[SaveId]] = frozenset
        self._heard: dict[int, int] = {}  # rank -> number of the verdict of its newest push
        self._receiving: set[int] = set()  # ranks whose copies are being received

    def serve(self, run: int, hear: Callable[[Verdict], None], retained: Callable[[], Collection[SaveId]]) -> None:
        """Take in the copies that are pushed in a run. For each push, ``hear`` is called with its verdict, and then
        ``retained``, which returns the saves whose copies are retained."""
        with self._changed:
            self.run, self._hear, self._retained, self._has_ended = run, hear, retained, False
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
        verdict = Verdict.parsed(rider.get("verdict"))
        with self._in_turn(manifest.rank, integer(rider, "run", 1), verdict.number):
            self._hear(verdict)
            save, pool = self._checked(manifest)
            if self._is_held(pool, save, manifest):
                yield None
                return

            def take() -> Slot:
                return _taken(pool, manifest, SlotRequest(save, frozenset(self._retained()) - {save}))

            until, what = time.monotonic() + ROOM_S, f"making room for a copy of {PartName.of(manifest)}"
            with self._lasting_shortages(pool, manifest):
                slot = retrying(take, until, what, also=(CapacityError,))
                with _committing(pool, manifest, slot) as view:
                    yield view

    @contextlib.contextmanager
    def _in_turn(self, rank: int, run: int, number: int) -> Iterator[None]:
        """Receive one push of a rank at a time: of this run, and of no earlier round.

        What is left of a connection that the rank has given up could take the slot of a newer push, which is retained
        only once this rank, too, has come to the round's save.
        """
        with self._changed:
            # Ranks begin a run together, but not at one instant. A push whose connection broke ends soon.
            self._changed.wait_for(lambda: run <= self.run and rank not in self._receiving, ROOM_S)
            if run != self.run or self._has_ended:
                text = f"the push is of run {run}, and this rank is in run {self.run}"
                raise ReplicationError(f"{text}, which has ended on this rank" if self._has_ended else text)
            if rank in self._receiving:
                raise ReplicationError("another copy of this rank is still being received", rank=rank)
            if number < (newest := self._heard.get(rank, 0)):
                raise ReplicationError(f"the push is of round {number}, after one of round {newest}", rank=rank)
            self._heard[rank] = number
            self._receiving.add(rank)
        try:
            yield
        finally:
            with self._changed:
                self._receiving.remove(rank)
                self._changed.notify_all()

    @contextlib.contextmanager
    def _lasting_shortages(self, pool: Pool, manifest: Manifest) -> Iterator[None]:
        """Raise a `CapacityError` only where no slot could be had later, either: the save is lost then. Slots that are
        read are free again soon, and the filesystem may be full for a moment."""
        try:
            yield
        except CapacityError as error:
            lasting = pool.shortage(manifest.record.file_size, self._retained())
            raise lasting or ReplicationError(f"no copy can be taken in just now: {error}") from error

    def _checked(self, manifest: Manifest) -> tuple[SaveId, Pool]:
        """Return the save of a part that is pushed, and the pool for it; refuse what cannot be right."""
        (save, rank), record = PartName.of(manifest), manifest.record
        pool = self._pools.get(rank)
        if pool is None or pool.owner.world_size != manifest.world_size:
            raise ReplicationError(f"this rank holds no copies of rank {rank} of {manifest.world_size}", rank=rank)
        if record.file_size <= 0 or record.file_size % PAGE:
            raise ManifestError(f"no slot has {record.file_size} bytes", rank=rank)
        most = most_bytes(self._container.base)
        if record.file_size > most:
            raise CapacityError(
                "the part is larger than the filesystem of its holder",
                needed_bytes=record.file_size,
                available_bytes=most,
                path=self._container.base,
                hint="enlarge the tmpfs (mount -o remount,size=...), or let larger nodes hold copies of one another",
            )
        return save, pool

    def _is_held(self, pool: Pool, save: SaveId, manifest: Manifest) -> bool:
        slot = pool.slot_of(save)
        if slot is None or slot.state is not State.COMMITTED:
            return False
        try:
            return self._container.read_manifest(save, manifest.rank) == manifest
        except (ObjectNotFoundError, DamagedError):
            return False


def _taken(pool: Pool, manifest: Manifest, request: SlotRequest) -> Slot:
    """Take a slot of just the size in a manifest; raise `CapacityError` if there is none now."""
    size = manifest.record.file_size
    slot = pool.take(size, request, exact=True)
    if slot is None:
        text = "there is no free slot, and no room for one more"
        hint = "enlarge the tmpfs (mount -o remount,size=...), free memory, or lower keep"
        raise CapacityError(text, needed_bytes=size, step=manifest.save.step, rank=manifest.rank, hint=hint)
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
