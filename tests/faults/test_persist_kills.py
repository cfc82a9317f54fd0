"""Jobs that are killed at any moment while they persist: what is there counts, and what is not whole never does."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ml_flashpoint.engine.recovery import Recovery
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.tools.export import export_version
from tests.support.forked import Child, Team
from tests.workers import persisting, training

assert Recovery  # the fork server has it imported


def verify(store: Path) -> int:
    """Every version that counts is whole; the newest step."""
    found = [version for version in open_store(store).versions() if version.counts]
    for version in found:
        for rank in version.ranks:
            manifest = open_store(store).manifest(version, rank)
            record, content = manifest.record, (store / version.folder / manifest.object_name).read_bytes()
            record.check(content[: record.size])
    return found[0].step if found else 0


def check_that_torch_reads_it(store: Path, exported: Path, step: int) -> None:
    """The newest persisted version, in a process that has nothing of this package: torch alone."""
    assert export_version(store, exported, format="torch").step == step
    script = "import sys, torch; found = torch.load(sys.argv[1], weights_only=False); "
    script += "print(len(found), *[each for each in sys.modules if each.startswith('ml_flashpoint')])"
    argv = [sys.executable, "-I", "-c", script, str(exported)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=200)
    assert int(done.stdout) > 0, "and no module of ours"


def kill_at_random(tmpfs: Path, times: int) -> None:
    """One rank, killed again and again; the memory goes with it every other time."""
    chance = random.Random(os.environ.get("FLASHPOINT_TEST_SEED"))
    base, store, newest = tmpfs / "job", tmpfs / "store", 0
    for life in range(times):
        with Child(persisting.train, str(base), str(store), 10**6, 1, 0.0, 5e5) as child:
            _, resumed, _ = child.next_report("resumed")
            assert resumed >= newest, "what was persisted is lost"
            child.next_report("step", resumed + chance.randrange(1, 6))
            threading.Event().wait(chance.uniform(0, 0.5))
            child.kill()
        newest = verify(store)
        if life % 2:
            shutil.rmtree(base)
    until = newest + 3
    with Child(persisting.train, str(base), str(store), until, 1) as child:
        assert child.result() == training.undisturbed(until)
    assert verify(store) == until
    leftovers = [each for each in open_store(store).versions() if not each.counts and not each.problem]
    assert leftovers == [], "what the killed ones left is removed"
    check_that_torch_reads_it(store, tmpfs / "exported.pt", until)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_while_persisting(tmpfs: Path) -> None:
    kill_at_random(tmpfs, 10)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_killed_while_persisting_a_hundred_times(tmpfs: Path) -> None:
    kill_at_random(tmpfs, 100)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_is_killed_while_persisting(tmpfs: Path, victim: int) -> None:
    chance, newest = random.Random(os.environ.get("FLASHPOINT_TEST_SEED")), 0
    store = tmpfs / "store"
    for _ in range(3):
        options = {"persist_every": 1, "persist_bytes_per_s": 1e6}
        with Team(persisting.train_ranks, tmpfs, 2, str(store), 10**6, "ddp", options) as team:
            _, resumed, _ = team[0].next_report("resumed")
            assert resumed >= newest
            team[victim].next_report("step", resumed + chance.randrange(2, 6))
            threading.Event().wait(chance.uniform(0, 0.3))
            team[victim].kill()
            team[1 - victim].kill()
        newest = verify(store)
        for node in (0, 1):
            shutil.rmtree(tmpfs / f"node-{node}")
