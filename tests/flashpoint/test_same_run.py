"""A run that crashes anywhere and resumes is the undisturbed run."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from ml_flashpoint import Flashpoint
from tests.support.forked import Child, call
from tests.support.loops import train
from tests.workers import training
from tests.workers.training import Job


def test_resumed_runs_are_the_undisturbed_run(base: Path) -> None:
    expected = training.undisturbed(17)
    for life, until in enumerate((3, 4, 11, 17)):
        job = Job(seed=life)
        fp = train(base, job, until)
        assert fp.last_saved == fp.steps_done == until
        assert fp.health.failures == 0
    assert job.digests() == expected


@pytest.mark.slow
def test_killed_at_random_points_is_the_undisturbed_run(base: Path) -> None:
    steps, chance = 60, random.Random(os.environ.get("FLASHPOINT_TEST_SEED"))
    reached, killed = 0, 0
    while reached < steps:
        # However late the kill comes, no life gets further than so many steps, and all of them not to the end.
        most = min(steps, reached + 18)
        with Child(training.train, str(base), most, 0.01) as child:
            (_, resumed) = child.next_report("resumed")
            assert resumed >= reached - 1, "a step that was saved is lost"
            # The last one may have saved more than it had reported when it was killed, and left nothing to do.
            target = min(most, resumed + chance.randrange(1, 14))
            if target > resumed:
                (_, reached) = child.next_report("step", target)
            if target == steps:
                reached = steps
                digests = child.result()
            else:
                threading.Event().wait(chance.uniform(0, 0.05))
                child.kill()
                killed += 1
                reached = target
    assert killed >= 3
    assert digests == training.undisturbed(steps)


@pytest.mark.slow
def test_killed_while_resuming(base: Path) -> None:
    job = Job()
    train(base, job, 6)
    for _ in range(2):
        with Child(training.resume_and_hang, str(base)) as child:
            child.next_report("loading")
            child.kill()
    assert call(training.train, str(base), 9) == training.undisturbed(9)


def test_resume_again_goes_back_to_the_newest_version(base: Path) -> None:
    job = Job()
    with Flashpoint(base, every_n_steps=3) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(5):
            job.step()
            fp.step()
            fp.wait()
        assert fp.resume() == fp.steps_done == fp.last_saved == 3
        assert job.digests() == training.undisturbed(3)
        for _ in range(3):
            job.step()
            fp.step()
        assert fp.wait()
        assert fp.last_saved == 6
    again = Job(seed=3)
    train(base, again, 7)
    assert again.digests() == training.undisturbed(7)
