"""Ranks of a job that commit parts, recover and read, without a trainer: what a test says in a `Plan`.

A copy is written by its holder, which knows what is in every part, so that no push is needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from ml_flashpoint import events
from ml_flashpoint.config import Config
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.copying import Copies
from ml_flashpoint.engine.recovery import Found, Recovery
from ml_flashpoint.engine.sidecars import sidecar_items, sidecar_labels
from ml_flashpoint.format.errors import FlashpointError, UnreadableError
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.format.object_format import plan_layout
from ml_flashpoint.memory.container import BaseContainer, JobLock, Owner
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.ranks.retention import Keep
from ml_flashpoint.ranks.strategies import checked_strategy
from ml_flashpoint.stores.location import open_durable
from tests.memory.support import NUMBERS, fill, fill_up, layout_of, value_of
from tests.support.forked import Report
from tests.workers.checkpointer_jobs import begin_and_commit


@dataclass(frozen=True)
class Plan:
    """What the ranks of a job do, from start to end.

    Attributes:
        wanted: step to go back to; None for the newest version. anew: recover nothing.
        steps: to save then.
        absent: ranks that do not commit their parts of a step, by step. Nor have they copies.
        uncopied: steps of which holders have no copies.
        tables: name of each rank's table, for a step.
        begin: False if the run is not to begin.
        keep: verified versions that are kept.
        persisted: steps that go to the durable store at ``durable``, too.
        discard: number of versions that the program cannot load.
        heard: True if ranks hear that saves are verified.
        sidecars: files beside the parts.
        fault: rank, what to call in vain there, and what that raises.
        fill_up: True if no memory is left once the job is open.
        hangs: True if the durable store does not answer.
        copies: False if recovery is to leave missing copies to the rounds.
    """

    wanted: int | None = None
    anew: bool = False
    steps: Sequence[int] = ()
    absent: Mapping[int, Sequence[int]] = field(default_factory=dict)
    uncopied: Sequence[int] = ()
    tables: Mapping[int, Sequence[str]] = field(default_factory=dict)
    begin: bool = True
    keep: int = 1
    strategy: str = "pairwise"
    persisted: Sequence[int] = ()
    durable: str | None = None
    discard: int = 0
    heard: bool = False
    sidecars: Mapping[str, bytes] = field(default_factory=dict)
    fault: tuple[int, str, Exception] | None = None
    fill_up: bool = False
    hangs: bool = False
    copies: bool = True


class Job:
    """One rank's side, open."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.ranks = plan, rank_group()
        base = Path(os.environ["FLASHPOINT_TEST_BASE"])
        ranks, size = self.ranks, self.ranks.world_size
        self.lock = JobLock(base, ranks.job, 30.0)
        self.container = BaseContainer(base, self.lock)
        if ranks.is_node_leader:
            self.container.clean()
        ranks.all_ok(True)
        self.strategy = checked_strategy(plan.strategy)
        assert self.strategy is not None
        topology = ranks.topology
        held = {rank: self.strategy.held_by(rank, topology) for rank in topology.ranks_of(ranks.node)}
        owners = [Owner(size, each) for rank in held for each in (rank, *held[rank])]
        make = lambda rank: Pool(self.container, Owner(size, rank), keep=plan.keep, owners=owners)  # noqa: E731
        self.pool = make(ranks.rank)
        self.held = {rank: make(rank) for rank in held[ranks.rank]}
        os.environ["FLASHPOINT_HOST"] = "127.0.0.1"
        self.copies = Copies(ranks, self.strategy, self.container, self.held)
        self.recovery = Recovery(
            ranks,
            self.container,
            self.pool,
            self.copies,
            self.strategy,
            Keep(plan.keep),
            held=self.held if plan.copies else None,
            durable=plan.durable,
            open_store=hang if plan.hangs else open_durable,
        )

    def save(self, run: int, step: int, retained: Sequence[SaveId]) -> None:
        plan, save, size = self.plan, SaveId(run, step), self.ranks.world_size
        pools = [self.pool, *(() if step in plan.uncopied else self.held.values())]
        for pool in pools:
            rank = pool.owner.rank
            if rank in plan.absent.get(step, ()):
                continue
            slot = pool.take(layout_of(NUMBERS).size + 4096, SlotRequest(save, retained))
            assert slot is not None
            manifest = fill(slot, save, rank, size, NUMBERS)
            if plan.sidecars:
                items = sidecar_items(plan.sidecars)
                layout = plan_layout([("w", "float32", (NUMBERS,))], [(key, len(value)) for key, value in items])
                entry = layout.by_key["w"]
                slot.view(entry.begin, entry.end, torch.float32, entry.shape).fill_(value_of(save, rank))
                record = slot.seal(layout, [value for _, value in items])
                manifest = replace(manifest, record=record, labels=sidecar_labels(0))
            if step in plan.tables:
                manifest = replace(manifest, labels={"table": plan.tables[step][rank]})
            pool.commit(slot, manifest)
        self.ranks.all_ok(True)
        if step in plan.persisted:
            self.persist(save)

    def persist(self, save: SaveId) -> None:
        assert self.plan.durable is not None
        store, rank = open_durable(self.plan.durable), self.ranks.rank
        with self.container.open_part(save, rank) as part:
            record = part.manifest.record
            rest = bytes(record.file_size - record.size)
            store.write_part(part.manifest, lambda: [part.buffer[: record.size], rest])
        self.ranks.all_ok(True)
        if rank == 0:
            store.complete(save, self.ranks.world_size)

    def values(self, found: Found) -> list[float]:
        """What the parts of all ranks say that they are."""
        values = []
        with self.recovery.reader(self.container.base / found.save.version) as reader:
            assert (reader.version.name, reader.world_size) == (found.save.version, found.world_size)
            for rank in range(reader.world_size):
                tensor = reader.open(rank).tensor("w")
                assert bool((tensor == tensor[0]).all())
                values.append(float(tensor[0]) - found.save.run * 10000)
        return values


def hang(url: str) -> NoReturn:
    threading.Event().wait()
    raise AssertionError


def play(report: Report, rank: int, plan: Plan) -> dict[str, Any]:
    """Recover, go on, save. Return what became of that on this rank."""
    job = Job(plan)
    if plan.fill_up:
        fill_up(job.container.base.parent)
        job.ranks.all_ok(True)
    with contextlib.ExitStack() as stack:
        if plan.fault is not None and plan.fault[0] == rank:
            stack.enter_context(mock.patch(plan.fault[1], side_effect=plan.fault[2]))
        told = recover_and_save(job, plan)
    job.ranks.all_ok(True)
    job.copies.close()
    return told


def recover_and_save(job: Job, plan: Plan) -> dict[str, Any]:
    told: dict[str, Any] = {"found": None}
    try:
        if not plan.anew and job.recovery.any_versions():
            found, excluded = job.recovery.find(plan.wanted), set[SaveId]()
            for _ in range(plan.discard):
                assert found is not None
                excluded.add(found.save)
                found = job.recovery.find(plan.wanted, excluded=excluded)
            if found is not None:
                told["found"], told["values"] = tuple(found.save), job.values(found)
            report = job.recovery.report or events.VersionRecovered()
            told["tier"] = report.tier
            told["fetched"], told["tries"] = report.fetched_bytes, report.tries
        else:
            found = None
        if plan.begin:
            run, verdict = job.recovery.record(found)
            told["run"], told["verified"], told["recovered"] = run, verdict.verified, verdict.recovered
            for step in plan.steps:
                job.save(run, step, verdict.retained)
                verdict = verdict._replace(verified=(*verdict.verified, SaveId(run, step))[-plan.keep :], total=1)
                if plan.heard:
                    job.recovery.mark()
        told["kept"] = [(each.step, each.verified, each.world_size) for each in job.recovery.versions()]
    except FlashpointError as error:
        told["error"] = (type(error).__name__, str(error))
        told["parts_lost"] = getattr(error, "parts_lost", None)
    return told


def await_copies(report: Report, rank: int) -> int | None:
    """Resume by a checkpointer that fetches no copies, and save nothing; return the step that is verified then."""
    fetch_part, verified = Copies.fetch_part, threading.Event()

    def fetch_own(copies: Copies, save: SaveId, part_rank: int, *args: Any, **how: Any) -> Any:
        if part_rank != rank:
            raise UnreadableError("no copy can be had")
        return fetch_part(copies, save, part_rank, *args, **how)

    base = os.environ["FLASHPOINT_TEST_BASE"]
    note = lambda event: isinstance(event, events.VersionVerified) and verified.set()  # noqa: E731
    with mock.patch.object(Copies, "fetch_part", fetch_own), Checkpointer(base) as checkpointer:
        with events.subscribe(note, base):
            checkpointer.latest()
            verified.wait(30)
        return checkpointer.status.verified


def go_on(report: Report, rank: int, steps: Sequence[int]) -> list[tuple[int, bool, int]]:
    """Resume by a checkpointer, save steps that are waited for, and return the two newest versions then."""
    with Checkpointer(os.environ["FLASHPOINT_TEST_BASE"], Config(replication="pairwise", keep=2)) as checkpointer:
        if not checkpointer.run:
            version = checkpointer.latest()
            assert version is not None
            with checkpointer.open_version(version) as reader:
                assert float(reader.open(rank).tensor("model.w")[0]) == 100.0 * version.step + rank
        for step in steps:
            begin_and_commit(checkpointer, step).verified.result(30)
        return [(each.step, each.verified, each.world_size) for each in checkpointer.versions()[:2]]
