"""Managers in processes of their own, killed at any moment, with their node or without: nothing sealed is lost."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ml_flashpoint.format.errors import DeadlineError
from tests.support import forked
from tests.support.forked import Child
from tests.workers import ddict_snapshots
from tests.workers.ddict_snapshots import NODES, content_at, digest

forked.preload("tests.workers.ddict_snapshots")


class Duo:
    """An owner of snapshots and the holder of its copies."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._stack = ExitStack()
        self.children: dict[int, Child] = {}
        self.saves: dict[int, str] = {}

    def up(self, number: int) -> Child:
        child = self._stack.enter_context(Child(ddict_snapshots.manager, str(self.base), number, label=NODES[number]))
        child.next_report("up")
        self.children[number] = child
        return child

    def kill(self, number: int, *, lose_node: bool) -> None:
        self.children[number].kill()
        (self.base / f"address-{number}").unlink()
        if lose_node:
            shutil.rmtree(self.base / NODES[number])

    def recover(self) -> dict[int, str]:
        """Have the owner recover what it has reported as sealed, as the coordinator would."""
        self.children[0].say("recover", [(attempt, step) for step, attempt in self.saves.items()])
        return self.children[0].next_report("recovered")[1]

    def next_sealed(self) -> int:
        """Wait until the owner has sealed a checkpoint; its id."""
        (_, sealed, attempt) = self.children[0].next_report("sealed")
        self.saves[sealed] = attempt
        return int(sealed)

    def note_sealed(self) -> int:
        """Take note of what the owner has reported; the newest, and the one before it, are to be there."""
        for report in self.children[0].reports:
            if report[0] == "sealed":
                self.saves[report[1]] = report[2]
        self.saves = {step: self.saves[step] for step in sorted(self.saves)[-2:]}
        return max(self.saves)

    def carry(self) -> None:
        """Bring what the owner has told by now to the holder."""
        for report in self.children[0].reports:
            if report[0] == "tell":
                self.children[1].say("drop", *report[1:])

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def duo(tmpfs: Path) -> Iterator[Duo]:
    duo = Duo(tmpfs)
    try:
        yield duo
    finally:
        duo.close()


def kill_again_and_again(duo: Duo, times: int, seed: int) -> None:
    dice = random.Random(seed)
    owner, holder = duo.up(0), duo.up(1)
    expected: dict[int, str] = {}
    sealed = -1
    for _ in range(times):
        owner.say("run", sealed + 1)
        for _ in range(dice.randrange(1, 4)):
            duo.next_sealed()
        # In the middle of something, whatever it is.
        time.sleep(dice.uniform(0, 0.03))
        duo.kill(0, lose_node=dice.random() < 0.5)
        sealed = duo.note_sealed()
        duo.carry()
        if dice.random() < 0.3:
            # What the holder has of them is on its node, too.
            duo.kill(1, lose_node=False)
            holder = duo.up(1)
        owner = duo.up(0)
        found = duo.recover()
        assert found.keys() == duo.saves.keys(), f"checkpoint {sealed} was sealed; {owner.log}"
        for checkpoint_id, content in found.items():
            if checkpoint_id not in expected:
                expected[checkpoint_id] = digest(content_at(checkpoint_id))
            assert content == expected[checkpoint_id]
        if dice.random() < 0.3:
            # The other way round: the holder is lost, and copied to again.
            duo.kill(1, lose_node=True)
            holder = duo.up(1)
            owner.say("replicate")
            owner.next_report("replicated")
    assert sealed > times // 2
    for child in (owner, holder):
        child.say("end")
        child.join()


@pytest.mark.slow
def test_nothing_sealed_is_lost_by_kills(duo: Duo) -> None:
    kill_again_and_again(duo, 6, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(more, marks=pytest.mark.soak) for more in range(1, 5))])
def test_nothing_sealed_is_lost_by_many_kills(duo: Duo, seed: int) -> None:
    kill_again_and_again(duo, 20, seed=100 + seed)


def test_a_holder_that_hangs_costs_no_more_than_the_deadline(duo: Duo) -> None:
    owner, holder = duo.up(0), duo.up(1)
    owner.say("seal", 0, 20.0)
    owner.next_report("sealed", 0)
    holder.stop()
    began = time.monotonic()
    owner.say("seal", 1, 2.0)
    (_, _, error) = owner.next_report("failed", 1)
    assert isinstance(error, DeadlineError)
    assert time.monotonic() - began < 15
    holder.go_on()
    owner.say("seal", 1, 20.0)
    owner.next_report("sealed", 1)


def test_a_seal_goes_on_when_the_holder_comes_back_elsewhere(duo: Duo) -> None:
    owner = duo.up(0)
    duo.up(1)
    owner.say("run", 0)
    while duo.next_sealed() < 2:
        pass
    duo.kill(1, lose_node=True)
    owner.next_report("failed")
    duo.up(1)
    sealed = duo.next_sealed()
    duo.kill(0, lose_node=True)
    assert duo.note_sealed() >= sealed
    duo.up(0)
    found = duo.recover()
    assert found.keys() == duo.saves.keys()
    assert all(content == digest(content_at(checkpoint_id)) for checkpoint_id, content in found.items())
