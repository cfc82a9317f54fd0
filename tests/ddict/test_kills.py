"""Managers and writers that are killed at random points: nothing committed is lost, nothing hangs, nothing stays.

In all some 200 kills. Each dictionary suffers several of them; the writers go on writing meanwhile, and check what they
read, as does the test after each kill.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictWritesLostError,
)
from tests.support.dictionaries import (
    DEADLINE_S,
    await_that,
    files_in,
    is_running,
    kill_manager,
    one_nursery,
    runtime_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_S = 15.0
BIG = 70_000
KEYS = 12


@pytest.fixture(scope="module", autouse=True)
def _nursery_is_kept() -> Iterator[None]:
    with one_nursery():
        yield


class Writer:
    """A thread with a handle that writes the number of its checkpoint to all of its keys, and heeds what it is told."""

    def __init__(self, dictionary: DDict, name: str) -> None:
        self.handle = DDict.attach(dictionary.serialize(), timeout=TIMEOUT_S)
        self.name = name
        self.told = 0
        self.slowest_s = 0.0
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._timed(self._step)
                except DDictWritesLostError as error:
                    self.told += 1
                    assert error.checkpoint_id is not None
                    to = error.checkpoint_id
                    self._timed(lambda: self._go_back(to))
        except BaseException as error:
            self.failure = error

    def _timed(self, call: Any) -> None:
        began = time.monotonic()
        call()
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _step(self) -> None:
        at = self.handle.checkpoint_id
        for number in range(KEYS):
            self.handle[self.name, number] = at
        self.handle[self.name, "big"] = torch.full((BIG,), float(at))
        self.handle.checkpoint()

    def _go_back(self, to: int) -> None:
        while True:
            try:
                if self.handle.checkpoint_id > to:
                    self.handle.rollback(to=to)
                return
            except DDictWritesLostError as error:  # another manager died meanwhile
                assert error.checkpoint_id is not None
                to = error.checkpoint_id

    def end(self) -> None:
        """Stop after the step that is under way; fails if there was an error other than the documented ones."""
        self._stop.set()
        self._thread.join(3 * DEADLINE_S)
        assert not self._thread.is_alive(), "a call hangs"
        if self.failure is not None:
            raise self.failure
        assert self.slowest_s < 20 * TIMEOUT_S


def check_committed(dictionary: DDict, names: list[str], *, at_least: int) -> int:
    """All keys of all writers are at the newest committed checkpoint what was written there. Returns its id."""
    reader = DDict.attach(dictionary.serialize(), timeout=TIMEOUT_S)
    give_up = time.monotonic() + DEADLINE_S
    while True:
        reader.checkpoint_id = max(reader.committed_checkpoint_id, 0)
        try:
            found = {
                name: [reader[name, number] for number in range(KEYS)]
                + [int(value) for value in reader[name, "big"][:: BIG - 1]]
                for name in names
            }
        except DDictCheckpointRetiredError:
            assert time.monotonic() < give_up  # the writers were faster
            continue
        assert found == {name: [reader.checkpoint_id] * (KEYS + 2) for name in names}
        assert reader.checkpoint_id >= at_least, "what was committed is so no more"
        return reader.checkpoint_id


@pytest.mark.parametrize("seed", range(4))
def test_killed_managers_cost_nothing_that_was_committed(seed: int) -> None:
    chance = random.Random(seed)
    nodes = chance.choice([2, 3])
    with DDict(1, nodes, 128 << 20, working_set_size=4, replication="ring", timeout=TIMEOUT_S) as dictionary:
        base = dictionary._configuration.base
        names = ["one", "two"]
        writers = [Writer(dictionary, name) for name in names]
        committed = -1
        await_that(lambda: dictionary.committed_checkpoint_id >= 1)
        for _ in range(30):
            manager = chance.randrange(nodes)
            time.sleep(chance.uniform(0.0, 0.05))
            before = kill_manager(dictionary, manager)
            if chance.random() < 0.3:
                shutil.rmtree(Path(base, f"node-{manager}"), ignore_errors=True)
            runtime_of(dictionary).wait_until_ready(manager, other_than=before, timeout_s=DEADLINE_S)
            committed = check_committed(dictionary, names, at_least=committed)
            # One at a time: there are copies again when something was committed since.
            newer = committed + 2
            await_that(lambda newer=newer: dictionary.committed_checkpoint_id >= newer or _failed(writers))  # type: ignore[misc]
            assert not _failed(writers)
        for writer in writers:
            writer.end()
        assert check_committed(dictionary, names, at_least=committed) > 30
        pids = list(runtime_of(dictionary).pids().values())
    assert not files_in(base)
    await_that(lambda: not any(map(is_running, pids)))


def _failed(writers: list[Writer]) -> bool:
    return any(writer.failure is not None for writer in writers)
