"""Ranks of a job that share its store."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from ml_flashpoint.engine.store import open_store
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.ranks.rank_group import rank_group


def share(report: Callable[..., None], rank: int) -> tuple[list[bytes], int, bool]:
    """Have each rank write a value, and read those of all; return them, a count, and whether a stranger is heard."""
    ranks = rank_group()
    store = open_store(ranks)
    client, other = store.connect("run-1"), store.connect("run-2")
    client.set(f"value/{rank}", f"of {rank}")
    count = client.plain.add("count", 1)
    other.set("value/0", "of another run")
    assert store.address is not None
    TCPStore(*store.address, None, False, timedelta(seconds=5)).set(f"run-1/strange/{rank}", "planted")
    ranks.all_ok(True)
    found = client.multi_get([f"value/{each}" for each in range(ranks.world_size)])
    planted = client.get(f"strange/{rank}") != b""
    ranks.all_ok(True)
    store.close()
    return found, count, planted


def cannot_reach(report: Callable[..., None], rank: int) -> str:
    """Open the store where rank 0 names an address that nobody reaches; return the error."""
    if rank == 0:
        os.environ["FLASHPOINT_HOST"] = "192.0.2.1"
    try:
        open_store(rank_group())
    except FlashpointError as error:
        return str(error)
    return ""
