"""Verified versions in a durable store, from the slots of two ranks in this process."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from ml_flashpoint import events
from ml_flashpoint.config import Persist
from ml_flashpoint.engine.persist import Persister
from ml_flashpoint.engine.rounds import Verdict
from ml_flashpoint.engine.store import JobStore
from ml_flashpoint.format.errors import CapacityError
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.container import BaseContainer, Owner
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.status import Status
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.location import open_durable
from ml_flashpoint.stores.version_store import StoredObject
from tests.memory.support import commit, layout_of, value_of
from tests.support.faulty_files import Faults, faulty_files
from tests.support.forked import wait_until

RANKS = 2


class Job:
    """Ranks that have committed what a test says is verified."""

    def __init__(
        self,
        root: Path,
        url: str,
        *,
        open_store: Callable[[str], DurableVersions] = open_durable,
        waits: bool = True,
        **options: Any,
    ) -> None:
        self.name = str(root)
        self.store = open_durable(url)
        job_store = JobStore(None, HashStore(), b"secret")
        self.pools = [
            Pool(BaseContainer(root / str(rank)), Owner(RANKS, rank), keep=1, owners=(), extra=2)
            for rank in range(RANKS)
        ]
        self.persisters = [
            Persister(
                Persist(url, **options),
                SimpleNamespace(rank=rank, world_size=RANKS, node="node-0"),  # type: ignore[arg-type]
                self.pools[rank],
                root,
                connect=lambda: job_store.connect("persist"),
                open_store=open_store,
            )
            for rank in range(RANKS)
        ]
        self.number = 0
        self.status = [Status(rank=rank, node="node-0") for rank in range(RANKS)]
        self._events = contextlib.ExitStack()
        self._events.enter_context(events.subscribe(self._reduce, root, at_once=True))
        if waits:
            wait_until(lambda: all(persister.owns_store for persister in self.persisters), "the store is owned")

    def _reduce(self, event: events.Event) -> None:
        self.status[event.rank] = self.status[event.rank].after(event)

    def await_silence(self, rank: int) -> None:
        """Wait until a rank notices that the store does not answer."""

        def is_silent() -> bool:
            self.persisters[rank].look()
            return "has not answered" in str(self.status[rank].persist_error)

        wait_until(is_silent, "the store is silent")

    def commit(self, step: int, *, run: int = 1) -> list[Any]:
        """Commit a step on all ranks; return what each rank's pool gave for it."""
        save, slots = SaveId(run, step), []
        for pool in self.pools:
            slot = pool.take(layout_of().size, SlotRequest(save, [], may_grow=True))
            assert slot is not None
            commit(pool, slot, save, job=self.name)
            slots.append(slot)
        return slots

    def verify(self, step: int, *, due: int | None = None, run: int = 1, ranks: Sequence[int] = range(RANKS)) -> None:
        """Have ranks hear that a step is verified, and which one was due to be persisted."""
        self.number += 1
        save = SaveId(run, step)
        persist = None if due is None else SaveId(run, due)
        for persister in [self.persisters[rank] for rank in ranks]:
            persister.heard(Verdict(self.number, (save,), SaveId(run, step + 1), self.number, persist=persist))

    @property
    def steps(self) -> list[int]:
        return [version.step for version in self.store.versions() if version.counts]

    def await_persisted(self, step: int) -> None:
        wait_until(lambda: all(each.persisted == step for each in self.status), f"{step} is persisted: {self.status}")
        wait_until(lambda: not self.persisters[0].is_busy, "rank 0 has nothing to do")

    def check(self) -> None:
        """Check the content of all versions that count."""
        for version in (version for version in self.store.versions() if version.counts):
            for rank in range(RANKS):
                manifest = self.store.manifest(version, rank)
                data = StoredObject(manifest, [self.store]).read(0, manifest.record.size)
                entry = layout_of().by_key["w"]
                numbers = memoryview(data)[entry.begin : entry.end].cast("f")
                assert set(numbers) == {value_of(version.save, rank)}

    def close(self) -> None:
        for persister in self.persisters:
            persister.close()
        self._events.close()
        for pool in self.pools:
            pool.close()


@pytest.fixture(params=["file", "memory"])
def job(request: pytest.FixtureRequest, tmpfs: Path) -> Iterator[Job]:
    url = f"file://{tmpfs}/store" if request.param == "file" else f"memory://{tmpfs.name}"
    made = Job(tmpfs, url, keep=2)
    yield made
    made.close()


@pytest.fixture
def faults() -> Iterator[Faults]:
    with faulty_files() as found:
        yield found


def test_versions_that_are_due_are_persisted_and_older_ones_go(job: Job) -> None:
    for step in range(10, 60, 10):
        job.commit(step)
        job.verify(step, due=step // 20 * 20 or None)
        if step % 20 == 0:
            job.await_persisted(step)
    assert job.steps == [40, 20]
    job.commit(60)
    job.verify(60, due=60)
    job.await_persisted(60)
    wait_until(lambda: job.steps == [60, 40], "an older version goes")
    job.check()


def test_the_newest_version_is_persisted_at_the_end_though_it_is_not_due(job: Job) -> None:
    job.commit(10)
    job.verify(10)
    assert job.persisters[1].finish(30)
    assert job.persisters[0].finish(30)
    assert job.steps == [10]
    job.check()


def test_what_a_job_went_back_from_is_not_persisted_at_the_end(job: Job) -> None:
    job.commit(10)
    job.verify(10)
    for persister in job.persisters:
        persister.heard(Verdict(0, (SaveId(1, 5),), SaveId(2, 0)))
        assert persister.finish(30)
    assert job.steps == []


@pytest.mark.parametrize("due", [10, None])
def test_a_part_whose_slot_is_gone_is_neither_waited_for_nor_tried_again(job: Job, due: int | None) -> None:
    assert job.persisters[0].finish(0), "nothing is verified"
    job.verify(10, due=due)
    assert job.persisters[0].finish(30) is False
    wait_until(lambda: not job.persisters[0].is_busy, "rank 0 has nothing to do")
    assert "slot" in str(job.status[0].persist_error)
    assert due or job.status[0].persist_failures == 1


def test_the_slot_of_a_part_is_not_reused_while_a_store_hangs(tmpfs: Path, faults: Faults) -> None:
    faults.now, job = "hang", Job(tmpfs, faults.url)
    slots = job.commit(10)
    job.verify(10, due=10)
    assert faults.met.wait(30)
    assert job.persisters[0].is_busy
    for step in range(20, 70, 10):
        assert job.commit(step)[0] is not slots[0], "the slot that is read"
    faults.now = None
    faults.go_on.set()
    job.await_persisted(10)
    job.check()
    job.close()


@pytest.mark.parametrize("hangs_first", [False, True])
def test_a_store_that_hangs_for_long_does_not_keep_the_slot(
    tmpfs: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, hangs_first: bool
) -> None:
    if hangs_first:
        faults.now = "hang"
    job = Job(tmpfs, faults.url, waits=not hangs_first)
    faults.now = "hang"
    slots = job.commit(10)
    job.verify(10, due=10)
    assert faults.met.wait(30)
    monkeypatch.setenv("FLASHPOINT_TRANSFER_DEADLINE_S", "0.05")
    job.await_silence(0)
    assert slots[0] in [job.commit(step)[0] for step in range(20, 70, 10)]
    monkeypatch.undo()
    faults.now = None
    faults.go_on.set()
    job.verify(60, due=60)
    job.await_persisted(60)
    assert job.steps == [60], "step 10 was given up"
    job.check()
    job.close()


def test_other_content_in_the_slot_of_a_part_that_was_given_up_is_no_failure(tmpfs: Path, faults: Faults) -> None:
    faults.now, job = "hang", Job(tmpfs, faults.url)
    slots = job.commit(10)
    job.verify(10, due=10)
    assert faults.met.wait(30)
    job.commit(20)
    job.verify(20, due=20)
    given = [job.commit(step)[0] for step in range(30, 70, 10)]
    assert slots[0] in given, "step 20 is persisted in place of step 10"
    faults.now = None
    faults.go_on.set()
    job.await_persisted(20)
    assert [each.persist_failures for each in job.status] == [0, 0]
    job.check()
    job.close()


def test_a_store_that_hangs_while_it_is_opened_keeps_no_other_job_waiting(tmpfs: Path) -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def hang(url: str) -> DurableVersions:
        hangs.set()
        go_on.wait(60)
        return open_durable(url)

    dead = Job(tmpfs / "dead", f"file://{tmpfs}/dead-store", open_store=hang, waits=False)
    assert hangs.wait(30)
    fine = Job(tmpfs / "fine", f"file://{tmpfs}/fine-store")
    fine.commit(10)
    fine.verify(10, due=10)
    fine.await_persisted(10)
    assert not dead.persisters[0].owns_store
    go_on.set()
    for job in (fine, dead):
        job.close()


def test_jobs_with_one_url_and_one_run_number_never_complete_a_version_of_both(tmpfs: Path) -> None:
    one, other = (Job(tmpfs / name, f"memory://{tmpfs.name}") for name in ("one", "other"))  # which has no locks
    for job in (one, other):
        job.commit(10)
    other.verify(10, due=10, ranks=[1])
    wait_until(lambda: other.status[1].persisted == 10, "a part of one job")
    one.verify(10, due=10)
    wait_until(lambda: all("another job" in str(each.persist_error) for each in one.status), "failures on both ranks")
    other.verify(10, due=10, ranks=[0])
    wait_until(lambda: "another job" in str(other.status[0].persist_error), "a failure on rank 0 of the other job")
    assert one.steps == []
    other.close()
    one.close()


def test_a_version_is_not_completed_where_another_job_has_a_newer_one(tmpfs: Path) -> None:
    url = f"memory://{tmpfs.name}"  # which has no locks
    other, job = Job(tmpfs / "other", url), Job(tmpfs / "job", url)
    other.commit(5, run=2)
    other.verify(5, due=5, run=2)
    other.await_persisted(5)
    job.commit(10)
    job.verify(10, due=10)
    wait_until(lambda: "counts as newer" in str(job.status[0].persist_error), "a failure on rank 0")
    assert job.steps == [5]
    other.close()
    job.close()


@pytest.mark.damages_on_purpose
def test_a_part_that_is_damaged_in_memory_is_not_persisted(tmpfs: Path) -> None:
    job = Job(tmpfs, f"file://{tmpfs}/store")
    slot, _ = job.commit(10)
    slot.buffer[9000] ^= 1
    job.verify(10, due=10)
    wait_until(lambda: job.status[0].persist_error is not None or job.steps != [], "an end")
    assert (job.steps, job.store.ranks_there(SaveId(1, 10)) - {1}) == ([], set())
    job.close()


def test_a_rank_that_cannot_write_is_named_and_the_next_version_is_tried(tmpfs: Path) -> None:
    refusing, told = threading.Event(), list[events.Event]()

    class Refusing(DurableVersions):
        def write_part(self, manifest: Manifest, content: Any) -> bool:
            if manifest.rank == 1 and refusing.is_set():
                raise CapacityError("the quota is used up")
            return super().write_part(manifest, content)

    job = Job(tmpfs, f"file://{tmpfs}/store", open_store=lambda url: Refusing(open_durable(url).files, url))
    refusing.set()
    with events.subscribe(told.append, tmpfs):
        slots = job.commit(10)
        job.verify(10, due=10)
        wait_until(lambda: None not in [each.persist_error for each in job.status], "a failure on both ranks")
        wait_until(lambda: not any(each.is_busy for each in job.persisters), "rank 0 waits no longer")
        assert slots[1] in [job.commit(step)[1] for step in range(11, 20)], "what is not written keeps no slot"
        assert "rank 1 could not write its part: the quota is used up" in str(job.status[0].persist_error)
        refusing.clear()
        job.commit(20)
        job.verify(20, due=20)
        job.await_persisted(20)
        events.flush()
    assert [job.steps, job.status[0].persist_error, job.status[0].persist_failures] == [[20], None, 1]
    assert {(event.rank, event.step) for event in told if isinstance(event, events.PersistFailed)} == {(0, 10), (1, 10)}
    assert [event.step for event in told if isinstance(event, events.VersionPersisted)] == [20]
    job.close()


def test_a_failure_after_a_job_has_taken_a_store_over_is_logged(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"file://{tmpfs}/store"
    one, other = Job(tmpfs / "one", url), Job(tmpfs / "other", url, waits=False)
    wait_until(lambda: "locked" in str(other.status[0].persist_error), "another job persists there")
    one.close()
    wait_until(lambda: other.persisters[0].owns_store, "the store is taken over")
    other.verify(10, due=10, ranks=[0])  # which has no slot
    wait_until(lambda: other.status[0].persist_failures > 0, "a failure")
    logged = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert (logging.ERROR, "step 10 is not persisted") in [(level, text.partition(",")[0]) for level, text in logged]
    other.close()


def test_the_end_tries_again_what_failed(tmpfs: Path, faults: Faults) -> None:
    faults.now, job = "raise", Job(tmpfs, faults.url)
    job.commit(10)
    job.verify(10, due=10)
    ended = [threading.Thread(target=persister.finish, args=(30,)) for persister in job.persisters]
    for thread in ended:
        thread.start()
    wait_until(lambda: all(each.persist_failures for each in job.status), "failures")
    faults.now = None
    for thread in ended:
        thread.join()
    assert job.steps == [10]
    job.close()


def test_the_end_writes_again_what_was_given_up_while_the_store_was_silent(
    tmpfs: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmpfs, faults.url)
    faults.now = "hang"
    job.commit(10)
    job.verify(10)
    ended = [threading.Thread(target=persister.finish, args=(30,)) for persister in job.persisters]
    for thread in ended:
        thread.start()
    assert faults.met.wait(30)
    monkeypatch.setenv("FLASHPOINT_TRANSFER_DEADLINE_S", "0.05")
    for rank in range(RANKS):
        job.await_silence(rank)
    monkeypatch.undo()
    faults.now = None
    faults.go_on.set()
    for thread in ended:
        thread.join()
    assert job.steps == [10]
    assert [each.persist_error for each in job.status] == [None, None]
    job.check()
    job.close()


def test_the_end_gives_up_a_store_that_is_away(tmpfs: Path, faults: Faults) -> None:
    faults.now, job = "raise", Job(tmpfs, faults.url)
    job.commit(10)
    job.verify(10)
    assert [persister.finish(60) for persister in reversed(job.persisters)] == [False, False]
    job.close()


def test_a_limit_on_bytes_a_second_ends_with_the_job(tmpfs: Path) -> None:
    job = Job(tmpfs, f"file://{tmpfs}/store", bytes_per_s=1e-3)
    job.commit(10)
    job.verify(10, due=10)
    wait_until(lambda: all(persister.is_busy for persister in job.persisters), "ranks that wait for their next bytes")
    job.commit(20)
    job.verify(20, due=10)
    assert [persister.finish(30) for persister in reversed(job.persisters)] == [True, True]
    assert job.steps == [20]
    job.close()
