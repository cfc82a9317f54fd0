"""A program that is interrupted in the midst of a call, and goes on: later saves are as good as ever."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import SaveError
from tests.facade.test_overlap import Job, _is_same, _loaded


@pytest.mark.parametrize("place", ["after the begin", "before the end is left to the background"])
def test_an_interrupt_between_two_calls_of_a_save_holds_up_no_later_one(
    base: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    job = Job()
    with Flashpoint(base, strict=True, deadline_s=20) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        fp.save(1)
        assert fp.wait()
        with monkeypatch.context() as patched:
            if place == "after the begin":
                begin = fp._engine.saver.begin

                def interrupted(**how: Any) -> None:
                    begin(**how)
                    raise KeyboardInterrupt

                patched.setattr(fp._engine.saver, "begin", interrupted)
            else:
                run, calls = fp._saves._background.run, list[Any]()

                def interrupted_once(function: Any) -> None:
                    calls.append(function)
                    if len(calls) == 1:
                        raise KeyboardInterrupt
                    run(function)

                patched.setattr(fp._saves._background, "run", interrupted_once)
            with pytest.raises(KeyboardInterrupt):
                fp.save(2)
        saved = job.state()
        with contextlib.suppress(SaveError):  # the one that was interrupted
            fp.save(3)
        assert fp.wait(10)
        assert fp.last_saved == 3
        assert fp._engine.saver.stats.last_verified == 3
    step, state = _loaded(base)
    assert step == 3
    assert _is_same(state, saved)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_the_midst_of_a_save_comes_after_it_and_at_once_if_it_is_repeated(
    base: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    job, went = Job(), list[str]()
    with Flashpoint(base, strict=True) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        stage = fp._saves._stage

        def interrupted(*args: Any) -> None:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            stage(*args)
            went.append("staged")

        with monkeypatch.context() as patched:
            patched.setattr(fp._saves, "_stage", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fp.step()
        assert went == ["staged"] * (times == 1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        fp.before_update()
        assert fp.wait(30)
        assert fp.last_saved == (1 if times == 1 else None)


def test_handlers_of_the_programs_own_are_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, told = Job(), list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    try:
        with Flashpoint(base, strict=True) as fp:
            fp.track(**job.tracked).resume()
            stage = fp._saves._stage

            def interrupted(*args: Any) -> None:
                signal.raise_signal(signal.SIGINT)
                assert told
                stage(*args)

            monkeypatch.setattr(fp._saves, "_stage", interrupted)
            job.step()
            fp.step()
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [signal.SIGINT]
