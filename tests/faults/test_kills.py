"""SIGKILL before every change to files, and while versions are persisted: what counts is whole, and nothing is lost.

The crucible kills jobs of several ranks at every point that has a name, and at random.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import threading
from pathlib import Path

import pytest

from ml_flashpoint.stores.location import open_store
from tests.faults.common import SCALE, files_of, iterations, last, slots
from tests.support.forked import Child, Team, call, preload
from tests.workers import distributed_training, training
from tests.workers import fault_engine as engine

preload("tests.workers.distributed_training")


@pytest.mark.slow
def test_kill_before_every_change_to_files(tmpfs: Path) -> None:
    """With one rank and no copies, what was verified, or a later save, must load: at every link, rename, removal."""
    steps, before, pids = [4, 5, 6], set(os.listdir("/dev/shm")), set()
    total = call(engine.save_steps, str(tmpfs / "job-0"), "tiny", steps, 0)
    assert total > 25
    not_killed = 0
    for nth in range(1, total + 1):
        base = tmpfs / f"job-{nth}"
        with Child(engine.save_steps, str(base), "tiny", steps, 0, nth, label=f"killed at change {nth}") as child:
            ended = child.wait()
            pids.add(str(child.pid))
            # The saver may have had to make a file more where they were counted, as its thread was late.
            not_killed += ended == 0
            assert ended == -9 or not_killed <= 3, child.failure("it was not killed")
            verified, begun = last(child, "verified"), last(child, "begins")
        # What the killed process left must not be in the way of the next one, or stay for good.
        found, then = call(engine.go_on, str(base), "tiny", [8, 9], 1)
        assert (found[0] if found else 0) in {verified, begun}, f"{found} after {nth} of {total} changes"
        assert then == (9, 1)
        assert len(slots(base)) <= 4, f"after {nth} of {total} changes"
        assert len(files_of(base)) <= 2 * 4
    # All that is left in memory lies in the base containers. Memory of torch's is named after its process.
    for name in set(os.listdir("/dev/shm")) - before:
        assert "flashpoint" not in name
        assert not ("torch" in name and pids & {*re.findall(r"\d+", name)})


def verify(store: Path) -> int:
    """Every version that counts is whole; the newest step."""
    found = [version for version in open_store(store).versions() if version.counts]
    for version in found:
        for rank in version.ranks:
            manifest = open_store(store).manifest(version, rank)
            record, content = manifest.record, (store / version.folder / manifest.object_name).read_bytes()
            record.check(content[: record.size])
    return found[0].step if found else 0


@pytest.mark.slow
@pytest.mark.timeout(600 * max(1, SCALE))
def test_killed_while_persisting(tmpfs: Path, rng: random.Random) -> None:
    """One rank, killed again and again; the memory goes with it every other time."""
    base, store, newest = tmpfs / "job", tmpfs / "store", 0
    options = {"persist": str(store), "persist_every": 1, "persist_keep": 2}
    for life in iterations(6):
        with Child(training.train, base, 10**6, {**options, "persist_bytes_per_s": 5e5}) as child:
            _, resumed, _ = child.next_report("resumed")
            assert resumed >= newest, "what was persisted is lost"
            child.next_report("step", resumed + rng.randrange(1, 6))
            threading.Event().wait(rng.uniform(0, 0.5))
            child.kill()
        newest = verify(store)
        if life % 2:
            shutil.rmtree(base)
    until = newest + 3
    with Child(training.train, base, until, options) as child:
        assert child.result()["digests"] == training.undisturbed(until)
    assert verify(store) == until
    leftovers = [each for each in open_store(store).versions() if not each.counts and not each.problem]
    assert leftovers == [], "what the killed ones left is removed"


@pytest.mark.slow
def test_one_of_two_ranks_is_killed_while_persisting(tmpfs: Path, rng: random.Random) -> None:
    store, newest = tmpfs / "store", 0
    for life in iterations(4):
        options = {"kind": "ddp", "persist": str(store), "persist_every": 1, "persist_bytes_per_s": 1e6}
        with Team(distributed_training.train, tmpfs, 2, 10**6, options) as team:
            _, resumed, _ = team[0].next_report("resumed")
            assert resumed >= newest
            team[life % 2].next_report("step", resumed + rng.randrange(2, 6))
            threading.Event().wait(rng.uniform(0, 0.3))
            team[life % 2].kill()
            team[1 - life % 2].kill()
        newest = verify(store)
        for node in (0, 1):
            shutil.rmtree(tmpfs / f"node-{node}")
