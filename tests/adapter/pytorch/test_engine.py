"""`Checkpointer`: opening, saving, loading and ending by one object, with a durable store and without."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ml_flashpoint import Checkpointer, Config, Persist, events
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.ranks.collectives import Collectives
from ml_flashpoint.stores.files import Directory
from tests.support.faulty_files import faulty_files
from tests.support.forked import Report, call_team, wait_until
from tests.support.persisting import persisted_steps

pytestmark = pytest.mark.usefixtures("process_group")


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((300, 7), value), "epoch": int(value)}


def in_background(*args: Any, **options: Any) -> None:
    saving: Any = dcp.async_save(*args, **options)
    saving.result()


def save(engine: Checkpointer, step: int, value: float | None = None) -> None:
    saved = state(step if value is None else value)
    dcp.save(saved, checkpoint_id=engine.id(step), storage_writer=engine.writer())
    assert engine.wait(30)


def loaded(engine: Checkpointer) -> tuple[int | None, float]:
    into = state(-1)
    latest = engine.latest()
    if latest is None:
        return None, -1.0
    dcp.load(into, checkpoint_id=latest, storage_reader=engine.reader(latest))
    assert bool((into["weight"] == into["epoch"]).all())
    return latest.step, float(into["epoch"])


def newest(engine: Checkpointer) -> tuple[int | None, str | None, float]:
    step, value = loaded(engine)
    assert engine.last_recovery is not None
    return step, engine.last_recovery.tier, value


def test_saves_and_loads(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job") as engine:
        assert loaded(engine) == (None, -1.0)
        save(engine, 1)
        save(engine, 2)
        assert engine.writer() is engine.writer()
        assert loaded(engine) == (2, 2.0)
        assert engine.finish(30)
        assert (engine.status.persisted, engine.status.persist_error) == (None, None)
    engine.close()  # once more does no harm
    with Checkpointer(tmpfs / "job", discard_existing=True) as engine:
        assert loaded(engine) == (None, -1.0)


@pytest.mark.parametrize("save", [dcp.save, in_background])
def test_a_path_says_which_version_and_not_which_storage(tmpfs: Path, process_group: None, save: Any) -> None:
    """DCP looks only for storages of its own by a path; if that is no longer so, the page on DCP is to be changed."""
    base, step = tmpfs / "job", 5
    with Checkpointer(base) as engine:
        save(state(5), checkpoint_id=f"{base}/step-{step}_ckpt", storage_writer=engine.writer())
        assert engine.wait(30)
        into = state(-1)
        with pytest.raises(CheckpointException):
            dcp.load(into, checkpoint_id=f"{base}/step-{step}_ckpt")
        dcp.load(into, checkpoint_id=f"{base}/step-{step}_ckpt", storage_reader=engine.reader())
        assert into["epoch"] == 5
        save(state(6), checkpoint_id=f"{base}/step-6_ckpt")
        assert loaded(engine) == (5, 5.0), "what DCP has written there by itself is no version"


def test_how_long_saves_hold_the_loop_is_told(tmpfs: Path) -> None:
    told: list[events.Event] = []
    with Checkpointer(tmpfs / "job") as engine, events.subscribe(told.append):
        dcp.save(state(1), checkpoint_id=engine.id(1), storage_writer=engine.writer())
        began = time.perf_counter()
        future: Any = dcp.async_save(
            state(2), checkpoint_id=engine.id(2), storage_writer=engine.writer(), async_stager=engine.writer()
        )
        held_s = time.perf_counter() - began
        future.result()
        assert engine.wait(30)
        assert events.flush()
        assert engine.status.held_s > 0
    held = [event for event in told if isinstance(event, events.LoopHeld)]
    assert [event.step for event in held] == [1, 2]
    assert held[0].seconds > 0
    assert 0 < held[1].seconds <= held_s, "what the background does counts for nothing"


def test_refuses_to_bury_what_nobody_asked_about_and_to_save_once_it_is_closed(
    tmpfs: Path,
) -> None:
    with Checkpointer(tmpfs / "job") as engine:
        save(engine, 1)
    for call in (dcp.save, in_background):
        with pytest.raises(CheckpointException, match=r"(?s)closed"):
            call(state(2), checkpoint_id=engine.id(2), storage_writer=engine.writer())
    with Checkpointer(tmpfs / "job") as engine:
        for call in (dcp.save, in_background):
            with pytest.raises(CheckpointException, match="saving would overwrite them"):
                call(state(2), checkpoint_id=engine.id(2), storage_writer=engine.writer())
        assert loaded(engine) == (1, 1.0)
        save(engine, 2)


def test_refuses_bad_arguments(tmpfs: Path) -> None:
    bad = {"replication": "both", "safe_globals": "x", "keep": 0, "overlap": 1, "on_world_size_change": "ask"}
    for name, value in {**bad, "deadline_s": 0, "sigterm_grace_s": 0, "persist": "s3://bucket"}.items():
        with pytest.raises(InvalidArgumentError) as refused:
            Config(**{name: value})  # type: ignore[arg-type]
        assert refused.value.argument == name
    for name, value in {"url": "file://relative", "every": 0, "keep": 0, "bytes_per_s": True}.items():
        with pytest.raises(InvalidArgumentError) as refused:
            Persist(**{"url": "memory://any", name: value})  # type: ignore[arg-type]
        assert refused.value.argument == ("persist" if name == "url" else f"persist_{name}")
    with pytest.raises(InvalidArgumentError, match="discard_existing"):
        Checkpointer(tmpfs / "job", discard_existing=1)  # type: ignore[arg-type]
    Checkpointer(tmpfs / "job").close()  # nothing is left open


def collectives_of_opening_and_looking(report: Report, rank: int) -> tuple[int, int | None]:
    calls: list[str] = []

    def counted(collective: Any) -> Any:
        def run(group: Collectives, what: str, *args: Any) -> None:
            calls.append(what)
            collective(group, what, *args)

        return run

    Collectives.reduce = counted(Collectives.reduce)  # type: ignore[method-assign]
    base = Path(os.environ["FLASHPOINT_TEST_BASE"])
    with Checkpointer(base) as engine:
        found = engine.latest()
        if found is None:
            save(engine, 1)
    return len(calls), found and found.step


@pytest.mark.slow
def test_starting_takes_no_more_collectives_with_more_ranks(tmpfs: Path) -> None:
    counts = set()
    for size in (2, 4):
        for found in (None, 1):
            for calls, step in call_team(collectives_of_opening_and_looking, tmpfs / str(size), size):
                assert step == found
                counts.add((found, calls))
    assert len(counts) == 2, counts


# ---- with a durable store -----------------------------------------------------------------------------------------


def test_latest_is_the_newer_of_memory_and_store(tmpfs: Path) -> None:
    base, store = tmpfs / "job", tmpfs / "store"
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


def test_no_more_is_read_than_is_wanted(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, store = tmpfs / "job", tmpfs / "store"
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


def test_a_step_that_is_saved_again_is_not_taken_for_the_persisted_one(tmpfs: Path) -> None:
    base, store = tmpfs / "job", tmpfs / "store"
    with Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        save(engine, 3)
    shutil.rmtree(base)
    with Checkpointer(base, Config(persist=Persist(str(store)))) as engine:
        assert newest(engine) == (3, "persisted", 3)
        save(engine, 3, value=30)
        assert loaded(engine) == (3, 30.0)


def test_a_process_that_is_about_to_end_has_it_persisted(tmpfs: Path) -> None:
    base, store = tmpfs / "job", tmpfs / "store"
    with Checkpointer(base, Config(persist=Persist(str(store), every=1000))) as engine:
        save(engine, 1)
        assert engine.status.persisted is None
        assert engine.finish(30)
        assert persisted_steps(store) == [1]
        save(engine, 2)
        wait_until(lambda: engine.status.persisted == 2, "from then on, all of them are")


@pytest.mark.parametrize("fails", [False, True])
def test_a_planned_end_waits_longer_for_a_slow_store(tmpfs: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setenv("FLASHPOINT_EXIT_DEADLINE_S", "0.05")
    with faulty_files() as faults:
        engine = Checkpointer(tmpfs / "job", Config(persist=Persist(faults.url, every=1)))
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
