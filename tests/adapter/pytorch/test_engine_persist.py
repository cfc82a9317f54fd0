"""`Checkpointer` with a durable store, in one process."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ml_flashpoint import Checkpointer, Config, Persist
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.knobs import BLOCK_BYTES_VARIABLE
from ml_flashpoint.stores.files import Directory
from tests.support.faulty_files import faulty_files
from tests.support.forked import wait_until
from tests.support.persisting import REFUSED, persisted_steps, refusal

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def store(tmpfs: Path) -> Path:
    return tmpfs / "store"


@pytest.fixture
def base(tmpfs: Path) -> Path:
    return tmpfs / "job"


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((300, 7), float(value)), "value": value}


def save(engine: Checkpointer, step: int, value: float | None = None) -> None:
    saved = state(step if value is None else value)
    dcp.save(saved, checkpoint_id=engine.id(step), storage_writer=engine.writer())
    assert engine.wait(30)


def read(engine: Checkpointer, step: int) -> float:
    into = state(-1)
    version = engine.id(step)
    dcp.load(into, checkpoint_id=version, storage_reader=engine.reader(version))
    assert bool((into["weight"] == into["value"]).all())
    return float(into["value"])


def newest(engine: Checkpointer) -> tuple[int | None, str, float]:
    latest = engine.latest()
    assert latest is not None
    assert latest.step is not None
    report = engine.last_recovery
    assert report is not None
    return latest.step, report.tier, read(engine, latest.step)


@pytest.mark.parametrize(("argument", "value"), REFUSED)
def test_refuses_what_the_facade_refuses_in_its_words(argument: str, value: Any) -> None:
    name = argument.removeprefix("persist_").replace("persist", "url")
    options: dict[str, Any] = {"url": "memory://any", name: value}
    with pytest.raises(InvalidArgumentError) as refused:
        Persist(**options)
    assert str(refused.value) == refusal(argument, value)


def test_verified_versions_are_persisted_and_told_of(base: Path, store: Path) -> None:
    with Checkpointer(base, Config(persist=Persist(str(store), every=2, keep=2))) as engine:
        assert engine.latest() is None
        for step in range(1, 8):
            save(engine, step)
            if step % 2 == 0:
                wait_until(lambda step=step: engine.status.persisted == step, "it is persisted")  # type: ignore[misc]
        wait_until(lambda: persisted_steps(store) == [6, 4], "older ones go once a newer one is persisted")
        assert (engine.status.persist_lag, engine.status.persist_error) == (1, None)
    wait_until(lambda: persisted_steps(store) == [7, 6], "the last one is persisted, and an older one goes")
    assert engine.status.persisted == 7


def test_latest_is_the_newer_of_memory_and_store(base: Path, store: Path) -> None:
    with Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        save(engine, 3)
    shutil.copytree(base, base.with_name("kept"), ignore=shutil.ignore_patterns("lock"))
    with Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        assert newest(engine) == (3, "memory", 3)
        save(engine, 4)
    shutil.rmtree(base)
    with Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        assert newest(engine) == (4, "persisted", 4)
        report = engine.last_recovery
        assert report is not None
        assert (report.step, report.world_size) == (4, 1)
    shutil.rmtree(base)
    base.with_name("kept").rename(base)
    with Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        assert newest(engine) == (4, "persisted", 4)
        save(engine, 5)
        assert newest(engine) == (5, "memory", 5)


def test_no_more_is_read_than_is_wanted(base: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BLOCK_BYTES_VARIABLE, "4096")
    saved = {"wanted": torch.rand(10_000), "other": torch.rand(1_000_000)}
    with Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        dcp.save(saved, checkpoint_id=engine.id(1), storage_writer=engine.writer())
    shutil.rmtree(base)
    read: list[int] = []
    real = Directory.read_into

    def counted(self: Directory, name: str, begin: int, into: memoryview) -> None:
        read.append(len(into))
        real(self, name, begin, into)

    with monkeypatch.context() as patched, Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        patched.setattr(Directory, "read_into", counted)
        latest = engine.latest()
        assert latest is not None
        into = {"wanted": torch.zeros(10_000)}
        dcp.load(into, checkpoint_id=latest, storage_reader=engine.reader(latest))
    assert torch.equal(into["wanted"], saved["wanted"])
    assert sum(read) < 200_000, "of 4 MB"


def test_a_step_that_is_saved_again_is_not_taken_for_the_persisted_one(base: Path, store: Path) -> None:
    with Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        save(engine, 3)
    shutil.rmtree(base)
    with Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        assert newest(engine) == (3, "persisted", 3)
        save(engine, 3, value=30)
        assert read(engine, 3) == 30


def test_what_was_gone_back_from_is_not_persisted_at_the_end(base: Path, store: Path) -> None:
    with Checkpointer(base, Config(keep=3, persist=Persist(str(store), every=1000))) as engine:
        for step in (1, 2, 3):
            save(engine, step)
        assert engine.go_back(2) == engine.id(2)
        assert read(engine, 2) == 2
    assert persisted_steps(store) == []


def test_a_process_that_is_about_to_end_has_it_persisted(base: Path, store: Path) -> None:
    with Checkpointer(base, Config(persist=Persist(str(store), every=1000))) as engine:
        save(engine, 1)
        assert engine.status.persisted is None
        assert engine.finish(30)
        assert persisted_steps(store) == [1]
        save(engine, 2)
        wait_until(lambda: engine.status.persisted == 2, "from then on, all of them are")


def test_without_a_store_there_is_nothing_to_tell(base: Path) -> None:
    with Checkpointer(base) as engine:
        save(engine, 1)
        assert engine.finish(30)
        assert engine.status.persisted is None
        assert engine.status.persist_error is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_planned_end_waits_longer_for_a_slow_store(base: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setenv("FLASHPOINT_EXIT_DEADLINE_S", "0.05")
    with faulty_files() as faults:
        engine = Checkpointer(base, Config(persist=Persist(faults.url, every=1)))
        faults.now = "hang"
        save(engine, 1)
        assert faults.met.wait(20)
        faults.now = None
        if fails:
            engine.__exit__(RuntimeError, RuntimeError(), None)
            assert engine.status.persisted is None
            faults.go_on.set()
        else:
            threading.Timer(0.3, faults.go_on.set).start()
            engine.close()
            assert engine.status.persisted == 1
