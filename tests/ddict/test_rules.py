"""A simulation of the rules by which a handle's requests are in order, and by which it is told what it has lost.

The network delivers in any order, late, or never; handles give up; commits are called off; managers are lost. The rules
are the product's own (`Fence`, `Written`, `Epochs`, `Shard`), the processes around them are played.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest

from ml_flashpoint.ddict.checkpoints.writers import Beginning, Epochs
from ml_flashpoint.ddict.errors import StaleRequestError
from ml_flashpoint.ddict.manager.shard import Entry, InlineValue, Shard
from ml_flashpoint.ddict.wire.fence import Fence
from ml_flashpoint.ddict.wire.written import NOTHING, Written

SCHEDULES = "FLASHPOINT_TEST_RULES_SCHEDULES"
STEPS = 100
MANAGERS = 2
HANDLES = 2

Content = list[list[Entry]]  # of each manager


@dataclass(eq=False)
class Put:
    """A write on its way, or written."""

    handle: Handle
    manager: int
    key: bytes
    checkpoint_id: int
    epoch: int
    generation: int
    number: int  # later ones have higher numbers
    given_up_at: int | None = None  # the number of the newest one then
    is_overtaken: bool = False  # by a later request of the handle that was answered, at the same manager


@dataclass(eq=False)
class Handle:
    """What a handle knows, and the writes that were acknowledged and that it has not gone back for."""

    name: str
    checkpoint_id: int = 0
    epoch: int = 0
    generation: int = 0
    written: Written = NOTHING
    acknowledged: set[Put] = field(default_factory=set)
    sent: list[Put] = field(default_factory=list)  # and not answered yet, or given up


class Manager:
    """A share of the keys."""

    def __init__(self) -> None:
        self.shard, self.fence = Shard(is_final=False), Fence()
        self.epoch, self.cut = 0, (0, -1)
        self.kept: dict[int, list[Entry]] = {}

    def put(self, put: Put) -> int:
        """Write. Returns the cut that it came late for; -1: none."""
        self.fence.hear(put.handle.name, put.generation, self.epoch)
        assert not put.is_overtaken, "it takes effect after a later request of its handle"
        self.shard.put(Entry(put.key, put.checkpoint_id, put.handle.name, InlineValue(b"")))
        return self.cut[0] if put.checkpoint_id <= self.cut[1] else -1

    def begin(self, epoch: int, base: int, cut: int, content: list[Entry]) -> None:
        """Begin an epoch."""
        self.shard.load([(base, content)] if base >= 0 else [])
        self.epoch, self.cut = epoch, (cut, base)
        self.fence.begin(epoch)

    def prepare(self, cut: int, checkpoint_id: int) -> None:
        """Note what belongs to a cut."""
        self.kept[cut] = list(self.shard.entries(checkpoint_id))
        self.cut = cut, checkpoint_id


class World:
    """All of it, and what may happen next."""

    def __init__(self, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.managers = [Manager() for _ in range(MANAGERS)]
        self.handles = [Handle(f"handle {number}") for number in range(HANDLES)]
        self.network: list[Put] = []
        self.written: list[Put] = []
        self.gone: set[bytes] = set()  # keys that a rollback has discarded
        self.epochs = Epochs(MANAGERS)
        self.cut = self.number = 0
        self.committed: tuple[int, int, Content] = (-1, 0, [[] for _ in range(MANAGERS)])
        self.preparing: tuple[int, int, list[int]] | None = None  # cut, checkpoint, managers that are yet to prepare it

    def step(self) -> None:
        """Let something happen."""
        handle, roll = self.chosen.choice(self.handles), self.chosen.random
        happens = self.chosen.choices(
            [self.send, self.deliver, self.give_up, self.move, self.go_back, self.prepare, self.lose, self.begin],
            [6, 6, 1, 2, 2, 5, 1, 3],
        )[0]
        if happens in (self.prepare, self.lose, self.begin, self.deliver):
            happens()  # type: ignore[call-arg]
        elif self.hear(handle) or roll() < 0.5:
            happens(handle)  # type: ignore[call-arg]

    # ---- handles ------------------------------------------------------------------------------------------

    def hear(self, handle: Handle) -> bool:
        """Hear of an epoch, and go back if something is lost. Returns true if the handle has lost nothing."""
        if handle.epoch == self.epochs.present or not self.epochs.is_open:
            return handle.epoch == self.epochs.present
        lost, _ = self.epochs.account(handle.epoch, handle.name, handle.checkpoint_id, handle.written, writes=False)
        base, there = self.epochs.base, self.keys(self.committed[2])
        gone = {put for put in handle.acknowledged if put.key not in there}
        assert lost is not None or not gone, f"{handle} is not told of {gone}"
        handle.epoch, handle.acknowledged = self.epochs.present, handle.acknowledged - gone
        handle.written = Written(min(handle.written.checkpoint, base))
        if lost is not None:
            handle.checkpoint_id = min(handle.checkpoint_id, max(base, 0))
        return lost is None

    def send(self, handle: Handle) -> None:
        """Send a write."""
        self.number += 1
        manager, key = self.chosen.randrange(MANAGERS), str(self.number).encode()
        put = Put(handle, manager, key, handle.checkpoint_id, handle.epoch, handle.generation, self.number)
        handle.sent.append(put)
        self.network.append(put)
        self.written.append(put)

    def give_up(self, handle: Handle) -> None:
        """Wait no longer for an answer: the next generation begins."""
        for put in [each for each in handle.sent if each.given_up_at is None]:
            put.given_up_at = self.number
            handle.generation = max(handle.generation, put.generation + 1)
            handle.written = handle.written.and_also(Written(put.checkpoint_id))

    def move(self, handle: Handle) -> None:
        """Go on to the next checkpoint, when all writes were answered or given up."""
        self.give_up(handle)
        handle.checkpoint_id += 1

    def go_back(self, handle: Handle) -> None:
        """Roll back, not below what is committed."""
        if handle.epoch != self.epochs.present or not self.epochs.is_open:
            return
        self.give_up(handle)
        to = max(handle.checkpoint_id - self.chosen.randrange(6), self.committed[0], 0)
        if to > handle.checkpoint_id:
            return
        handle.generation += 1
        self.call_off(to)
        for manager in self.managers:
            manager.fence.hear(handle.name, handle.generation, self.epochs.present)
            manager.shard.rollback(handle.name, to)
        self.overtake(handle, self.number + 1, range(MANAGERS))
        self.gone |= {put.key for put in self.written if put.handle is handle and put.checkpoint_id > to}
        handle.acknowledged = {put for put in handle.acknowledged if put.checkpoint_id <= to}
        handle.checkpoint_id, handle.written = to, handle.written.back_to(to)

    def overtake(self, handle: Handle, number: int, managers: range) -> None:
        """What the handle gave up before it asked for this one must not be written any more, at these managers."""
        for put in self.network:
            is_given_up = put.given_up_at is not None and put.given_up_at < number
            if put.handle is handle and is_given_up and put.manager in managers:
                put.is_overtaken = True

    # ---- managers -----------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Deliver some message, or lose it."""
        if not self.network:
            return
        put = self.network.pop(self.chosen.randrange(len(self.network)))
        manager, handle = self.managers[put.manager], put.handle
        if put in handle.sent:
            handle.sent.remove(put)
        if put.epoch != manager.epoch or self.chosen.random() < 0.1:
            return
        try:
            late = manager.put(put)
        except StaleRequestError:
            return
        if put.given_up_at is None and put.epoch == handle.epoch:
            handle.acknowledged.add(put)
            handle.written = handle.written.and_also(Written(put.checkpoint_id, late))
            self.overtake(handle, put.number, range(put.manager, put.manager + 1))

    # ---- the coordinator ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Begin a commit, or go on with one."""
        if self.epochs.behind:
            return
        if self.preparing is None:
            whole = min(handle.checkpoint_id for handle in self.handles) - 1
            is_behind = any(handle.epoch != self.epochs.present for handle in self.handles)
            is_late = any(handle.written.late >= self.committed[1] for handle in self.handles)
            if whole < max(self.committed[0], 0) or is_behind or (whole == self.committed[0] and not is_late):
                return
            self.cut += 1
            self.preparing = self.cut, whole, self.chosen.sample(range(MANAGERS), MANAGERS)
        cut, checkpoint_id, missing = self.preparing
        self.managers[missing.pop()].prepare(cut, checkpoint_id)
        if not missing:
            self.committed = checkpoint_id, cut, [manager.kept[cut] for manager in self.managers]
            self.preparing = None
            self.check_steps()

    def call_off(self, to: int) -> None:
        """A handle writes again where a commit is under way."""
        if self.preparing is not None and to <= self.preparing[1]:
            self.preparing = None

    def lose(self) -> None:
        """Lose a manager: all go on from what is committed."""
        base, cut, _ = self.committed
        self.preparing = None
        self.epochs.begin(Beginning(base, base, cut, "a manager was lost"))

    def begin(self) -> None:
        """Have a manager begin the epoch."""
        if self.epochs.behind:
            number = self.chosen.choice(sorted(self.epochs.behind))
            base, _, content = self.committed
            self.managers[number].begin(self.epochs.present, base, self.cut, content[number])
            self.epochs.behind.discard(number)
            self.epochs.is_open = not self.epochs.behind

    # ---- what must hold -----------------------------------------------------------------------------------

    @staticmethod
    def keys(content: Content) -> set[bytes]:
        """All keys of a cut."""
        return {entry.key for entries in content for entry in entries}

    def check_steps(self) -> None:
        """A commit is made of whole steps, and of nothing that was taken back."""
        checkpoint_id, cut, content = self.committed
        there = self.keys(content)
        assert not there & self.gone, "what a rollback has discarded is committed"
        for put in (put for handle in self.handles for put in handle.acknowledged):
            is_in = put.checkpoint_id <= checkpoint_id and put.handle.written.late < cut
            assert put.key in there or not is_in, f"{put} was acknowledged before cut {cut}, which lacks it"

    def check_end(self) -> None:
        """Everything that was acknowledged, and was neither lost nor taken back, is there."""
        while self.epochs.behind:
            self.begin()
        while self.network:
            self.deliver()
        for manager in self.managers:
            assert not self.gone & {entry.key for entry in manager.shard.newest()}, "it is back after a rollback"
        for handle in self.handles:
            self.hear(handle)
            for put in handle.acknowledged:
                shard = self.managers[put.manager].shard
                assert shard.find(put.key, max(put.checkpoint_id, shard.oldest)), f"{put} was acknowledged"


def run(seed: int) -> None:
    """Run one schedule."""
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.check_end()


@pytest.mark.parametrize("of", range(4))
def test_nothing_acknowledged_is_lost_without_a_word_or_covered(of: int) -> None:
    for seed in range(of * 500, (of + 1) * 500):
        run(seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost_in_many_schedules() -> None:
    for seed in range(2_000, 2_000 + int(os.environ.get(SCHEDULES, "100000"))):
        run(seed)
