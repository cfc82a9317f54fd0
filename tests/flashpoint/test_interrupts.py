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
from tests.flashpoint.test_overlap import LOCKED, Job, assert_loaded, on_device, settled
from tests.support.loops import Stored
from tests.support.persisting import persisted_steps


@contextlib.contextmanager
def around(place: str, before: Callable[[], object] = bool, after: Callable[[], object] = bool) -> Any:
    """Do something before and after this call of a save."""
    with pytest.MonkeyPatch.context() as patched:
        call = getattr(Save, place)

        def interrupted(*args: Any, **how: Any) -> Any:
            before()
            result = call(*args, **how)
            after()
            return result

        patched.setattr(Save, place, interrupted)
        yield


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("place", "moment"), [("stage", "before"), ("stage", "after"), ("commit", "after")])
def test_an_interrupt_in_the_midst_of_a_save_holds_up_no_later_one(base: Path, place: str, moment: str) -> None:
    job = Job()
    with Flashpoint(base, strict=True, deadline_s=20) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        fp.save(1)
        assert fp.wait()
        with around(place, **{moment: interrupt}), pytest.raises(KeyboardInterrupt):
            fp.save(2)
        with contextlib.suppress(SaveError):  # the one that was interrupted
            fp.save(3)
        assert fp.wait(10)
        assert fp.last_saved == 3
    assert_loaded(base, job.state(), 3)


class Saving(Stored):
    """Whose state dict saves, as a signal handler might in the midst of a save."""

    save: Callable[[], object] = staticmethod(lambda: None)

    def state_dict(self) -> dict[str, Any]:
        self.save()
        return super().state_dict()


@pytest.mark.parametrize("opens", [Checkpointer, Flashpoint])
def test_a_save_from_within_a_save_is_refused_and_leaves_sigterm_to_the_next_one(
    base: Path, opens: type[Checkpointer] | type[Flashpoint]
) -> None:
    said, saving = list[str](), Saving()
    signal.signal(signal.SIGTERM, lambda number, frame: said.append("SIGTERM"))
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
        assert opened.wait()
        if isinstance(opened, Flashpoint):
            assert (opened.health.saves, opened.health.failures) == (1, 1)
            assert "while a save begins" in str(opened.health.last_error)
    assert said == ["refused", "SIGTERM"]
    assert persisted_steps(Path(f"{base}-store")) == [1]


def _save_another(fp: Flashpoint) -> None:
    fp.save(LOCKED + 2)


@pytest.mark.parametrize("call", [_save_another, Flashpoint.before_update])
def test_a_handler_while_a_step_is_held_for_a_copy_holds_up_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Flashpoint], None]
) -> None:
    job, hold = on_device(monkeypatch, Job()), LateCopy.hold
    with settled(base, job, deadline_s=20, strict=True) as fp, monkeypatch.context() as patched:

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
        assert job.device.late
        step = fp.last_saved or 0
    assert step == LOCKED + (2 if call is _save_another else 1)
    assert_loaded(base, saved, step)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_the_midst_of_a_save_comes_after_it_and_at_once_if_it_is_repeated(base: Path, times: int) -> None:
    went = list[str]()

    def press() -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    with Flashpoint(base, strict=True) as fp:
        fp.track(**Job().tracked).resume()
        with around("stage", press, lambda: went.append("staged")), pytest.raises(KeyboardInterrupt):
            fp.step()
        assert went == ["staged"] * (times == 1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert fp.wait(30)
        assert fp.last_saved == (1 if times == 1 else None)


def test_handlers_of_the_programs_own_are_left_alone(base: Path) -> None:
    told = list[str]()
    signal.signal(signal.SIGINT, lambda number, frame: told.append("SIGINT"))
    with Flashpoint(base, strict=True) as fp:
        fp.track(**Job().tracked).resume()
        with around("stage", lambda: signal.raise_signal(signal.SIGINT), lambda: told.append("staged")):
            fp.step()
    assert told == ["SIGINT", "staged"]
