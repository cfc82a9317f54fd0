"""Fixtures of several files here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from tests.support.dictionaries import DEADLINE_S, Created
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
