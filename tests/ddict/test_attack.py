"""Managers and the coordinator are stopped for longer than anybody waits, over and over, while handles do whatever they
can do. Nothing that was acknowledged is covered by what was given up, and nothing given up returns."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from ml_flashpoint.ddict import DDict, links
from ml_flashpoint.ddict.errors import DDictError, DDictKeyError, DDictManagerLostError, DDictTimeoutError
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support.dictionaries import DEADLINE_S, Created

SEEDS = "FLASHPOINT_TEST_ATTACK_SEEDS"
HANDLES = 3
KEYS = 5
IMPATIENT_S = 0.25
GIVEN_UP = (DDictTimeoutError, DDictManagerLostError)
FILLERS = {f"filler {number}": number for number in range(500)}  # which take a manager some time


@dataclass(eq=False)
class Write:
    """What a handle wrote, or may have written: ``value`` None deletes the key."""

    checkpoint_id: int
    value: int | None
    is_acknowledged: bool


class Worker:
    """A handle with keys of its own, and the log of what it wrote at each."""

    def __init__(self, handle: DDict, number: int) -> None:
        self.handle = handle
        self.log: dict[str, list[Write]] = {f"{number}-{key}": [] for key in range(KEYS)}

    def patiently(self, call: Callable[[], Any]) -> Any:
        """What a call returns that nothing makes time out."""
        self.handle._access.timeout_s = DEADLINE_S
        try:
            return call()
        finally:
            self.handle._access.timeout_s = IMPATIENT_S

    def write(self, call: Callable[[], Any], value: int | None, *keys: str) -> None:
        """Make a call that writes, and note whether it was acknowledged."""
        write = Write(self.handle.checkpoint_id, value, is_acknowledged=False)
        try:
            call()
            write.is_acknowledged = True
        except DDictKeyError:
            self.check(keys[0], None)
            keys = ()
        finally:
            for key in keys:
                self.log[key].append(dataclasses.replace(write))

    def drop(self, to: int) -> None:
        """It went back."""
        for key, its in self.log.items():
            self.log[key] = [write for write in its if write.checkpoint_id <= to]

    def check(self, key: str, seen: int | None) -> None:
        """What is seen is the last acknowledged write, or one given up since; and stays so."""
        at = self.handle.checkpoint_id
        there = sorted((w for w in self.log[key] if w.checkpoint_id <= at), key=lambda write: write.checkpoint_id)
        may_be: list[Write | None] = []
        for write in reversed(there):
            may_be.append(write)
            if write.is_acknowledged:
                break
        else:
            may_be.append(None)
        found = next((i for i, each in enumerate(may_be) if seen == (each.value if each else None)), None)
        assert found is not None, f"{key} at {at} is {seen}, and not one of {may_be}; all: {self.log[key]}"
        self.log[key] = [write for write in self.log[key] if write not in may_be[:found]]
        if (which := may_be[found]) is not None:
            which.is_acknowledged = True

    def check_all(self) -> None:
        """Read each key on its own, without giving up."""
        for key in self.log:
            self.check(key, self.patiently(lambda key=key: self.handle.get(key)))

    def go_back(self, to: int) -> None:
        """Roll back, and know that it was done even where it is not finished."""
        try:
            self.handle.rollback(to=to)
        finally:
            if self.handle.checkpoint_id == to:
                self.drop(to)


@contextlib.contextmanager
def stalling(pids: list[int], seed: int) -> Iterator[None]:
    """Stop processes for a while, one after the other."""
    its, is_over = random.Random(seed), threading.Event()

    def stall() -> None:
        while not is_over.wait(its.uniform(0.05, 0.5)):
            pid = its.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(its.uniform(0.2, 1.2))
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stall)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def have_connections(dictionary: DDict) -> None:
    """What comes after a request that was given up must not have to wait for a new connection."""

    def look(number: int) -> None:
        with contextlib.suppress(DDictError):
            dictionary.get(f"absent {number}")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(look, range(60)))


def step(worker: Worker, chosen: random.Random, number: int) -> None:
    """Do something, and something else at once where that was given up."""
    handle, key = worker.handle, chosen.choice([*worker.log])
    some, at = chosen.sample([*worker.log], 3), handle.checkpoint_id
    committed = max(0, worker.patiently(lambda: handle.committed_checkpoint_id))
    calls: list[tuple[int, Callable[[], Any]]] = [
        (6, lambda: worker.write(lambda: handle.put(key, number), number, key)),
        (6, lambda: worker.write(lambda: handle.update({**dict.fromkeys(some, number), **FILLERS}), number, *some)),
        (3, lambda: worker.write(lambda: handle.__delitem__(key), None, key)),
        (3, lambda: worker.check(key, handle.get(key))),
        (3, handle.checkpoint),
        (2, lambda: worker.go_back(max(at - chosen.randrange(3), min(committed, at)))),
        (1, lambda: handle.wait_for_commit(at - 1) if at else None),
    ]
    try:
        chosen.choices([call for _, call in calls], [weight for weight, _ in calls])[0]()
    except GIVEN_UP:
        if chosen.random() < 0.6:
            worker.patiently(lambda: worker.write(lambda: handle.put(some[0], -number), -number, some[0]))
        elif worker.patiently(lambda: handle.committed_checkpoint_id) < handle.checkpoint_id:
            worker.patiently(lambda: worker.go_back(handle.checkpoint_id - 1))
        for _ in range(3):
            worker.check_all()
    except InvalidArgumentError:
        assert handle.checkpoint_id <= at


def attack(created: Created, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make so many calls."""
    monkeypatch.setattr(links, "GRACE_S", 0.05)
    chosen, dictionary = random.Random(seed), DDict.attach(created.serialized, timeout=DEADLINE_S)
    dictionary.sync_to_newest_checkpoint()
    workers = [Worker(copy.copy(dictionary), number) for number in range(HANDLES)]
    with stalling([*created.managers, created.pid], seed):
        for number in range(1, 1 + steps):
            if number % 20 == 1:
                have_connections(dictionary)
            step(chosen.choice(workers), chosen, number)
    for worker in workers:
        worker.check_all()
        worker.handle.detach()


@pytest.mark.slow
def test_nothing_acknowledged_is_covered_by_what_was_given_up(
    creator: Created,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attack(creator, 1, 150, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(int(os.environ.get(SEEDS, "10"))))
def test_nothing_acknowledged_is_covered_whatever_is_done(
    creator: Created,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    attack(creator, seed, 2_000, monkeypatch)
