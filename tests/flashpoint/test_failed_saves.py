"""Saves that fail: training goes on, and whoever looks is told."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.events import flush
from ml_flashpoint.format.errors import (
    FlashpointError,
    LoadError,
    UnsafeContentError,
)
from ml_flashpoint.memory.pool import Pool
from tests.support.loops import Custom, Stored, resumed, save_and, save_and_wait
from tests.workers import training
from tests.workers.training import Job


def _make_unusable(base: Path) -> None:
    assert flush()  # else the status of the last save may be written there meanwhile
    shutil.rmtree(base)
    base.write_text("no directory any more")


def test_failed_saves_do_not_stop_training(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        fp.step()
        fp.wait()
        _make_unusable(base)
        for _ in range(5):
            job.step()
            fp.step()
            assert fp.wait()
        health = fp.health
        assert (health.saves, health.failures, fp.last_saved, fp.steps_done) == (1, 5, 1, 6)
        assert health.degraded
        assert health.last_error is not None
        assert str(base) in health.last_error
    assert job.digests() == training.undisturbed(6)
    told = [r for r in caplog.records if r.name.startswith("ml_flashpoint.flashpoint") and r.levelno >= logging.ERROR]
    assert 1 <= len(told) < 5


def test_strict_raises_failures(base: Path) -> None:
    stored = Stored(1)
    with Flashpoint(base, strict=True) as fp:
        save_and_wait(fp.track(stored=stored))
        _make_unusable(base)
        with pytest.raises(FlashpointError, match=str(base)):
            save_and_wait(fp)
        fp.wait()  # each failure once
        with pytest.raises(FlashpointError, match=str(base)):
            save_and(Flashpoint.step, fp)
        with contextlib.suppress(FlashpointError):
            fp.wait()
        with pytest.raises(FlashpointError, match=str(base)):  # noqa: PT012, which of the two it is depends on threads
            fp.save(9)
            fp.close()
        fp.close()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "mlf-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_tmpfs(small_tmpfs: Path) -> None:
    base, stored = small_tmpfs / "job", Stored(torch.ones(100_000))
    with Flashpoint(base) as fp:
        fp.track(stored=stored).resume()
        for _ in range(3):
            fp.step()
            assert fp.wait()
        stored.value = torch.full((2_500_000,), 2.0)
        fp.step()
        assert fp.wait()
        assert (fp.last_saved, fp.health.failures, fp.health.degraded) == (3, 1, True)
        assert "bytes" in str(fp.health.last_error)
        stored.value = torch.full((100_000,), 3.0)
        fp.step()
        assert fp.wait()
        assert (fp.last_saved, fp.health.degraded) == (5, False)
    assert resumed(base, stored=stored) == 5
    assert stored.value.unique().tolist() == [3.0]


def test_unsafe_state_is_told_at_the_first_save(base: Path) -> None:
    stored = Stored({"deep": [Custom(4)]})
    name = f"{Custom.__module__}.Custom"
    with Flashpoint(base) as fp:
        fp.track(model=nn.Linear(2, 2), stored=stored).step()
        assert fp.wait()
        assert fp.last_saved is None
        assert f"'stored.value.deep.0' holds {name}" in str(fp.health.last_error)
        assert f"safe_globals=[{name}]" in str(fp.health.last_error)
    with (
        Flashpoint(base, strict=True) as fp,
        pytest.raises(UnsafeContentError, match=r"'stored\.value\.deep\.0' holds"),
    ):
        save_and_wait(fp.track(stored=stored))
    with Flashpoint(base, strict=True, safe_globals=[Custom]) as fp:
        fp.track(stored=stored).step()
    restored = Stored()
    with Flashpoint(base, safe_globals=[Custom]) as fp:
        assert fp.track(stored=restored).resume() == 1
        assert restored.value == stored.value
    with pytest.raises(LoadError, match=r"Custom.*may run code"):
        resumed(base, stored=restored)


def test_unsafe_extra_state_of_a_module_is_told(base: Path) -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> Any:
            return Custom(1)

    with Flashpoint(base, strict=True) as fp, pytest.raises(UnsafeContentError, match=r"'model\._extra_state' holds"):
        save_and_wait(fp.track(model=WithExtra(2, 2)))


@pytest.mark.parametrize("value", [lambda: 0, threading.Lock()], ids=["lambda", "lock"])
def test_state_that_cannot_be_saved_is_told_by_name(base: Path, value: Any) -> None:
    stored = Stored(value)
    with Flashpoint(base) as fp:
        fp.track(stored=stored).step()
        assert fp.wait()
        assert "the state of 'stored.value' cannot be saved" in str(fp.health.last_error)
        stored.value = 1
        fp.step()
        assert fp.wait()
        assert (fp.last_saved, fp.health.failures) == (2, 1)


def test_object_that_raises_when_asked_for_its_state(base: Path) -> None:
    class Failing(nn.Linear):
        fails = True

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            if self.fails:
                raise RuntimeError("not now")
            return super().state_dict(*args, **kwargs)

    model = Failing(2, 2)
    with Flashpoint(base) as fp:
        fp.track(model=model)
        fp.step()
        assert fp.wait()
        assert "RuntimeError: not now" in str(fp.health.last_error)
        model.fails = False
        fp.step()
        assert fp.wait()
        assert fp.last_saved == 2


def test_a_step_that_is_skipped_only_in_the_end_can_be_saved_by_name(tmpfs: Path) -> None:
    """A slot that is much too large is given up when the save is placed, and there may be no other one."""
    model = torch.nn.Linear(1, 1)
    for turn in range(12):
        with Flashpoint(tmpfs / str(turn), strict=True) as fp:
            fp.track(model=model)
            fp.step()
            fp.step()
            fp.save()
            assert fp.wait()
            assert fp.last_saved == 2


def test_a_save_without_a_slot_copies_nothing(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(dict[str, int]):
        copies = 0

        def __deepcopy__(self, memo: object) -> dict[str, int]:
            Counted.copies += 1
            return dict(self)

    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(stored=Stored(Counted(a=1))).resume()
        fp.step()
        assert fp.wait()
        assert Counted.copies == 1
        with monkeypatch.context() as patched:
            patched.setattr(Pool, "take", lambda *_, **__: None)
            patched.setattr(Pool, "shortage", lambda *_: None)
            fp.step()
        assert (fp.health.skipped, Counted.copies) == (1, 1)
        fp.step()
        fp.save()  # where the step found no slot after all, this one waits for it
        assert fp.wait()
        assert (fp.last_saved, Counted.copies) == (3, 2)


def test_a_step_that_was_skipped_can_be_saved_by_name(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value, take = Stored(1), Pool.take
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(value=value).resume()
        fp.step()
        assert fp.wait()
        with monkeypatch.context() as patched:
            patched.setattr(Pool, "take", lambda *_, **__: None)
            patched.setattr(Pool, "shortage", lambda *_: None)
            value.value = 2
            fp.step()
        assert (fp.steps_done, fp.last_saved, fp.health.skipped) == (2, 1, 1)
        fp.save()
        fp.save()  # that version is there now
        assert fp.wait()
        assert (fp.last_saved, fp.health.saves, fp.health.failures) == (2, 2, 0)
    assert Pool.take is take
    with Flashpoint(tmpfs / "job") as fp:
        loaded = Stored()
        assert fp.track(value=loaded).resume() == 2
        assert loaded.value == 2
