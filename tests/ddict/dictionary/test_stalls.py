"""Processes of a dictionary that are stopped for longer than anybody waits, and go on; and creators that are killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ml_flashpoint.ddict import DDict, links
from ml_flashpoint.ddict.client import session
from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictManagerLostError, DDictTimeoutError
from tests.support.dictionaries import DEADLINE_S, Created
from tests.support.processes import suspend

WATCH_S = 1
STALL_S = 4.0
PATIENT_S = 600.0


def test_a_creator_that_is_stopped_costs_no_writer_its_open_step(
    creator: Created, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_WATCH_S", WATCH_S)
    writer = DDict.attach(creator.serialized, timeout=DEADLINE_S)
    writer.checkpoint_id = 1
    writer["open"] = 1
    suspend(creator.pid)
    time.sleep(STALL_S)  # longer than a watch may take, and its answer
    os.kill(creator.pid, signal.SIGCONT)
    writer["open too"] = 1

    assert writer.checkpoint() == 2
    assert writer.wait_for_commit() == 1
    reader = DDict.attach(creator.serialized, timeout=DEADLINE_S)
    assert reader.sync_to_newest_checkpoint() == 1
    assert {key: reader[key] for key in ("open", "open too")} == {"open": 1, "open too": 1}
    writer.detach()


def test_calls_of_a_dictionary_whose_creator_was_killed_say_at_once_that_it_is_gone(creator: Created) -> None:
    d = DDict.attach(creator.serialized, timeout=PATIENT_S)  # by far longer than a test may take
    d.checkpoint_id = 1
    d["key"] = 1
    creator.kill()

    def write_on() -> None:
        while True:  # its managers serve for a moment yet
            d["key"] = 1

    with pytest.raises(DDictDestroyedError):
        write_on()
    for call in (lambda: d["key"], lambda: len(d), d.checkpoint, d.rollback, d.sync_to_newest_checkpoint, d.stats):
        with pytest.raises(DDictDestroyedError):
            call()
    d.detach()


def test_a_creator_that_is_stopped_is_not_taken_for_gone(creator: Created, monkeypatch: pytest.MonkeyPatch) -> None:
    d = DDict.attach(creator.serialized, timeout=DEADLINE_S)
    suspend(creator.pid)
    with monkeypatch.context() as impatient:
        impatient.setattr(links, "GRACE_S", 0.05)
        impatient.setattr(d._access, "timeout_s", 0.1)
        for _ in range(2):
            with pytest.raises((DDictTimeoutError, DDictManagerLostError)):
                _ = d.committed_checkpoint_id
    os.kill(creator.pid, signal.SIGCONT)
    assert d.committed_checkpoint_id == 0
