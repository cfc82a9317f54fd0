"""Construction, arguments, the end, and what a user sees of it."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
)
from ml_flashpoint.ranks.strategies import RingReplicationStrategy
from tests.support import warm
from tests.support.forked import Child
from tests.support.loops import Custom, Stored, resumed, train
from tests.support.processes import child_environment
from tests.workers import training
from tests.workers.training import Job


def test_context_manager_ends_it_whatever_happens(base: Path) -> None:
    stored = Stored(1)

    def fail(fp: Flashpoint) -> None:
        with fp:
            fp.track(stored=stored).step()
            raise ZeroDivisionError

    fp = Flashpoint(base)
    with pytest.raises(ZeroDivisionError):
        fail(fp)
    for use in (fp.step, fp.save, fp.resume, fp.track):
        with pytest.raises(FlashpointError, match="closed"):
            use()
    fp.close()
    assert fp.last_saved == 1
    assert resumed(base, stored=stored) == 1


def test_a_second_one_on_one_base_takes_over(base: Path, tmpfs: Path) -> None:
    (tmpfs / "link").symlink_to(tmpfs)
    earlier = Flashpoint(base)
    for other in (base, str(base) + "/", tmpfs / "link" / "job"):
        later = Flashpoint(other)
        with pytest.raises(FlashpointError, match="closed"):
            earlier.step()
        earlier = later
    with Flashpoint(base) as fp, Flashpoint(tmpfs / "other") as beside:
        for each in (fp, beside):
            each.track(stored=Stored(1)).step()
        assert fp.wait()
        assert beside.wait()
        assert fp.last_saved == beside.last_saved == 1
    with Flashpoint(base) as fp:
        assert fp.track(stored=Stored()).resume() == 1


def test_a_live_process_on_the_base_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_LOCK_DEADLINE_S", "0.2")
    with Child(training.train, str(base), 1000, 0.2) as child:
        child.next_report("step", 2)  # then the save of step 1 has ended
        with pytest.raises(JobInUseError, match=str(child.pid)):
            Flashpoint(base)
    assert resumed(base, **Job().tracked) >= 1


def test_base_that_is_a_file(tmpfs: Path) -> None:
    (tmpfs / "job").write_text("a file")
    for _ in range(2):
        with pytest.raises(FlashpointError, match="cannot be used"):
            Flashpoint(tmpfs / "job")


def test_process_group_that_comes_later(base: Path) -> None:
    with Flashpoint(base) as fp:
        fp.track(stored=Stored(1)).resume()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(FlashpointError, match="after init_process_group"):
                fp.step()
        finally:
            dist.destroy_process_group()


def test_process_group_of_one(base: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = Job()
        train(base, job, 4)
    finally:
        dist.destroy_process_group()
    again = Job(seed=2)
    train(base, again, 8)
    assert again.digests() == training.undisturbed(8)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("base", value) for value in ("relative/path", "", "/tmp/../etc", 3, None)),
        *(("every_n_steps", value) for value in (0, -1, 1.5, True, "1", None)),
        *(("replication", value) for value in ("pairs", RingReplicationStrategy)),
        *(("strict", value) for value in (1, None, "yes")),
        *(("handle_sigterm", value) for value in (0, None)),
        *(("grace_s", value) for value in (0, -1.0, math.inf, math.nan, "5", True, None)),
        *(("deadline_s", value) for value in (0, -1, math.inf, "5", False)),
        *(("on_world_size_change", value) for value in ("ignore", None, True, 3)),
        *(("safe_globals", value) for value in ("abc", [3], [("x", "y")], [(Custom, 3)], None, Custom)),
    ],
)
def test_bad_arguments_are_named_with_their_value(base: Path, argument: str, value: Any) -> None:
    arguments = {"base": base, argument: value}
    with pytest.raises(InvalidArgumentError) as caught:
        Flashpoint(**arguments)
    assert caught.value.argument == argument
    assert re.search(rf"^{argument} must be .*, got {re.escape(caught.value.value)}", str(caught.value))
    assert not base.exists()


@pytest.mark.parametrize(
    ("reshard", "reason"),
    [
        (3, "must be a function"),
        ({}, "must be a function"),
        ({"stored": None}, "must be a function"),
        ({"other": print}, "nothing is tracked here as 'other'"),
        ({"model": print}, "modules are resharded by themselves"),
    ],
)
def test_bad_reshard_functions(base: Path, reshard: Any, reason: str) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match=reason):
        fp.track(stored=Stored(), model=nn.Linear(2, 2), reshard=reshard)


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", 10**30])
def test_bad_steps(base: Path, step: Any) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match="step must be"):
        fp.track(stored=Stored()).save(step)


@pytest.mark.parametrize("deadline", [0, -1, math.nan, "1"])
def test_bad_deadlines(base: Path, deadline: Any) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match="deadline_s must be"):
        fp.wait(deadline)


def test_the_job_depends_on_every_generator() -> None:
    """Else the tests above would show little."""
    reference = training.undisturbed(20)
    for disturb in (random.random, np.random.random, lambda: torch.rand(())):
        job = Job()
        for step in range(20):
            job.step()
            if step == 10:
                disturb()
        assert job.digests()["model.0.weight"] != reference["model.0.weight"]


@pytest.mark.parametrize("path", ["/dev/shm", "/proc"])
def test_whole_filesystem_is_no_base(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"mount point of a filesystem.*job-145"):
        Flashpoint(path)


@pytest.mark.parametrize("fallback", [7, "long-term", True])
def test_fallback_that_cannot_be_called(base: Path, fallback: Any) -> None:
    with Flashpoint(base) as fp:
        fp.track(stored=Stored(1)).save(3)
        with pytest.raises(InvalidArgumentError, match="must be a function without arguments"):
            fp.resume(fallback=fallback)


_TWO_RUNS = """
import sys
import torch
from ml_flashpoint import Flashpoint
{setup}
for _ in range(2):
    with Flashpoint({base!r}) as fp:
        fp.track(model=torch.nn.Linear(10, 10)).resume(fallback=({fallback}))
        for _ in range(3):
            fp.step()
            fp.wait()
"""


def _said(base: Path, setup: str = "", fallback: str = "None", *, cold: bool = False) -> list[str]:
    argv = [sys.executable, "-c", _TWO_RUNS.format(base=str(base), setup=setup, fallback=fallback)]
    if cold or warm.ALL_COLD:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True)
    else:
        done = warm.run(argv, child_environment(PYTHONUNBUFFERED="1"), check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.slow
def test_says_where_it_goes_on_and_that_it_saves(base: Path) -> None:
    said = _said(base, cold=True)
    assert len(said) == 4, said
    assert said[0] == f"ml_flashpoint: no version in {base}: training starts at step 0"
    assert re.fullmatch(
        r"ml_flashpoint: first save committed: step [123], [\d.]+ MB on this rank; it blocked .* [\d.]+ s",
        said[1],
    )
    assert said[2].startswith(f"ml_flashpoint: resumed at step 3 from memory ({base}/step-3_ckpt) in ")
    assert said[3].startswith("ml_flashpoint: first save committed: step ")


@pytest.mark.slow
def test_says_it_once_where_logging_is_set_up(base: Path) -> None:
    setup = "import logging; logging.basicConfig(level=logging.INFO, format='%(name)s | %(message)s')"
    said = [line for line in _said(base, setup, "lambda: 5") if "ml_flashpoint.flashpoint |" in line]
    assert said[0].endswith(": resumed at step 5 from the fallback")
    assert len(said) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [
        "import logging; logging.getLogger('ml_flashpoint').setLevel(logging.WARNING)",
        "import logging; logging.basicConfig()",
        "import logging; logging.disable(logging.INFO)",
    ],
)
def test_what_it_says_can_be_silenced(base: Path, setup: str) -> None:
    assert _said(base, setup) == []
