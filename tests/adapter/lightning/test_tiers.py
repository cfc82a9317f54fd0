"""The callback with a durable store, and with versions that are kept in memory: trainers of one process."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ml_flashpoint.adapter.lightning import FlashpointCallback, resume_path
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError
from tests.adapter.lightning.test_callback import fit, recovered
from tests.support.faulty_files import Faults, faulty_files
from tests.support.persisting import await_store, persisted_steps

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def store(tmpfs: Path) -> Path:
    return tmpfs / "store"


@pytest.fixture
def faults() -> Iterator[Faults]:
    with faulty_files() as found:
        yield found


class Terminates(Callback):
    """As a scheduler ends a job: the signal comes in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step, self.at = step, 0.0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.at = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_planned_end_persists_the_last_version(tmpfs: Path, tmp_path: Path, store: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True, persist=str(store), persist_every=1000)
    fit(tmp_path, ours, max_steps=5)
    assert persisted_steps(store) == [5]
    assert ours.flashpoint is not None
    assert ours.flashpoint.health.persisted == 5
    fit(tmp_path, ours, max_steps=8)
    assert recovered(ours) == ("memory", "step-5_ckpt"), "first where it is as new"
    shutil.rmtree(tmpfs / "job")
    trainer = fit(tmp_path, ours, max_steps=9)
    assert recovered(ours) == ("persisted", "step-8_ckpt")
    assert trainer.global_step == 9


def test_sigterm_persists_the_newest_version(tmpfs: Path, tmp_path: Path, store: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True, persist=str(store), persist_every=1000)
    with pytest.raises(SIGTERMException):
        fit(tmp_path, ours, callbacks=[Terminates(4)])
    assert persisted_steps(store)[0] == 5, "the batch was ended, and what it came to is persisted"


@pytest.mark.slow
def test_sigterm_waits_no_longer_than_its_grace_for_a_store(tmpfs: Path, tmp_path: Path, faults: Faults) -> None:
    ours = FlashpointCallback(tmpfs / "job", persist=faults.url, persist_every=1000, grace_s=1.0)

    class Hangs(Callback):
        def on_train_start(self, *args: Any) -> None:
            assert ours.flashpoint is not None
            await_store(ours.flashpoint._checkpointer._persister)
            faults.now = "hang"

    terminates = Terminates(3)
    with pytest.raises(SIGTERMException):
        fit(tmp_path, ours, callbacks=[Hangs(), terminates])
    assert time.monotonic() - terminates.at < 15  # the grace is 20 by default, and the store hangs for 60
    assert ours.flashpoint is not None
    assert ours.flashpoint.health.persisted is None
    faults.go_on.set()


def test_a_step_is_gone_back_to(tmpfs: Path, tmp_path: Path) -> None:
    ours = FlashpointCallback(tmpfs / "job", strict=True, keep=3)
    fit(tmp_path, ours, max_steps=5)

    def goes_on_from(max_steps: int, **wanted: Any) -> str | None:
        fit(tmp_path, ours, max_steps=max_steps, path=lambda trainer: resume_path(trainer, **wanted))
        return recovered(ours)[1]

    assert goes_on_from(4, step=3) == "step-3_ckpt"
    assert goes_on_from(5) == "step-4_ckpt", "what was newer than 3 was left"
    with pytest.raises(LoadError, match="no version of step 77"):
        goes_on_from(7, step=77)
    with pytest.raises(InvalidArgumentError, match="cannot go with a step"):
        goes_on_from(7, step=2, fallback="last")
    assert ours.flashpoint is not None
    ours.flashpoint.close()  # no training has begun that would end it
