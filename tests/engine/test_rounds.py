"""Rounds, on thousands of schedules of a simulation, and what ranks tell each other about them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.engine.rounds import Answer, Fate, Leader, Member, Outcome, Verdict
from ml_flashpoint.format.errors import InvalidArgumentError, ProtocolError
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.ranks.retention import Keep
from tests.engine.simulation import BROKEN, find_violation

_NUMBERS = st.integers(0, 2**63 - 1)
_SAVES = st.builds(SaveId, _NUMBERS, _NUMBERS)
_SAVE_LISTS = st.lists(_SAVES).map(tuple)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=6),
    max_leaves=12,
)


@pytest.mark.parametrize("begin", range(0, 2000, 500))
def test_no_schedule_loses_a_verified_version_or_starves(begin: int) -> None:
    assert find_violation(range(begin, begin + 500)) is None


@pytest.mark.soak
@pytest.mark.parametrize("begin", range(10_000, 60_000, 5_000))
def test_no_schedule_of_many_loses_a_verified_version_or_starves(begin: int) -> None:
    assert find_violation(range(begin, begin + 5_000)) is None


@pytest.mark.parametrize("broken", BROKEN)
def test_the_simulation_notices_a_rule_that_is_left_out(broken: str) -> None:
    assert find_violation(range(2000), broken) is not None


@given(st.builds(Verdict, _NUMBERS, _SAVE_LISTS, _SAVES, _NUMBERS, *[st.none() | _SAVES] * 2, _SAVE_LISTS))
def test_a_verdict_comes_back_from_json(verdict: Verdict) -> None:
    assert Verdict.parsed(json.loads(json.dumps(verdict))) == verdict


@given(st.builds(Answer, _NUMBERS, _SAVES, st.sampled_from(Outcome), _NUMBERS, st.text(max_size=32)))
def test_an_answer_comes_back_from_json(answer: Answer) -> None:
    assert Answer.parsed(json.loads(json.dumps(answer))) == answer


@given(_JSON)
def test_what_is_no_verdict_and_no_answer_is_refused(value: object) -> None:
    for parse in (Verdict.parsed, Answer.parsed):
        with pytest.raises(ProtocolError):
            parse(value)


def test_a_step_is_saved_once_a_run() -> None:
    member = Member(Verdict(0, (), SaveId(1, 0)), keep=Keep(1))
    member.call(SaveId(1, 10))
    with pytest.raises(InvalidArgumentError, match=r"step 10 is not above step 10"):
        member.call(SaveId(1, 10))


def test_a_round_chooses_the_newest_part_that_rank_0_has_committed() -> None:
    member = Member(Verdict(0, (), SaveId(1, 0)), keep=Keep(2))
    for step in (10, 20, 30, 40):
        member.call(SaveId(1, step))
    for step in (10, 20, 30):
        member.parts[SaveId(1, step)] = True
    verdict = Leader(member, ranks=3).decide([Answer(0, SaveId(1, 10), outcome=Outcome.COPIED)] * 3)
    assert verdict == Verdict(1, (SaveId(1, 10),), SaveId(1, 30), total=1)


@pytest.mark.parametrize(("total", "grows"), [(1, False), (2, True)])
def test_the_terms_of_a_save_leave_a_slot_for_the_rounds_save_that_is_to_come(total: int, grows: bool) -> None:
    def terms(step: int | None, **how: bool) -> tuple[bool, int, bool]:
        found = member.request(None if step is None else SaveId(1, step), **how)
        return found.of_round, found.spare, found.may_grow

    member = Member(Verdict(3, (SaveId(1, 5),), SaveId(1, 50), total), keep=Keep(1))
    member.call(SaveId(1, 10))
    member.call(SaveId(1, 20), explicit=True)
    assert [terms(step) for step in (10, 20, None)] == [(False, 1, grows), (True, 0, grows), (True, 0, grows)]
    member.call(SaveId(1, 50))
    member.call(SaveId(1, 60))
    assert [terms(step) for step in (50, 60, None)] == [(True, 0, grows), (False, 0, grows), (False, 0, grows)]
    assert terms(None, explicit=True) == (True, 0, grows)
    assert member.request(SaveId(1, 60)).retained == {SaveId(1, 5), SaveId(1, 50)}


def test_what_is_lost_stays_so_where_an_older_save_is_verified() -> None:
    member = Member(Verdict(0, (), SaveId(1, 30)), keep=Keep(1))
    for step in (20, 30):
        member.call(SaveId(1, step), explicit=True)
        member.parts[SaveId(1, step)] = True
    leader = Leader(member, ranks=1)
    for number, (step, outcome) in enumerate([(30, Outcome.LOST), (20, Outcome.COPIED)]):
        verdict = leader.decide([Answer(number, SaveId(1, step), outcome)])
        assert verdict is not None
        assert verdict.lost == (SaveId(1, 30),)
        member.adopt(verdict)
    assert member.verdict == Verdict(2, (SaveId(1, 20),), SaveId(1, 31), total=1, lost=(SaveId(1, 30),))


@pytest.mark.parametrize("is_late", [False, True])
def test_somebody_who_waits_for_a_save_gets_the_next_round(is_late: bool) -> None:
    member = Member(Verdict(4, (SaveId(1, 10),), SaveId(1, 50)), keep=Keep(1))
    member.call(SaveId(1, 20), explicit=not is_late)
    if is_late:  # it was a loop's save
        assert Leader(member, ranks=2).decide([]) is None
        member.ask(SaveId(1, 20))
        member.ask(SaveId(1, 20))
        assert member.explicit == [SaveId(1, 20)]
    verdict = Leader(member, ranks=2).decide([])
    assert verdict == Verdict(5, (SaveId(1, 10),), SaveId(1, 20))


@pytest.mark.parametrize(
    ("save", "explicit", "fate"),
    [
        (SaveId(1, 10), False, Fate.VERIFIED),
        (SaveId(1, 30), True, Fate.VERIFIED),
        (SaveId(1, 20), True, Fate.SUPERSEDED),
        (SaveId(1, 40), True, Fate.OPEN),
        (SaveId(1, 40), False, Fate.SUPERSEDED),
        (SaveId(1, 45), True, Fate.SUPERSEDED),
        (SaveId(1, 50), False, Fate.OPEN),
    ],
)
def test_a_verdict_says_what_becomes_of_a_save(save: SaveId, explicit: bool, fate: Fate) -> None:
    verdict = Verdict(3, (SaveId(1, 10), SaveId(1, 30)), SaveId(1, 50), lost=(SaveId(1, 45),))
    assert verdict.fate(save, explicit=explicit) is fate


def test_a_save_without_copies_begins_a_round_again_after_a_pause_that_grows() -> None:
    member = Member(Verdict(0, (), SaveId(1, 0)), keep=Keep(1))
    member.call(SaveId(1, 10), explicit=True)
    member.parts[SaveId(1, 10)] = True
    leader = Leader(member, ranks=2)
    for number, pause_s in enumerate([0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]):
        answers = [Answer(number, SaveId(1, 10), Outcome.UNCOPIED)]
        assert number == 0 or leader.decide(answers, since_s=0.99 * pause_s) is None
        verdict = leader.decide(answers, since_s=pause_s)
        assert verdict is not None
        assert verdict.first == SaveId(1, 10) or number == 0
        member.adopt(verdict)
    member.call(SaveId(1, 20), explicit=True)
    verdict = leader.decide([Answer(9, SaveId(1, 10), Outcome.UNCOPIED)], since_s=0.0)
    assert verdict is not None
    assert verdict.first == SaveId(1, 20), "its slot may be the one that is needed"


class _Rounds:
    """Rank 0 of two, whose program waits for each save, or may wait."""

    def __init__(self) -> None:
        self.member = Member(Verdict(0, (), SaveId(1, 0)), keep=Keep(1))
        self.leader = Leader(self.member, ranks=2)

    def call(self, *steps: int) -> None:
        for step in steps:
            self.member.call(SaveId(1, step), explicit=True)
            self.member.parts[SaveId(1, step)] = True

    def decide(self, *answers: Answer, **how: float) -> int | None:
        """Return the step that the next round begins with; None if the round stays open."""
        number = self.member.verdict.number
        verdict = self.leader.decide([answer._replace(number=number) for answer in answers], **how)
        return verdict.first.step if verdict is not None and self.member.adopt(verdict) else None


def _late(step: int, saves: int) -> Answer:
    return Answer(0, SaveId(1, step), Outcome.LOST, saves)


def test_a_round_begins_as_many_saves_later_as_a_rank_is_ahead_wherever_the_last_one_had_begun() -> None:
    rounds = _Rounds()
    rounds.call(10, 20)
    assert rounds.decide(_late(10, 40)) == 21 + 40 * 10
    rounds.call(30)
    assert rounds.decide(idle_s=60) == 30
    assert rounds.decide(_late(30, 41)) == 421, "the round that was given up goes on"
    rounds.call(*range(40, 440, 10))
    copied = Answer(0, SaveId(1, 430), Outcome.COPIED)
    assert rounds.decide(copied, copied) == 431 + 20 * 10, "a success halves it"
    assert rounds.decide(_late(640, 3)) == 431 + 23 * 10


def test_a_round_is_given_up_for_a_save_that_is_waited_for_ever_more_seldom_where_that_spoils_it() -> None:
    rounds = _Rounds()
    rounds.call(10, 20)
    first = rounds.decide(_late(10, 9))
    for step, while_s in ((30, 0.05), (40, 0.1), (50, 0.2)):
        rounds.call(step)
        assert rounds.decide(idle_s=0.99 * while_s) is None
        assert rounds.decide(idle_s=while_s) == step
        assert rounds.decide(_late(step, 9)) == first
        first = rounds.decide(_late(step + 80, 2))


def test_a_rank_without_a_part_of_the_rounds_save_keeps_that_of_the_round_that_was_given_up() -> None:
    member = Member(Verdict(4, (), SaveId(1, 60)), keep=Keep(1))
    for step in (40, 50, 60):
        member.call(SaveId(1, step), explicit=True)
    member.fail(SaveId(1, 40))
    member.adopt(Verdict(5, (), SaveId(1, 40)))
    assert member.answer == Answer(5, SaveId(1, 40), Outcome.LOST, late=3)
    assert member.retained == {SaveId(1, 60)}
    member.adopt(Verdict(6, (), SaveId(1, 50)))
    assert member.retained == {SaveId(1, 50)}


def test_a_round_that_some_rank_has_answered_is_not_given_up_and_older_saves_are_passed_over() -> None:
    rounds = _Rounds()
    rounds.call(10, 20)
    first = rounds.decide(_late(10, 9))
    rounds.call(30)
    assert rounds.decide(Answer(0, SaveId(1, 120), Outcome.COPIED), idle_s=60) == first
    assert rounds.member.verdict.lost == (SaveId(1, 10), SaveId(1, 20), SaveId(1, 30))


def test_a_save_that_somebody_waits_for_may_take_any_free_slot_for_the_round_may_wait_for_it() -> None:
    member = Member(Verdict(4, (SaveId(1, 10),), SaveId(1, 50)), keep=Keep(1))
    member.call(SaveId(1, 20))
    member.call(SaveId(1, 30), explicit=True)
    of_a_loop, waited = (member.request(SaveId(1, step)) for step in (20, 30))
    assert (of_a_loop.of_round, of_a_loop.spare) == (False, 1)
    assert (waited.of_round, waited.spare) == (True, 0)


def test_the_first_verified_save_at_or_after_each_multiple_is_due_to_be_persisted() -> None:
    verdict, due = Verdict(0, (SaveId(1, 25),), SaveId(2, 0)), []
    member = Member(verdict, keep=Keep(1))
    leader = Leader(member, ranks=1, persist_every=20)
    for number, step in enumerate(range(30, 100, 10)):
        member.call(SaveId(2, step), explicit=True)
        member.parts[SaveId(2, step)] = True
        decided = leader.decide([Answer(number, SaveId(2, step), Outcome.COPIED)], persister_is_busy=step == 60)
        assert decided is not None
        due.append(None if decided.persist is None else decided.persist.step)
        member.adopt(decided)
    assert due == [None, 40, 40, 40, 70, 80, 80]
    assert list(member.calls) == [SaveId(2, 90)], "older ones are forgotten"


def test_answers_of_an_earlier_round_decide_nothing() -> None:
    member = Member(Verdict(7, (), SaveId(1, 0)), keep=Keep(1))
    stale = Answer(6, SaveId(1, 10), outcome=Outcome.COPIED)
    assert Leader(member, ranks=2).decide([stale, stale._replace(outcome=Outcome.LOST)]) is None


def test_only_the_first_answer_of_a_round_counts() -> None:
    member = Member(Verdict(0, (), SaveId(1, 0)), keep=Keep(1))
    member.call(SaveId(1, 10))
    member.fail(SaveId(1, 10), late=1)
    member.end(SaveId(1, 10), Outcome.COPIED)
    assert member.answer == Answer(0, SaveId(1, 10), outcome=Outcome.LOST, late=1)
