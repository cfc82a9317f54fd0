"""Copies from devices that are played, beside a training that changes the sources as soon as it may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.staging import cuda
from ml_flashpoint.staging.copy import _copy
from ml_flashpoint.staging.late_device_copy import LateDeviceCopy, NotDirectError
from ml_flashpoint.staging.transfer_plan import Memo
from tests.support.played_lane import PlayedLanes
from tests.support.tensors import raw, tensor_of

SIZES = [(7,), (), (700_000,), (5, 9), (), (30,)]


class Job:
    """A state, most of it on a device, and the arena of its saves."""

    def __init__(self, eagerness: float = 0.0, seed: int = 0, *, locked: bool = True) -> None:
        self.lanes = PlayedLanes(seed, eagerness)
        self.sources = [tensor_of(torch.float32, shape, seed=seed + n) for n, shape in enumerate(SIZES)]
        for source in self.sources:
            if source.dim():
                self.lanes.on(0, source)
        memory = torch.full((sum(source.nbytes for source in self.sources),), 0x55, dtype=torch.uint8)
        self.views, at = [], 0
        for source in self.sources:
            self.views.append(memory[at : at + source.nbytes].view(torch.float32).view(source.shape))
            at += source.nbytes
        begin = memory.data_ptr()
        if locked:
            for first, last in cuda.slices(begin, begin + memory.nbytes):
                cuda._process.locked.setdefault(first // cuda.SLICE, {})[first] = last

    def save(self, memo: Memo | None = None, **options: object) -> LateDeviceCopy:
        return LateDeviceCopy(self.views, self.sources, _copy, memo=memo, lanes=self.lanes, **options)  # type: ignore[arg-type]

    def update(self) -> None:
        """What a step of an optimizer does to it."""
        for source in self.sources:
            if not source.dim():
                source.add_(1)
        self.lanes.lane(0).update([source for source in self.sources if source.dim()])


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_process", cuda._Process())


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
@settings(max_examples=40)
def test_what_is_saved_is_the_state_before_the_update(seed: int, eagerness: float, update_first: bool) -> None:
    job, memo = Job(eagerness, seed % 1000), Memo()
    for _ in range(2):
        expected = [raw(source) for source in job.sources]
        late = job.save(memo)
        assert not late.over
        if update_first:
            late.finish()
            job.update()
            late.copy()
        else:
            late.copy()
            late.finish()
            job.update()
        late.wait(5)
        assert late.over
        assert [raw(view) for view in job.views] == expected
        assert job.lanes.lane(0).is_idle


def test_memory_that_is_not_locked_is_left_to_those_who_wait() -> None:
    job = Job(locked=False)
    with pytest.raises(NotDirectError):
        job.save()
    assert not job.lanes.lane(0).transfers


def test_sources_are_checked_before_they_may_change() -> None:
    job = Job()
    versions = [source._version for source in job.sources]
    checks: list[bool] = []

    def check() -> None:
        checks.append([source._version for source in job.sources] == versions)

    late = job.save(check=check)
    late.finish()
    job.update()
    late.copy()
    assert checks == [True]
    assert late.held_s == 0.25
    late = job.save(check=check)
    late.copy()
    assert checks == [True, False]
    late.finish()
    assert late.held_s == 0.0


def test_an_error_is_told_after_all_is_over() -> None:
    job = Job()

    def check() -> None:
        raise ValueError("something was changed")

    late = job.save(check=check)
    called: list[str] = []
    late.when_over(lambda: called.append("first"))
    late.when_over(lambda: called.append("then"))
    late.finish()
    assert not called
    late.copy()
    late.copy()
    assert called == ["first", "then"]
    late.when_over(lambda: called.append("now"))
    assert called[-1] == "now"
    with pytest.raises(SaveError, match="something was changed"):
        late.wait(1)


def test_a_copy_that_is_given_up_is_waited_for_all_the_same() -> None:
    job = Job()
    late = job.save()
    with pytest.raises(SaveError, match="not copied within"):
        late.wait(0.01)
    late.cancel(SaveError("no longer wanted"))
    assert late.over
    assert job.lanes.lane(0).is_idle
    with pytest.raises(SaveError, match="no longer wanted"):
        late.wait(1)
    late.copy()
    late.cancel(SaveError("too late"))
    assert "no longer" in str(late.error)


def test_a_device_that_fails_leaves_nothing_under_way(tmp_path: Path) -> None:
    job = Job()
    job.lanes.lane(0).fails_at = 0
    with pytest.raises(RuntimeError, match="enough"):
        job.save()
    assert job.lanes.lane(0).is_idle
    job = Job()
    late = job.save()
    job.lanes.lane(0).fails_to_end = True
    late.copy()
    with pytest.raises(SaveError, match="the device is lost"):
        late.wait(1)


def test_who_waits_is_told_after_all_that_depends_on_the_copy() -> None:
    late, went = Job().save(), list[str]()

    def go_on() -> None:
        with pytest.raises(SaveError, match="within 0 s"):
            late.wait(0)
        late.when_over(lambda: went.append("second"))
        went.append("first")

    def fail() -> None:
        raise ValueError("of theirs")

    late.when_over(go_on)
    late.when_over(fail)
    late.copy()
    assert went == ["first", "second"]
    with pytest.raises(SaveError, match="of theirs"):
        late.wait(1)


def test_an_interrupt_while_a_step_waits_comes_once_others_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    checks: list[bool] = []
    late = Job().save(check=lambda: checks.append(True))
    monkeypatch.setattr(late._transfer, "hold", interrupt)
    with pytest.raises(KeyboardInterrupt):
        late.finish()
    assert checks == [True]
    late.copy()
    with pytest.raises(SaveError):
        late.wait(1)


def test_the_state_is_let_go_of() -> None:
    job = Job()
    late = job.save()
    late.copy()
    assert late._transfer is None
    assert late._check is None
