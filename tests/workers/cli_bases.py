"""Base containers for the tests of the command line, made by the engine's own store, in children.

Owns what the parts hold. In children, since a store's lock is the process's, and looking at a base container from
the same process would give it up.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.digest import BlockDigester
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name
from tests.workers.fault_engine import Rank

Report = Callable[..., None]

RUN = "1700000000000-0a0b0c0d"
BLOCK = 4096


@dataclass(frozen=True)
class Part:
    """A part to commit: the part of `rank`, put into an arena of `holder` (itself by default)."""

    rank: int
    step: int
    holder: int | None = None
    world_size: int = 4
    run: str = RUN
    size: int = 3 * BLOCK + 100

    @property
    def save_id(self) -> str:
        return f"{self.run}-{self.step:08d}"

    @property
    def name(self) -> str:
        return object_name(self.rank, self.save_id)


def commit(store: RankStore, part: Part) -> None:
    arena = store.acquire(part.size)
    arena.buffer[: part.size] = bytes((part.rank + part.step + i) % 251 for i in range(part.size))
    digests = BlockDigester(arena.buffer, part.size, block_size=BLOCK).finish()
    record = ObjectRecord(part.name, part.size, arena.size, digests, BLOCK)
    node = f"node-{part.rank // 2}"
    store.commit(Manifest(f"step-{part.step}_ckpt", part.rank, part.world_size, part.save_id, node, (record,)), [arena])


def make(report: Report, base: Path, ranks: Sequence[int], parts: Sequence[Part]) -> None:
    """Commits parts, and ends."""
    stores = {rank: RankStore(base, rank) for rank in ranks}
    for part in parts:
        commit(stores[part.rank if part.holder is None else part.holder], part)


def make_and_live(report: Report, base: Path, ranks: Sequence[int], parts: Sequence[Part]) -> None:
    """Commits parts, and lives on."""
    stores = {rank: RankStore(base, rank) for rank in ranks}
    for part in parts:
        commit(stores[part.rank if part.holder is None else part.holder], part)
    report("ready")
    signal.pause()


def save_for_ever(report: Report, base: Path) -> None:
    """Saves again and again, which prunes the save before, with the real saver."""
    rank = Rank(base)
    step = 0
    while True:
        step += 1
        rank.save("small", step, 1)
        if step == 3:
            report("ready")


def save_once(report: Report, base: Path) -> None:
    """One save with the real saver."""
    rank = Rank(base)
    rank.save("small", 7, 1)
    rank.saver.wait(30)
