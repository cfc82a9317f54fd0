"""Random models, shardings, kills and failures through every door; what is promised must hold after each round.

`make soak` plays FLASHPOINT_SOAK_ROUNDS rounds from the seed FLASHPOINT_SOAK_SEED on; `make test` a few, always the
same. A failing round names its seed and its scenario: kept in `KEPT`, it is played from then on by every run.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.crucible.campaign import Campaign, Finding
from tests.crucible.scenarios import ERRORS, POINTS_OF_RECOVERIES, POINTS_OF_SAVES, Life, Save, Scenario, draw
from tests.crucible.states import Leaf, Spec
from tests.support import own_network
from tests.support.injector import Fault

_GROWING = Spec(
    (Leaf("a.t0", "parameter", (2, 5000), "bfloat16"), Leaf("b.t1", "parameter", (3, 341))),
    tuple(Leaf(f"grown{number}", "buffer", (2, 5000)) for number in range(2)),
    sharding="ddp",
)

_SMALL = Spec((Leaf("t", "parameter", (3, 341)),), sharding="none", optimizer="none", payload=3)


def _saves(count: int, mode: str = "thread", awaited: tuple[int, ...] = ()) -> tuple[Save, ...]:
    return tuple(Save(nth, False, mode, nth in awaited) for nth in range(1, count + 1))


_NO_THREAD = Fault(0, 1, "thread", "no-thread")
_KILLED_AT_ONCE = (Fault(1, 0, "loading", "kill"),)

KEPT: list[Scenario] = [
    # Buffers that only rank 0 saves come after the others have learned what they need not stage.
    Scenario("facade", _GROWING, (Life(tuple(Save(nth, nth in (4, 6), "thread", True) for nth in range(1, 8))),)),
    # A background save has no thread; the manager could not be closed after it.
    Scenario("local", _SMALL, (Life(_saves(2, awaited=(1, 2)), (replace(_NO_THREAD, step=2),), placement=(0,)),)),
    # A node is lost while another one, lost before, has not got its copies yet: nothing was promised.
    Scenario("facade", _SMALL, (Life(_saves(2), loses=0), Life(_saves(1), _KILLED_AT_ONCE, loses=1), Life(_saves(1)))),
    # A node that fetches its part has no room for it just now.
    Scenario(
        "dcp",
        _SMALL,
        (
            Life(_saves(1), placement=(0, 0)),
            Life(_saves(1), (Fault(1, 0, "link", "enospc"),), placement=(0, 1)),
        ),
    ),
    # A node that was alone is lost before the first save with another one: nothing was promised.
    Scenario(
        "dcp",
        _SMALL,
        (
            Life(_saves(1, "sync"), placement=(0, 0)),
            Life((), loses=0, placement=(0, 0, 1)),
            Life(_saves(1), placement=(0, 0, 1)),
        ),
    ),
    # Rank 0 answers late: saves that are not verified yet make way for newer ones, though more could be kept.
    Scenario(
        "facade",
        _SMALL,
        (Life(_saves(8), tuple(Fault(0, 1, "answering", "slow", nth) for nth in (2, 3, 4, 5)), placement=(0, 0)),),
        keep=3,
    ),
    # It crashes before its first verified save, again and again: the memory must not fill.
    Scenario("facade", _SMALL, (Life(_saves(2)), *[Life(_saves(3), (Fault(0, 1, "deciding", "kill"),))] * 4)),
    # Ranks and nodes change from life to life.
    Scenario("facade", _SMALL, tuple(Life(_saves(2), placement=each) for each in ((0, 1), (1,), (0, 0, 1), (1, 0)))),
    # A save fails on another rank, and what this one has written is in the way of the next, which is asynchronous.
    Scenario(
        "dcp",
        _SMALL,
        (
            Life(
                (Save(1, False, "thread", True), Save(2, False, "sync"), *_saves(4)[2:]),
                (Fault(1, 2, "link", "enospc"),),
            ),
        ),
    ),
]

OF_MEGATRON = {"file"}
"""Points that only its door comes to."""

CUT = range(12, 25)  # seeds; none in which a deadline is waited for


def killed_at(number: int, point: str, *, of_save: bool) -> Scenario:
    """One of two ranks is killed at a point; the memory of its node goes with it every other time."""
    rank = 0 if point == "deciding" else number % 2
    loses = rank if number // 2 % 2 else None
    hurt = Life(_saves(5, awaited=(1,)), (Fault(rank, 2 if of_save else 0, point, "kill"),), loses=loses)
    return Scenario("facade", _SMALL, ((hurt,) if of_save else (Life(_saves(2)), hurt)) + (Life(_saves(2)),))


def failing(point: str, action: str) -> Scenario:
    """A call fails on one of two ranks: in a save, in the recovery of its lost node, and never again."""
    first = Life(_saves(5, awaited=(1,)), (Fault(1, 1, point, action),), loses=1)
    return Scenario("facade", _SMALL, (first, Life(_saves(3), (Fault(1, 0, point, action),)), Life(_saves(2))))


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with one thing less: a life, or something that happens in one, or a tensor."""
    lives, leaves = scenario.lives, scenario.spec.leaves
    for at, life in enumerate(lives):
        less = [replace(life, faults=tuple(each for each in life.faults if each != fault)) for fault in life.faults]
        less += [replace(life, strike=None), replace(life, loses=None), replace(life, clock_s=0.0, interrupted=False)]
        less += [replace(life, looks_back=False), replace(life, saves=life.saves[:-1])]
        for instead in ([], *([each] for each in less if each != life)):
            yield replace(scenario, lives=(*lives[:at], *instead, *lives[at + 1 :]))
    for leaf in leaves if all(each.role != "tied" for each in leaves) else ():
        others = tuple(each for each in leaves if each != leaf)
        yield replace(scenario, spec=replace(scenario.spec, leaves=others))


def shrunk(campaign: Campaign, scenario: Scenario) -> Scenario:
    """The smallest scenario found within a minute that still fails: each is tried twice."""
    give_up = time.monotonic() + float(os.environ.get("FLASHPOINT_SOAK_SHRINK_S", 60))
    left = smaller(scenario)
    while (candidate := next(left, None)) and time.monotonic() < give_up:
        try:
            for _ in range(2 if candidate.lives and candidate.spec.leaves else 0):
                campaign.play(candidate)
        except Finding:
            scenario, left = candidate, smaller(candidate)
    return scenario


def rounds(folder: Path, seeds: range, seconds: float = float("inf"), at_once: int = 1) -> None:
    doors = tuple(os.environ["FLASHPOINT_SOAK_DOORS"].split(",")) if "FLASHPOINT_SOAK_DOORS" in os.environ else None
    began, left, findings, slowest = time.monotonic(), iter(seeds), [], (0.0, 0)
    played: Counter[str] = Counter()
    lock = threading.Lock()

    def play(campaign: Campaign) -> None:
        nonlocal slowest
        while time.monotonic() - began < seconds:
            with lock:
                seed = next(left, None)
            if seed is None:
                return
            scenario, since, found = draw(seed, doors) if doors else draw(seed), time.monotonic(), ""
            try:
                campaign.play(scenario)
            except Finding as finding:
                found = f"{finding}\nin short, {shrunk(campaign, scenario)}"
            with lock:
                played[scenario.door] += 1
                slowest = max(slowest, (time.monotonic() - since, seed))
                if found:
                    print(f"FINDING in the round of seed {seed}: {found[:12000]}...{found[-3000:]}", flush=True)
                    findings.append(f"seed {seed}: {found}")
                if played.total() % 50 == 0:
                    print(summary(campaign), flush=True)

    def summary(campaign: Campaign) -> str:
        return (
            f"{played.total()} rounds {dict(sorted(played.items()))}, {campaign.lives} lives, from seed {seeds.start},"
            f" {len(findings)} findings, {time.monotonic() - began:.0f} s; the slowest {slowest[0]:.0f} s: {slowest[1]}"
        )

    with Campaign(folder) as campaign, ThreadPoolExecutor(at_once) as pool:
        for future in [pool.submit(play, campaign) for _ in range(at_once)]:
            future.result()
    print(summary(campaign))
    assert not findings, f"{len(findings)} findings in {played.total()} rounds\n" + "\n\n".join(findings)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", KEPT, ids=range(len(KEPT)))
def test_kept_scenarios(tmpfs: Path, scenario: Scenario) -> None:
    with Campaign(tmpfs) as campaign:
        campaign.play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("points", [POINTS_OF_SAVES, POINTS_OF_RECOVERIES], ids=["saves", "recoveries"])
def test_a_kill_at_every_point(tmpfs: Path, points: tuple[str, ...]) -> None:
    with Campaign(tmpfs) as campaign:
        scenarios = {each: killed_at(at, each, of_save=points is POINTS_OF_SAVES) for at, each in enumerate(points)}
        never = [point for point, scenario in scenarios.items() if not campaign.play(scenario)]
    assert set(never) <= OF_MEGATRON, f"it was not killed at {never}"


@pytest.mark.slow
def test_an_error_of_every_kind(tmpfs: Path) -> None:
    with Campaign(tmpfs) as campaign:
        scenarios = {(point, action): failing(point, action) for point, action in sorted(set(ERRORS))}
        never = [point for (point, _), each in scenarios.items() if each.lives[0].faults[0] not in campaign.play(each)]
    assert set(never) <= OF_MEGATRON, f"{never} did not come"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cut_of_the_crucible(tmpfs: Path) -> None:
    rounds(tmpfs, CUT)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_crucible(tmpfs: Path) -> None:
    seed = int(os.environ.get("FLASHPOINT_SOAK_SEED", time.time_ns() // 1_000_000_000 * 10_000))
    count = int(os.environ.get("FLASHPOINT_SOAK_ROUNDS", 1_000_000_000))
    # torch looks for the port of a saving process before that listens there: what else runs here may take it.
    own_network.enter()
    rounds(tmpfs, range(seed, seed + count), float(os.environ.get("FLASHPOINT_SOAK_SECONDS", 1800)), at_once=2)
