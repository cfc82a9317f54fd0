"""Who writes what: whatever ranks change, and whatever answers get lost, what is agreed on is whole."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from ml_flashpoint.adapter.pytorch.metadata_format import decode_metadata
from ml_flashpoint.core.save_identity import SaveIdentity
from ml_flashpoint.facade.plan_agreement import Answer, PlanAgreement, Report
from ml_flashpoint.format.errors import CapacityError, DivergedError, FlashpointError, SaveError

_RUN = "1" * 20


def _plan(names: frozenset[str]) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner({name: torch.ones(3) for name in sorted(names)}, is_coordinator=True)
    return planner.create_local_plan()


def _identity(step: int) -> SaveIdentity:
    return SaveIdentity(_RUN, step, step)


@dataclass
class _Rank:
    """What a rank remembers, as `SaveExchange` does."""

    has: frozenset[str]
    planned: frozenset[str] | None = None
    generation: int | None = None
    share: frozenset[str] = frozenset()
    staged: frozenset[str] | None = field(default=None)

    def report(self, step: int) -> Report:
        if self.planned == self.has and self.generation is not None:
            self.staged = self.share  # at once
            return Report(_identity(step), self.generation)
        self.planned, self.generation, self.staged = self.has, None, None
        return Report(_identity(step), plan=_plan(self.has))

    def hear(self, answer: Answer) -> None:
        if answer.failure is not None:
            if answer.generation != self.generation:
                self.generation = None
            return
        if answer.share is not None:
            names = [item.index.fqn for item in _plan(self.has).items]
            self.share = self.staged = frozenset(names[number] for number in answer.share)
        self.generation = answer.generation


_names = st.frozensets(st.sampled_from("abcdef"), min_size=1)


@given(
    first=st.lists(_names, min_size=1, max_size=4),
    saves=st.lists(
        st.tuples(st.dictionaries(st.integers(0, 3), _names, max_size=4), st.frozensets(st.integers(0, 3))), max_size=8
    ),
)
def test_every_agreed_save_is_whole_and_each_rank_has_copied_its_share(
    first: list[frozenset[str]], saves: list[tuple[dict[int, frozenset[str]], frozenset[int]]]
) -> None:
    agreement, ranks = PlanAgreement(len(first)), [_Rank(has) for has in first]
    for step, (changes, deaf) in enumerate([({}, frozenset[int]()), *saves]):
        for number, has in changes.items():
            if number < len(ranks):
                ranks[number].has = has
        answers = agreement.agree([rank.report(step) for rank in ranks])
        assert len({answer.failure is None for answer in answers}) == 1
        for number, (rank, answer) in enumerate(zip(ranks, answers, strict=True)):
            if number not in deaf:
                rank.hear(pickle.loads(pickle.dumps(answer)))
        if answers[0].failure is not None or deaf & set(range(len(ranks))):
            continue
        shares = [rank.staged or frozenset() for rank in ranks]
        assert frozenset().union(*shares) == frozenset().union(*(rank.has for rank in ranks))
        assert sum(map(len, shares)) == len(frozenset().union(*shares)), "something is written twice"
        assert all(share <= rank.has for share, rank in zip(shares, ranks, strict=True))
        saved = decode_metadata(agreement.metadata(), path="here")
        places = {index.fqn: place.rank for index, place in saved.storage_data.items()}
        assert places == {name: rank for rank, share in enumerate(shares) for name in share}


def test_what_does_not_change_is_agreed_on_without_plans() -> None:
    agreement = PlanAgreement(2)
    ranks = [_Rank(frozenset("ab")), _Rank(frozenset("ab"))]
    for step in range(3):
        reports = [rank.report(step) for rank in ranks]
        assert all((report.plan is None) == (step > 0) for report in reports)
        known = agreement.metadata() if step else b""
        for rank, answer in zip(ranks, agreement.agree(reports), strict=True):
            assert answer.identity == _identity(step)
            assert answer.failure is None
            rank.hear(answer)
        assert not step or agreement.metadata() is known
    assert sorted(map(sorted, (rank.share for rank in ranks))) == [["a"], ["b"]]


def test_who_goes_on_as_before_keeps_its_share_and_others_take_the_rest() -> None:
    agreement = PlanAgreement(2)
    ranks = [_Rank(frozenset("ab")), _Rank(frozenset("ab"))]
    for rank, answer in zip(ranks, agreement.agree([rank.report(0) for rank in ranks]), strict=True):
        rank.hear(answer)
    ranks[0].has = frozenset("abcd")
    kept = ranks[1].share
    for rank, answer in zip(ranks, agreement.agree([rank.report(1) for rank in ranks]), strict=True):
        rank.hear(answer)
    assert ranks[1].share == kept
    assert ranks[0].share == frozenset("abcd") - kept


def test_what_nobody_has_copied_fails_one_save_and_the_next_plans_anew() -> None:
    agreement = PlanAgreement(2)
    ranks = [_Rank(frozenset("ab")), _Rank(frozenset("ab"))]
    for rank, answer in zip(ranks, agreement.agree([rank.report(0) for rank in ranks]), strict=True):
        rank.hear(answer)
    ranks[0].has = ranks[1].share  # it has no more what it was to write
    answers = agreement.agree([rank.report(1) for rank in ranks])
    for rank, answer in zip(ranks, answers, strict=True):
        assert isinstance(answer.failure, SaveError)
        assert "is not written" in str(answer.failure)
        rank.hear(answer)
    reports = [rank.report(2) for rank in ranks]
    assert all(report.plan is not None for report in reports)
    assert all(answer.failure is None for answer in agreement.agree(reports))


def test_a_number_of_an_answer_that_was_lost_is_not_taken_for_a_later_one() -> None:
    agreement = PlanAgreement(2)
    one, other = _Rank(frozenset("ab")), _Rank(frozenset("ab"))
    for rank, answer in zip((one, other), agreement.agree([one.report(0), other.report(0)]), strict=True):
        rank.hear(answer)
    before = other.generation
    one.has = frozenset("abc")
    answers = agreement.agree([one.report(1), other.report(1)])
    one.hear(answers[0])  # and the other one does not
    answers = agreement.agree([one.report(2), other.report(2)])
    assert "disagree about the plan" in str(answers[1].failure)
    one.hear(answers[0])
    one.hear(agreement.agree([one.report(3), Report(_identity(3), plan=_plan(other.has))])[0])
    assert one.generation != before
    assert "disagree" in str(agreement.agree([one.report(4), Report(_identity(4), before)])[0].failure)


def test_failures_are_told_to_all_and_leave_plans_alone() -> None:
    agreement = PlanAgreement(2)
    ranks = [_Rank(frozenset("ab")), _Rank(frozenset("ab"))]
    for rank, answer in zip(ranks, agreement.agree([rank.report(0) for rank in ranks]), strict=True):
        rank.hear(answer)
    for answer in agreement.agree([ranks[0].report(1), Report(failure=CapacityError("full", rank=1))]):
        assert isinstance(answer.failure, CapacityError)
        assert answer.failure.rank == 1
        ranks[0].hear(answer)
    for answer in agreement.agree([ranks[0].report(2), Report(_identity(5), ranks[1].generation)]):
        assert isinstance(answer.failure, DivergedError)
        assert answer.failure.highest_step == 5
        ranks[0].hear(answer)
    assert all(answer.failure is None for answer in agreement.agree([rank.report(3) for rank in ranks]))


@pytest.mark.parametrize("report", [Report(_identity(0)), Report(_identity(0), 1), Report()])
def test_a_rank_without_a_plan_is_told_before_there_is_any(report: Report) -> None:
    agreement = PlanAgreement(2)
    for answer in agreement.agree([report, Report(_identity(0), plan=_plan(frozenset("a")))]):
        assert isinstance(answer.failure, FlashpointError)
