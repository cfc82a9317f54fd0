"""For how long a staged state, which the traceback of a failure keeps, holds up the next save."""

from __future__ import annotations

import threading
import weakref

import pytest

from ml_flashpoint.adapter.pytorch import staged_state
from ml_flashpoint.adapter.pytorch.staged_state import StagedStateDict, wait_until_over
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.save_identity import SaveIdentity

LONG_S = 60.0
SHORT_S = 0.05


@pytest.fixture
def save() -> Save:
    return Save(SaveIdentity("run", 1), exchanged=True)


def staged(save: Save) -> StagedStateDict:
    save.offered = True
    return StagedStateDict({"x": 1}, save, lambda save: None)


@pytest.mark.timeout(30)
def test_not_after_its_thread_has_ended_for_which_it_was_given_up_too_early(save: Save) -> None:
    state = staged(save)
    save.offered = False  # as `fail` does, at the deadline
    looking = threading.Thread(target=state.items)
    looking.start()
    looking.join()
    assert wait_until_over(save, weakref.ref(state), LONG_S)


@pytest.mark.timeout(30)
def test_not_where_no_thread_ever_came(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_state, "_TAKE_UP_S", 0.0)
    state = staged(save)
    starting = threading.Thread(target=int)  # it fails before it looks at the state
    starting.start()
    starting.join()
    assert wait_until_over(save, weakref.ref(state), LONG_S)


@pytest.mark.timeout(30)
def test_as_long_as_a_thread_may_take_it_on(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_state, "_TAKE_UP_S", 0.0)
    state, go_on = staged(save), threading.Event()
    starting = threading.Thread(target=go_on.wait)
    starting.start()
    try:
        assert not wait_until_over(save, weakref.ref(state), SHORT_S)
    finally:
        go_on.set()
        starting.join()
    assert wait_until_over(save, weakref.ref(state), LONG_S)


@pytest.mark.timeout(30)
def test_threads_that_were_there_before_have_a_while(save: Save) -> None:
    state = staged(save)
    assert not wait_until_over(save, weakref.ref(state), SHORT_S)
