"""Managers and writers that are killed at random points: nothing committed is lost, nothing hangs, nothing stays.

In all some 200 kills. Each dictionary suffers several of them; the writers go on writing meanwhile, and check what they
read, as does the test after each kill.
"""

from __future__ import annotations

import copy
import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictWritesLostError,
)
from ml_flashpoint.ddict.runtime.embedded import DEATHS_WITHIN_S, MOST_DEATHS
from tests.support.dictionaries import (
    DEADLINE_S,
    await_that,
    files_in,
    is_running,
    kill_manager,
    runtime_of,
    wait_until_ready,
)
from tests.workers import ddict_handles

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_S = 15.0
BIG = 70_000
KEYS = 12


class Writer:
    """A thread with a handle that writes the number of its checkpoint to all of its keys, and heeds what it is told."""

    def __init__(self, dictionary: DDict, name: str) -> None:
        self.handle = DDict.attach(dictionary.serialize(), timeout=TIMEOUT_S)
        self.name = name
        self.told = 0
        self.slowest_s = 0.0
        self.failure: BaseException | None = None
        self._last: int | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._last is None or self.handle.checkpoint_id < self._last:
                try:
                    self._step()
                except DDictWritesLostError as error:
                    self.told += 1
                    self._go_back(error)
        except BaseException as error:
            self.failure = error

    def _step(self) -> None:
        at = self.handle.checkpoint_id
        for number in range(KEYS):
            self._put((self.name, number), at)
        self._put((self.name, "big"), torch.full((BIG,), float(at)))
        self._timed(self.handle.checkpoint)

    def _put(self, key: Any, value: Any) -> None:
        self._timed(lambda: self.handle.put(key, value))

    def _timed(self, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            call()
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _go_back(self, told: DDictWritesLostError) -> None:
        to = told.checkpoint_id
        if to is not None and to < self.handle.checkpoint_id:
            self._timed(lambda: self.handle.rollback(to=to))

    def check(self) -> None:
        """Fails if there was an error that it could not go on after."""
        if self.failure is not None:
            raise self.failure

    def end_at(self, checkpoint_id: int) -> None:
        """Stop at this checkpoint."""
        self._last = checkpoint_id

    def await_end(self) -> None:
        """Fails if there was an error other than the documented ones."""
        self._thread.join(3 * DEADLINE_S)
        assert not self._thread.is_alive(), "a call hangs"
        self.check()
        assert self.slowest_s < TIMEOUT_S + 1.0


def end_all(writers: Collection[Writer]) -> None:
    """Have writers stop, all at the same checkpoint: one that went on alone would wait for the others in vain."""
    last = max(writer.handle.checkpoint_id for writer in writers) + 10
    for writer in writers:
        writer.end_at(last)
    for writer in writers:
        writer.await_end()


def check_committed(dictionary: DDict, writers: dict[str, Writer], *, at_least: int) -> int:
    """All keys of all writers are at the newest committed checkpoint what was written there. Returns its id."""
    reader = DDict.attach(dictionary.serialize(), timeout=TIMEOUT_S)
    give_up = time.monotonic() + DEADLINE_S
    while True:
        reader.checkpoint_id = max(reader.committed_checkpoint_id, 0)
        try:
            found = {
                name: [reader[name, number] for number in range(KEYS)] + reader[name, "big"][:: BIG - 1].tolist()
                for name in writers
            }
        except DDictCheckpointRetiredError:
            assert time.monotonic() < give_up  # the writers were faster
            continue
        for writer in writers.values():
            writer.check()
        assert found == {name: [reader.checkpoint_id] * (KEYS + 2) for name in writers}
        assert reader.checkpoint_id >= at_least, "what was committed is so no more"
        return reader.checkpoint_id


@pytest.mark.parametrize(
    ("nodes", "kills"),
    [(2, 15), (3, 25), *(pytest.param(*more, marks=pytest.mark.soak) for more in ((5, 45), (6, 55)))],
)
def test_killed_managers_cost_nothing_that_was_committed(nodes: int, kills: int) -> None:
    chance = random.Random(nodes)
    with DDict(
        1, nodes, 128 << 20, working_set_size=4, wait_for_writers=True, replication="ring", timeout=TIMEOUT_S
    ) as dictionary:
        base = dictionary._configuration.base
        writers = {name: Writer(dictionary, name) for name in ("one", "two")}
        committed = await_committed(dictionary, 1, writers)
        killed: dict[int, list[float]] = {manager: [] for manager in range(nodes)}
        for _ in range(kills):
            # One that dies too often stays down.
            manager = min(chance.sample(range(nodes), nodes), key=lambda each: killed[each][-MOST_DEATHS:][:1])
            recent = killed[manager][-MOST_DEATHS:]
            if len(recent) == MOST_DEATHS:
                time.sleep(max(0.0, recent[0] + DEATHS_WITHIN_S + 3.0 - time.monotonic()))
            time.sleep(chance.uniform(0.0, 0.03))
            killed[manager].append(time.monotonic())
            before = kill_manager(dictionary, manager, lose_node=chance.random() < 0.3)
            committed = check_committed(dictionary, writers, at_least=committed)
            # One at a time: when something was committed since, there are copies again.
            wait_until_ready(runtime_of(dictionary), manager, other_than=before)
            committed = await_committed(dictionary, committed + 2, writers)
        end_all(writers.values())
        check_committed(dictionary, writers, at_least=committed)
        pids = list(runtime_of(dictionary).pids().values())
    assert not files_in(base)
    await_that(lambda: not any(map(is_running, pids)))


def await_committed(dictionary: DDict, least: int, writers: dict[str, Writer]) -> int:
    """Wait until a checkpoint is committed, while writers work. Returns the newest."""

    def is_over() -> bool:
        return dictionary.committed_checkpoint_id >= least or any(each.failure for each in writers.values())

    await_that(is_over)
    for writer in writers.values():
        writer.check()
    return dictionary.committed_checkpoint_id


def read_committed(dictionary: DDict, keys: list[Any]) -> list[int]:
    """What keys are at the newest committed checkpoint; tensors must be whole."""
    reader = copy.copy(dictionary)
    give_up = time.monotonic() + DEADLINE_S
    while True:
        try:
            reader.sync_to_newest_checkpoint()
            values = [reader[key] for key in keys]
            break
        except DDictCheckpointRetiredError:
            assert time.monotonic() < give_up  # the writers were faster
    for value in values:
        assert not isinstance(value, torch.Tensor) or torch.equal(value, torch.arange(100_000.0) + value[0])
    return [int(value[0]) if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.parametrize("seed", range(2))
def test_killed_writers_cost_nothing_that_was_committed(seed: int) -> None:
    chance = random.Random(seed)
    context = multiprocessing.get_context("fork")
    with DDict(
        1, 2, 128 << 20, working_set_size=4, wait_for_writers=True, replication="ring", timeout=TIMEOUT_S
    ) as dictionary:
        base = dictionary._configuration.base
        survivor = Writer(dictionary, "survivor")
        for generation in range(30):
            name = f"victim {generation % 3}"
            handle = copy.copy(dictionary)
            handle.checkpoint_id = survivor.handle.checkpoint_id
            ours, theirs = context.Pipe(duplex=False)
            victim = context.Process(target=ddict_handles.write_for_ever, args=(handle, name, theirs))
            victim.start()
            theirs.close()
            assert ours.poll(DEADLINE_S)
            first = ours.recv()
            time.sleep(chance.uniform(0.0, 0.05))
            victim.kill()
            victim.join(DEADLINE_S)
            assert victim.exitcode == -signal.SIGKILL
            # Whatever it was in the middle of, others go on and what they read is whole.
            await_committed(dictionary, first + 1, {"survivor": survivor})
            for number in read_committed(dictionary, [*((name, number) for number in range(4)), (name, "big")]):
                assert first <= number
        end_all([survivor])
        check_committed(dictionary, {"survivor": survivor}, at_least=0)
        before = sum(each.used_bytes for each in dictionary.stats())
        assert before < 64 << 20, "what killed writers had begun takes memory for ever"
    assert not files_in(base)
