"""`keep=` and going back in one process."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ml_flashpoint import Flashpoint, Keep
from ml_flashpoint.config import Config
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, SaveError
from ml_flashpoint.tools.items import open_version
from tests.support.commands import flashpoint
from tests.workers.kept_versions import State, content, shown


def save(fp: Flashpoint, state: State, *steps: int, attempt: int = 0) -> None:
    for step in steps:
        state.set(0, step, attempt)
        fp.save(step)
        fp.wait()


def opened(base: Path, state: State, keep: int | Keep = 3) -> Flashpoint:
    return Flashpoint(base, keep=keep).track(state=state)


def test_the_newest_and_milestones_are_kept_and_each_is_loaded(base: Path) -> None:
    state = State(3000)
    with opened(base, state, Keep(newest=2, every_n_steps=5, milestones=2)) as fp:
        fp.resume()
        save(fp, state, *range(1, 18))
        assert {(17,), (16,), (15,), (10,)} <= {*shown(fp.versions())}
        with pytest.raises(LoadError, match=r"no version of step 9 .* there are 17, 16, 15"):
            fp.resume(step=9)
        assert (fp.steps_done, state.checked()) == (0, [0, 17, 0]), "nothing has changed"
        assert (fp.resume(step=10), state.checked(), fp.last_saved) == (10, [0, 10, 0], 10)
        assert (fp.resume(), state.checked()) == (10, [0, 10, 0])
        with pytest.raises(LoadError, match=r"no version of step 17 .* there (is|are) 10"):
            fp.resume(step=17)
        save(fp, state, 11, 12, attempt=1)
        assert shown(fp.versions())[:3] == [(12,), (11,), (10,)]
        assert (fp.resume(), state.checked()) == (12, [0, 12, 1])


def test_after_going_back_that_cannot_be_recorded_the_next_save_begins_a_run(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State(3000)
    with opened(base, state) as fp:
        fp.resume()
        save(fp, state, 1, 2, 3)
        with monkeypatch.context() as patched:
            patched.setattr("ml_flashpoint.engine.recovery.write_record", Mock(side_effect=SaveError("no")))
            with pytest.raises(SaveError, match="no"):
                fp.resume(step=1)
        assert state.checked() == [0, 1, 0]
        assert [each.step for each in fp.versions()] == [3, 2, 1]
        save(fp, state, 4)
        assert (fp.resume(), state.checked()) == (4, [0, 4, 0])


def test_what_was_gone_back_from_is_nowhere_taken_for_the_newest(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = State(3000)
    with opened(base, state) as fp:
        fp.resume()
        save(fp, state, 5, 6, 7)
        fp.resume(step=5)
        with open_version(base) as newest, open_version(base, 7) as abandoned:
            assert (newest.step, abandoned.step) == (5, 7)
        assert flashpoint("ls", base, "--json") == 0
        found = json.loads(capsys.readouterr().out)["versions"]
        assert [(each["step"], each["abandoned"]) for each in found] == [(7, True), (6, True), (5, False)]
        flashpoint("ls", base)
        lines = capsys.readouterr().out.splitlines()
        assert ["gone back from" in line for line in lines[2:]] == [True, True, False]
        save(fp, state, 6, attempt=1)
        with open_version(base) as newest:
            assert newest.step == 6


def test_a_step_that_was_saved_again_is_read_by_its_path_as_it_was_saved_last(base: Path) -> None:
    with Checkpointer(base, Config(keep=3)) as engine:

        def save(step: int, attempt: int) -> None:
            made = engine.begin(step, explicit=True)
            made.fill([("values", content(0, step, attempt, 3000))])
            made.commit()
            made.verified.result(30)

        def assert_saved(step: int, attempt: int) -> None:
            with engine.open_version(engine.id(step)) as reader:
                assert torch.equal(reader.open(0).tensor("values"), content(0, step, attempt, 3000))

        engine.latest()
        save(1, 0)
        save(2, 0)
        engine.go_back(1)
        assert_saved(1, 0)
        for attempt in (1, 2):
            save(2, attempt)
            assert_saved(2, attempt)
            engine.go_back(1)


@pytest.mark.parametrize("step", [-1, True, 1.0, "one"])
def test_what_is_no_step_is_refused(base: Path, step: object) -> None:
    with opened(base, State(10)) as fp:
        with pytest.raises(InvalidArgumentError, match="step"):
            fp.resume(step=step)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="step must be"):
            fp.save(step)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="fallback"):
            fp.resume(lambda: 3, step=1)
        with pytest.raises(LoadError, match="there are none"):
            fp.resume(step=1)
