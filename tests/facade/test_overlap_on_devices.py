"""The same as in `test_overlap` with a device that is played: its memory is the host's, and its streams lag behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml_flashpoint import Flashpoint
from ml_flashpoint.staging import cuda
from ml_flashpoint.staging.late_device_copy import LateDeviceCopy
from tests.facade.test_overlap import Job, _is_same, _loaded
from tests.support.played_device import PlayedDevice, lock_arenas


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()
    made.device = PlayedDevice(monkeypatch, (made.model, made.average), (made.optimizer,))  # type: ignore[attr-defined]
    return made


def locked(fp: Flashpoint) -> None:
    lock_arenas(fp._engine.saver._objects.store)


def test_each_version_is_the_state_of_its_step(tmpfs: Path, job: Job) -> None:
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(30):  # the content of each of the 24 tensors that are copied late is compared
            job.step()
            saved, step = job.state(), fp.step()
            job.step()
            assert fp.wait()
            locked(fp)
        assert fp.health.failures == 0
    late: list[LateDeviceCopy] = job.device.late  # type: ignore[attr-defined]
    assert len(late) >= 4, "the first saves go through slots, those that follow need not"
    assert all(each.over and each.error is None for each in late)
    found, state = _loaded(tmpfs / "job")
    assert found == step
    assert _is_same(state, saved)


def test_an_optimizer_whose_steps_are_replayed_is_waited_for(
    tmpfs: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that was captured changes the state without any hook being called."""
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(3):
            job.step()
            fp.step()
            assert fp.wait()
            locked(fp)
        late: list[LateDeviceCopy] = job.device.late  # type: ignore[attr-defined]
        late.clear()
        fp.step()  # nobody has called a hook since the last one
        assert fp.wait()
        assert not late
        monkeypatch.setattr(cuda, "is_capturing", lambda: True)
        job.step()
        monkeypatch.setattr(cuda, "is_capturing", lambda: False)
        for _ in range(2):
            fp.step()
            assert fp.wait()
            job.step()
        assert not late
