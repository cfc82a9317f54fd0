"""Versions in a durable store, as a user of `Flashpoint` sees them, in one process."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
import torch
from safetensors import safe_open

from ml_flashpoint import Checkpointer, Config, Flashpoint, Persist, events
from ml_flashpoint.format.errors import CapacityError, NothingLoadableError, SaveError
from ml_flashpoint.format.names import manifest_name, object_name
from ml_flashpoint.stores.durable import MARKER, DurableVersions
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.stores.version_store import Version
from tests.support.faulty_files import Faults, faulty_files
from tests.support.forked import call, wait_until
from tests.support.loops import Stored, damage
from tests.support.persisting import await_store, persisted_steps
from tests.workers import training
from tests.workers.training import Job


@pytest.fixture
def store(tmpfs: Path) -> Path:
    return tmpfs / "store"


@pytest.fixture
def faults() -> Iterator[Faults]:
    with faulty_files() as found:
        yield found


def persisted(store: Path) -> list[Version]:
    return [version for version in open_store(store).versions() if version.counts]


def write_steps(fp: Flashpoint, last: int, *, wait_for: int = 1, due: Sequence[int] = ()) -> None:
    """Steps up to this one; at each multiple of ``wait_for``, or those that are ``due``, until that is persisted."""
    await_store(fp._checkpointer._persister)
    while fp.steps_done < last:
        step = fp.step()
        assert fp.wait()
        if step in due if due else step % wait_for == 0:
            wait_until(lambda step=step: fp.health.persisted == step, f"{step} is persisted: {fp.health}")


def test_versions_at_or_after_each_multiple_are_persisted_and_told_and_older_ones_go(base: Path, store: Path) -> None:
    due, told, model = [6, 12, 15, 21], list[events.Event](), torch.nn.Linear(300, 5)
    options: dict[str, Any] = {"persist": str(store), "persist_every": 5, "persist_keep": 2}
    with Flashpoint(base, every_n_steps=3, on_event=told.append, **options) as fp:
        fp.track(model=model).resume()
        write_steps(fp, 22, due=due)
        wait_until(lambda: persisted_steps(store) == [21, 15], "older ones go once a newer one is persisted")
        fp.save(23)
        assert fp.wait()
        assert fp.health.persist_lag == 2
        size = fp.health.bytes
    wait_until(lambda: persisted_steps(store) == [23, 21], "the last one is persisted, and an older one goes")
    assert (fp.health.persisted, fp.health.degraded) == (23, False)
    parts = [event for event in told if isinstance(event, events.PartPersisted)]
    assert [(event.step, event.bytes) for event in parts] == [(step, size) for step in (*due, 23)]
    versions = [event for event in told if isinstance(event, events.VersionPersisted)]
    assert [(event.step, event.url) for event in versions] == [(step, f"file://{store}") for step in (*due, 23)]
    newest = persisted(store)[0]
    with safe_open(store / newest.folder / object_name(0, newest.save_id), "pt") as opened:
        found = [opened.get_tensor(key) for key in opened.keys()]  # noqa: SIM118
    assert any(each.shape == model.weight.shape and torch.equal(each, model.weight) for each in found)


# ---- coming back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_job_whose_memory_is_gone_is_the_undisturbed_run(base: Path, store: Path, kind: str) -> None:
    url = f"file://{store}" if kind == "file" else f"memory://{store.parent.name}"
    expected = training.undisturbed(17)
    try:
        for life, until in enumerate((3, 11, 17)):
            job = Job(seed=life)
            with Flashpoint(base, persist=url, persist_every=4) as fp:
                step = fp.track(**job.tracked).resume()
                assert fp.last_recovery is not None
                assert (step, fp.last_recovery.source) == [(0, "nothing"), (3, "persisted"), (11, "persisted")][life]
                while step < until:
                    job.step()
                    step = fp.step()
                    assert fp.wait()
            shutil.rmtree(base)
        assert job.digests() == expected
    finally:
        if kind == "memory":
            fsspec.filesystem("memory").rm(url, recursive=True)


def save_all(base: Path, url: Path | str, *steps: int) -> None:
    """A version of each of these steps, of their numbers, all of them persisted."""
    value = Stored()
    with Flashpoint(base, persist=str(url), persist_every=1, persist_keep=9) as fp:
        fp.track(value=value).resume(lambda: 0)
        await_store(fp._checkpointer._persister)
        for step in steps:
            value.value = step
            fp.save(step)
            assert fp.wait()
            wait_until(lambda step=step: fp.health.persisted == step, f"{step} is persisted: {fp.health}")


def resumed(base: Path, url: Path | str, fallback: Any = None) -> tuple[int, Any, str]:
    value = Stored(None)
    with Flashpoint(base, persist=str(url), handle_sigterm=False) as fp:
        step = fp.track(value=value).resume(fallback)
        assert fp.last_recovery is not None
        return step, value.value, fp.last_recovery.source


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("how", ["content", "short", "gone", "marker", "manifest"])
def test_what_is_damaged_is_left_for_an_older_version(base: Path, store: Path, how: str) -> None:
    save_all(base, store, 1, 2, 3)
    shutil.rmtree(base)
    newest = persisted(store)[0]
    folder, (name, manifest) = store / newest.folder, (object_name(0, newest.save_id), manifest_name(0, newest.save_id))
    if how == "content":
        damage(store, 3)
    elif how == "short":
        with open(folder / name, "r+b") as file:
            file.truncate(1000)
    elif how == "gone":
        (folder / name).unlink()
    else:
        path = folder / (MARKER if how == "marker" else manifest)
        path.write_bytes(path.read_bytes().replace(b"3", b"2", 1))
    assert resumed(base, store) == (2, 2, "persisted")


@pytest.mark.damages_on_purpose
def test_where_all_are_damaged_it_is_said_and_the_fallback_is_last(base: Path, store: Path) -> None:
    save_all(base, store, 1, 2)
    shutil.rmtree(base)
    for step in (1, 2):
        damage(store, step)
    with pytest.raises(NothingLoadableError, match=r"step-2_ckpt.*step-1_ckpt"):
        resumed(base, store)
    assert resumed(base, store, lambda: 77) == (77, None, "fallback")


def test_memory_comes_first_where_it_is_as_new_and_that_of_an_earlier_life_does_not_count(
    base: Path, store: Path
) -> None:
    save_all(base, store, 1, 2)
    assert resumed(base, store) == (2, 2, "memory")
    base.rename(base.with_name("kept"))
    save_all(base, store, 3)
    shutil.rmtree(base)
    base.with_name("kept").rename(base)
    assert resumed(base, store) == (3, 3, "persisted")
    save_all(base, store, 4)
    assert resumed(base, store) == (4, 4, "memory")


@pytest.mark.damages_on_purpose
def test_the_same_step_is_persisted_where_memory_is_damaged(base: Path, store: Path) -> None:
    save_all(base, store, 1, 2)
    damage(base, 2)
    assert resumed(base, store) == (2, 2, "persisted")


def test_what_is_saved_later_is_newer_whatever_its_step(base: Path, store: Path) -> None:
    save_all(base, store, 5, 6)
    shutil.rmtree(base)
    save_all(base, store, 3)
    shutil.rmtree(base)
    assert resumed(base, store) == (3, 3, "persisted")


def test_what_was_gone_back_from_is_no_reason_to_start_anew(base: Path, store: Path) -> None:
    with Flashpoint(base, persist=str(store), persist_every=1, persist_keep=1, keep=3) as fp:
        fp.track(value=Stored()).resume()
        write_steps(fp, 3)
        assert fp.resume(step=2) == 2
    wait_until(lambda: persisted_steps(store) == [3], "older ones go")
    for version in base.glob("step-*"):
        shutil.rmtree(version)
    with pytest.raises(NothingLoadableError, match="no part of any is on a node of this job"):
        resumed(base, store)
    assert resumed(base, store, lambda: 77) == (77, None, "fallback")


def test_a_store_that_cannot_be_read_is_no_reason_to_start_anew(
    base: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHPOINT_RECOVERY_DEADLINE_S", "0.1")
    save_all(base, faults.url, 1)
    for faults.now in ("raise", "hang"):
        faults.operations, faults.where = {"list"}, ""
        assert resumed(base, faults.url) == (1, 1, "memory")
        base.rename(base.with_name("kept"))
        with pytest.raises(NothingLoadableError, match="cannot be known"):
            resumed(base, faults.url)
        with pytest.raises(SaveError, match="no number can be chosen for the run"):
            resumed(base, faults.url, lambda: 9)
        shutil.rmtree(base)
        base.with_name("kept").rename(base)
    faults.go_on.set()


# ---- stores that fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raise", "full", "hang"])
def test_a_store_that_fails_costs_training_nothing(
    base: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    said = {"raise": "the store is away", "full": "no room", "hang": "has not answered"}[how]
    with Flashpoint(base, persist=faults.url, persist_every=2, deadline_s=20) as fp:
        fp.track(value=Stored()).resume()
        write_steps(fp, 2, wait_for=2)
        monkeypatch.setenv("FLASHPOINT_TRANSFER_DEADLINE_S", "0.05")
        faults.now = how
        for _ in range(4):
            fp.step()
            assert fp.wait()  # held up, a save has 20 s, and the store hangs for 60
        assert faults.met.wait(10)
        wait_until(lambda: said in str(fp.health.persist_error), f"it is told: {fp.health}")
        health = fp.health
        assert health.degraded
        assert (health.saves, health.failures, health.persisted, health.persist_lag) == (6, 0, 2, 4)
        faults.now = None
        faults.go_on.set()

        def goes_on() -> bool:  # which step is the first at which nothing is being written, nobody knows
            fp.step()
            assert fp.wait()
            return fp.health.persisted > 2

        wait_until(goes_on, f"a newer one is persisted: {fp.health}")
        assert fp.health.persist_error is None


@pytest.mark.timeout(50)  # the store hangs for 60 s
def test_the_end_does_not_wait_for_ever(base: Path, faults: Faults) -> None:
    fp = Flashpoint(base, persist=faults.url, deadline_s=1)
    fp.track(value=Stored(1)).resume()
    faults.now = "hang"
    fp.step()
    fp.close()
    assert fp.health.persisted is None


@pytest.mark.timeout(50)
def test_the_end_does_not_wait_for_what_is_not_in_memory_any_more(base: Path, store: Path) -> None:
    fp = Flashpoint(base, persist=str(store), deadline_s=1000)
    fp.track(value=Stored(1)).resume()
    fp.step()
    assert fp.wait()
    assert events.flush()  # else the status of that save may be written there meanwhile
    shutil.rmtree(base)
    fp.close()
    assert "there is no such manifest" in str(fp.health.persist_error)


def test_what_failed_is_removed_before_the_next_version_is_written(
    base: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the store fills up with it, and nothing is persisted any more.
    full, told = Mock(side_effect=CapacityError("no room for the marker")), list[events.Event]()
    with Flashpoint(base, persist=str(store), persist_every=1, deadline_s=20, on_event=told.append) as fp:
        fp.track(value=Stored()).resume()
        write_steps(fp, 1)

        def fails_again() -> bool:
            fp.step()
            assert fp.wait()
            return sum(isinstance(event, events.PersistFailed) for event in told) > 3

        with monkeypatch.context() as patched:
            patched.setattr(DurableVersions, "complete", full)
            wait_until(fails_again, "the store fails four times")
            assert len(list(store.rglob("*.safetensors"))) <= 2, "the complete one, and the last one that failed"


def test_a_version_is_due_while_older_ones_are_removed(
    base: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removes, may_end = threading.Event(), threading.Event()
    keep_newest = DurableVersions.keep_newest
    calls: list[int] = []

    def slow(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # before the part is written, and after the version is complete
            removes.set()
            assert may_end.wait(20)
        return keep_newest(*arguments)

    with Flashpoint(base, persist=str(store), persist_every=1, deadline_s=20) as fp:
        fp.track(value=Stored()).resume()
        await_store(fp._checkpointer._persister)
        with monkeypatch.context() as patched:
            patched.setattr(DurableVersions, "keep_newest", slow)
            write_steps(fp, 1)
            assert removes.wait(20)
            fp.step()
            assert fp.wait()
            may_end.set()
            wait_until(lambda: fp.health.persisted == 2, f"2 is persisted: {fp.health}")


def test_a_version_is_due_while_a_slow_store_is_opened(
    base: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, may_go_on, owned = threading.Event(), threading.Event(), DurableVersions.owned

    def slow(self: DurableVersions) -> Any:
        met.set()
        assert may_go_on.wait(20)
        return owned(self)

    monkeypatch.setattr(DurableVersions, "owned", slow)
    with Flashpoint(base, persist=str(store), persist_every=50, deadline_s=20) as fp:
        fp.track(value=Stored()).resume()
        assert met.wait(20)
        fp.save(50)  # the only one for long
        assert fp.wait()
        may_go_on.set()
        wait_until(lambda: fp.health.persisted == 50, f"it is persisted: {fp.health}")
        assert not fp.health.degraded


def test_the_limit_on_bytes_a_second_is_kept(base: Path, store: Path) -> None:
    state = Stored(torch.zeros(400_000, dtype=torch.uint8))
    with Flashpoint(base, persist=str(store), persist_every=1, persist_bytes_per_s=1e6) as fp:
        fp.track(state=state).resume()
        await_store(fp._checkpointer._persister)
        began = time.monotonic()
        write_steps(fp, 2, wait_for=1)
        assert time.monotonic() - began > 0.4  # the second one waits for what the first one has used


# ---- the end of a job -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgets", [False, True])
def test_a_planned_exit_persists_the_last_version_even_without_close(base: Path, store: Path, forgets: bool) -> None:
    call(training.exit_without_closing, str(base), str(store), forgets)
    assert persisted_steps(store) == [3]


def test_a_run_is_above_any_that_has_left_something_in_the_store(base: Path, store: Path) -> None:
    """A job that lost all memory in the midst of persisting: its parts would be taken for those of the next one."""
    with Flashpoint(base, persist=str(store), persist_every=1) as fp:
        fp.track(value=Stored()).resume()
        write_steps(fp, 2)
    left = store / "run-00000007" / "step-9_ckpt"
    left.mkdir(parents=True)
    (left / object_name(1, "00000007")).write_bytes(b"cut short")
    shutil.rmtree(base)
    with Checkpointer(base, Config(persist=Persist(str(store)))) as checkpointer:
        assert checkpointer.load({"value": Stored()}) == 2
        assert checkpointer.run == 8
