"""Fixtures of several files here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ml_flashpoint.ddict.checkpoints.coordinator import Coordinator
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ddict.persistence import PosixCheckpointPersister
from tests.ddict.coordination import Make, Managers, Play, Run
from tests.support.dictionaries import DEADLINE_S, Created
from tests.workers import ddict_handles


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Play] = []

    def make_one(
        managers: int = 2,
        *,
        persist: Callable[[int, list[str]], None] | None = None,
        remove_above: Callable[[int], None] | None = None,
        **rules: Any,
    ) -> Play:
        replicated, snapshots = rules.pop("replicated", True), rules.pop("snapshots", True)
        given = {
            "working_set_size": 4,
            "replication": "ring" if replicated else None,
            "persister_class": PosixCheckpointPersister if snapshots else None,
            "persist_count": -1,
        }
        played = Managers(managers)
        run: Any = Run(persist or played.persist, remove_above or played.removed_above.append)
        coordinator = Coordinator(Options(managers, **{**given, **rules}), played.call, run)
        made.append(Play(coordinator, played))
        return made[-1]

    yield make_one
    for each in made:
        for gate in each.managers.gates.values():
            gate.set()
        each.coordinator.close()


@pytest.fixture
def creator() -> Iterator[Created]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=ddict_handles.create_and_serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert ours.poll(2 * DEADLINE_S)
        yield Created(process, *ours.recv())
    finally:
        process.kill()
        process.join(DEADLINE_S)
