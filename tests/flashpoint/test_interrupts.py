"""A program that is interrupted in the midst of a call, and goes on: later saves are as good as ever."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint import Checkpointer, Config, Flashpoint, Persist
from ml_flashpoint.copy.overlap import LateCopy
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.errors import SaveError
from tests.flashpoint.test_overlap import Job, _is_same, _loaded
from tests.support.persisting import persisted_steps
from tests.support.played_device import PlayedDevice, lock_slots


@pytest.mark.parametrize("place", ["stage", "commit"])
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
            call = getattr(Save, place)

            def interrupted(*args: Any, **how: Any) -> None:
                call(*args, **how)
                raise KeyboardInterrupt

            patched.setattr(Save, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                fp.save(2)
        saved = job.state()
        with contextlib.suppress(SaveError):  # the one that was interrupted
            fp.save(3)
        assert fp.wait(10)
        assert fp.last_saved == 3
    step, state = _loaded(base)
    assert step == 3
    assert _is_same(state, saved)


class Saving:
    """Whose state dict saves, as a signal handler might in the midst of a save."""

    save: Callable[[], object] = staticmethod(lambda: None)

    def state_dict(self) -> dict[str, Any]:
        self.save()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_save_from_within_a_save_is_refused_and_holds_up_nothing(base: Path) -> None:
    job, saving = Job(), Saving()
    with Flashpoint(base, deadline_s=20) as fp:
        fp.track(**job.tracked, saving=saving).resume()
        saving.save = lambda: fp.save(99)  # type: ignore[method-assign]
        job.step()
        saved = job.state()
        fp.save(1)
        assert fp.wait()
        assert (fp.health.saves, fp.health.failures) == (1, 1)
        assert "while a save begins" in str(fp.health.last_error)
        saving.save = lambda: None  # type: ignore[method-assign]
    job = Job()
    with Flashpoint(base) as fp:
        assert fp.track(**job.tracked, saving=Saving()).resume() == 1
    assert _is_same(job.state(), saved)


@pytest.mark.parametrize("opens", [Checkpointer, Flashpoint])
def test_a_save_from_within_a_save_leaves_sigterm_to_the_next_one(
    base: Path, opens: type[Checkpointer] | type[Flashpoint]
) -> None:
    said, saving = list[str](), Saving()
    before = signal.signal(signal.SIGTERM, lambda number, frame: said.append("SIGTERM"))
    try:
        with opens(base, config=Config(persist=Persist(f"{base}-store"), sigterm_grace_s=1)) as opened:
            if isinstance(opened, Flashpoint):
                save = opened.track(saving=saving).save
                opened.resume()
            else:
                save = partial(opened.save, state={"saving": saving})
                opened.load({"saving": saving})

            def save_another() -> None:
                signal.raise_signal(signal.SIGTERM)
                with contextlib.suppress(SaveError):
                    save(2)
                said.append("refused")

            saving.save = save_another  # type: ignore[method-assign]
            save(1)
            assert said == ["refused"]
        assert said == ["refused", "SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert persisted_steps(Path(f"{base}-store")) == [1]


def _save_another(fp: Flashpoint) -> None:
    fp.save(6)


@pytest.mark.parametrize("call", [_save_another, Flashpoint.before_update])
def test_a_handler_while_a_step_is_held_for_a_copy_holds_up_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Flashpoint], None]
) -> None:
    job = Job()
    device = PlayedDevice(monkeypatch, [job.model, job.average], [job.optimizer])
    hold = LateCopy.hold
    with Flashpoint(base, deadline_s=20, strict=True, overlap=True) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(4):
            job.step()
            fp.step()
            assert fp.wait()
            lock_slots(fp._checkpointer._pool)
        job.step()
        device.late.clear()
        device.lag()
        with monkeypatch.context() as patched:

            def interrupted(late: LateCopy) -> None:
                patched.setattr(LateCopy, "hold", hold)
                if call is _save_another:
                    saved.update(job.state())  # whose statistics are those of the forward before
                call(fp)
                hold(late)

            fp.step()
            saved = job.state()
            patched.setattr(LateCopy, "hold", interrupted)
            job.step()
        fp.before_update()
        assert fp.wait()
        assert device.late
        assert fp.last_saved == (6 if call is _save_another else 5)
    step, state = _loaded(base)
    assert step == (6 if call is _save_another else 5)
    assert _is_same(state, saved)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_the_midst_of_a_save_comes_after_it_and_at_once_if_it_is_repeated(
    base: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    job, went = Job(), list[str]()
    with Flashpoint(base, strict=True) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        stage = Save.stage

        def interrupted(*args: Any, **how: Any) -> Any:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            copies = stage(*args, **how)
            went.append("staged")
            return copies

        with monkeypatch.context() as patched:
            patched.setattr(Save, "stage", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fp.step()
        assert went == ["staged"] * (times == 1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert fp.wait(30)
        assert fp.last_saved == (1 if times == 1 else None)


def test_handlers_of_the_programs_own_are_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, told = Job(), list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    try:
        with Flashpoint(base, strict=True) as fp:
            fp.track(**job.tracked).resume()
            stage = Save.stage

            def interrupted(*args: Any, **how: Any) -> Any:
                signal.raise_signal(signal.SIGINT)
                assert told
                return stage(*args, **how)

            monkeypatch.setattr(Save, "stage", interrupted)
            job.step()
            fp.step()
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [signal.SIGINT]
