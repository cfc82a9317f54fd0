"""A rank with pools and copies, which does what a test says."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint.engine import copying
from ml_flashpoint.engine.copying import Copies, Failures
from ml_flashpoint.engine.rounds import Verdict
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.format.names import SaveId, object_name
from ml_flashpoint.memory.container import BaseContainer, Owner
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.net.channel import Channel
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, RingReplicationStrategy
from tests.memory.support import fill, layout_of, value_in
from tests.support.forked import Report

RUN = 7


class Rank:
    """One rank of a job whose holders are the next ``copies`` ranks."""

    def __init__(self, report: Report, copies: int, host: str | None, room_s: float) -> None:
        self.report = report
        self.ranks = ranks = rank_group()
        self.container = BaseContainer(Path(os.environ["FLASHPOINT_TEST_BASE"]))
        if ranks.is_node_leader:
            self.container.clean()
        strategy = RingReplicationStrategy(copies) if copies else NoReplicationStrategy()
        held = strategy.held_by(ranks.rank, ranks.topology)
        owners = [Owner(ranks.world_size, rank) for rank in (ranks.rank, *held)]
        self.own, *others = (Pool(self.container, owner, keep=1, owners=owners) for owner in owners)
        copying.ROOM_S = room_s  # type: ignore[misc]
        if host is not None:
            os.environ["FLASHPOINT_HOST"] = host
        self.copies = Copies(ranks, strategy, self.container, dict(zip(held, others, strict=True)))
        self.verdict = Verdict(0, (), SaveId(RUN, 0))
        self.copies.serve(RUN, self.adopt, lambda: self.verdict.retained)

    def adopt(self, verdict: Verdict) -> None:
        self.verdict = max(self.verdict, verdict, key=lambda each: each.number)

    # ---- what a test says -------------------------------------------------------------------------------------

    def save(self, step: int, numbers: int = 5000) -> None:
        save = SaveId(RUN, step)
        slot = self.own.take(layout_of(numbers).size, SlotRequest(save, self.verdict.retained))
        assert slot is not None
        self.own.commit(slot, fill(slot, save, self.ranks.rank, self.ranks.world_size, numbers))

    def push(self, step: int) -> None:
        self.copies.push(SaveId(RUN, step), RUN, self.verdict, self.own)

    def hear(self, number: int, verified: list[int], recovered: int | None = None) -> None:
        saves = tuple(SaveId(RUN, step) for step in verified)
        self.adopt(Verdict(number, saves, SaveId(RUN, 0), 0, None if recovered is None else SaveId(RUN, recovered)))

    def number(self) -> int:
        """The number of the newest verdict that this rank knows."""
        return self.verdict.number

    def value(self, step: int, rank: int) -> float:
        return value_in(self.container, SaveId(RUN, step), rank)

    def parts(self) -> list[tuple[int, int, int]]:
        """The committed parts here: step, rank, inode."""
        committed = self.container.committed()
        paths = {path.stat().st_ino: path for path in self.container.base.glob("*/rank-*.safetensors")}
        return sorted((save.step, int(paths[inode].name[5:10]), inode) for inode, save in committed.items())

    def same(self, step: int, rank: int) -> bytes:
        """The manifest of a part, as it lies here."""
        path = self.container.base / SaveId(RUN, step).version / f"rank-{rank:05d}-{RUN:08d}.manifest"
        return path.read_bytes()

    def lose(self, step: int, rank: int) -> None:
        self.container.remove_part(SaveId(RUN, step), rank)

    def damage(self, step: int, rank: int) -> None:
        with open(self.container.base / SaveId(RUN, step).version / object_name(rank, f"{RUN:08d}"), "r+b") as file:
            file.seek(4096)
            file.write(b"damaged")

    def fetch(self, step: int, rank: int, nodes: list[str], within_s: float) -> list[tuple[str, str]]:
        """Fetch a part; which nodes failed, and how."""
        failures: Failures = []
        until = time.monotonic() + within_s
        self.copies.fetch_part(SaveId(RUN, step), rank, nodes, self.own, (), until=until, failures=failures)
        return [(node, type(error).__name__) for node, error in failures]

    def read(self, step: int, rank: int, first_block: int, size: int, nodes: list[str]) -> bytes:
        save, into = SaveId(RUN, step), bytearray(size)
        manifest = self.copies.manifest_of(save, rank, nodes)
        self.copies.read_blocks(save, manifest, first_block, memoryview(into), nodes)
        return bytes(into)

    def end_run(self) -> None:
        self.copies.end()

    def begin_run(self, run: int) -> None:
        self.copies.serve(run, self.adopt, lambda: self.verdict.retained)

    def push_crafted(self, to: int, run: int, number: int | None = None, **changes: Any) -> None:
        """Push a part of this rank that is not what it should be."""
        record = ObjectRecord(size=0, file_size=changes.pop("file_size", 4096), digests=())
        save = SaveId(RUN, changes.pop("step", 1))
        part = {"rank": self.ranks.rank, "world_size": self.ranks.world_size, "node": "n", **changes}
        manifest = Manifest(save, record=record, **part)
        verdict = self.verdict if number is None else self.verdict._replace(number=number)
        with self.copies.connection(to) as peer:
            peer.push(manifest, memoryview(b""), {"run": run, "verdict": verdict})

    def receive_twice(self, of: int, wait_s: float | None) -> list[str]:
        """Receive a part of a rank, and another one meanwhile, whose end is waited for; what came, in order."""
        said: list[str] = []

        def receive(step: int, meanwhile: Callable[[], None] = lambda: None) -> None:
            record = ObjectRecord(size=0, file_size=4096, digests=())
            manifest = Manifest(SaveId(RUN, step), of, self.ranks.world_size, "n", record)
            try:
                with self.copies.receive(manifest, {"run": RUN, "verdict": self.verdict}):
                    said.append(f"begins {step}")
                    meanwhile()
                    said.append(f"ends {step}")
            except FlashpointError as error:
                said.append(str(error))

        def begin_second() -> None:
            second.start()
            second.join(wait_s)

        second = threading.Thread(target=receive, args=(2,))
        receive(1, begin_second)
        second.join()
        return said

    def die_amid(self, method: str) -> None:
        """Kill this process once it has sent, or received, half of the next part."""
        original, calls = getattr(Channel, method), iter(range(100))

        def some(channel: Channel, view: memoryview, **options: Any) -> None:
            if method == "send_payload":
                original(channel, view[: len(view) // 2])
            elif next(calls) < 3:
                return original(channel, view, **options)  # type: ignore[no-any-return]
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(Channel, method, some)


def obey(report: Report, rank: int, copies: int, host: str | None = None, room_s: float = 30.0) -> str | None:
    """Do what the test says, and report how it ended; return the error of the construction, if there is one."""
    torch.set_num_threads(1)
    try:
        it = Rank(report, copies, host if rank else None, room_s)
    except FlashpointError as error:
        return f"{type(error).__name__}: {error}"
    report("address", it.copies.addresses)
    while (said := report.listen())[0] != "end":
        name, args, options = said
        try:
            report(name, getattr(it, name)(*args, **options))
        except FlashpointError as error:
            report(name, f"{type(error).__name__}: {error}")
    it.copies.close()
    return None
