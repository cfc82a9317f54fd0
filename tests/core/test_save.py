"""The states of a save: which may follow which, whoever comes when, and what each of them leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ml_flashpoint.core.save import Save, SaveState
from ml_flashpoint.core.save_identity import SaveIdentity

UNDER_WAY = (SaveState.BEGUN, SaveState.STAGED, SaveState.FILLED)
HERE = (SaveState.COMMITTED, SaveState.REPLICATED, SaveState.VERIFIED)
ENDS = (SaveState.VERIFIED, SaveState.FAILED, SaveState.EVICTED)


def _thing() -> Any:
    """A part, a store, an arena or a staged object: a save only keeps them."""
    return object()


class SaveMachine(RuleBasedStateMachine):
    """Any call at any time, as a saver, a queue, a late worker and a deadline may come in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.save = Save(SaveIdentity("run", 1), exchanged=True)
        self.before = self.save.state
        self.errors: list[BaseException] = []
        self.parts: list[Any] = []
        self.taken: set[Any] = set()

    @rule()
    def stage(self) -> None:
        self.save.stage(_thing())
        assert (self.save.state is SaveState.STAGED) == (self.before in (SaveState.BEGUN, SaveState.STAGED))

    @rule()
    def fill(self) -> None:
        self.save.fill(_thing())
        assert (self.save.state is SaveState.FILLED) == (self.before in UNDER_WAY)

    @rule()
    def commit(self) -> None:
        part = _thing()
        assert self.save.commit(part, _thing()) == (self.before in UNDER_WAY)
        self.parts.append(part)

    @rule()
    def fail(self) -> None:
        error = OSError("no")
        assert self.save.fail(error) == (self.before in UNDER_WAY)
        self.errors.append(error)

    @rule()
    def replicate(self) -> None:
        self.save.replicate()
        if self.before is SaveState.COMMITTED:
            assert self.save.state is SaveState.REPLICATED

    @rule()
    def verify(self) -> None:
        self.save.verify()
        assert (self.save.state is SaveState.VERIFIED) == (self.before in (SaveState.REPLICATED, SaveState.VERIFIED))

    @rule(uncertain=st.booleans())
    def evict(self, uncertain: bool) -> None:
        self.save.uncertain = uncertain
        may_go = not uncertain and self.before in (SaveState.COMMITTED, SaveState.REPLICATED)
        assert self.save.evict() == may_go

    @rule()
    def take(self) -> None:
        self.taken.add(self.save.take(_thing()))

    @rule(which=st.randoms(use_true_random=False))
    def release(self, which: Any) -> None:
        some = set(which.sample(sorted(self.taken, key=id), which.randint(0, len(self.taken))))
        released = self.save.release(*some, _thing()) if some else self.save.release()
        assert released == (some or self.taken)
        self.taken -= released

    @invariant()
    def holds_together(self) -> None:
        save, state = self.save, self.save.state
        if self.before in ENDS:
            assert state is self.before, "an end was left"
        assert save.decided.is_set() == (state not in UNDER_WAY)
        assert (save.part is not None) == (state in (*HERE, SaveState.EVICTED))
        if save.part is not None:
            assert save.part is self.parts[0] or save.part in self.parts
        if self.errors and state is SaveState.FAILED:
            assert save.error in self.errors
        assert save.arenas == self.taken
        self.before = state


TestSaveMachine = SaveMachine.TestCase
TestSaveMachine.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)


def test_only_the_first_outcome_counts() -> None:
    failed, committed = Save(SaveIdentity("run", 1)), Save(SaveIdentity("run", 2))
    assert failed.fail(OSError("first"))
    assert not failed.fail(OSError("second"))
    assert not failed.commit(_thing(), _thing())
    assert str(failed.error) == "first"
    assert failed.part is None
    assert committed.commit(_thing(), _thing())
    assert not committed.fail(OSError("late"))
    assert committed.error is None


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_name_is_known_to_others_once_it_is_adopted_or_if_each_counts_alone(exchanged: bool) -> None:
    save = Save(SaveIdentity("run", 1), exchanged=exchanged)
    assert save.known is not exchanged
    save.adopt(SaveIdentity("run", 5))
    assert save.known
    assert save.save_id.endswith("-0000000000000000005")
    assert save.key == Save(SaveIdentity("run", 1)).key, "the name by which this rank knows it stays"
