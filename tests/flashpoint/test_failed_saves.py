"""Saves that fail, or lack something: training goes on, and whoever looks is told."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ml_flashpoint import Checkpointer, Flashpoint, events
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, LoadError, UnsafeContentError
from ml_flashpoint.memory.pool import Pool
from tests.support.loops import Custom, Stored, resumed, save_and, save_and_wait
from tests.workers import training
from tests.workers.training import Job


def _make_unusable(base: Path) -> None:
    assert events.flush()  # else the status of the last save may be written there meanwhile
    shutil.rmtree(base)
    base.write_text("no directory any more")


def test_failed_saves_do_not_stop_training(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, told = Job(), list[events.Event]()
    with Flashpoint(base, on_event=told.append) as fp:
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
        assert str(base) in str(health.last_error)
    assert job.digests() == training.undisturbed(6)
    failed = [event for event in told if isinstance(event, events.SaveFailed)]
    assert [event.step for event in failed] == [2, 3, 4, 5, 6]
    assert all(str(base) in event.error for event in failed)
    logged = [r for r in caplog.records if r.name.startswith("ml_flashpoint.flashpoint") and r.levelno >= logging.ERROR]
    assert 1 <= len(logged) < 5


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


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return Custom(1)


@pytest.mark.parametrize(
    ("tracked", "key"),
    [(Stored({"deep": [Custom(4)]}), "tracked.value.deep.0"), (WithExtra(2, 2), "tracked._extra_state")],
)
def test_unsafe_state_is_told_at_the_first_save(base: Path, tracked: Any, key: str) -> None:
    name = f"{Custom.__module__}.Custom"
    with Flashpoint(base) as fp:
        fp.track(tracked=tracked).step()
        assert fp.wait()
        assert fp.last_saved is None
        assert f"'{key}' holds {name}" in str(fp.health.last_error)
        assert f"safe_globals=[{name}]" in str(fp.health.last_error)
    with Flashpoint(base, strict=True) as fp, pytest.raises(UnsafeContentError, match=f"'{key}' holds"):
        save_and_wait(fp.track(tracked=tracked))


def test_a_type_that_is_listed_is_saved_and_loaded_where_it_is_listed(base: Path) -> None:
    with Flashpoint(base, strict=True, safe_globals=[Custom]) as fp:
        fp.track(stored=Stored(Custom(4))).step()
    restored = Stored()
    with Flashpoint(base, safe_globals=[Custom]) as fp:
        assert fp.track(stored=restored).resume() == 1
    assert restored.value == Custom(4)
    with pytest.raises(LoadError, match=r"Custom.*may run code"):
        resumed(base, stored=restored)


class Failing(Stored):
    def state_dict(self) -> dict[str, Any]:
        if self.value == "fails":
            raise RuntimeError("not now")
        return super().state_dict()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: 0, "the state of 'stored.value' cannot be saved"),
        (threading.Lock(), "the state of 'stored.value' cannot be saved"),
        ("fails", "RuntimeError: not now"),
    ],
)
def test_state_that_cannot_be_had_or_saved_fails_its_save_and_no_later_one(base: Path, value: Any, told: str) -> None:
    stored = Failing(value)
    with Flashpoint(base) as fp:
        fp.track(stored=stored).step()
        assert fp.wait()
        assert told in str(fp.health.last_error)
        stored.value = 1
        fp.step()
        assert fp.wait()
        assert (fp.last_saved, fp.health.failures) == (2, 1)


def test_a_step_that_is_skipped_only_in_the_end_can_be_saved_by_name(tmpfs: Path) -> None:
    """A slot that is much too large is given up when the save is placed, and there may be no other one."""
    for turn in range(12):
        with Flashpoint(tmpfs / str(turn), strict=True) as fp:
            fp.track(model=torch.nn.Linear(1, 1))
            fp.step()
            fp.step()
            fp.save()
            assert fp.wait()
            assert fp.last_saved == 2


class Counted(dict[str, int]):
    copies = 0

    def __deepcopy__(self, memo: object) -> dict[str, int]:
        Counted.copies += 1
        return dict(self)


def test_a_step_without_a_slot_copies_nothing_and_can_be_saved_by_name(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(Counted(a=1))
    with Flashpoint(base, strict=True) as fp:
        fp.track(stored=stored).resume()
        fp.step()
        assert fp.wait()
        with monkeypatch.context() as patched:
            patched.setattr(Pool, "take", lambda *_, **__: None)
            patched.setattr(Pool, "shortage", lambda *_: None)
            stored.value = Counted(a=2)
            fp.step()
        assert (fp.steps_done, fp.last_saved, fp.health.skipped, Counted.copies) == (2, 1, 1, 1)
        fp.save()
        fp.save()  # that version is there now
        assert fp.wait()
        assert (fp.last_saved, fp.health.saves, fp.health.failures, Counted.copies) == (2, 2, 0, 2)
    loaded = Stored()
    assert resumed(base, stored=loaded) == 2
    assert loaded.value == {"a": 2}


@pytest.mark.parametrize("tracks", ["nothing else", "all but the model", "another model", "the model"])
def test_weights_of_a_tracked_optimizer_that_are_not_saved_are_told_of_once(
    base: Path, caplog: pytest.LogCaptureFixture, tracks: str
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    beside: dict[str, Any] = {
        "nothing else": {},
        "all but the model": {
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
            "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 3))),
        },
        "another model": {"model": nn.Linear(3, 2)},
        "the model": {"model": model},
    }[tracks]
    with Flashpoint(base, strict=True) as fp:
        fp.track(optimizer=optimizer, **beside).resume()
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            fp.step()
        assert fp.wait()
    told = [each.getMessage() for each in caplog.records if "weights" in each.getMessage()]
    assert len(told) == (tracks != "the model")
    assert all("'optimizer'" in text for text in told)


def test_a_facade_whose_saves_failed_is_gone_without_a_collection(base: Path) -> None:
    """Else their errors keep what was copied, and all callers' frames: loaders wait there for their workers."""

    class Unusable:
        state: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"kept": torch.ones(1), "bad": self.state}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    gc.collect()
    gc.disable()
    try:
        tracked = Unusable()
        loader = torch.utils.data.DataLoader(torch.arange(8.0))
        fp = Flashpoint(base).track(tracked=tracked, loader=loader)
        fp.resume()
        for number, _ in enumerate(fp.batches(loader)):
            tracked.state = None if number == 0 else threading.Lock()
            fp.step()
            assert fp.wait()
            if number == 3:
                break
        assert fp.health.failures == 3
        fp.close()
        left = [weakref.ref(fp), weakref.ref(tracked), weakref.ref(loader)]
        del fp, tracked, loader
        assert [each() for each in left] == [None] * 3
    finally:
        gc.enable()


def test_a_step_that_cannot_be_counts_for_nothing(base: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(base) as ckpt:
        ckpt.load({"model": model})
        for step in (2**63, -1):
            with pytest.raises(InvalidArgumentError, match="step"):
                ckpt.save(step, {"model": model})
        ckpt.save(1, {"model": model}).verified.result(60)
