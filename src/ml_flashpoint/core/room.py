"""The preflight of a job: whether its nodes have room for what its ranks will save and keep.

Owns the vote before training, so that one node without room is an error on every rank, and what each rank may take once
the size of its saves is known. The sums are `capacity`'s and `budget`'s.
"""

from __future__ import annotations

import json
import logging
from functools import partial

from ml_flashpoint.checkpoint_object_manager.arena_pool import with_headroom
from ml_flashpoint.checkpoint_object_manager.budget import Budget
from ml_flashpoint.checkpoint_object_manager.capacity import preflight
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.errors import CapacityError
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.replication.replication_manager import ReplicationManager

_log = logging.getLogger(__name__)


def check_capacity(
    ranks: RankGroup,
    expected_bytes: int,
    store: RankStore,
    replication: ReplicationManager,
) -> None:
    """Check that every node has room for what its ranks will save, and for the copies that they will hold. Collective.

    Args:
        expected_bytes: bytes that this rank saves.

    Raises:
        CapacityError: one has not.
    """
    mine = json.dumps([expected_bytes, sum(store.arenas.resident_bytes())])
    gathered = [json.loads(blob) for blob in ranks.gather(mine.encode())]
    here = ranks.topology.ranks_of(ranks.node)

    def check() -> None:
        with_room_for = partial(
            preflight,
            store.base,
            with_headroom(max(gathered[rank][0] for rank in here)),  # what its arenas, and copies of them, have
            copies=max(len(replication.held_by(rank)) for rank in here),
            ranks_on_node=len(here),
            held_bytes=sum(gathered[rank][1] for rank in here),
            kept=store.retained.keep.beside_newest,
        )
        with_room_for()

    ranks.together(check, CapacityError("another node has too little room; its log says how much", rank=ranks.rank))


def prepare_room(store: RankStore, ranks: RankGroup, size: int, copies: int) -> None:
    """Set what this rank may take, before the first save of a size.

    Args:
        size: bytes that it saves.
        copies: peers whose parts it holds.

    Raises:
        CapacityError: there is too little.
    """
    size = with_headroom(size)
    held_bytes, kept = sum(store.arenas.resident_bytes()), store.retained.keep.beside_newest
    preflight(store.base, size, copies=copies, held_bytes=held_bytes, kept=kept)
    here = ranks.topology.ranks_of(ranks.node)
    neighbours = tuple(store.directory_of(rank) for rank in here if rank != store.rank)
    store.arenas.budget = Budget(store.directory, neighbours, copies)
