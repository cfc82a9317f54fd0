"""The façade on another number of ranks: random numbers, what ranks have of their own, and places in the data.

Processes are what costs time here: one team of ranks tries one thing after the other, each in a base container of its
own.
"""

from __future__ import annotations

import shutil
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Team, call_team
from tests.workers import resharding as worker

# Of `worker._drawn`: the global generators and a rank's own; the last is seeded alike on all ranks.
OF_RANKS, OF_ALL = slice(0, 4), slice(4, None)

MIXED: dict[str, list[Any]] = {"epoch": [7], "counter": [1, 2], "looped": [5]}
NONE: dict[str, list[Any]] = {name: [0] for name in MIXED}

Call = tuple[str, str, tuple[Any, ...]]


def on_ranks(root: Path, world_size: int, *calls: Call, one_node: bool = False) -> list[list[Any]]:
    """What calls of functions of the worker return: by call, then by rank."""
    placement = [0] * world_size if one_node else None
    with Team(worker.several, root, world_size, list(calls), placement=placement) as team:
        by_rank = team.results(60.0 * len(calls))
    return [list(results) for results in zip(*by_rank, strict=True)]


# ---- what ranks have of their own -----------------------------------------------------------------------------


def test_on_the_same_number_of_ranks_each_gets_its_own(tmpfs: Path) -> None:
    before, after = on_ranks(tmpfs, 2, ("save", "job", (MIXED,)), ("load", "job", (NONE, "failing")))
    assert [each["drawn"] for each in after] == before
    assert [each["values"] for each in after] == [
        {"epoch": 7, "counter": 1, "looped": 5},
        {"epoch": 7, "counter": 2, "looped": 5},
    ]
    assert [each["told"] for each in after] == [[], []]


@pytest.mark.parametrize("world_size", [1, 4])
def test_what_ranks_have_of_their_own(tmpfs: Path, world_size: int) -> None:
    alike = {"epoch": [{"now": 7, "seen": {3, 5}}], "best": [float("inf")]}
    before, before_alike = on_ranks(tmpfs, 2, ("save", "job", (MIXED,)), ("save", "alike", (alike,)))
    by_name = {"counter": "summed", "looped": "summed"}
    found, again, raised, fell_back, summed, all_summed, failing, kept = on_ranks(
        tmpfs,
        world_size,
        *[("load", "alike", ({"epoch": [0], "best": [0]},))] * 2,
        ("load", "job", (NONE,)),
        ("load", "job", (NONE, None, "raise", True)),
        ("load", "job", (NONE, by_name)),
        ("load", "job", (NONE, "summed")),
        ("load", "job", (NONE, "failing")),
        ("load", "job", (NONE, None, "keep")),
    )
    ranks = range(world_size)
    # What all had alike is everybody's.
    assert [each["values"] for each in found] == [{name: values[0] for name, values in alike.items()}] * world_size
    assert [(each["step"], each["weight"]) for each in found] == [(3, found[0]["weight"])] * world_size
    check_random_numbers(before_alike, found)
    assert [each["drawn"] for each in again] == [each["drawn"] for each in found], "new ones are the same again"
    # What differs is named on all ranks, and nothing is touched, nor loaded from elsewhere.
    for each in (*raised, *fell_back):
        check_undecided(each, world_size)
    # Functions are given what all ranks had; one may be for everything that is tracked with it.
    given = [[[1, 2], rank, world_size] for rank in ranks], [[[5, 5], rank, world_size] for rank in ranks]
    assert [each["values"] for each in summed] == [
        {"epoch": 7, "counter": given[0][rank], "looped": given[1][rank]} for rank in ranks
    ]
    assert "'counter', 'looped' as reshard functions make of what all ranks had" in summed[0]["told"][0]
    assert [each["values"]["epoch"] for each in all_summed] == [[[7, 7], rank, world_size] for rank in ranks]
    # One that fails is named on all ranks.
    for each in failing:
        assert "ReshardError: version step-3_ckpt" in each["error"]
        assert f"the reshard function of 'counter' failed: KeyError: 'rank {world_size - 1}'" in each["error"]
        assert not each["touched"]
    # Or all is as it was of the rank modulo the old number.
    assert [each["values"]["counter"] for each in kept] == [1, 2, 1, 2][:world_size]
    assert [each["drawn"] for each in kept] == [*before, *before][:world_size]
    assert "rank r takes the random numbers and the own state of rank r modulo 2" in kept[0]["told"][0]
    assert ("of ranks that are gone: random numbers, 'counter', 'noise'" in kept[0]["told"][0]) == (world_size == 1)


def check_random_numbers(before: list[list[float]], found: list[dict[str, Any]]) -> None:
    """Ranks that were there have what would have come next; new ones have numbers of their own."""
    drawn, there = [each["drawn"] for each in found], min(len(before), len(found))
    assert drawn[:there] == before[:there]
    for one, other in combinations(drawn, 2):
        assert not set(one[OF_RANKS]) & set(other[OF_RANKS])
        assert one[OF_ALL] == other[OF_ALL]
    assert [len(each["told"]) for each in found] == [1, *[0] * (len(found) - 1)]
    if len(found) > len(before):
        assert "saved by 2 ranks, loaded by 4: new ranks have" in found[0]["told"][0]
    else:
        assert "not used any more of ranks that are gone: random numbers, 'noise'" in found[0]["told"][0]


def check_undecided(each: dict[str, Any], world_size: int) -> None:
    error = each["error"]
    assert error.startswith("ReshardError: version step-3_ckpt cannot be loaded yet: saved by 2 ranks, ")
    assert f"loaded by {world_size}, and nothing says what becomes of 'counter', which differs between" in error
    assert "of 'looped', whose place in the data" in error
    assert "reshard={'counter': function, 'looped': function}" in error
    assert 'on_world_size_change="keep"' in error
    assert "epoch" not in error
    assert (each["touched"], each["stepped"], each["trains"], each["fell back"]) == (False, False, True, [])


@pytest.mark.damages_on_purpose
def test_an_older_version_of_this_number_of_ranks_is_not_taken_instead(tmpfs: Path) -> None:
    states = {"counter": [1, 2, 3]}
    call_team(worker.save, tmpfs, 2, states, 3)
    nodes = ("node-0", "node-1")
    for node in nodes:
        shutil.copytree(tmpfs / node / "job" / "step-3_ckpt", tmpfs / node / "kept")
    call_team(worker.save, tmpfs, 3, states, 5, "keep")
    for node in nodes:
        (tmpfs / node / "kept").rename(tmpfs / node / "job" / "step-3_ckpt")
    raised, found = on_ranks(tmpfs, 2, ("load", "job", (states,)), ("load", "job", (states, "summed")))
    for each in raised:
        assert "ReshardError: version step-5_ckpt cannot be loaded yet" in (each["error"] or "none")
    assert [each["step"] for each in found] == [5, 5], "it is still there"


# ---- places in the data ---------------------------------------------------------------------------------------


def lives(
    root: Path, jobs: list[tuple[str, int, bool, list[int | None]]], ranks: tuple[int, ...]
) -> list[list[list[list[tuple[int, list[int]]]]]]:
    """Several jobs that live on so many ranks of one node, one life after the other.

    Args:
        jobs: kind of loader, samples, whether the last ones are dropped, and batches on each rank in each life.

    Returns:
        Epoch and samples of the batches, by job, life and rank.
    """
    by_life = [
        on_ranks(
            root,
            world_size,
            *[
                ("epochs", f"job-{n}", (kind, size, until[life], drop_last))
                for n, (kind, size, drop_last, until) in enumerate(jobs)
            ],
            one_node=True,
        )
        for life, world_size in enumerate(ranks)
    ]
    return [[of_life[job] for of_life in by_life] for job in range(len(jobs))]


def times_given(of_lives: list[list[list[tuple[int, list[int]]]]], epoch: int) -> Counter[int]:
    batches = [batch for life in of_lives for rank in life for batch in rank]
    return Counter(sample for number, batch in batches if number == epoch for sample in batch)


def given_once(size: int) -> dict[int, int]:
    return dict.fromkeys(range(size), 1)


RANKS = (2, 3, 3, 1)
# 8 samples of the first epoch on two ranks, 12 and, after a restart, 6 more on three, and one goes on alone.
UNTIL: list[int | None] = [2, 2, 1, None]


def test_every_sample_is_given_once(tmpfs: Path) -> None:
    plain, by_workers, whole, padded, dropped = lives(
        tmpfs,
        [
            ("plain", 37, False, UNTIL),
            ("persistent workers", 37, False, UNTIL),
            ("plain", 16, False, [4, 1, 1, None]),  # the first epoch is given in full before ranks come
            ("plain", 21, False, [2, None, None, None]),
            ("plain", 21, True, [2, None, None, None]),
        ],
        RANKS,
    )
    for epoch in range(worker.EPOCHS):
        assert times_given(plain, epoch) == times_given(by_workers, epoch) == given_once(37)
        assert times_given(whole, epoch) == given_once(16)
    # Ranks have as many samples as each other: else those with more would wait for the others.
    for job, of_rest in ((padded, 5), (dropped, 4)):
        counts = [Counter(epoch for epoch, batch in rank for _ in batch) for rank in job[1]]
        assert [count[0] for count in counts] == [of_rest] * 3
        assert counts[0] == counts[1] == counts[2]
        assert set(times_given(job[1:2], 0).values()) == {1}
        assert job[2] == [[]] * 3, "it has ended"
    assert padded[3] == [[]]
    assert times_given(padded, 0).keys() == given_once(21).keys()
    # What three ranks dropped in the end is enough for one.
    assert [len(batches) for batches in dropped[3]] == [1]
    assert set(times_given(dropped, 1).values()) == {1}


def test_loaders_that_cannot_go_on_are_named(tmpfs: Path) -> None:
    on_ranks(
        tmpfs,
        2,
        ("epochs", "dealt", ("plain", 20, 2)),
        ("epochs", "begun", ("plain", 20, 2)),
        ("other_loader", "undealt", (20, False)),
    )
    undecided, kept, undealt, longer, from_undealt, another, _, begun = on_ranks(
        tmpfs,
        3,
        ("undecided_loader", "dealt", (20, "raise")),
        ("undecided_loader", "dealt", (20, "keep")),
        ("other_loader", "dealt", (20, False)),
        ("other_loader", "dealt", (30, True)),
        ("other_loader", "undealt", (20, True)),
        ("other_epoch", "dealt", (20,)),
        ("other_epoch", "begun", (20, True)),
        ("other_epoch", "begun", (20,)),
    )
    assert kept == [2, 2, 2]
    for said, reason in (
        (undecided, "becomes of 'loader', whose place in the data means something else now"),
        (undecided, "reshard={'loader': rest_of_epoch}"),
        (undealt, "was to be dealt, and the loader is no plain one"),
        (longer, "the epoch that was begun has 20 samples, not 30"),
        (from_undealt, "the loader that was saved was no plain one with a DistributedSampler"),
        (another, "'loader' was set to epoch 1, and its state is of the midst of epoch 0"),
        (begun, "'loader' was set to epoch 1, and its state is of the midst of epoch 0"),
    ):
        assert all(reason in each for each in said), said


# ---- Lightning ------------------------------------------------------------------------------------------------


def test_lightnings_dictionary(tmpfs: Path) -> None:
    pytest.importorskip("lightning")
    on_ranks(
        tmpfs,
        2,
        ("dictionary", "alike", ([5.0],)),
        ("dictionary", "own", ([5.0, 6.0],)),
        ("dictionary", "place", ([5.0], "raise", [{"given": 3}])),
    )
    alike, own, kept, place = on_ranks(
        tmpfs,
        3,
        ("dictionary", "alike", ([0.0],)),
        ("dictionary", "own", ([0.0],)),
        ("dictionary", "own", ([0.0], "keep")),
        ("dictionary", "place", ([0.0],)),
    )
    assert alike == [(4, 5.0)] * 3
    for said in own:
        assert "ReshardError" in said
        assert "becomes of 'lightning', which differs between the ranks that saved it" in said
        assert 'FlashpointCallback(..., on_world_size_change="keep")' in said
        assert "track(" not in said, "there is no such call in Lightning"
    assert kept == [(4, 5.0), (4, 6.0), (4, 5.0)]
    for said in place:
        assert "becomes of 'lightning', whose place in the data means something else now" in said
