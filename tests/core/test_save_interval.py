"""How often to save: what is chosen from measurements, and from when on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.core.save_interval import Choice, Measured, SaveInterval, checked_skip
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.ranks.goodput import best_interval_s

HOUR_S = 3600.0


def measured(step_s: float = 0.5, save_s: float = 0.01, observed_s: float = 0.0, starts: int = 1) -> Measured:
    return Measured(step_s, save_s, observed_s, starts)


def chosen(*ranks: Measured | None, mtbf_s: float | None = 3 * HOUR_S) -> int | None:
    """What it comes to, in as many steps as it takes."""
    interval, last = SaveInterval("auto", mtbf_s), None
    while (choice := interval.agree(ranks)) is not None and choice.every != last:
        assert choice.every <= 8 * interval.every
        last = interval.every = choice.every
        interval.reason = choice.reason
    return last


def loop(
    interval: SaveInterval, turns: int, *, step_s: float, held_s: float, slower_s: float = 0.0, steps: int = 1
) -> list[int]:
    """Steps that a loop saves at, whose saves are all good. Each turn counts as so many."""
    saved, now, saving = [], 0.0, False
    for step in range(steps, steps * turns + 1, steps):
        now += step_s + (slower_s if saving else 0.0)
        interval.passed(now, saving=saving, steps=steps)
        saving = interval.is_due(step, step - steps)
        if saving:
            if saved:
                interval.saved(held_s)
            interval.begin()
            now += held_s
            interval.hear(interval.agree([interval.measured]))
            interval.confirm()
            saved.append(step)
    return saved


# ---- the choice -----------------------------------------------------------------------------------------------


def test_what_is_chosen_costs_least() -> None:
    best = best_interval_s(0.01, 3 * HOUR_S) / 0.5
    assert 16 * 2**0.5 < best < 32 * 2**0.5
    assert chosen(measured()) == 32


@given(step_s=st.floats(1e-5, 1e3), save_s=st.floats(0, 1e3), mtbf_s=st.floats(1, 1e8), observed_s=st.floats(0, 1e9))
def test_it_is_a_power_of_two_near_the_best(step_s: float, save_s: float, mtbf_s: float, observed_s: float) -> None:
    every = chosen(measured(step_s, save_s, observed_s), mtbf_s=mtbf_s)
    assert every is not None
    assert every & (every - 1) == 0
    best = min(max(best_interval_s(save_s, mtbf_s) / step_s, 1), 1 << 16)
    assert every / 1.61 <= best <= every * 1.61


def test_the_slowest_rank_counts() -> None:
    assert chosen(measured(), measured(save_s=0.16)) == 128
    assert chosen(measured(), measured(step_s=2.0)) == 8
    assert chosen(measured(), None) is None


def test_failures_are_those_of_the_job() -> None:
    rare = chosen(measured(observed_s=30 * 24 * HOUR_S), mtbf_s=None)
    often = chosen(measured(observed_s=30 * 24 * HOUR_S, starts=300), mtbf_s=None)
    replaced = chosen(measured(), measured(observed_s=30 * 24 * HOUR_S, starts=300), mtbf_s=None)
    assert rare is not None
    assert often is not None
    assert rare == 16 * often
    assert replaced == often, "what a new node has not seen does not count"


def test_what_was_planted_is_survived() -> None:
    assert chosen(measured(starts=2**60), mtbf_s=None) == 1
    assert chosen(measured(save_s=0.0), mtbf_s=None) == 1


@pytest.mark.parametrize("since_s", [float("nan"), float("inf"), float("-inf"), -1e300, 1e300])
@pytest.mark.parametrize("held_s", [0.0, 0.01])
def test_a_damaged_file_breaks_no_save(since_s: float, held_s: float) -> None:
    interval = SaveInterval("auto")
    interval.since_s = since_s
    assert loop(interval, 100, step_s=0.5, held_s=held_s)[:9] == list(range(1, 10))
    assert interval.measured is not None


def test_a_damaged_number_of_starts_breaks_no_exchange() -> None:
    """The coordinator reckons with it while all others wait for its answer."""
    interval = SaveInterval("auto")
    interval.starts = 10**400
    loop(interval, 100, step_s=0.5, held_s=0.01)
    assert interval.measured is not None
    interval.agree([interval.measured])
    assert interval.every == 1


def test_it_does_not_go_to_and_fro() -> None:
    interval = SaveInterval("auto", 3 * HOUR_S)
    interval.every, interval.reason = 32, "why"
    assert interval.agree([measured(save_s=0.012)]) is None
    assert interval.agree([measured(save_s=0.008)]) is None
    assert interval.agree([measured(save_s=0.04)]) is not None


# ---- from when on ---------------------------------------------------------------------------------------------


def test_a_choice_holds_from_the_save_after_a_good_one_on() -> None:
    interval = SaveInterval("auto")
    interval.hear(Choice(8, "why"))
    assert interval.begin() is None, "the save in which it was heard was not good"
    interval.hear(None)
    interval.confirm()
    assert (interval.begin(), interval.every) == (None, 1)
    interval.hear(Choice(8, "why"))
    interval.confirm()
    assert interval.every == 1
    assert interval.begin() == Choice(8, "why")
    assert (interval.every, interval.reason) == (8, "why")
    assert [step for step in range(20) if interval.is_due(step)] == [0, 8, 16]
    interval.begin_anew()
    assert (interval.every, interval.reason) == (1, None)


def test_a_given_interval_stays() -> None:
    interval = SaveInterval(3)
    assert loop(interval, 40, step_s=0.1, held_s=0.5) == list(range(3, 41, 3))
    assert (interval.measured, interval.reason) == (None, None)
    interval.begin_anew()
    assert interval.every == 3


@pytest.mark.parametrize(
    ("every", "mtbf_s", "argument"),
    [(0, None, "every_n_steps"), ("often", None, "every_n_steps"), (5, 60.0, "mtbf_s"), ("auto", 0.0, "mtbf_s")],
)
def test_bad_arguments(every: object, mtbf_s: float | None, argument: str) -> None:
    with pytest.raises(InvalidArgumentError, match=argument):
        SaveInterval(every, mtbf_s)  # type: ignore[arg-type]


# ---- measuring ------------------------------------------------------------------------------------------------


def test_a_loop_saves_at_each_step_until_it_knows() -> None:
    interval = SaveInterval("auto", 3 * HOUR_S)
    saved = loop(interval, 400, step_s=0.5, held_s=0.01)
    assert saved[:10] == list(range(1, 11))
    assert interval.every == 32
    assert saved[-3:] == [320, 352, 384]
    assert "a step takes 0.5 s, a save 0.01 s of it, and a failure every 3 h is to be expected" in str(interval.reason)


def test_what_slows_steps_down_is_what_a_save_costs() -> None:
    interval = SaveInterval("auto", 3 * HOUR_S)
    loop(interval, 4000, step_s=0.5, held_s=0.01, slower_s=0.15)
    assert interval.every == 128
    assert "a save 0.16 s of it" in str(interval.reason)


def test_saves_that_last_as_long_as_two_steps_do_not_hide_what_a_step_takes() -> None:
    interval, now = SaveInterval("auto", 3 * HOUR_S), 0.0
    interval.every = 2
    for _ in range(30):
        interval.saved(0.4)
        for held_s in (0.4, 0.0):
            now += 0.5 + held_s
            interval.passed(now, saving=True)
    choice = interval.agree([interval._measure()])
    assert choice is not None
    step_s = float(choice.reason.split()[3])
    assert 0.4 < step_s < 0.6, choice


def test_steps_are_counted_where_a_turn_of_the_loop_has_several() -> None:
    interval = SaveInterval("auto", 3 * HOUR_S)
    loop(interval, 400, step_s=1.5, held_s=0.01, steps=3)
    assert "a step takes 0.5 s, a save 0.01 s of it" in str(interval.reason)
    assert interval.every == 32
    assert [step for step in range(3, 100, 3) if interval.is_due(step, step - 3)] == [33, 66, 96]


# ---- in a vote ------------------------------------------------------------------------------------------------


def measuring(save_s: float = 0.01, step_s: float = 0.5, mtbf_s: float | None = 3 * HOUR_S) -> SaveInterval:
    """One that has measured this, and chosen nothing yet."""
    interval, now = SaveInterval("auto", mtbf_s), 0.0
    for _ in range(12):
        now += step_s + save_s
        interval.passed(now, saving=True)
        interval.saved(save_s)
    return interval


def vote(*ranks: SaveInterval) -> list[Choice | None]:
    least = [min(each) for each in zip(*(rank.offer() for rank in ranks), strict=True)]
    return [rank.settle(least) for rank in ranks]


def test_a_vote_comes_to_what_a_coordinator_does() -> None:
    ranks = [measuring(), measuring(save_s=0.16), measuring(step_s=0.1)]
    assert vote(*ranks)[0] is not None
    assert [rank.every for rank in ranks] == [8, 8, 8], "it grows by so much at most"
    while any(vote(*ranks)):
        pass
    assert {rank.every for rank in ranks} == {chosen(measured(save_s=0.16))}
    assert ranks[0].reason == ranks[1].reason == ranks[2].reason
    assert "a step takes 0.5 s, a save 0.16 s of it, and a failure every 3 h" in str(ranks[0].reason)


def test_a_vote_waits_until_all_have_measured() -> None:
    ranks = [measuring(), SaveInterval("auto", 3 * HOUR_S)]
    assert vote(*ranks) == [None, None]
    assert [rank.every for rank in ranks] == [1, 1]


def test_a_rank_that_has_missed_a_vote_follows() -> None:
    ranks = [measuring(), measuring()]
    vote(ranks[0])
    assert [rank.every for rank in ranks] == [8, 1]
    vote(*ranks)
    assert ranks[0].every == ranks[1].every == 32


def test_the_history_of_a_vote_is_one_ranks() -> None:
    ranks = [measuring(mtbf_s=None) for _ in range(3)]
    ranks[0].starts, ranks[1].since_s, ranks[2].starts = 300, 0.0, 2**80
    ranks[2].since_s = float("nan")
    vote(*ranks)
    assert all(f"({2**31 - 1} starts)" in str(rank.reason) for rank in ranks)


def test_ranks_that_were_given_something_else_choose_nothing() -> None:
    ranks = [measuring(), SaveInterval(4)]
    assert vote(*ranks) == [None, None]
    assert [rank.every for rank in ranks] == [1, 4]


def test_the_lowest_rate_that_a_rank_was_given_counts() -> None:
    ranks = [measuring(mtbf_s=None), measuring(mtbf_s=1e-9), measuring(mtbf_s=1e30)]
    vote(*ranks)
    assert [rank.every for rank in ranks] == [1, 1, 1]
    assert len({rank.reason for rank in ranks}) == 1


@given(
    step_s=st.floats(0, 1e300),
    save_s=st.floats(0, 1e300),
    mtbf_s=st.none() | st.floats(1e-300, 1e300),
    since_s=st.floats(),
    starts=st.integers(0, 2**100),
)
def test_whatever_is_offered_fits_into_64_bits(
    step_s: float, save_s: float, mtbf_s: float | None, since_s: float, starts: int
) -> None:
    interval = measuring(save_s, step_s, mtbf_s)
    interval.since_s, interval.starts = since_s, starts
    assert all(-(2**63) <= number < 2**63 for number in interval.offer())
    vote(interval)
    assert 1 <= interval.every <= 1 << 16


def test_what_others_have_is_followed() -> None:
    interval = SaveInterval("auto")
    interval.follow(8)
    assert (interval.every, interval.reason) == (8, "other ranks do so: the reason was missed")
    interval.follow(8)
    given = SaveInterval(3)
    given.follow(8)
    assert (given.every, given.reason) == (3, None)


def test_nothing_can_be_left_out_of_what_is_chosen() -> None:
    assert (checked_skip(4, 1), checked_skip(None, "auto"), checked_skip(0, "auto")) == (4, 0, 0)
    with pytest.raises(InvalidArgumentError, match=r"a given every_n_steps only \[skip_every_n_steps=4\]"):
        checked_skip(4, "auto")
    with pytest.raises(InvalidArgumentError, match="skip_every_n_steps=-1"):
        checked_skip(-1, 5)
