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
from typing import Any, TypeVar

from ml_flashpoint.engine.rounds import Verdict
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    FlashpointError,
    ManifestError,
    ObjectNotFoundError,
    ReplicationError,
)
from ml_flashpoint.format.failure_kinds import as_ours, is_transient, pauses, retrying
from ml_flashpoint.format.knobs import recovery_deadline_s, transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, encode
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.capacity import most_bytes
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.memory.slot import PAGE, Slot, State
from ml_flashpoint.net.blocks import BlockChecker
from ml_flashpoint.net.messages import Fields, integer
from ml_flashpoint.net.peer import PeerConnection, push_to_all
from ml_flashpoint.net.reachable import reachable_host
from ml_flashpoint.net.transfers import Address, PartName, TransferService
from ml_flashpoint.ranks.rank_group import RankGroup, boot_id
from ml_flashpoint.ranks.strategies import ReplicationStrategy

_log = logging.getLogger(__name__)

ROOM_S = 5.0
"""Seconds that a copy waits for a slot: long enough for this rank to hear a verdict that its peer has heard."""

Failures = list[tuple[str, FlashpointError]]
"""The node and the error of each failed attempt, in order."""

_T = TypeVar("_T")


class Copies:
    """Copies of this rank's parts at its holders, and of other ranks' parts here. Collective to construct. Thread-safe.

    Serves reads of all parts of this node from construction on, and takes copies in from `serve` on. A job on a single
    node serves nothing.

    Args:
        ranks: ranks of the job.
        strategy: who holds copies of whose parts.
        container: base container of this node.
        held: pools for the copies that this rank holds, by the rank whose parts they are.
        host: address that peers reach this process at; by default `reachable_host`.

    Attributes:
        addresses: address of each rank's service; None for a rank that serves nothing.

    Raises:
        TopologyError: two machines have the same node id. On all ranks.
        ReplicationError: a rank cannot serve its peers. On all ranks.
    """

    addresses: tuple[Address | None, ...]

    def __init__(
        self,
        ranks: RankGroup,
        strategy: ReplicationStrategy,
        container: BaseContainer,
        held: Mapping[int, Pool],
        *,
        host: str | None = None,
    ) -> None:
        ranks.check_nodes(boot_id(), "a machine")
        self._ranks = ranks
        self._container = container
        self._held = _HeldCopies(container, held)
        self._service: TransferService | None = None
        self._holders: dict[int, PeerConnection] = {}
        trouble: FlashpointError | None = None
        if len(ranks.topology.node_order) > 1:
            try:
                self._service = TransferService(
                    ranks.secret, self._held, host=host or reachable_host(), deadline_s=transfer_deadline_s()
                )
            except FlashpointError as error:
                trouble = error
            except OSError as error:
                trouble = ReplicationError(f"peers cannot reach this host: {error}", rank=ranks.rank)
        try:
            self.addresses = self._gather(trouble)
        except BaseException:
            self.close()
            raise
        for rank in strategy.copies_of(ranks.rank, ranks.topology):
            self._holders[rank] = self._connection(rank)

    def _gather(self, trouble: FlashpointError | None) -> tuple[Address | None, ...]:
        """Return the addresses of all ranks; raise on all of them if one has trouble, so that no other one hangs."""
        address = None if self._service is None else self._service.address
        mine = [address, trouble is None]
        gathered = [json.loads(blob) for blob in self._ranks.gather(json.dumps(mine).encode())]
        for rank, (_, can_serve) in enumerate(gathered):
            if not can_serve:
                text = f"rank {rank} cannot serve its peers; the error on that rank says why"
                raise trouble or ReplicationError(text, rank=self._ranks.rank)
        return tuple(None if address is None else (str(address[0]), int(address[1])) for address, _ in gathered)

    def address_of(self, rank: int) -> Address:
        """Return the address of a rank's service.

        Raises:
            ReplicationError: the rank serves nothing: the job runs on a single node.
        """
        address = self.addresses[rank]
        if address is None:
            raise ReplicationError("the rank serves nothing, because the job runs on a single node", rank=rank)
        return address

    def _connection(self, rank: int) -> PeerConnection:
        node = self._ranks.topology.node_of(rank)
        deadline_s = transfer_deadline_s()
        return PeerConnection(self.address_of(rank), self._ranks.secret, node=node, deadline_s=deadline_s)

    # ---- copies of this rank's parts ---------------------------------------------------------------------------

    def serve(self, run: int, hear: Callable[[Verdict], None], retained: Callable[[], Collection[SaveId]]) -> None:
        """Take in the copies that are pushed in a run, and push in this run.

        Args:
            run: number of the run.
            hear: called with the verdict of each push.
            retained: called after that; returns the saves whose copies are retained.
        """
        self._held.serve(run, hear, retained)

    def end(self) -> None:
        """Take in no more copies of the run: this rank retains by another run's verdicts soon."""
        self._held.end()

    def push(self, save: SaveId, verdict: Verdict, pool: Pool) -> None:
        """Give all holders of this rank, at once, a copy of a committed part. Return when all have acknowledged.

        Args:
            save: of the part.
            verdict: newest verdict that this rank knows.
            pool: pool of this rank's parts.

        Raises:
            FlashpointError: a holder has no copy. Others may.
        """
        if not self._holders:
            return
        manifest = self._container.read_manifest(save, self._ranks.rank)
        rider = {"run": self._held.run, "verdict": verdict.to_fields()}
        with pool.reading(save) as slot, slot.buffer[: manifest.objects[0].size] as view:
            push_to_all(list(self._holders), lambda rank: self._holders[rank].push(manifest, view, rider))

    # ---- parts of other nodes ----------------------------------------------------------------------------------

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
        """Bring a part here: into a slot, checked, committed.

        A node that breaks off is followed by the next one, from the last good block on.

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
        record, part = manifest.objects[0], PartName.of(manifest)
        request = SlotRequest(save, frozenset(retained) - {save})

        def fetch() -> None:
            slot = _taken(pool, manifest, request)
            try:
                with slot.buffer[: record.size] as view, BlockChecker(record, view, str(part)) as blocks:
                    self._ask(nodes, part, lambda peer: peer.fetch(part, blocks), until, failures)
            except BaseException:
                pool.free(slot)
                raise
            pool.commit(slot, manifest)

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
        """Return the manifest of a part from one of the nodes that have the part.

        Args:
            save, rank, nodes, until, failures: see `fetch_part`; by default until ``FLASHPOINT_RECOVERY_DEADLINE_S``
                have passed.

        Raises:
            FlashpointError: no node gives the manifest.
        """
        part = PartName(save, rank)
        return self._ask(nodes, part, lambda peer: peer.read_manifest(part), until, failures)

    def read_blocks(
        self, save: SaveId, manifest: Manifest, first_block: int, buffer: memoryview, nodes: Sequence[str]
    ) -> None:
        """Fill a buffer with whole blocks of a part's object, checked.

        Args:
            save: save of the part. manifest: its manifest.
            first_block: number of the first block.
            buffer: as many bytes as the blocks have.
            nodes: nodes that have the part.

        Raises:
            FlashpointError: no node gives the blocks.
        """
        part = PartName(save, manifest.rank)
        with BlockChecker(manifest.objects[0], buffer, str(part), first_block) as blocks:
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
        waiting = pauses(time.monotonic() + recovery_deadline_s() if until is None else until)
        left = [node for node in nodes if node != self._ranks.node and node in topology.node_order]
        last: dict[str, FlashpointError] = {}
        while left:
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
            if left and next(waiting, _OVER) is _OVER:
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


class _HeldCopies:
    """The parts of this node, and room for the copies that this rank holds: see `TransferBackend`."""

    def __init__(self, container: BaseContainer, pools: Mapping[int, Pool]) -> None:
        self._container = container
        self._pools = pools
        self._changed = threading.Condition()
        self._receiving: set[int] = set()  # ranks whose copies are being received
        self._hear: Callable[[Verdict], None] = lambda verdict: None
        self._retained: Callable[[], Collection[SaveId]] = frozenset
        self._heard: dict[int, int] = {}  # rank -> number of the verdict of its newest push
        self.run = self._ended = 0

    def serve(self, run: int, hear: Callable[[Verdict], None], retained: Callable[[], Collection[SaveId]]) -> None:
        with self._changed:
            self.run, self._hear, self._retained = run, hear, retained
            self._heard.clear()
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = self.run

    @contextlib.contextmanager
    def open_part(self, part: PartName) -> Iterator[memoryview]:
        with self._container.open_part(*part) as opened:
            yield opened.buffer

    def read_manifest(self, part: PartName) -> bytes:
        return encode(self._container.read_manifest(*part))

    @contextlib.contextmanager
    def receive(self, manifest: Manifest, rider: Fields) -> Iterator[memoryview | None]:
        self._check_run(integer(rider, "run", 1))
        verdict = Verdict.from_fields(rider.get("verdict"))
        self._hear(verdict)
        save, pool = self._checked(manifest)
        with self._only_one_of(manifest.rank):
            self._check_order(manifest.rank, verdict.number)
            if self._is_held(pool, save, manifest):
                yield None
                return

            def take() -> Slot:
                return _taken(pool, manifest, SlotRequest(save, frozenset(self._retained()) - {save}))

            until, what = time.monotonic() + ROOM_S, f"making room for a copy of {PartName.of(manifest)}"
            with self._lasting_shortages(pool, manifest):
                slot = retrying(take, until, what, also=(CapacityError,))
            try:
                with slot.buffer[: manifest.objects[0].size] as view:
                    yield view
            except BaseException:
                pool.free(slot)
                raise
            with self._lasting_shortages(pool, manifest):
                pool.commit(slot, manifest)

    @contextlib.contextmanager
    def _lasting_shortages(self, pool: Pool, manifest: Manifest) -> Iterator[None]:
        """Raise a `CapacityError` only where no slot could be had later, either: the save is lost then. Slots that are
        read are free again soon, and the filesystem may be full for a moment."""
        try:
            yield
        except CapacityError as error:
            lasting = pool.shortage(manifest.objects[0].file_size, self._retained())
            raise lasting or ReplicationError(f"no copy can be taken in just now: {error}") from error

    def _check_run(self, run: int) -> None:
        with self._changed:  # ranks begin a run together, but not at one instant
            self._changed.wait_for(lambda: run <= self.run, ROOM_S)
            if run != self.run:
                raise ReplicationError(f"the push is of run {run}, and this rank is in run {self.run}")
            if run == self._ended:
                raise ReplicationError(f"the push is of run {run}, which has ended on this rank")

    def _check_order(self, rank: int, number: int) -> None:
        """Refuse what is left of a connection that the rank has given up: it could take the slot of a newer push, which
        is retained only once this rank, too, has come to the round's save."""
        with self._changed:
            if number < (newest := self._heard.get(rank, 0)):
                raise ReplicationError(f"the push is of round {number}, after one of round {newest}", rank=rank)
            self._heard[rank] = number

    def _checked(self, manifest: Manifest) -> tuple[SaveId, Pool]:
        """Return the save of a part that is pushed, and the pool for it; refuse what cannot be right."""
        (save, rank), record = PartName.of(manifest), manifest.objects[0]
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

    @contextlib.contextmanager
    def _only_one_of(self, rank: int) -> Iterator[None]:
        """Wait until no other copy of the rank is received: one whose connection broke ends soon."""
        with self._changed:
            if not self._changed.wait_for(lambda: rank not in self._receiving, ROOM_S):
                raise ReplicationError("another copy of this rank is still being received", rank=rank)
            self._receiving.add(rank)
        try:
            yield
        finally:
            with self._changed:
                self._receiving.remove(rank)
                self._changed.notify_all()

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
    size = manifest.objects[0].file_size
    slot = pool.take(size, request, exact=True)
    if slot is None:
        text = "there is no free slot, and no room for one more"
        hint = "enlarge the tmpfs (mount -o remount,size=...), free memory, or lower keep"
        raise CapacityError(text, needed_bytes=size, step=manifest.step, rank=manifest.rank, hint=hint)
    return slot


_OVER: Any = object()
