"""SIGKILL of a rank that is on its own, at any moment: nothing that was committed is lost.

With one rank and no copies, a committed save is all there is, so the latest step that the rank had reported as
committed, or a later one, must load bit-equal, always.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.faults.common import await_more, files_of, iterations, last, lives
from tests.support.forked import Child, call
from tests.workers import fault_engine as engine


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count", "longest_s"), [("small", 60, 0.06), ("mid", 30, 0.3)])
def test_kill_while_saving(tmpfs: Path, rng: random.Random, size: str, count: int, longest_s: float) -> None:
    committed = begun = 0
    for life, gets_on in lives(count):
        with Child(engine.save_for_ever, str(tmpfs / "job"), size, begun + 1, life) as child:
            (_, found) = child.next_report("loaded")
            loaded = found[0] if found else 0
            assert committed <= loaded <= max(committed, begun), child.failure(f"loaded {found}")
            if gets_on:
                await_more("committed", committed, [child])
            time.sleep(rng.random() ** 2 * longest_s)
            child.kill()
            committed, begun = max(loaded, last(child, "committed")), max(begun, last(child, "begins"))
    assert committed >= len(iterations(count)) // 2


@pytest.mark.slow
def test_kill_before_every_change_to_files(tmpfs: Path) -> None:
    """The same, at each point of the commit protocol, one by one: every link, rename and removal."""
    steps = [4, 5, 6, 7]
    total = call(engine.save_steps, str(tmpfs / "job-0"), "tiny", steps, 0)
    assert total > 30
    not_killed = 0
    for nth in range(1, total + 1):
        base = tmpfs / f"job-{nth}"
        with Child(engine.save_steps, str(base), "tiny", steps, 0, nth, label=f"killed at change {nth}") as child:
            ended = child.wait()
            # The saver may have had to make a file more where they were counted, as its thread was late.
            not_killed += ended == 0
            assert ended == -9 or not_killed <= 3, child.failure("it was not killed")
            committed, begun = last(child, "committed"), last(child, "begins")
        found = call(engine.load, str(base), "tiny")
        assert (found[0] if found else 0) in {committed, begun}, f"{found} after {nth} of {total} changes"
        # What the killed process left must not be in the way of the next one, or stay for good.
        call(engine.save_steps, str(base), "tiny", [8, 9], 1)
        assert call(engine.load, str(base), "tiny") == (9, 1)
        assert len(list(base.glob(".flashpoint/slots/*/*"))) <= 4, f"after {nth} of {total} changes"
        assert len(files_of(base)) <= 2 * 4


@pytest.mark.slow
def test_kill_while_loading_changes_nothing(tmpfs: Path, rng: random.Random) -> None:
    base = tmpfs / "job"
    call(engine.save_steps, str(base), "mid", [1, 2], 0)
    before = files_of(base)
    for _ in iterations(25):
        with Child(engine.load_for_ever, str(base), "mid") as child:
            child.next_report("loading")
            time.sleep(rng.random() * 0.2)
            child.kill()
            assert all(report == ("loaded", (2, 0)) for report in child.reports if report[0] == "loaded")
    assert call(engine.load, str(base), "mid") == (2, 0)
    assert files_of(base) == before


@pytest.mark.slow
def test_many_kills_leave_no_more_slots_than_one_rank_uses(tmpfs: Path, rng: random.Random) -> None:
    base = tmpfs / "job"
    for life in iterations(40):
        with Child(engine.save_for_ever, str(base), "small", 1000 * life, life) as child:
            child.next_report("loaded")
            time.sleep(rng.random() * 0.05)
    with Child(engine.save_steps, str(base), "small", [10**6, 10**6 + 1], 0) as child:
        child.join()
    slots = list(base.glob(".flashpoint/slots/*/*"))
    linked = {path.stat().st_ino for path in base.glob("step-*/*.safetensors")}
    assert len(slots) <= 4
    assert linked <= {path.stat().st_ino for path in slots}
