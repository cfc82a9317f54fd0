"""`ReplicationManager`: keeps copies of this rank's parts on the nodes that the strategy names.

Owns the strategy in use, the service that peers talk to and the addresses of all ranks. It moves one part at a
time when asked; when to do so, and what a failure means for older versions, is the saver's to decide.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.format.errors import (
    FlashpointError,
    ReplicationError,
    TopologyError,
)
from ml_flashpoint.format.knobs import transfer_deadline_s
from ml_flashpoint.net.peer import PeerConnection, push_to_all
from ml_flashpoint.net.reachable import reachable_host
from ml_flashpoint.net.transfer_service import TransferService
from ml_flashpoint.ranks.rank_group import RankGroup, boot_id, rank_group
from ml_flashpoint.ranks.strategies import (
    NoReplicationStrategy,
    PairwiseReplicationStrategy,
    ReplicationStrategy,
    checked_strategy,
)
from ml_flashpoint.replication.store_backend import StoreBackend

Address = tuple[str, int]


class ReplicationManager:
    """See the module.

    Args:
        strategy: who holds copies of whom, or its name; by default pairs of nodes, or nothing on a single node.
        advertise_host: address that peers reach this process at; by default the one that this host uses towards
            ``MASTER_ADDR``.
    """

    def __init__(self, strategy: ReplicationStrategy | str | None = None, *, advertise_host: str | None = None) -> None:
        self._given_strategy = checked_strategy(strategy, "strategy")
        self._advertise_host = advertise_host
        self._service: TransferService | None = None
        self._group: RankGroup | None = None
        self._addresses: tuple[Address, ...] = ()
        self._links: dict[int, PeerConnection] = {}
        self._links_lock = threading.Lock()
        self.strategy = self._given_strategy or NoReplicationStrategy()

    def initialize(self, checkpoint_object_manager: CheckpointObjectManager) -> None:
        """Start serving and learn the peers' addresses. Collective; a second call does nothing.

        Raises:
            TopologyError: the ranks chose different strategies, or two machines have the same node id.
            ReplicationError: a rank cannot listen for peers.
        """
        if self._group is not None:
            return
        group = rank_group()
        group.check_nodes(boot_id(), "a machine")
        if self._given_strategy is None and len(group.topology.node_order) > 1:
            self.strategy = PairwiseReplicationStrategy()
        address: Address | None = ("", 0)
        error: FlashpointError | None = None
        if len(group.topology.node_order) > 1:
            try:
                address = self._serve(group, checkpoint_object_manager)
            except FlashpointError as caught:
                address, error = None, caught
            except OSError as caught:
                address = None
                error = ReplicationError(f"peers cannot reach this host: {caught}", rank=group.rank, node=group.node)
        # All in one message, so that one rank's trouble is an error everywhere and not a hang of the others.
        gathered = [json.loads(blob) for blob in group.gather(json.dumps([repr(self.strategy), address]).encode())]
        if len(strategies := {strategy for strategy, _ in gathered}) > 1:
            self.close()
            raise TopologyError(
                f"ranks use different replication strategies: {sorted(strategies)}",
                rank=group.rank,
                hint="pass the same strategy on every rank",
            )
        if any(address is None for _, address in gathered):
            self.close()
            raise error or ReplicationError("another rank cannot serve its peers; its log says why", rank=group.rank)
        self._addresses = tuple(_parse_address(address) for _, address in gathered)
        self._group = group

    def _serve(self, group: RankGroup, objects: CheckpointObjectManager) -> Address:
        host = self._advertise_host or reachable_host()
        self._service = TransferService(
            group.secret,
            StoreBackend(lambda: objects.wait_for_store(transfer_deadline_s())),
            host=host,
            deadline_s=transfer_deadline_s(),
        )
        return self._service.address

    @property
    def initialized(self) -> bool:
        """Whether :meth:`initialize` was called."""
        return self._group is not None

    def copies_of(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold copies of ``rank``'s parts."""
        return self.strategy.copies_of(rank, self._topology_group().topology)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Ranks whose parts ``rank`` holds copies of."""
        return self.strategy.held_by(rank, self._topology_group().topology)

    def _topology_group(self) -> RankGroup:
        if self._group is None:
            raise ReplicationError("the replication manager is not initialized", hint="call initialize() first")
        return self._group

    def address_of(self, rank: int) -> Address:
        """Where the service of ``rank`` listens."""
        host, port = self._addresses[rank]
        if not port:
            raise ReplicationError("this rank serves nothing: the job runs on a single node", rank=rank)
        return host, port

    def replicate(self, part: HeldPart, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Bring a copy of a committed part to every rank that should hold one; returns when all acknowledged.

        Raises:
            ReplicationError, DeadlineError: a peer did not acknowledge. Others may have.
        """
        group = self._topology_group()
        if (manifest := part.manifest) is None:
            raise ReplicationError("a damaged part cannot be replicated", rank=part.rank)
        buffer = part.arenas[0].buffer[: manifest.objects[0].size]

        def push(peer: PeerConnection) -> None:
            peer.push(manifest, buffer, cancelled=cancelled)

        push_to_all(self.strategy.copies_of(part.rank, group.topology), lambda target: self._push(target, push))

    def _push(self, target: int, push: Callable[[PeerConnection], None]) -> None:
        with self._links_lock:
            link = self._links.setdefault(target, self.connect(target))
        push(link)

    def connect(self, rank: int) -> PeerConnection:
        """A new authenticated connection to the service of ``rank``. Close it after use."""
        group = self._topology_group()
        node = group.topology.node_of(rank)
        return PeerConnection(self.address_of(rank), group.secret, node=node, deadline_s=transfer_deadline_s())

    def close(self) -> None:
        """Stop serving. Idempotent."""
        with self._links_lock:
            for link in self._links.values():
                link.close()
            self._links.clear()
        if self._service is not None:
            self._service.close()
            self._service = None

    shutdown = close
    """The name of :meth:`close` in google/ml-flashpoint."""


def _parse_address(announced: object) -> Address:
    match announced:
        case [str(host), int(port)]:
            return host, port
        case other:
            raise TopologyError(f"a rank announced an address that is none: {other!r}")
