"""The same as in `test_overlap` with a device that is played: its memory is the host's, and its streams lag behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from ml_flashpoint import Flashpoint
from ml_flashpoint.staging import cuda, device_copy
from ml_flashpoint.staging.late_device_copy import LateDeviceCopy
from tests.facade.test_overlap import Job, _is_same, _loaded
from tests.support.played_cuda import PlayedRuntime, play
from tests.support.played_lane import PlayedLane, PlayedLanes


class Device(PlayedLanes):
    """Parameters, statistics and moments are on it, but not the optimizer's steps."""

    def __init__(self, job: Job) -> None:
        super().__init__(seed=3, eagerness=0.2)
        self.job = job
        self.late: list[LateDeviceCopy] = []

    def is_on(self, tensor: torch.Tensor) -> bool:
        there = [t for t in self._all() if t.dim()]
        return any(t.data_ptr() == tensor.data_ptr() for t in there)

    def _all(self) -> Iterable[torch.Tensor]:
        for model in (self.job.model, self.job.average):
            yield from (*model.parameters(), *model.buffers())
        for state in self.job.optimizer.state.values():
            yield from state.values()

    def indices(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [0 if self.is_on(tensor) else -1 for tensor in tensors]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()
    device = Device(made)
    made.device = device  # type: ignore[attr-defined]
    play(monkeypatch, PlayedRuntime(), device=0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # torch itself would go on to use it
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    monkeypatch.setattr(cuda, "settle", lambda: None)
    monkeypatch.setattr(cuda, "is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "are_on_devices", lambda tensors: any(map(device.is_on, tensors)))
    monkeypatch.setattr(device_copy, "_process_lanes", device)
    # The optimizer of the host changes what it changes at once; a device's waits before that.
    monkeypatch.setattr(
        PlayedLane, "hold", lambda self: [self.sync(self.record(s)) for s in (self.pack, self.move)] and 0.0
    )
    begin = LateDeviceCopy.__init__

    def noted(self: LateDeviceCopy, *args: object, **options: object) -> None:
        begin(self, *args, **options)  # type: ignore[arg-type]
        device.late.append(self)

    monkeypatch.setattr(LateDeviceCopy, "__init__", noted)
    return made


def locked(fp: Flashpoint) -> None:
    """Leave time to lock all arenas."""
    store = fp._engine.saver._objects.store
    assert store is not None
    for arena in (*store.arenas._free, *store.arenas._in_use):
        arena.lock_in_background()
        if arena._prefault is not None:
            arena._prefault.join()


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
