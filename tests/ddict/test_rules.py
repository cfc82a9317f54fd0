"""A simulation of a dictionary: the rules of the product, told of everything in any order, late, or never.

The network delivers in any order, late, or never; handles give up, go back, leave and are killed; commits are called
off; managers are lost. The coordinator's decisions are the product's (`Rules`), and so are those of managers (`Share`),
and what a handle knows (`Standing`). The processes around them are played.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ml_flashpoint.ddict.client.session import Standing
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictWritesLostError,
    StaleEpochError,
    StaleRequestError,
)
from ml_flashpoint.ddict.manager.shard import Entry, InlineValue
from ml_flashpoint.ddict.manager.share import CutTable, Share
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ddict.rules import Rules, Step
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.requests import Back, Written

SCHEDULES = "FLASHPOINT_TEST_RULES_SCHEDULES"
STEPS = 150
MANAGERS = 2
HANDLES = 2
OPTIONS = Options(1, MANAGERS, working_set_size=3, replication="ring")


@dataclass(eq=False)
class Put:
    """A write on its way, or written."""

    handle: Handle = field(repr=False)
    manager: int
    key: bytes
    whose: asked.Whose
    number: int  # later ones have higher numbers
    given_up_at: int | None = None  # the number of the newest one then
    is_overtaken: bool = False  # by a later request of the handle that was answered, at the same manager


@dataclass(eq=False)
class Handle:
    """A handle, and the writes that were acknowledged and that it has not gone back for."""

    standing: Standing
    acknowledged: set[Put] = field(default_factory=set)
    sent: list[Put] = field(default_factory=list)  # and not answered yet, or given up


class Manager(Share):
    """A manager's share of the keys."""

    def __init__(self) -> None:
        super().__init__(0, OPTIONS, CutTable())

    def answer(self, request: asked.Request) -> dict[str, Any]:
        """Do what the coordinator asks for."""
        if isinstance(request, asked.Begin):
            assert request.epoch <= self.epoch or self.begin(request), "what all go on from is gone"
        elif isinstance(request, asked.Discard):
            self.discard(request)
        elif isinstance(request, asked.Prepare):
            self.prepare(request)
        elif isinstance(request, asked.Seal):
            self.check_epoch(request.epoch)
        else:
            assert isinstance(request, asked.Settle)
            self.settle(request)
        return {"part": (1, 1)}

    def put(self, put: Put) -> int:
        """Write. Returns the cut that it came late for; -1: none."""
        late = self.check_change(put.whose)
        self.shard.put(Entry(put.key, put.whose.checkpoint_id, put.whose.handle, InlineValue(b"")))
        assert not put.is_overtaken, "it takes effect after a later request of its handle"
        return int(late.get("late", -1))


class World:
    """All of it, and what may happen next."""

    def __init__(self, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.rules = Rules(OPTIONS)
        self.managers = [Manager() for _ in range(MANAGERS)]
        self.network: list[Put] = []
        self.written: list[Put] = []
        self.gone: set[bytes] = set()  # keys that must not be seen any more
        self.number = 0
        self.contents: dict[int, set[bytes]] = {0: set()}  # the keys of each cut
        self.there: set[bytes] = set()  # the keys of the one that the epoch began with
        self.under_way: list[Callable[[], None]] = []  # what the coordinator still has to ask, and to note
        self.handles: list[Handle] = []
        for _ in range(HANDLES):
            self.come()

    def step(self) -> None:
        """Let something happen."""
        handle = self.chosen.choice(self.handles)
        happens, takes_handle = self.chosen.choices(
            [
                *((self.send, True), (self.give_up, True), (self.move, True), (self.go_back, True)),
                *((self.die, True), (self.leave, True)),
                *((self.deliver, False), (self.coordinate, False), (self.lose, False)),
            ],
            [12, 1, 6, 2, 0.2, 0.2, 12, 40, 0.5],
        )[0]
        if not takes_handle:
            happens()  # type: ignore[operator]
        elif self.hear(handle) or self.chosen.random() < 0.5:
            happens(handle)  # type: ignore[operator]

    # ---- handles ------------------------------------------------------------------------------------------

    def come(self) -> None:
        """Have another handle, of another process, where all go on from."""
        self.number += 1
        name = f"handle {self.number}"
        self.handles.append(Handle(Standing(name, f"of {name}", max(self.rules.committed, 0), self.rules.epoch)))
        self.rules.processes[f"of {name}"] = "a process"

    def call(self, _: int, request: asked.CatchUp, *, deadline: float) -> Any:
        """Ask the coordinator, as `Links` do."""
        return SimpleNamespace(fields=self.rules.catch_up(request.account))

    def hear(self, handle: Handle) -> bool:
        """Hear of an epoch, and go back if something is lost. Returns true if the handle has lost nothing."""
        standing = handle.standing
        if standing.epoch != self.rules.epoch and self.rules.is_open:
            self.give_up(handle)
            standing.catch_up(self, 0.0)  # type: ignore[arg-type]
            told, standing.untold = standing.untold, None
            gone = {put for put in handle.acknowledged if self.is_lost(put)}
            assert isinstance(told, DDictWritesLostError) or not gone, f"{handle} is not told of {gone}"
            handle.acknowledged -= gone
        if standing.going_back is not None:
            self.roll_back(handle, standing.going_back.to)
            return False
        if standing.lost is not None:
            self.roll_back(handle, standing.lost[1])
            return False
        return standing.epoch == self.rules.epoch

    def send(self, handle: Handle) -> None:
        """Send a write. The first one of a handle makes it one that writes."""
        standing = handle.standing
        if standing.lost is not None or standing.going_back is not None:
            return
        try:
            if not standing.joined:
                self.rules.join(standing.account())
                standing.joined = True
        except (StaleEpochError, StaleRequestError):
            return
        except DDictCheckpointRetiredError:
            standing.checkpoint_id = max(self.rules.committed, 0)
            return
        self.number += 1
        manager, key = self.chosen.randrange(MANAGERS), str(self.number).encode()
        put = Put(handle, manager, key, standing.whose(writes=True), self.number)
        for sent in (handle.sent, self.network, self.written):
            sent.append(put)

    def give_up(self, handle: Handle) -> None:
        """Wait no longer for an answer: the next generation begins."""
        for put in [each for each in handle.sent if each.given_up_at is None]:
            put.given_up_at = self.number
            handle.standing.give_up(put.whose.generation)
            handle.standing.wrote(Written(put.whose.checkpoint_id), put.whose.epoch)

    def move(self, handle: Handle) -> None:
        """Go on to the next checkpoint, when all writes were answered or given up."""
        self.give_up(handle)
        standing = handle.standing
        if standing.lost is not None or standing.going_back is not None:
            return
        if not standing.joined:
            standing.checkpoint_id += 1
            return
        try:
            to = self.rules.begin_move(standing.account(), standing.checkpoint_id + 1, onwards=True)
            if self.rules.keeps_from_moving(standing.handle, to) is not None:
                self.rules.stay(standing.handle)
                return
            standing.checkpoint_id = int(self.rules.move(standing.account(), to, onwards=True)["position"])
        except (StaleEpochError, DDictWritesLostError):
            return  # the loss of what others wrote that are gone is told once, to anybody

    def go_back(self, handle: Handle) -> None:
        """Roll back, now and then below what is committed."""
        at = handle.standing.checkpoint_id
        lowest = self.rules.committed if self.chosen.random() < 0.9 else self.rules.oldest()
        to = max(at - self.chosen.randrange(6), lowest, 0)
        if to <= at and handle.standing.going_back is None and handle.standing.lost is None:
            self.roll_back(handle, to)

    def roll_back(self, handle: Handle, to: int) -> None:
        """Roll back; what cannot be done now is done before whatever the handle does next."""
        self.give_up(handle)
        standing, back = handle.standing, Back(to)
        standing.go_back(back)
        handle.acknowledged = {put for put in handle.acknowledged if put.whose.checkpoint_id <= to}
        try:
            _, told = self.rules.go_back(standing.account().whose, standing.session if standing.joined else "", back)
        except StaleEpochError:
            return
        except DDictCheckpointRetiredError:
            standing.going_back = None
            return
        if told is None:
            self.note_epoch()
        else:
            for manager in self.managers:
                manager.discard(told)
            self.overtake(handle, self.number + 1, range(MANAGERS))
        its = [put for put in self.written if put.handle is handle]
        self.gone |= {put.key for put in its if put.whose.checkpoint_id > to}
        standing.went_back(to, self.rules.state())
        handle.acknowledged = {put for put in handle.acknowledged if not self.is_lost(put)}

    def overtake(self, handle: Handle, number: int, managers: range) -> None:
        """What the handle gave up before it asked for this one must not be written any more, at these managers."""
        for put in self.network:
            is_given_up = put.given_up_at is not None and put.given_up_at < number
            if put.handle is handle and is_given_up and put.manager in managers:
                put.is_overtaken = True

    def die(self, handle: Handle) -> None:
        """Have the process of a handle killed: what it had open is dropped."""
        standing = handle.standing
        writer = self.rules.writers.get(standing.handle)
        settled = max(self.rules.committed, self.rules.committing)
        if writer is not None and writer.position > settled:
            its = [put for put in self.written if put.handle is handle]
            self.gone |= {put.key for put in its if put.whose.checkpoint_id >= writer.position}
        self.rules.killed(standing.session)
        self.handles.remove(handle)
        self.come()

    def leave(self, handle: Handle) -> None:
        """Have a handle leave: what it wrote counts, and a rollback that is not finished is."""
        self.give_up(handle)
        if self.rules.leave(handle.standing.account()) is not None:
            self.note_epoch()
        self.handles.remove(handle)
        self.come()

    # ---- managers -----------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Deliver some message, or lose it."""
        if not self.network:
            return
        put = self.network.pop(self.chosen.randrange(len(self.network)))
        manager, handle = self.managers[put.manager], put.handle
        if put in handle.sent:
            handle.sent.remove(put)
        if self.chosen.random() < 0.1:
            handle.standing.wrote(Written(put.whose.checkpoint_id), put.whose.epoch)
            handle.standing.give_up(put.whose.generation)
            return
        try:
            late = manager.put(put)
        except (StaleRequestError, StaleEpochError, DDictCheckpointRetiredError):
            return
        if put.given_up_at is None:
            handle.standing.wrote(Written(put.whose.checkpoint_id, late), put.whose.epoch)
            if handle.standing.lost is None:
                handle.acknowledged.add(put)
                self.overtake(handle, put.number, range(put.manager, put.manager + 1))

    def lose(self) -> None:
        """Lose a manager: all go on from what is committed."""
        self.number += 1
        self.rules.returned(self.chosen.randrange(MANAGERS), str(self.number))
        self.note_epoch()

    def note_epoch(self) -> None:
        """An epoch has begun: what is not in the cut that it began with is gone."""
        self.there = self.contents[max(self.rules.begins()[0].keep, default=0)]

    def is_lost(self, put: Put) -> bool:
        """Return True if an epoch has begun without a write."""
        return put.whose.epoch < self.rules.epoch and put.key not in self.there

    # ---- the coordinator ----------------------------------------------------------------------------------

    def coordinate(self) -> None:
        """Do the next thing that the rules say, one manager at a time, in any order."""
        if not self.under_way and (step := self.rules.next()) is not None:
            self.ask, answers = self.rules.ask(step), dict[int, dict[str, Any]]()
            self.under_way = [partial(self.tell, each, answers) for each in self.ask.requests]
            self.chosen.shuffle(self.under_way)
            self.under_way.append(lambda: self.have_told([answers[each] for each in self.ask.requests]))
        if self.under_way:
            is_done = True
            try:
                self.under_way.pop(0)()
            except StaleEpochError:  # another one has begun: tried again then
                self.under_way.clear()
                is_done = False
            if not self.under_way:
                self.rules.ended(self.ask, is_done=is_done)

    def tell(self, manager: int, answers: dict[int, dict[str, Any]]) -> None:
        """Ask one manager."""
        answers[manager] = self.managers[manager].answer(self.ask.requests[manager])
        self.ask.heard(manager)

    def have_told(self, answers: list[dict[str, Any]]) -> None:
        """A commit is made of whole steps, and of nothing that was taken back."""
        self.ask.done(answers)
        at, cut = self.rules.committed, self.rules.cut_of(self.rules.committed)
        if self.ask.step is not Step.SEAL or cut in self.contents:
            return
        there = {entry.key for manager in self.managers for entry in manager.table.find(cut).entries}
        self.contents[cut] = there
        assert not there & self.taken_back(), "what was taken back is committed"
        for put in (put for handle in self.handles for put in handle.acknowledged):
            is_in = put.whose.checkpoint_id <= at and put.handle.standing.written.late < cut
            assert put.key in there or not is_in, f"{put} was acknowledged before cut {cut}, which lacks it"

    def taken_back(self) -> set[bytes]:
        """Return the keys that must not be seen any more."""
        return self.gone | {put.key for put in self.written if self.is_lost(put)}

    def check_end(self) -> None:
        """Everything that was acknowledged, and was neither lost nor taken back, is there."""
        for _ in range(10):
            while self.under_way or self.rules.next() is not None:
                self.coordinate()
            for handle in self.handles:
                self.hear(handle)
            while self.network:
                self.deliver()
        assert self.rules.committed == self.rules.target(), "not all is committed that can be"
        for manager in self.managers:
            assert not self.taken_back() & {entry.key for entry in manager.shard.newest()}, "it is back"
        for put in (put for handle in self.handles for put in handle.acknowledged):
            shard = self.managers[put.manager].shard
            assert shard.find(put.key, max(put.whose.checkpoint_id, shard.committed)), f"{put} was acknowledged"


def run(seed: int) -> None:
    """Run one schedule."""
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.check_end()


def test_commits_go_on_when_all_are_taken_back_just_after_a_commit() -> None:
    rules, handle = Rules(OPTIONS), Standing("handle", "session", 0, 0)
    rules.processes["session"] = "a process"
    rules.join(handle.account())

    def carry_out(step: Step) -> None:
        ask = rules.ask(step)
        for manager in ask.requests:
            ask.heard(manager)
        ask.done([{"part": (1, 1)}] * MANAGERS)
        rules.ended(ask, is_done=True)

    def commit(at: int) -> None:
        rules.move(handle.account(), at + 1, onwards=True)
        while rules.committed < at and (step := rules.next()) is not None:
            carry_out(step)
        assert rules.committed == at

    commit(0)
    carry_out(Step.SETTLE)
    commit(1)
    handle.go_back(Back(0))
    rules.go_back(handle.account().whose, handle.session, Back(0))
    carry_out(Step.BEGIN)
    handle.went_back(0, rules.state())
    commit(0)
    commit(1)


@pytest.mark.parametrize("of", range(4))
def test_nothing_acknowledged_is_lost_without_a_word_or_covered(of: int) -> None:
    for seed in range(of * 500, (of + 1) * 500):
        run(seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost_in_many_schedules() -> None:
    for seed in range(2_000, 2_000 + int(os.environ.get(SCHEDULES, "100000"))):
        run(seed)
