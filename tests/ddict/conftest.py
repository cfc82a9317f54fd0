"""Dictionaries for the tests here: one for all of a file, and those that a test makes."""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.client.handle import _handles as handles_here
from ml_flashpoint.format.errors import FlashpointError
from tests.ddict.support import WORKING_SET, Make
from tests.support.dictionaries import DEADLINE_S, Created, await_that, files_in
from tests.workers import ddict_handles


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


@pytest.fixture(scope="module")
def shared() -> Iterator[DDict]:
    with DDict(2, 1, 256 << 20, working_set_size=WORKING_SET, timeout=DEADLINE_S) as dictionary:
        yield dictionary


@pytest.fixture
def d(shared: DDict) -> Iterator[DDict]:
    """A handle that finds the dictionary empty, at a checkpoint where no one was."""
    handle = copy.copy(shared)
    # Those whose handles the test before has forgotten, or whose processes have ended, leave a little later.
    await_that(lambda: handle._access.state()["writers"] == 0)
    handle.checkpoint_id = handle._access.state()["newest"] + WORKING_SET
    handle.clear()
    yield handle
    handle.detach()
    # A test that fails keeps its handles.
    for each in list(handles_here):
        if each.configuration == shared._configuration and each is not shared._access:
            each.detach(time.monotonic() + DEADLINE_S)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[DDict] = []

    def make_one(*args: Any, **named: Any) -> DDict:
        made.append(DDict(*args, **{"timeout": DEADLINE_S, **named}))
        return made[-1]

    yield make_one
    for each in made:
        try:
            each.destroy()
        except FlashpointError:
            assert not files_in(each._configuration.base)
