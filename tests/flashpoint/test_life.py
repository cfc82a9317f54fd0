"""Construction, arguments, what is tracked, the end, and what a user sees of it."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ml_flashpoint import Config, Flashpoint
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError
from ml_flashpoint.ranks.strategies import RingReplicationStrategy
from tests.support import warm
from tests.support.loops import Custom, Stored, resumed
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
            assert each.wait()
            assert each.last_saved == 1
    assert resumed(base, stored=Stored()) == 1


def test_base_that_is_a_file(base: Path) -> None:
    base.write_text("a file")
    for _ in range(2):
        with pytest.raises(FlashpointError, match="cannot be used"):
            Flashpoint(base)


def test_process_group_that_comes_later(base: Path, request: pytest.FixtureRequest) -> None:
    with Flashpoint(base) as fp:
        fp.track(stored=Stored(1)).resume()
        request.getfixturevalue("process_group")
        with pytest.raises(FlashpointError, match="after init_process_group"):
            fp.step()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("base", value) for value in ("relative/path", "", "/tmp/../etc", 3, None)),
        *(("every_n_steps", value) for value in (0, 1.5, True, "1", None)),
        *(("replication", value) for value in ("pairs", RingReplicationStrategy)),
        *((name, value) for name in ("strict", "handle_sigterm", "overlap") for value in (1, None)),
        *(("grace_s", value) for value in (0, math.inf, math.nan, "5", True, None)),
        *(("deadline_s", value) for value in (0, math.inf, "5", False)),
        *(("on_world_size_change", value) for value in ("ignore", None)),
        *(("safe_globals", value) for value in ("abc", [3], [("x", "y")], [(Custom, 3)], None, Custom)),
        *(("keep", value) for value in (0, "3", 1.5, True)),
        ("on_event", 7),
        *(("persist", value) for value in ("", 3, "file://relative", "ckpts", "../ckpts")),
        *(("persist_every", value) for value in (0, True)),
        *(("persist_keep", value) for value in (0, True)),
        *(("persist_bytes_per_s", value) for value in (0, True)),
    ],
)
def test_bad_arguments_are_named_with_their_value(base: Path, argument: str, value: Any) -> None:
    arguments = {"base": base, "persist": "memory://any", argument: value}
    with pytest.raises(InvalidArgumentError) as caught:
        Flashpoint(**arguments)
    assert caught.value.argument == argument
    assert str(caught.value).startswith(f"{argument} must be ") or f"{argument}=" in str(caught.value)
    assert str(caught.value.value) in str(caught.value)
    assert not base.exists()


def test_settings_come_by_keywords_or_in_one_config(base: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="keywords"):
        Flashpoint(base, config=Config(keep=3), replication="none")
    with Flashpoint(base, config=Config(keep=3)).track(stored=Stored(1)) as fp:
        fp.resume()
        for _ in range(4):
            fp.step()
            assert fp.wait(60)
        assert {4, 3, 2} <= {each.step for each in fp.versions() if each.verified}


@pytest.mark.parametrize("path", ["/dev/shm", "/proc"])
def test_whole_filesystem_is_no_base(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"mount point of a filesystem.*job-145"):
        Flashpoint(path)


def test_deadlines_and_functions_for_other_ranks_are_checked(base: Path) -> None:
    with Flashpoint(base) as fp:
        for deadline in (0, -1, math.nan, "1"):
            with pytest.raises(InvalidArgumentError, match="deadline_s must be"):
                fp.wait(deadline)  # type: ignore[arg-type]
        wrong: list[tuple[Any, str]] = [(each, "must be a function") for each in (3, {}, {"stored": None})]
        wrong += [({"other": print}, "nothing is tracked here as 'other'")]
        wrong += [({"model": print}, "modules are resharded by themselves")]
        for reshard, reason in wrong:
            with pytest.raises(InvalidArgumentError, match=reason):
                fp.track(stored=Stored(), model=nn.Linear(2, 2), reshard=reshard)


@pytest.mark.parametrize("name", ["1st", "with space", "_hidden", "a.b", ""])
def test_names_must_be_identifiers(base: Path, name: str) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match=r"name='") as caught:
        fp.track(**{name: Stored()})
    assert caught.value.value == repr(name)


@pytest.mark.parametrize("end", [Flashpoint.resume, Flashpoint.step, Flashpoint.save])
def test_tracking_is_checked_and_ends_with_the_first_save_or_resume(
    base: Path, end: Callable[[Flashpoint], Any]
) -> None:
    with Flashpoint(base) as fp:
        with pytest.raises(FlashpointError, match="nothing is tracked"):
            end(fp)
        stored = Stored()
        assert fp.track(stored=stored) is fp
        with pytest.raises(InvalidArgumentError, match="name='stored'"):
            fp.track(stored=Stored())
        with pytest.raises(InvalidArgumentError, match="already, under another name"):
            fp.track(again=stored)
        for value in (3, object(), Stored):
            with pytest.raises(InvalidArgumentError, match="loader must have"):
                fp.track(loader=value)
        end(fp)
        with pytest.raises(FlashpointError, match=r"tracking ends|before resume"):
            fp.track(late=Stored())


def test_the_job_depends_on_every_generator() -> None:
    """Else the tests that compare runs of it would show little."""
    reference = training.undisturbed(20)
    for disturb in (random.random, np.random.random, lambda: torch.rand(())):
        job = Job()
        for step in range(20):
            job.step()
            if step == 10:
                disturb()
        assert job.digests()["model.0.weight"] != reference["model.0.weight"]


# ---- what is said ----------------------------------------------------------------------------------------------


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


def _said(base: Path, setup: str = "", fallback: str = "None") -> list[str]:
    program = _TWO_RUNS.format(base=str(base), setup=setup, fallback=fallback)
    done = warm.run([sys.executable, "-c", program], child_environment(PYTHONUNBUFFERED="1"), check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.slow
def test_says_where_it_goes_on_and_that_it_saves(base: Path) -> None:
    said = _said(base)
    assert len(said) == 4, said
    assert said[0] == f"ml_flashpoint: no version in {base}: training starts at step 0"
    assert re.fullmatch(
        r"ml_flashpoint: first save committed: step [123], [\d.]+ MB on this rank; it blocked .* [\d.]+ s",
        said[1],
    )
    assert said[2].startswith(f"ml_flashpoint: resumed at step 3 from memory ({base}/step-3_ckpt) in ")
    assert said[3].startswith("ml_flashpoint: first save committed: step ")


@pytest.mark.slow
def test_says_it_once_where_logging_is_set_up_and_can_be_silenced(base: Path) -> None:
    setup = "import logging; logging.basicConfig(level=logging.INFO, format='%(name)s | %(message)s')"
    said = [line for line in _said(base, setup, "lambda: 5") if "ml_flashpoint.flashpoint |" in line]
    assert said[0].endswith(": resumed at step 5 from the fallback")
    assert len(said) == 4
    for how in ("getLogger('ml_flashpoint').setLevel(logging.WARNING)", "basicConfig()", "disable(logging.INFO)"):
        assert _said(base, f"import logging; logging.{how}") == []
