"""`flashpoint doctor`: findings between the nodes of a job, when it is launched as the job is.

They are measured with versions of its own, in a base container beside the job's, which are saved and copied as the
job's are: by the same addresses, authentication, connections and digests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ml_flashpoint
from ml_flashpoint import events
from ml_flashpoint.cli.examination import BAD, NOTE, OK, Examined, Finding
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.extras import DISTRIBUTION
from ml_flashpoint.format.errors import FlashpointError, ReplicationError
from ml_flashpoint.memory.capacity import available_bytes, existing_parent
from ml_flashpoint.ranks.rank_group import RankGroup, rank_group

_SAVES = 4
_ROUNDS = 9
_SKEW_S = 0.5
_SLOW = 3.0
_SLOTS = 8  # of a rank with one copy to hold, at most, and to spare


@dataclass(frozen=True, slots=True)
class Sent:
    """Copies of a rank.

    Attributes:
        rank, node: the rank, and its node.
        to: nodes that hold its copies.
        gbs: GB/s of 1e9 bytes that were acknowledged, at best; 0.0 if none were.
        error: why there are none; empty if there are.
    """

    rank: int
    node: str
    to: tuple[str, ...]
    gbs: float
    error: str


def examine_all(base: Path, mine: Sequence[Finding], *, megabytes: int, deadline_s: float) -> list[Examined]:
    """Return the findings on each node, and then between them: the same on all ranks. Collective.

    Args:
        base: the job's base container, on this node. It is left alone.
        mine: findings on this node.
        megabytes: most that each rank saves.
        deadline_s: seconds for which ranks wait for each other.

    Raises:
        FlashpointError: ranks do not come together.
    """
    os.environ.setdefault("FLASHPOINT_COLLECTIVE_DEADLINE_S", str(deadline_s))
    with _process_group(deadline_s):
        ranks = rank_group()
        told = [json.loads(blob) for blob in ranks.gather(_encoded(mine))]
        nodes = []
        for node in ranks.topology.node_order:
            leader = told[ranks.topology.ranks_of(node)[0]]
            nodes.append(Examined(node, tuple(map(Finding.from_json, leader["findings"]))))
        between = [*_compare_versions(told), _compare_clocks(ranks)]
        if len(nodes) == 1:
            text = f"all {ranks.world_size} ranks are on one node: there are no peers"
            between.append(Finding("copies", NOTE, text, "start it on all nodes, like the job"))
        else:
            between += _judge(_send(base, ranks, megabytes, deadline_s))
        return [*nodes, Examined("between nodes", tuple(between))]


@contextlib.contextmanager
def _process_group(deadline_s: float) -> Iterator[None]:
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=deadline_s))
    except Exception as error:  # of kinds that torch does not name
        raise ReplicationError(
            f"ranks cannot connect to each other at {where}: {error}",
            hint="check that all nodes reach MASTER_ADDR and MASTER_PORT, and that every node runs this command",
        ) from error
    try:
        yield
    except RuntimeError as error:  # of gloo
        raise ReplicationError(f"a rank no longer answers: {error}") from error
    finally:
        dist.destroy_process_group()


def _encoded(findings: Sequence[Finding]) -> bytes:
    versions = {DISTRIBUTION: ml_flashpoint.__version__, "torch": torch.__version__}
    return json.dumps({"findings": [dataclasses.asdict(each) for each in findings], "versions": versions}).encode()


def _compare_versions(told: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for name, level in ((DISTRIBUTION, BAD), ("torch", NOTE)):
        found = sorted({str(each["versions"][name]) for each in told})
        if len(found) > 1:
            yield Finding("releases", level, f"{name} is {' and '.join(found)}", "install the same one on every node")
        else:
            yield Finding("releases", OK, f"{name} is {found[0]} on all {len(told)} ranks")


def _compare_clocks(ranks: RankGroup) -> Finding:
    """Compare clocks: all ranks read theirs when they leave a collective, at about the same moment."""
    rounds = []
    for _ in range(_ROUNDS):
        ranks.gather(b"")
        rounds.append([float(blob) for blob in ranks.gather(repr(time.time()).encode())])
    skews = [statistics.median(each[rank] - each[0] for each in rounds) for rank in range(ranks.world_size)]
    first, last = (pick(range(len(skews)), key=skews.__getitem__) for pick in (min, max))
    apart = skews[last] - skews[first]
    if apart <= _SKEW_S:
        return Finding("clocks", OK, f"are within {max(apart, 0.001):.3f} s of each other")
    ahead, behind = ranks.topology.node_of(last), ranks.topology.node_of(first)
    text = f"the clock of {ahead} is {apart:.3f} s ahead of the clock of {behind}"
    return Finding("clocks", NOTE, text, "run chrony or another NTP client on every node")


def _send(base: Path, ranks: RankGroup, megabytes: int, deadline_s: float) -> list[Sent]:
    """Have every rank save a few versions, and return how fast they were copied."""
    beside = base.with_name(f"{base.name}-doctor")
    here = len(ranks.topology.ranks_of(ranks.node))
    size = max(1, min(megabytes * 1_000_000, available_bytes(beside) // (_SLOTS * here)))
    rates, errors = [0.0], [""]

    def note(event: events.Event) -> None:
        match event:
            case events.PartReplicated() if event.rank == ranks.rank and event.seconds > 0:
                rates.append(event.bytes * len(event.holders) / event.seconds / 1e9)
            case events.ReplicationFailed() | events.SaveFailed() if event.rank == ranks.rank:
                errors.append(event.error)

    holders: tuple[str, ...] = ()
    with _removed_afterwards(beside, ranks), _noted(errors), events.subscribe(note, beside):
        checkpointer = Checkpointer(beside, discard_existing=True)
        try:
            tensor = torch.ones(size, dtype=torch.uint8, device="cpu")
            for step in range(_SAVES):  # the first ones make slots, here and at peers
                with _noted(errors):
                    save = checkpointer.begin(step, explicit=True)
                    save.fill([("doctor", tensor)])
                    save.commit()
                checkpointer.wait(deadline_s)
            held = checkpointer.strategy.copies_of(ranks.rank, ranks.topology)
            holders = tuple(ranks.topology.node_of(rank) for rank in held)
        finally:
            ranks.gather(b"")  # who is faster goes on serving the others
            checkpointer.close()
    mine = [holders, max(rates), errors[-1] if max(rates) == 0.0 else ""]
    told = [json.loads(blob) for blob in ranks.gather(json.dumps(mine).encode())]
    return [
        Sent(rank, ranks.topology.node_of(rank), tuple(map(str, to)), float(gbs), str(error))
        for rank, (to, gbs, error) in enumerate(told)
    ]


@contextlib.contextmanager
def _noted(errors: list[str]) -> Iterator[None]:
    try:
        yield
    except FlashpointError as error:
        errors.append(str(error))


@contextlib.contextmanager
def _removed_afterwards(folder: Path, ranks: RankGroup) -> Iterator[None]:
    """Remove a folder that is made meanwhile, and those on the way to it, when no rank uses it any more."""
    before = existing_parent(folder)
    ranks.gather(b"")
    try:
        yield
    finally:
        ranks.gather(b"")
        if ranks.is_node_leader:
            shutil.rmtree(folder, ignore_errors=True)
            for parent in folder.parents:
                if parent == before:
                    break
                with contextlib.suppress(OSError):  # somebody uses it by now
                    parent.rmdir()


def _judge(sent: Sequence[Sent]) -> Iterator[Finding]:
    """Yield a finding for each node: the nodes that it reaches, how fast, and if others are much faster."""
    by_node: dict[str, list[Sent]] = {}
    for each in sent:
        by_node.setdefault(each.node, []).append(each)
    rates = {node: sum(each.gbs for each in of) for node, of in by_node.items()}
    usual = statistics.median(rates.values())
    for node, of in by_node.items():
        to = ", ".join(sorted({name for each in of for name in each.to})) or "its peer"
        if failed := [each for each in of if not each.gbs]:
            text = f"{node} to {to}: rank {failed[0].rank} has no copy: {failed[0].error or 'no answer in time'}"
            mend = "open the ports above between all nodes, or set FLASHPOINT_HOST"
            yield Finding("copies", BAD, text, mend)
        elif rates[node] * _SLOW < usual:
            text = f"{node} to {to}: {rates[node]:.2f} GB/s; the median of this job is {usual:.2f}"
            yield Finding("copies", NOTE, text, "check the route above, and the network link of that node")
        else:
            text = f"{node} to {to}: {rates[node]:.2f} GB/s by {len(of)} rank{'s' * (len(of) > 1)}, with digests"
            yield Finding("copies", OK, text)
