"""Promise 1 on real files: at every instant, for every loss that the strategy survives, the newest verified
version, or a newer one, can be recovered, and every part that can be seen has its bytes.

A hypothesis state machine plays a whole job with the real stores: saves, copies, verdicts, pruning, reuse of
arenas, crashes and lost nodes. Every change to a file's name is a step of its own; the steps of different
operations come in any order, and any of them may be the last one before a crash.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.core.inventory import has_objects, part_record
from ml_flashpoint.core.part_reader import read_local_manifests
from ml_flashpoint.core.recovery_plan import NodeInventory, RecoveryPlan, plan_recovery
from ml_flashpoint.core.recovery_run import _useless
from ml_flashpoint.format.digest import BLOCK_SIZE, digest_block
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name
from ml_flashpoint.ranks.strategies import (
    CliqueStrategy,
    PairwiseReplicationStrategy,
    ReplicationStrategy,
    RingReplicationStrategy,
    Topology,
)
from ml_flashpoint.replication.store_backend import IncomingCopy
from tests.faults.common import SAMPLE
from tests.support.stepwise import Operation
from tests.support.tmpfs import has_tmpfs, make_folder

JOBS: list[tuple[str, ReplicationStrategy]] = [
    ("ab", PairwiseReplicationStrategy()),
    ("aabb", PairwiseReplicationStrategy()),
    ("abab", PairwiseReplicationStrategy()),
    ("aab", PairwiseReplicationStrategy()),
    ("abc", PairwiseReplicationStrategy()),
    ("abc", RingReplicationStrategy(copies=2)),
    ("aabc", RingReplicationStrategy(copies=1)),
    ("abab", CliqueStrategy(factor=2, jump=1)),
]


@dataclass
class Save:
    """One save of the job. Ranks are in `committed` and pairs (rank, holder) in `copied` once that is done."""

    step: int
    save_id: str
    committed: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    copied: set[tuple[int, int]] = field(default_factory=set)
    verified: bool | None = None


def content(rank: int, save_id: str) -> bytes:
    """The bytes of a part: of one length, so that arenas are reused, and each different."""
    return f"rank {rank} {save_id} ".encode().ljust(64, b".") * 80


class Job(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = make_folder()
        self.operations: dict[int, Operation] = {}
        self.effects: dict[int, Callable[[], None]] = {}
        self.readers: list[tuple[ExitStack, memoryview, bytes]] = []

    def teardown(self) -> None:
        self.stop_everything()
        shutil.rmtree(self.root)

    # ---- the job -------------------------------------------------------------------------------------------

    @initialize(job=st.sampled_from(JOBS), saves=st.integers(0, 2))
    def start(self, job: tuple[str, ReplicationStrategy], saves: int) -> None:
        nodes, self.strategy = job
        self.topology = Topology(tuple(nodes))
        self.ranks = range(len(nodes))
        self.claim = self.strategy.survivable_losses(self.topology)
        self.stores: dict[int, RankStore] = {}
        self.lost: set[str] = set()
        self.life = self.step = 0
        self.verified = ""
        self.begin_life()
        for rank in self.ranks:
            self.open_store(rank)
            self.finish(rank)
        for _ in range(saves):
            self.save_a_version(1, -1, "heard")

    def begin_life(self) -> None:
        self.life += 1
        self.saves: list[Save] = []
        self.learned = dict.fromkeys(self.ranks, 0)  # verdicts that each rank has heard

    def base(self, rank: int) -> Path:
        return self.root / self.topology.nodes[rank] / "job"

    def runs(self, rank: int) -> bool:
        return rank in self.stores and self.topology.nodes[rank] not in self.lost

    def idle(self, rank: int) -> bool:
        """Whether a rank runs and has nothing under way. One operation a store: it has a lock."""
        return self.runs(rank) and rank not in self.operations

    def do(self, rank: int, function: Callable[[], object], effect: Callable[[], None] = lambda: None) -> None:
        """Begin something on a rank's store; ``effect`` is what the job knows once it is done."""
        assert rank not in self.operations
        self.operations[rank], self.effects[rank] = Operation(function), effect
        self.after_step(rank)

    def after_step(self, rank: int) -> None:
        operation = self.operations[rank]
        if operation.done:
            del self.operations[rank]
            effect = self.effects.pop(rank)
            if operation.error is not None:
                raise operation.error
            effect()

    def open_store(self, rank: int) -> None:
        def open_it() -> None:
            self.stores[rank] = RankStore(self.base(rank), rank)

        self.do(rank, open_it)

    @rule(data=st.data(), steps=st.integers(1, 8))
    @precondition(lambda self: self.operations)
    def go_on(self, data: st.DataObject, steps: int) -> None:
        """Some operation makes some of its changes to files."""
        rank = data.draw(st.sampled_from(sorted(self.operations)), label="rank")
        for _ in range(steps):
            if rank in self.operations:
                self.operations[rank].step()
                self.after_step(rank)
                self.check()

    def finish(self, rank: int) -> None:
        while rank in self.operations:
            self.operations[rank].step()
            self.after_step(rank)
            self.check()

    # ---- saving --------------------------------------------------------------------------------------------

    @rule(advance=st.sampled_from([0, 1, 1, 2]))
    def begin_save(self, advance: int) -> None:
        self.step += advance
        save_id = f"{self.life:03d}-{len(self.saves):04d}"
        self.saves.append(Save(self.step, save_id))

    def manifest(self, rank: int, save: Save) -> Manifest:
        data = content(rank, save.save_id)
        record = ObjectRecord(object_name(rank, save.save_id), len(data), 65536, (digest_block(data),), BLOCK_SIZE)
        return Manifest(
            f"step-{save.step}_ckpt", rank, len(self.ranks), save.save_id, self.topology.nodes[rank], (record,)
        )

    def commit_next(self, rank: int) -> Save | None:
        return next((s for s in self.saves if rank not in s.committed | s.given_up), None)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A rank begins to write its part of its next save."""
        ready = [rank for rank in self.ranks if self.idle(rank) and self.commit_next(rank) is not None]
        if ready:
            rank = data.draw(st.sampled_from(ready), label="rank")
            self.begin_commit(rank, self.commit_next(rank))

    def begin_commit(self, rank: int, save: Save | None) -> None:
        assert save is not None
        store, manifest = self.stores[rank], self.manifest(rank, save)

        def write() -> None:
            arena = store.acquire(65536, exact=True)
            arena.buffer[:] = bytes(arena.size)  # what was there is gone from here on
            data = content(rank, save.save_id)
            arena.buffer[: len(data)] = data
            store.commit(manifest, [arena])

        self.do(rank, write, lambda: save.committed.add(rank))

    @rule(data=st.data())
    def give_a_save_up(self, data: st.DataObject) -> None:
        """A rank's save fails."""
        ready = [rank for rank in self.ranks if self.idle(rank) and self.commit_next(rank) is not None]
        if ready:
            rank = data.draw(st.sampled_from(ready), label="rank")
            save = self.commit_next(rank)
            assert save is not None
            save.given_up.add(rank)

    def current(self, rank: int) -> Save | None:
        """The save that a rank's queue is at: the first of which it has not heard the verdict."""
        at = self.learned[rank]
        return self.saves[at] if at < len(self.saves) else None

    @rule(data=st.data(), late=st.booleans())
    def copy(self, data: st.DataObject, late: bool) -> None:
        """A rank pushes its part to one that should hold a copy. A push that was given up may arrive late."""
        pairs = []
        for rank, holder in self.pairs():
            save = self.current(rank)
            if late and self.learned[rank]:
                save = self.saves[self.learned[rank] - 1]
            if save is not None and self.can_copy(save, rank, holder):
                pairs.append((save, rank, holder))
        if pairs:
            save, rank, holder = data.draw(st.sampled_from(pairs), label="copy")
            self.begin_copy(save, rank, holder)

    def pairs(self) -> Iterable[tuple[int, int]]:
        return ((rank, holder) for rank in self.ranks for holder in self.strategy.copies_of(rank, self.topology))

    def can_copy(self, save: Save, rank: int, holder: int) -> bool:
        if not (self.idle(rank) and self.idle(holder)) or rank not in save.committed or (rank, holder) in save.copied:
            return False
        return self.stores[rank].find(save.save_id, rank) is not None

    def begin_copy(self, save: Save, rank: int, holder: int) -> None:
        source, target, manifest = self.stores[rank], self.stores[holder], self.manifest(rank, save)
        name = manifest.objects[0].name
        with source.open_object(manifest.version, name) as view:
            data = bytes(view)
        assert data == content(rank, save.save_id), "a part that is pushed has changed"

        def receive() -> None:
            held = target.find(save.save_id, rank)
            if held is not None and held.manifest is not None:
                return
            incoming = IncomingCopy(target, manifest)
            incoming.buffers[0][:] = bytes(len(data))
            incoming.buffers[0][:] = data
            incoming.commit()

        # It counts only while its sender waits for it.
        counts = save is self.current(rank)
        self.do(holder, receive, lambda: save.copied.add((rank, holder)) if counts else None)

    # ---- verdicts ------------------------------------------------------------------------------------------

    @rule(give_up=st.booleans())
    def agree(self, give_up: bool) -> None:
        """The ranks vote on the next save: no, if any of them has given up on it."""
        save = next((s for s in self.saves if s.verified is None), None)
        if save is None or any(self.current(rank) is not save for rank in self.ranks):
            return
        if not all(rank in save.committed | save.given_up for rank in self.ranks):
            return
        ready = not save.given_up and save.copied >= set(self.pairs())
        if ready or give_up or save.given_up:
            save.verified = ready
            if ready:
                self.verified = save.save_id

    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        """A rank hears the verdict that it waits for, and prunes."""
        ready = [rank for rank in self.ranks if self.idle(rank) and self.can_learn(rank)]
        if ready:
            self.begin_learn(data.draw(st.sampled_from(ready), label="rank"))

    def can_learn(self, rank: int) -> bool:
        save = self.current(rank)
        return save is not None and save.verified is not None

    def begin_learn(self, rank: int) -> None:
        save, store = self.current(rank), self.stores[rank]
        assert save is not None
        verdict = store.advance if save.verified else store.reject

        def heard() -> None:
            self.learned[rank] += 1

        self.do(rank, lambda: verdict(save.save_id), heard)

    @rule(data=st.data())
    def drop_an_unverified_save(self, data: st.DataObject) -> None:
        """A rank that is short of arenas gives up a save that it has committed, if it has another one."""
        droppable: list[tuple[int, Save]] = []
        for rank in self.ranks:
            if self.idle(rank):
                held = [s for s in self.saves if self.stores[rank].find(s.save_id, rank) is not None]
                droppable += [
                    (rank, s)
                    for s in held
                    if len(held) > 1 and s is not self.current(rank) and not (s.verified and self.has_heard(rank, s))
                ]
        if droppable:
            rank, save = data.draw(st.sampled_from(droppable), label="drop")
            part = self.stores[rank].find(save.save_id, rank)
            assert part is not None
            if save.verified is None:
                save.given_up.add(rank)
            self.do(rank, lambda: self.stores[rank].drop(part))

    def has_heard(self, rank: int, save: Save) -> bool:
        return self.saves.index(save) < self.learned[rank]

    @rule(
        advance=st.sampled_from([0, 1, 1]),
        failing=st.just(-1) | st.integers(-1, 3),
        until=st.sampled_from(["copied", "voted", "heard", "heard"]),
    )
    def save_a_version(self, advance: int, failing: int, until: str) -> None:
        """All of a save in the usual order, since chance alone seldom gets a version that far. One rank may fail."""
        self.begin_save(advance)
        for rank in self.ranks:
            self.finish(rank)
        for save in self.saves:
            for rank in self.ranks:
                if self.runs(rank) and self.commit_next(rank) is save:
                    if rank == failing:
                        save.given_up.add(rank)
                    else:
                        self.begin_commit(rank, save)
                        self.finish(rank)
            if any(self.current(rank) is not save for rank in self.ranks):
                continue
            for rank, holder in self.pairs():
                if self.can_copy(save, rank, holder):
                    self.begin_copy(save, rank, holder)
                    self.finish(holder)
            last = save is self.saves[-1]
            if last and until == "copied":
                return
            self.agree(True)
            if last and until == "voted":
                return
            for rank in self.ranks:
                if self.idle(rank) and self.can_learn(rank):
                    self.begin_learn(rank)
                    self.finish(rank)

    # ---- readers -------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Somebody opens an object of a store, and keeps it open."""
        parts = [(store, part) for rank, store in self.stores.items() if self.idle(rank) for part in store.held()]
        if parts:
            store, part = data.draw(st.sampled_from(parts), label="part")
            stack = ExitStack()
            view = stack.enter_context(store.open_object(part.version, part.names[0]))
            self.readers.append((stack, view, content(part.rank, part.save_id)))

    @precondition(lambda self: self.readers and not self.operations)
    @rule(data=st.data())
    def stop_reading(self, data: st.DataObject) -> None:
        stack, _, _ = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        stack.close()

    # ---- disasters -----------------------------------------------------------------------------------------

    def stop_everything(self) -> None:
        for operation in self.operations.values():
            operation.kill()
        self.operations.clear()
        self.effects.clear()
        for stack, view, _ in self.readers:
            view.release()
            stack.pop_all()  # as in a process that is killed: nothing is put in order
        self.readers.clear()
        for store in self.stores.values():
            store.close()
        self.stores.clear()

    @rule(
        data=st.data(),
        kind=st.sampled_from(["none", "none", "none", "none", "loss", "anew", "restart", "restart"]),
        crash_again=st.integers(0, 12),
    )
    def disaster(self, data: st.DataObject, kind: str, crash_again: int) -> None:
        """One rule for all, or they would come so often that hardly a save got through."""
        if kind == "none":
            return
        if kind == "loss" and len(self.lost) < self.claim:
            self.lose_a_node(data.draw(st.sampled_from(sorted({*self.topology.nodes} - self.lost)), label="node"))
        elif kind == "anew" and not self.lost:
            self.start_anew()
        else:
            self.restart(data, crash_again)

    def lose_a_node(self, node: str) -> None:
        """A node is gone, with all processes and all memory; the others do not know it yet."""
        self.lost.add(node)
        for rank in self.ranks:
            if self.topology.nodes[rank] == node and rank in self.operations:
                self.operations.pop(rank).kill()
                self.effects.pop(rank)
        shutil.rmtree(self.root / node)

    def start_anew(self) -> None:
        """All processes are killed where they stand, and new ones save at once: some before others have started."""
        self.stop_everything()
        self.begin_life()
        for rank in self.ranks:
            self.open_store(rank)

    def restart(self, data: st.DataObject, crash_again: int) -> None:
        """All processes are killed where they stand, and the job recovers. They may be killed doing that, too."""
        self.start_anew()
        self.check()
        for _ in range(crash_again or 10**9):
            if not self.operations:
                break
            rank = data.draw(st.sampled_from(sorted(self.operations)), label="opening")
            self.operations[rank].step()
            self.after_step(rank)
            self.check()
        else:
            self.start_anew()
            for rank in self.ranks:
                self.finish(rank)
        plan = self.plan()
        if plan is None:
            self.lost.clear()
            self.step = 0
            return
        for fetch in plan.fetches:
            store, save = self.stores[fetch.target_rank], Save(plan.version.step, plan.version.save_id)
            part_bytes = content(fetch.part_rank, save.save_id)
            manifest = self.manifest(fetch.part_rank, save)

            def receive(store: RankStore = store, manifest: Manifest = manifest, data: bytes = part_bytes) -> None:
                incoming = IncomingCopy(store, manifest)
                incoming.buffers[0][:] = data
                incoming.commit()

            self.do(fetch.target_rank, receive)
            self.finish(fetch.target_rank)
        for store in self.stores.values():
            useless = _useless(store, plan.version, self.inventories(), f"{self.life:03d}")
            store.drop_before_next_save(useless)
        self.lost.clear()
        self.verified = plan.version.save_id
        self.step = plan.version.step

    # ---- what must hold ------------------------------------------------------------------------------------

    def inventories(self, without: Iterable[str] = ()) -> list[NodeInventory]:
        found = []
        for node in self.topology.node_order:
            base = self.root / node / "job"
            if node in without or not base.exists():
                continue
            parts = []
            for version in list_versions(base):
                manifests, errors = read_local_manifests(base, version)
                assert not errors, errors
                for manifest in manifests:
                    if not has_objects(base, manifest):
                        continue
                    self.check_bytes(base, manifest)
                    parts.append(part_record(manifest))
            found.append(NodeInventory(node, tuple(parts)))
        return found

    def check_bytes(self, base: Path, manifest: Manifest) -> None:
        """What can be seen of a part can be loaded."""
        (record,) = manifest.objects
        data = (base / manifest.version / record.name).read_bytes()[: record.size]
        assert data == content(manifest.rank, manifest.save_id), f"{manifest} has other bytes"

    def plan(self, without: Iterable[str] = ()) -> RecoveryPlan | None:
        return plan_recovery(self.inventories(without), self.topology, strategy=self.strategy)

    @invariant()
    def check(self) -> None:
        for _, view, data in self.readers:
            assert view == data, "an object changed while it was read"
        if not self.verified:
            self.inventories()
            return
        for further in itertools.combinations(sorted({*self.topology.nodes} - self.lost), self.claim - len(self.lost)):
            plan = self.plan(further)
            assert plan is not None, f"nothing is left after losing {further}"
            assert plan.version.save_id >= self.verified, f"{self.verified} is gone after losing {further}"


@pytest.mark.slow
@pytest.mark.timeout(900)  # a failure takes time to be made small
@pytest.mark.skipif(not has_tmpfs(), reason="needs a tmpfs")
class TestPromiseOne(Job.TestCase):
    settings = settings(
        max_examples=round(20 * SAMPLE), stateful_step_count=40, deadline=None, report_multiple_bugs=False
    )
