"""Where parts come from that are not on this node: their holders, asked until one of them gives what is wanted.

Owns which services are asked for a rank's part, in which order and for how long: all of them, and those that could not
answer just now again, with back-off, until a deadline. Which version is wanted is the loader's to decide.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.recovery_plan import CompleteVersion
from ml_flashpoint.format.errors import CapacityError, FlashpointError, LoadError, ObjectNotFoundError, SaveError
from ml_flashpoint.format.failure_kinds import as_ours, is_transient, pauses, retrying
from ml_flashpoint.format.knobs import recovery_deadline_s, transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.net.blocks import BlockChecker
from ml_flashpoint.net.peer import PeerConnection
from ml_flashpoint.net.transfers import Address, PartName
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.strategies import ReplicationStrategy
from ml_flashpoint.replication.replication_manager import ReplicationManager
from ml_flashpoint.replication.store_backend import IncomingCopy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that should have an object, and where its transfer service listens."""

    node: str
    address: Address


Failures = list[tuple[str, FlashpointError]]
"""What each node that was asked failed with, in order."""

_T = TypeVar("_T")


class PartSource:
    """See the module. One caller at a time.

    Args:
        replication: how peers are reached; None if there are none.
    """

    def __init__(self, replication: ReplicationManager | None) -> None:
        self._replication = replication

    @property
    def strategy(self) -> ReplicationStrategy | None:
        """Who holds copies of whom, if peers can be reached."""
        replication = self._replication
        return replication.strategy if replication is not None and replication.initialized else None

    def holders(
        self, version: CompleteVersion, rank: int, group: RankGroup, *, first: str | None = None
    ) -> list[Holder]:
        """Services that can give a rank's part, ``first`` in front. Ranks of a node share the load.

        Raises:
            LoadError: there is no way to reach peers.
        """
        if self._replication is None or not self._replication.initialized:
            raise LoadError(
                "the part is on another node, and there is no replication manager to reach it",
                rank=rank,
                hint="pass an initialized ReplicationManager to the loader",
            )
        nodes = sorted(version.holders[rank], key=lambda node: node != first)
        holders = []
        for node in nodes:
            if node != group.node and node in group.topology.node_order:
                ranks = group.topology.ranks_of(node)
                address = self._replication.address_of(ranks[rank % len(ranks)])
                holders.append(Holder(node, address))
        return holders

    def manifest(
        self,
        version: CompleteVersion,
        rank: int,
        group: RankGroup,
        *,
        first: str | None = None,
        until: float | None = None,
        failures: Failures | None = None,
    ) -> Manifest:
        """The manifest of a rank's part, from a holder.

        Args:
            first: node to ask first; by default any.
            until: when to give up (`time.monotonic`); by default after ``FLASHPOINT_RECOVERY_DEADLINE_S``.
            failures: what each node failed with is appended here.

        Raises:
            FlashpointError: no holder gives it.
        """

        def ask(holder: Holder) -> Manifest:
            with _peer(holder, group) as peer:
                return peer.read_manifest(PartName(version.version, version.save_id, rank))

        holders = self.holders(version, rank, group, first=first)
        what = f"the manifest of rank {rank} in {version.version}"
        return _ask_all(holders, ask, what, until, [] if failures is None else failures)

    def blocks(
        self,
        version: CompleteVersion,
        manifest: Manifest,
        record: ObjectRecord,
        first_block: int,
        buffer: memoryview,
        group: RankGroup,
    ) -> None:
        """Fill a buffer with whole, verified blocks of an object.

        Raises:
            FlashpointError: no holder gives them.
        """

        def ask(holder: Holder) -> None:
            with _peer(holder, group) as peer, BlockChecker(record, buffer, record.name, first_block) as blocks:
                peer.fetch(PartName.of(manifest), blocks)

        _ask_all(self.holders(version, manifest.rank, group), ask, f"{manifest.version}/{record.name}", None, [])

    def fetch_part(
        self,
        version: CompleteVersion,
        rank: int,
        store: RankStore,
        group: RankGroup,
        *,
        first: str,
        until: float,
        failures: Failures,
    ) -> Manifest:
        """Bring a rank's part here, verify it and commit it.

        Args:
            first, until, failures: see :meth:`manifest`.

        Raises:
            FlashpointError: no holder gives it, or there is no room for it.
        """
        manifest = self.manifest(version, rank, group, first=first, until=until, failures=failures)
        holders = self.holders(version, rank, group, first=first)
        with contextlib.ExitStack() as undo:
            what = f"{version.version}/{manifest.objects[0].name}"
            incoming = retrying(lambda: IncomingCopy(store, manifest), until, f"making room for {what}", also=_FULL)
            undo.callback(incoming.abort)
            for record, buffer in zip(manifest.objects, incoming.buffers, strict=True):
                with BlockChecker(record, buffer, f"{version.version}/{record.name}") as blocks:

                    def fetch(holder: Holder, blocks: BlockChecker = blocks) -> None:
                        with _peer(holder, group) as peer:
                            peer.fetch(PartName.of(manifest), blocks)

                    _ask_all(holders, fetch, f"{version.version}/{record.name}", until, failures)
            retrying(incoming.commit, until, f"committing {what}", also=_FULL)
            undo.pop_all()
        return manifest


def _peer(holder: Holder, group: RankGroup) -> PeerConnection:
    return PeerConnection(holder.address, group.secret, node=holder.node, deadline_s=transfer_deadline_s())


def _ask_all(
    holders: Sequence[Holder], ask: Callable[[Holder], _T], what: str, until: float | None, failures: Failures
) -> _T:
    """What the first holder answers that can. Those that could not just now are asked again after the others."""
    waiting = pauses(time.monotonic() + recovery_deadline_s() if until is None else until)
    last: dict[str, FlashpointError] = {}
    left = list(holders)
    while left:
        again = []
        for holder in left:
            try:
                return ask(holder)
            except (FlashpointError, OSError) as caught:
                error = as_ours(caught)
            if holder.node not in last:
                _log.warning("%s cannot give %s: %s", holder.node, what, error)
            last[holder.node] = error
            failures.append((holder.node, error))
            if is_transient(error):
                again.append(holder)
        left = again
        if left and next(waiting, _OVER) is _OVER:
            break
    # One that could not answer may have it: what the others answered is not the last word then.
    undecided = [error for error in last.values() if is_transient(error)]
    raise next(iter(undecided or last.values()), None) or ObjectNotFoundError(f"no holder of {what} is known")


_OVER = object()
# Of a filesystem or a process that is full just now, which says nothing about the version.
_FULL = (CapacityError, SaveError)
