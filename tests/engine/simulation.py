"""A simulation of rounds, slots and recovery that drives the decisions of `ml_flashpoint.engine.rounds`.

Deterministic: a seed gives a schedule of save calls, commits, pushes, answers and verdicts on 1 to 5 ranks and 1 to 4
nodes, with saves that fail, saves that somebody waits for, on all ranks, or on one where ranks are close, ranks that do
not agree on who writes what, ranks that are ahead of others, processes that stop for a while, messages that are late,
readers, versions that are persisted, a store that cannot be reached, crashes, lost nodes, nodes that come back with old
memory, and jobs that go back to an older version. `World.play` raises `Violation` if a promise is broken.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from ml_flashpoint.engine.rounds import NOTHING, Answer, Fate, Leader, Member, Outcome, Verdict
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.lineage import RunRecord, newest_begun, next_run
from ml_flashpoint.memory.pool import New, SlotRequest, choose, slot_limit
from ml_flashpoint.memory.slot import State
from ml_flashpoint.ranks.retention import Keep, kept

BROKEN = {
    "the round's part is free": "a rank does not retain its part of the round's save",
    "free after the answer": "a rank may reuse its part once it has answered that the part is copied",
    "no verdict rides": "a push does not carry the pusher's verdict",
    "answer at commit": "a rank answers that its part is copied when the part is committed",
    "no slack": "after a round without result the next one begins with the very next save",
    "slack adds up": "a rank that comes too late for a round puts off the next one, from wherever the round had begun",
    "given up for good": "a round that is given up for an explicit save does not go on if that one is lost",
    "greedy slots": "a rank makes more than keep + 1 slots as soon as there is memory",
    "empty first verdict": "the first verdict lists nothing",
    "one try": "the recovered version is retained for one round only",
    "manifest last": "a slot is reused before its manifest is unlinked",
    "no second look": "a reader does not look at the manifest again after it has locked the slot",
    "no lock": "a slot is reused while a reader locks it",
    "one phase": "a run's record counts as soon as one node has it",
    "mixed saves": "a round succeeds if all ranks answer that a part is copied, whichever saves the parts are of",
    "mixed tables": "a round succeeds if all ranks answer that a part is copied, whatever they agreed on",
    "no milestones": "the newest versions are retained, and no milestones",
    "hopeless saves": "a round begins again about an explicit save that a rank has no part of",
    "lost in silence": "a verdict does not say which explicit saves are lost",
    "persisted parts are free": "a slot is reused while it is persisted",
    "due once": "only one verdict names a save that is due to be persisted",
    "due while busy": "a save becomes due to be persisted while rank 0 persists another one",
    "published first": "rank 0 publishes a verdict before it adopts it, and decides again if it fails in between",
}
"""Ways to break one sentence of the rules; the simulation must notice each."""


class Violation(AssertionError):
    """A promise is broken."""


@dataclass(eq=False)
class Slot:
    """A tmpfs file. `manifest` and `content` survive the processes; `save` and `state` are known to the owner only."""

    manifest: SaveId | None = None
    content: tuple[SaveId, int] | None = None
    save: SaveId | None = None
    state: State = State.EMPTY
    locks: int = 0
    readers: int = 0

    def spoil(self) -> None:
        """Lose what was being written."""
        self.manifest = self.content = self.save = None
        self.state = State.EMPTY

    def commit(self, save: SaveId) -> None:
        """Have the part of a save."""
        self.manifest, self.state = save, State.COMMITTED


@dataclass
class Node:
    """Memory of a node: slots by (rank that keeps them, rank whose parts they are for), and the records of runs."""

    slots: dict[tuple[int, int], list[Slot]] = field(default_factory=dict)
    records: dict[int, RunRecord] = field(default_factory=dict)

    def count(self) -> int:
        """Return the number of slots."""
        return sum(map(len, self.slots.values()))


@dataclass
class Process:
    """What dies with a rank's process."""

    member: Member
    calls: int = 0
    published: bool = False
    acknowledged: set[int] = field(default_factory=set)
    push: tuple[int, Slot] | None = None
    staging: Slot | None = None
    queue: list[Slot] = field(default_factory=list)
    waiting: SaveId | None = None
    """An explicit save that has no slot yet."""
    blocked: SaveId | None = None
    """An explicit save that the program waits for."""
    deadline: int = 0
    """Until when the program waits for a slot, or for a save."""
    must_end: bool = False
    """It is a violation if the program waits as long as that."""
    pending: dict[SaveId, bool] = field(default_factory=dict)
    """Saves whose fate is open; True for explicit ones."""
    superseded: set[SaveId] = field(default_factory=set)
    heard: SaveId = NOTHING
    """The newest save that this rank knows to be due to be persisted."""
    persisting: SaveId | None = None
    persisted: bool = False


class CarelessLeader(Leader):
    """A leader that leaves a sentence out, which `broken` is the name of."""

    broken = ""

    def decide(self, answers: Iterable[Answer], **how: Any) -> Verdict | None:
        found = [each for each in answers if each.number == self.member.verdict.number]
        if self.broken == "mixed saves" and found and all(each.outcome is Outcome.COPIED for each in found):
            newest = max(each.save for each in found)
            found = [each._replace(save=newest) for each in found]
        if self.broken == "mixed tables":
            found = [each._replace(table="") for each in found]
        how["persister_is_busy"] &= self.broken != "due while busy"
        if self.broken == "slack adds up":
            self.offset = max(self.offset, self.slack)
        if self.broken == "given up for good":
            self.given_up = NOTHING
        verdict = super().decide(found, **how)
        if verdict is None:
            return None
        if self.broken == "hopeless saves":
            self.lost -= set(self.member.explicit)
            waited = [save for save in self.member.explicit if save > verdict.newest]
            verdict = verdict._replace(lost=(), first=waited[-1] if waited else verdict.first)
        if self.broken == "no milestones":
            verdict = verdict._replace(verified=verdict.verified[-self.member.keep.newest :])
        if self.broken == "one try":
            verdict = verdict._replace(recovered=None)
        if self.broken == "lost in silence":
            verdict = verdict._replace(lost=())
        if self.broken == "due once" and verdict.persist == self.member.verdict.persist:
            verdict = verdict._replace(persist=None)
        return verdict


class World:
    """A job, its nodes and what happens to them.

    Args:
        seed: decides everything.
        broken: a key of `BROKEN`, or "".
    """

    def __init__(self, seed: int, broken: str = "") -> None:
        self.random = rng = random.Random(seed)
        self.broken, self.now, self.called, self.seen = broken, 0, 0, Counter[str]()
        alone = not broken and rng.random() < 0.1
        self.ranks = 1 if alone else rng.randint(2, 5)
        self.nodes = 1 if alone else min(rng.randint(2, 4), self.ranks)
        self.home = [rank * self.nodes // self.ranks for rank in range(self.ranks)]
        self.holders = self._holders()
        self.skew, self.stride = rng.choice([1, 2, 3, 8]), rng.choice([1, 10])
        self.stalls, self.second = rng.choice([0.0, 0.0, 0.001]), rng.choice([1_000, 10_000])
        every = rng.choice([None, None, 2, 3])
        self.keep = Keep(rng.randint(1, 3 if every is None else 2), every and every * self.stride, rng.randint(1, 2))
        self.persist_every = rng.choice([0, 1, 3]) * self.stride
        self.pace = rng.choice([0.5, 0.5, 0.02])
        self.extra = rng.randint(0, 3 if self.persist_every else 2)
        self.explicit_every = rng.choice([0, 0, 1, 3, 7])
        one = [rng.randrange(self.ranks)] if self.skew < 3 else []
        self.blocked_ranks = rng.choice([[], range(self.ranks), one])
        held = Counter(self.home[holder] for holders in self.holders for holder in holders)
        own = Counter(self.home)
        self.room = [
            (self.keep.versions + 1) * (own[node] + held[node]) + rng.randint(0, 2) for node in range(self.nodes)
        ]
        self.memory = [Node() for _ in range(self.nodes)]
        self.parked: dict[int, Node] = {}
        self.faults, self.store_is_up, self.last_call = True, True, 10**9
        self.acts: list[tuple[Callable[..., None], tuple[int, ...]]] = []
        self.weights: list[float] = []
        self.known = NOTHING  # the newest save that any rank knew as verified
        self.gone_back: tuple[int, SaveId] | None = None
        self.fragile = False  # a node was lost, and what was recovered has not all its copies yet
        self.patience = 1000
        self.calm_after = 10**9
        """The last call that some rank may miss."""
        self.tables: dict[SaveId, dict[int, str]] = {}
        self.durable: dict[SaveId, dict[int, tuple[SaveId, int]]] = {}
        self.completed = 0
        self.readers: list[tuple[int, Slot, SaveId, int, bool]] = []
        self.stopped: dict[int, float] = {}
        """Ranks whose processes are stopped, and until when."""
        self.processes: list[Process] | None = None
        self.changed = True
        self.opening: Iterator[None] | None = self.open()

    def _holders(self) -> list[list[int]]:
        rng, nodes = self.random, self.nodes
        copies = rng.randint(1, min(2, nodes - 1)) if nodes > 1 else 0
        if nodes > 1 and nodes % 2 == 0 and rng.random() < 0.5:
            of = [[home ^ 1] for home in self.home]
        else:
            of = [[(home + 1 + i) % nodes for i in range(copies)] for home in self.home]
        on = [[rank for rank in range(self.ranks) if self.home[rank] == node] for node in range(nodes)]
        return [[on[node][rank % len(on[node])] for node in of[rank]] for rank in range(self.ranks)]

    def fails(self, probability: float = 0.03) -> bool:
        """Return True if something that can fail does."""
        return self.faults and self.random.random() < probability

    # ---- memory -------------------------------------------------------------------------------------------

    def slots(self, keeper: int, of: int) -> list[Slot]:
        """Return the slots that a rank keeps for the parts of a rank."""
        return self.memory[self.home[keeper]].slots.setdefault((keeper, of), [])

    def part(self, rank: int, save: SaveId | None) -> Slot | None:
        """Return the slot that has, or will have, a rank's own part of a save."""
        return next((slot for slot in self.slots(rank, rank) if save is not None and slot.save == save), None)

    def take(self, keeper: int, of: int, request: SlotRequest, *, extra: int = 0) -> Slot | None:
        """Return a slot to write to: a free one, longest unused first, or a new one."""
        slots = self.slots(keeper, of)
        grows = request.may_grow or (extra > 0 and self.broken == "greedy slots")
        limit = slot_limit(self.keep.versions, may_grow=grows, extra=extra)
        node = self.memory[self.home[keeper]]
        room = len(slots) < limit and node.count() < self.room[self.home[keeper]]
        locked = [slot for slot in slots if slot.locks and self.broken != "no lock"]
        locked += [slot for slot in slots if slot.readers and self.broken != "persisted parts are free"]
        slot = choose(slots, request, locked, may_make=room)
        if isinstance(slot, New):
            slots.append(slot := Slot())
        if slot is None:
            return None
        if keeper == of and slot.save is not None and self.processes is not None:
            self.processes[of].member.fail(slot.save)
        if self.broken != "manifest last":
            slot.manifest = None
        slot.content, slot.save, slot.state = None, request.save, State.WRITING
        slots.remove(slot)
        slots.append(slot)
        self.changed = True
        return slot

    # ---- the training thread: it waits for nobody -----------------------------------------------------------

    def call(self, rank: int) -> None:
        """Have the program save, unless it is busy or too far ahead of the others."""
        assert self.processes is not None
        mine = self.processes[rank]
        if mine.calls >= self.last_call or mine.staging or mine.waiting:
            return
        if mine.blocked is not None:
            if mine.blocked in mine.pending and not self.is_over(mine):
                return
            mine.blocked = None
        running = [other for other in range(self.ranks) if self.stopped.get(other, 0) < math.inf]
        slowest = min(self.processes[other].calls for other in running)
        if mine.calls >= slowest + self.skew:
            return
        mine.calls += 1
        if self.fails(0.015):
            return  # the program misses the call on this rank
        save, is_last = self.save_of(mine.calls), mine.calls == self.last_call
        is_explicit = is_last or (self.explicit_every > 0 and mine.calls % self.explicit_every == 0)
        table = str(rank) if self.fails(0.01) else ""
        self.called = self.now if rank == 0 else self.called
        mine.member.call(save, explicit=is_explicit, table=table)
        mine.pending[save] = is_explicit
        self.tables.setdefault(save, {})[rank] = table
        if is_explicit:
            mine.blocked = save if rank in self.blocked_ranks else None
            mine.must_end = mine.calls > self.calm_after
            mine.deadline = self.now + (50_000 if mine.must_end else self.patience)
        if self.fails(0.015) or (is_explicit and not is_last and self.random.random() < 0.02):
            mine.member.fail(save)
            mine.pending.pop(save)
            return
        mine.waiting = save if is_explicit else None
        self.end_pending(mine)
        self.begin(rank, save)

    def is_over(self, mine: Process) -> bool:
        """Return True if the program has waited up to its deadline."""
        if self.now > mine.deadline and mine.must_end:
            raise Violation(f"a program waited for {mine.blocked or mine.waiting} in vain")
        return self.now > mine.deadline

    def begin(self, rank: int, save: SaveId) -> None:
        """Take a slot for a save, if there is one."""
        assert self.processes is not None
        mine = self.processes[rank]
        request = mine.member.request(save)
        if self.broken == "the round's part is free":
            request = replace(request, retained=mine.member.verdict.retained)
        if self.broken == "free after the answer" and mine.member.answer and mine.member.target:
            request = replace(request, retained=set(request.retained) - {mine.member.target})
        slot = self.take(rank, rank, request, extra=self.extra)
        if slot is not None:
            mine.staging, mine.waiting = slot, None
        elif mine.waiting is None:
            mine.member.fail(save, late=1)
            mine.pending.pop(save, None)
            self.seen["saves without a slot"] += 1

    def stage(self, rank: int) -> None:
        """End a copy into a slot; or look again for a slot for an explicit save."""
        assert self.processes is not None
        mine = self.processes[rank]
        if mine.waiting and not mine.staging:
            save = mine.waiting
            if save not in mine.pending or self.is_over(mine):
                mine.waiting = None  # superseded meanwhile, or at its deadline
            self.begin(rank, save)
        elif mine.staging:
            slot, mine.staging = mine.staging, None
            if self.fails():
                self.give_up(rank, slot)
            else:
                assert slot.save is not None
                slot.content = (slot.save, rank)
                mine.queue.append(slot)

    def give_up(self, rank: int, slot: Slot) -> None:
        """Have a save fail after it has taken a slot."""
        assert self.processes is not None
        assert slot.save is not None
        self.processes[rank].member.fail(slot.save)
        self.processes[rank].pending.pop(slot.save, None)
        slot.spoil()

    # ---- executors and the board's threads --------------------------------------------------------------------

    def commit(self, rank: int) -> None:
        """Commit a part."""
        assert self.processes is not None
        mine = self.processes[rank]
        if mine.queue:
            slot = mine.queue.pop(0)
            if self.fails():
                self.give_up(rank, slot)
            else:
                assert slot.save is not None
                slot.commit(slot.save)
                mine.member.parts[slot.save] = True
                self.changed = True

    def copy(self, rank: int) -> None:
        """Go on with the push of the round's part: find one holder, or end the push to one."""
        assert self.processes is not None
        mine, member = self.processes[rank], self.processes[rank].member
        slot = self.part(rank, member.target)
        if slot is None or member.target is None or slot.manifest != member.target or member.answer:
            return
        todo = [holder for holder in self.holders[rank] if holder not in mine.acknowledged]
        if not todo or self.broken == "answer at commit":
            member.end(member.target, Outcome.COPIED)
        elif mine.push is not None:
            holder, there = mine.push
            if holder in self.stopped:
                if self.random.random() < 0.01:  # its deadline
                    member.end(member.target, Outcome.UNCOPIED)
                return
            mine.push = None
            if self.fails():
                there.spoil()
                return
            there.content, self.changed = slot.content, True
            there.commit(member.target)
            mine.acknowledged.add(holder)
        elif self.fails():
            member.end(member.target, self.random.choice([Outcome.UNCOPIED, Outcome.LOST]))
        elif todo[0] not in self.stopped:
            self.offer(rank, todo[0], member.target)

    def offer(self, rank: int, holder: int, save: SaveId) -> None:
        """Have a holder look for a slot for a copy."""
        assert self.processes is not None
        mine, theirs = self.processes[rank], self.processes[holder]
        if self.broken != "no verdict rides":
            self.adopt(holder, mine.member.verdict)
        if any(slot.manifest == save for slot in self.slots(holder, rank)):
            mine.acknowledged.add(holder)
            return
        retained = theirs.member.verdict.retained
        slot = self.take(holder, rank, SlotRequest(save, retained))
        if slot is not None:
            mine.push = (holder, slot)

    def board(self, rank: int) -> None:
        """Publish a rank's answer, or else look for the next verdict."""
        assert self.processes is not None
        mine = self.processes[rank]
        if not self.store_is_up:
            return
        if mine.member.answer and not mine.published:
            answer = mine.member.answer._replace(late=0) if self.broken == "no slack" else mine.member.answer
            self.answers[rank] = Answer.parsed(json.loads(json.dumps(answer)))
            mine.published = True
        else:
            self.adopt(rank, self.published)

    def adopt(self, rank: int, verdict: Verdict) -> None:
        """Have a rank hear of a verdict."""
        assert self.processes is not None
        mine = self.processes[rank]
        if not mine.member.adopt(verdict):
            return
        if self.heard.setdefault(verdict.number, verdict) != verdict:
            raise Violation(f"ranks have heard {verdict} and {self.heard[verdict.number]}")
        self.end_pending(mine)
        if verdict.persist is not None and verdict.persist > mine.heard:
            self.begin_to_persist(rank, verdict.persist)
        self.changed = True
        self.known = max(self.known, verdict.newest)
        if mine.push:
            mine.push[1].spoil()
        mine.acknowledged, mine.push, mine.published = set(), None, False
        self.seen["learned of a round too late"] += mine.member.answer is not None

    def end_pending(self, mine: Process) -> None:
        """End what the program waits for, of saves that are verified or superseded."""
        verdict = mine.member.verdict
        for save, is_explicit in list(mine.pending.items()):
            fate = verdict.fate(save, explicit=is_explicit)
            if fate is not Fate.OPEN:
                del mine.pending[save]
            if fate is Fate.SUPERSEDED:
                mine.superseded.add(save)
        if mine.superseded.intersection(verdict.verified):
            raise Violation(f"a rank took a save for superseded that is verified: {verdict}")

    def lead(self) -> None:
        """Have rank 0 publish what it has decided, or else decide. In between, the store may fail."""
        assert self.processes is not None
        if not self.store_is_up:
            return
        if self.published.number < self.verdict.number:
            self.published = Verdict.parsed(json.loads(json.dumps(self.verdict)))
            return
        is_busy = self.processes[0].persisting is not None
        since_s = math.inf if self.random.random() < 0.5 else 0.0
        idle_s = (self.now - self.called) / self.second
        verdict = self.leader.decide(self.answers.values(), since_s=since_s, idle_s=idle_s, persister_is_busy=is_busy)
        if verdict is None:
            return
        if self.broken == "published first" and self.random.random() < 0.5:
            self.published = verdict
            return
        is_success = verdict.total > self.verdict.total
        self.seen["rounds verified" if is_success else "rounds without result"] += 1
        if is_success:
            self.fragile, self.changed = False, True
            self.check_listed(verdict)
        self.verdict = verdict
        self.adopt(0, verdict)

    def is_mixed(self, save: SaveId) -> bool:
        """Return True if the ranks have not written a save by one table."""
        return len(set(self.tables[save].values())) > 1

    def check_listed(self, verdict: Verdict) -> None:
        """Check that what a verdict lists is what it must list, and that all ranks know what it says no more."""
        assert self.processes is not None
        if self.is_mixed(verdict.newest):
            raise Violation(f"{verdict.newest} was written by {self.tables[verdict.newest]}")
        self.line.append(verdict.newest)
        every = self.keep.every_n_steps
        older = self.line[: -self.keep.newest]
        wanted = [save for save in older if every and save.step % every == 0][-self.keep.milestones :]
        if list(verdict.verified) != wanted + self.line[-self.keep.newest :]:
            raise Violation(f"{verdict.verified} stay of {self.line}")
        persist = self.verdict.persist
        if persist is not None and any(process.heard < persist for process in self.processes):
            raise Violation(f"some rank does not know that {persist} is due to be persisted")

    # ---- persistence: it reads slots, and writes where memory does not matter ------------------------------------

    def begin_to_persist(self, rank: int, save: SaveId) -> None:
        """Have a rank begin to read its part of a save, in place of an earlier one."""
        assert self.processes is not None
        mine = self.processes[rank]
        self.end_to_persist(rank)
        mine.heard = save
        slot = self.part(rank, save)
        if slot is not None and slot.manifest == save:
            slot.readers += 1
            mine.persisting, mine.persisted = save, False
        else:
            self.seen["parts that were gone before they were persisted"] += 1

    def end_to_persist(self, rank: int) -> None:
        """Have a rank stop to persist."""
        assert self.processes is not None
        mine = self.processes[rank]
        slot = self.part(rank, mine.persisting)
        if mine.persisting is not None and not mine.persisted and slot is not None:
            slot.readers -= 1
        mine.persisting = None

    def persist(self, rank: int) -> None:
        """Have a rank write its part; rank 0 then waits for the others."""
        assert self.processes is not None
        mine, save = self.processes[rank], self.processes[rank].persisting
        if save is None or self.random.random() > self.pace:
            return
        parts = self.durable.setdefault(save, {})
        if not mine.persisted:
            slot = self.part(rank, save)
            if slot is None or slot.content != (save, rank):
                raise Violation(f"rank {rank} persisted {slot and slot.content} for {save}")
            slot.readers -= 1
            mine.persisted = True
            if self.fails():
                mine.persisting = None
                return
            parts[rank] = slot.content
        others = [other for each, other in enumerate(self.processes) if each not in parts]
        has_failed = any(other.heard >= save and other.persisting != save for other in others)
        if rank != 0 or self.fails(0.1) or has_failed:
            mine.persisting = None
        elif len(parts) == self.ranks:
            mine.persisting = None
            self.completed += 1
            self.seen["versions persisted"] += 1

    def save_of(self, call: int) -> SaveId:
        """Return the save of the n-th call of this run."""
        return SaveId(self.run, self.origin.step + call * self.stride)

    # ---- recovery -----------------------------------------------------------------------------------------

    def parts(self) -> dict[SaveId, dict[int, set[int]]]:
        """Return the nodes on which each rank's part of each version is, and check all bytes."""
        found: dict[SaveId, dict[int, set[int]]] = {}
        for k, node in enumerate(self.memory):
            for (_, of), slots in node.slots.items():
                for slot in slots:
                    if slot.manifest:
                        found.setdefault(slot.manifest, {}).setdefault(of, set()).add(k)
                        if slot.content != (slot.manifest, of):
                            raise Violation(f"the manifest of {slot.manifest} rank {of} has bytes of {slot.content}")
        return found

    def complete(self, lost: int | None, found: dict[SaveId, dict[int, set[int]]]) -> list[SaveId]:
        """Return the versions that exist if a node is lost, newest first."""
        nodes = [node for k, node in enumerate(self.memory) if k != lost]
        records = [record for node in nodes for record in node.records.values()]
        if self.broken == "one phase":
            records = [replace(record, begun=True) for record in records]
        newest, gone = newest_begun(records), set() if lost is None else {lost}
        whole = [save for save, by in found.items() if len(by) == self.ranks and all(at - gone for at in by.values())]
        whole = [save for save in whole if not self.is_mixed(save)]
        return sorted((save for save in whole if newest is None or newest.has(save)), reverse=True)

    def has_all_copies(self, save: SaveId) -> bool:
        """Return True if every rank has its part of a save, and every holder its copy."""
        return all(
            any(slot.manifest == save for slot in self.slots(keeper, rank))
            for rank in range(self.ranks)
            for keeper in (rank, *self.holders[rank])
        )

    def open(self, back_to: SaveId | None = None) -> Iterator[None]:
        """Recover and begin a run; all ranks stand still. A crash may come at every yield."""
        there = self.complete(None, self.parts())
        chosen = back_to or (there[0] if there else NOTHING)
        listed = [save for save in reversed(there) if save <= chosen and self.has_all_copies(save)]
        verified = tuple(kept(listed, self.keep))
        for rank in range(self.ranks):
            yield from self.fetch(rank, chosen, verified)
        found = [slot.manifest for k in self.memory for each in k.slots.values() for slot in each if slot.manifest]
        records = [record for node in self.memory for record in node.records.values()]
        record = next_run(records, found, None if chosen == NOTHING else chosen)
        self.run = run = record.run
        for has_begun in (False, True):
            for node in self.random.sample(self.memory, self.nodes):
                node.records[run] = replace(record, begun=has_begun)
                self.changed = True
                if back_to and has_begun:
                    self.known = chosen
                yield
        self.origin = chosen
        if back_to:
            self.gone_back, self.known = (run, chosen), chosen
        if chosen in verified or chosen == NOTHING:
            verdict = Verdict(0, verified, SaveId(run, 0))
        else:
            verdict = Verdict(0, verified, chosen, recovered=None if self.broken == "one try" else chosen)
        if self.broken == "empty first verdict":
            verdict = Verdict(0, (), SaveId(run, 0))
        self.start(verdict)

    def fetch(self, rank: int, chosen: SaveId, verified: tuple[SaveId, ...]) -> Iterator[None]:
        """Have a rank fetch its part of the version that is recovered."""
        if chosen == NOTHING or any(slot.manifest == chosen for slot in self.slots(rank, rank)):
            return
        source = next(
            slot
            for node in self.memory
            for (_, of), slots in node.slots.items()
            for slot in slots
            if of == rank and slot.manifest == chosen
        )
        request = SlotRequest(chosen, {chosen, *verified})
        while (slot := self.take(rank, rank, request)) is None:
            self.read()  # a reader locks the slot
            yield
        yield
        slot.content, self.changed = source.content, True
        slot.commit(chosen)
        yield

    def start(self, verdict: Verdict) -> None:
        """Begin to train."""
        self.verdict = self.published = verdict  # the newest one of rank 0, and the newest one in the store
        self.heard = {verdict.number: verdict}
        self.answers, self.line = dict[int, Answer](), list(verdict.verified)
        self.processes = [Process(Member(verdict, self.keep)) for _ in range(self.ranks)]
        kind = CarelessLeader if self.broken else Leader
        self.leader = kind(self.processes[0].member, self.ranks, self.persist_every)
        if isinstance(self.leader, CarelessLeader):
            self.leader.broken = self.broken
        self.known = max(self.known, verdict.newest)
        self.changed = True

    def crash(self, lost: int | None = None) -> None:
        """End all processes. One node may be lost, be replaced, or be the old one that was replaced before."""
        self.seen["crashes" if lost is None else "lost nodes"] += 1
        self.processes, self.stopped = None, {}
        if lost is not None:
            old, self.memory[lost] = self.memory[lost], self.parked.pop(lost, Node())
            self.readers = [reader for reader in self.readers if reader[0] != lost]
            if self.random.random() < 0.5:
                self.parked[lost] = old
                for slot in (slot for slots in old.slots.values() for slot in slots):
                    slot.locks = 0
            self.fragile = True
        for node in (*self.memory, *self.parked.values()):
            for slot in (slot for slots in node.slots.values() for slot in slots):
                slot.save = slot.manifest
                slot.state = State.COMMITTED if slot.manifest else State.EMPTY
                slot.readers = 0
        self.changed = True
        self.check()
        self.opening = self.open()

    def go_back(self) -> None:
        """Restart the job from an older version that has all its copies."""
        there = [save for save in self.complete(None, self.parts()) if self.has_all_copies(save)]
        if there and not self.fragile:
            self.seen["went back"] += 1
            self.crash()
            self.opening = self.open(there[-1])

    # ---- readers and checks -----------------------------------------------------------------------------------

    def read(self) -> None:
        """Go on with what processes outside the job do: read a manifest, lock the slot, look again, read, unlock."""
        if len(self.readers) < 2:
            k = self.random.randrange(self.nodes)
            by = self.memory[k].slots.items()
            there = [(slot, of) for (_, of), slots in by for slot in slots if slot.manifest]
            if there:
                slot, of = self.random.choice(there)
                assert slot.manifest is not None
                self.readers.append((k, slot, slot.manifest, of, False))
            return
        k, slot, save, of, locked = self.readers.pop(0)
        if locked:
            if slot.content != (save, of):
                raise Violation(f"a reader of {save} rank {of} got bytes of {slot.content}")
            slot.locks -= 1
        elif slot.manifest == save or self.broken == "no second look":
            slot.locks += 1
            self.readers.append((k, slot, save, of, True))

    def check(self) -> None:
        """Check that every loss of one node at this instant leaves what anybody knows as verified, or newer."""
        if not self.changed:
            return
        self.changed = False
        found = self.parts()
        alone = self.fragile or self.nodes == 1
        for lost in (None,) if alone else (None, *range(self.nodes)):
            there = self.complete(lost, found)
            best = there[0] if there else NOTHING
            if best < self.known:
                raise Violation(f"{self.known} is known as verified; without node {lost} there is {best}")
            if not self.fragile and self.processes is not None and not set(self.verdict.verified) <= set(there):
                raise Violation(f"{self.verdict.verified} are listed; without node {lost} there are {there}")
            if self.gone_back and best.run < self.gone_back[0] and best > self.gone_back[1]:
                raise Violation(f"gone back to {self.gone_back[1]}, and {best} is preferred")
        for k, node in enumerate(self.memory):
            for (keeper, of), slots in node.slots.items():
                most = self.keep.versions + 1 + (self.extra if keeper == of else 0)
                if len(slots) > most:
                    raise Violation(f"{len(slots)} slots of rank {keeper} for rank {of}")
            if node.count() > self.room[k]:
                raise Violation(f"node {k} has {node.count()} slots")

    # ---- schedules ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Have one thing happen."""
        self.now += 1
        rng = self.random
        if self.opening is not None and next(self.opening, self) is self:
            self.opening = None
        if self.faults and rng.random() < (0.004 if self.opening is None else 0.04):
            if self.processes is None or rng.random() < 0.6:
                kept = self.fragile or self.nodes == 1 or rng.random() < 0.5
                self.crash(None if kept else rng.choice([*range(self.nodes), *self.parked, *self.parked]))
            else:
                self.go_back()
        if self.faults and rng.random() < 0.02:
            self.store_is_up = not self.store_is_up
        if self.processes is not None and self.opening is None:
            self._stop_some()
            act, arguments = self._next_act()
            if not self.stopped.keys() & ({0} if act == self.lead else set(arguments)):
                act(*arguments)
        self.check()

    def _stop_some(self) -> None:
        """Have a process stop for a while, and others go on."""
        if self.stopped:
            self.stopped = {rank: until for rank, until in self.stopped.items() if until > self.now}
        if self.stalls and self.random.random() < self.stalls:
            rank = self.random.choice([0, self.random.randrange(self.ranks)])
            self.stopped.setdefault(rank, self.now + self.random.randint(50, 1500))

    def _next_act(self) -> tuple[Callable[..., None], tuple[int, ...]]:
        if not self.acts:
            each: tuple[Callable[..., None], ...] = (self.call, self.stage, self.commit, self.copy, self.board)
            each += (self.persist,) if self.persist_every else ()
            self.acts = [
                (self.lead, ()),
                (self.read, ()),
                *((act, (rank,)) for act in each for rank in range(self.ranks)),
            ]
            # Where memory is short, a round may wait for a slot that is read for the durable store.
            pace = [1.0 if act == self.persist else self.random.choice([0.1, 0.3, 1.0, 1.0]) for act, _ in self.acts]
            self.weights = list(accumulate(pace))
        return self.random.choices(self.acts, cum_weights=self.weights)[0]

    def play(self, *, ticks: int = 1500, quiet: int = 80_000, stop_one: bool = False) -> None:
        """Play a schedule: with faults for a while, then without until all that was promised has come.

        Args:
            ticks: things that happen with faults.
            quiet: things that may happen without faults until one more round is verified.
            stop_one: stop a rank for ever after the faults, and check that the others train on and nothing is lost.

        Raises:
            Violation: a promise is broken.
        """
        for _ in range(ticks):
            self.tick()
        self.faults, self.store_is_up = False, True
        while self.processes is None or self.opening is not None:
            self.tick()
        if stop_one:
            self.stopped[self.random.randrange(self.ranks)] = math.inf
            self.patience = 100
            before = [process.calls for process in self.processes]
            running = [rank for rank in range(self.ranks) if self.stopped.get(rank, 0) < math.inf]
            for number in range(quiet):
                self.tick()
                if number >= 1500 and all(self.processes[rank].calls > before[rank] for rank in running):
                    return
            raise Violation("a rank that has stopped blocks the training of another")
        self.calm_after = max(process.calls for process in self.processes)
        self._expect_progress(quiet)

    def _expect_progress(self, quiet: int) -> None:
        assert self.processes is not None
        rounds, completed = self.keep.versions + 3, self.completed
        for goal in range(self.verdict.total + 1, self.verdict.total + 1 + rounds):
            self._await(lambda goal=goal: self.verdict.total >= goal, quiet, "starved: no round is verified any more")  # type: ignore[misc]
        if self.persist_every:
            self._await(lambda: self.completed > completed, quiet // 2, "no version is persisted")
        self.last_call = max(process.calls for process in self.processes) + 1
        last, members = self.save_of(self.last_call), [process.member for process in self.processes]
        self._await(
            lambda: all(member.verdict.newest == last for member in members), quiet, "the last save is not verified"
        )

    def _await(self, has_come: Callable[[], bool], ticks: int, text: str) -> None:
        for _ in range(ticks):
            if has_come():
                return
            self.tick()
        raise Violation(text)


def find_violation(seeds: range, broken: str = "") -> str | None:
    """Return the first violation in the schedules of some seeds, and its seed; None if there is none."""
    for seed in seeds:
        world = World(seed, broken)
        try:
            world.play(stop_one=seed % 5 == 4)
        except Violation as violation:
            return f"seed {seed}, after {world.now} steps: {violation}"
    return None
