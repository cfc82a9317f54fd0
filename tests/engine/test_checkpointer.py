"""Saves of one rank and of several, from `begin` to the verdict, with real processes and tmpfs."""

from __future__ import annotations

import concurrent.futures
import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch

from ml_flashpoint.config import Config, Persist
from ml_flashpoint.engine.board import Board
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.recovery import Recovery
from ml_flashpoint.engine.store import SignedStore
from ml_flashpoint.format.errors import (
    CapacityError,
    DeadlineError,
    InvalidArgumentError,
    NothingLoadableError,
    ObjectNotFoundError,
    SaveError,
    SkippedError,
    SupersededError,
    UnaskedVersionsError,
    UnreadableError,
)
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.slot import Slot
from tests.memory.support import fill_up
from tests.support.forked import call, call_team, preload
from tests.workers import checkpointer_jobs as jobs

preload("tests.workers.checkpointer_jobs")


@pytest.fixture
def checkpointer(tmpfs: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmpfs / "job") as opened:
        yield opened


# ---- one rank ------------------------------------------------------------------------------------------------


def test_a_save_is_staged_committed_and_verified(checkpointer: Checkpointer) -> None:
    save = jobs.begin_and_commit(checkpointer, 5, table="t1")
    manifest = save.committed.result(30)
    save.verified.result(30)
    assert save.staged.done()
    assert save.id == SaveId(1, 5)
    assert str(checkpointer.id(5)) == f"{checkpointer.base}/step-5_ckpt"
    assert dict(manifest.labels) == {"door": "test", "table": "t1", "job": checkpointer.ranks.job}
    found = safetensors.torch.load_file(Path(checkpointer.id(5)) / manifest.object_name)
    assert found["model.w"].tolist() == [500.0] * jobs.SIZE
    assert bytes(found["note"]) == b"nnnnn"
    assert (checkpointer.status.saves, checkpointer.status.verified) == (1, 5)
    with pytest.raises(InvalidArgumentError, match="not above step 5"):
        checkpointer.begin(5)


def test_versions_that_nobody_has_asked_about_are_not_overwritten(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job") as first:
        jobs.begin_and_commit(first, 5).verified.result(30)
        assert call(jobs.open_elsewhere, str(tmpfs / "job")) == "JobInUseError"
    with Checkpointer(tmpfs / "job") as second:
        assert second.run == 0
        for call_it in (lambda: second.begin(6), lambda: second.check_usable("resume()")):
            with pytest.raises(UnaskedVersionsError, match="saving would overwrite them"):
                call_it()
        assert second.latest() == second.id(5)
        assert second.run == 2
        jobs.begin_and_commit(second, 3).verified.result(30)
    with Checkpointer(tmpfs / "job", discard_existing=True) as third:
        assert third.run == 3
        assert jobs.versions_in(tmpfs / "job") == []
        jobs.begin_and_commit(third, 1).verified.result(30)
        third.remove_versions()
        assert jobs.versions_in(tmpfs / "job") == []
        jobs.begin_and_commit(third, 1).verified.result(30)


def test_versions_are_removed_where_there_is_no_room_for_anything(small_tmpfs: Path) -> None:
    with Checkpointer(small_tmpfs / "job") as checkpointer:
        jobs.begin_and_commit(checkpointer, 1).verified.result(30)
        others = fill_up(small_tmpfs)
        checkpointer.remove_versions()
        assert jobs.versions_in(small_tmpfs / "job") == []
        others.unlink()
        jobs.begin_and_commit(checkpointer, 1).verified.result(30)


def test_a_full_tmpfs_is_an_error_when_it_is_opened_that_says_what_to_do(small_tmpfs: Path) -> None:
    others = fill_up(small_tmpfs)
    with pytest.raises(CapacityError, match=r"no room for the record of a run.*enlarge the tmpfs.*free memory"):
        Checkpointer(small_tmpfs / "job")
    others.unlink()
    with Checkpointer(small_tmpfs / "job") as checkpointer:
        jobs.begin_and_commit(checkpointer, 1).verified.result(30)
    others = fill_up(small_tmpfs)  # no slot is made any more, for which there would be no room then
    with Checkpointer(small_tmpfs / "job") as checkpointer:
        with pytest.raises(CapacityError, match="no room for the record of a run"):
            checkpointer.latest()
        others.unlink()
        assert checkpointer.latest() == checkpointer.id(1)


def test_of_two_in_one_process_the_later_one_counts(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job") as first:
        jobs.begin_and_commit(first, 1).verified.result(30)
        with Checkpointer(tmpfs / "job") as second:
            assert first.is_closed
            with pytest.raises(SaveError, match="is closed"):
                first.begin(2)
            first.close()
            assert second.latest() == second.id(1)
            jobs.begin_and_commit(second, 2).verified.result(30)


def test_one_that_is_closed_has_nothing_to_finish(checkpointer: Checkpointer) -> None:
    checkpointer.close()
    assert not checkpointer.finish(30)  # no error, which would end a training that ends after it


def test_one_that_is_closed_while_a_run_begins_stays_closed(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Recovery.record

    def close_first(*args: Any) -> Any:
        checkpointer.close()  # as another thread or a signal handler may
        return record(*args)

    monkeypatch.setattr(Recovery, "record", close_first)
    with pytest.raises(SaveError, match="is closed"):
        checkpointer.latest()
    assert (checkpointer.is_closed, checkpointer.run) == (True, 0)
    with pytest.raises(SaveError, match="is closed"):
        checkpointer.begin(1)


def test_a_save_that_fails_leaves_no_trace(checkpointer: Checkpointer) -> None:
    counted: list[int] = []
    for step in (1, 2, 3):
        save = checkpointer.begin(step, explicit=True)
        save.verified.add_done_callback(lambda _: counted.append(checkpointer.status.failures))
        save.stage(jobs.state_of(0, step))
        save.fail(SaveError("out of luck"))
        for future in (save.staged, save.committed, save.verified):
            assert future is save.staged or str(future.exception(0)) == "out of luck"
        with pytest.raises(SaveError, match="out of luck"):
            save.fill([])
    save = checkpointer.begin(4, explicit=True)
    with pytest.raises(InvalidArgumentError, match="twice"):
        save.fill([("a", torch.ones(1)), ("a", torch.ones(1))])
    for future in (save.staged, save.verified):
        assert isinstance(future.exception(0), InvalidArgumentError)
    save = checkpointer.begin(5, explicit=True)
    save.commit(items=lambda: {}["missing"])
    assert isinstance(save.verified.exception(30), KeyError)
    jobs.begin_and_commit(checkpointer, 6).verified.result(30)
    assert counted == [1, 2, 3], "who waits for a save sees the status after it"
    assert (checkpointer.status.failures, checkpointer.status.saves) == (5, 1)
    assert list(checkpointer.container.list_versions()) == [(1, 6)]


def test_without_a_slot_a_loop_skips_and_somebody_who_waits_gets_one(checkpointer: Checkpointer) -> None:
    jobs.begin_and_commit(checkpointer, 1).verified.result(30)
    busy = checkpointer.begin(2)
    busy.stage(jobs.state_of(0, 2))
    skipped = checkpointer.begin(3)
    with pytest.raises(SkippedError, match=r"no slot is free.*end stopped readers"):
        skipped.stage(jobs.state_of(0, 3))
    assert (checkpointer.status.skipped, checkpointer.status.failures) == (1, 0)
    unstaged = checkpointer.begin(4, explicit=True)
    unstaged.commit(items=lambda: (jobs.state_of(0, 4), []))
    assert isinstance(unstaged.committed.exception(30), SkippedError), "the thread that commits waits for no slot"
    explicit = checkpointer.begin(5, explicit=True)
    staged = threading.Thread(target=lambda: explicit.stage(jobs.state_of(0, 5)))
    staged.start()
    busy.fail(SaveError("out of luck"))
    staged.join(30)
    explicit.commit(items=lambda: (jobs.state_of(0, 5), []))
    explicit.verified.result(30)


def test_saves_before_the_round_that_a_skip_has_put_off_are_passed_over(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job", Config(keep=2)) as checkpointer:
        jobs.begin_and_commit(checkpointer, 10).verified.result(30)
        unnamed = [checkpointer.begin() for _ in range(2)]
        for save in unnamed:
            save.stage(jobs.state_of(0, 1))
        with pytest.raises(SkippedError):
            checkpointer.begin(20).stage(jobs.state_of(0, 20))
        for save in unnamed:
            save.fail(SaveError("out of luck"))
        for step in (21, 22):
            save = jobs.begin_and_commit(checkpointer, step, explicit=False)
            save.committed.result(30)
            assert isinstance(save.verified.exception(30), SupersededError)
        jobs.begin_and_commit(checkpointer, 31, explicit=False).verified.result(30)


def test_a_save_whose_slot_a_later_one_took_is_never_verified(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmpfs / "job", Config(keep=2)) as checkpointer:
        jobs.begin_and_commit(checkpointer, 1).verified.result(30)
        go_on, write = threading.Event(), SignedStore.set

        def write_late(*args: Any) -> None:
            assert go_on.wait(30)
            write(*args)

        monkeypatch.setattr(SignedStore, "set", write_late)
        saves = []
        for step in (2, 3, 4):
            saves.append(jobs.begin_and_commit(checkpointer, step))
            saves[-1].committed.result(30)
        assert not checkpointer.wait(0)
        go_on.set()
        saves[2].verified.result(30)
        assert isinstance(saves[1].verified.exception(30), SupersededError)
        assert sorted(checkpointer.container.list_versions())[-2:] == [(1, 2), (1, 4)]


def test_skips_are_logged_less_and_less_often(checkpointer: Checkpointer, caplog: pytest.LogCaptureFixture) -> None:
    jobs.begin_and_commit(checkpointer, 1).verified.result(30)
    checkpointer.begin(2).stage(jobs.state_of(0, 2))
    for step in range(3, 19, 2):
        with pytest.raises(SkippedError):
            checkpointer.begin(step).stage(jobs.state_of(0, step))
        checkpointer.begin(step + 1).fail(SaveError("out of luck"))
    assert checkpointer.status.skipped == 8
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [text.rpartition("(")[2] for text in warnings if "is skipped" in text] == [
        f"{count} skipped so far)" for count in (1, 2, 4, 8)
    ]


def test_a_slot_that_is_made_while_the_run_ends_is_free_again(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.begin_and_commit(checkpointer, 1).verified.result(30)
    checkpointer.latest()
    jobs.begin_and_commit(checkpointer, 2).verified.result(30)
    making, ended = threading.Event(), threading.Event()
    make, record = Slot.make, Recovery.record

    def make_until_the_run_has_ended(*args: Any, **how: Any) -> Slot:
        made = make(*args, **how)
        making.set()
        assert ended.wait(30)
        return made

    def record_after_the_save(*args: Any) -> Any:
        ended.set()
        concurrent.futures.wait([staged], 30)
        return record(*args)

    with ThreadPoolExecutor() as beside, monkeypatch.context() as patched:
        patched.setattr(Slot, "make", make_until_the_run_has_ended)
        patched.setattr(Recovery, "record", record_after_the_save)
        larger = checkpointer.begin(3, explicit=True)
        staged = beside.submit(larger.stage, [("w", torch.zeros(10 * jobs.SIZE))])
        assert making.wait(30)
        checkpointer.latest()
    assert isinstance(larger.committed.exception(30), SupersededError)
    assert SaveId(1, 1) not in checkpointer.container.list_versions(), "its slot was taken"
    for step in (4, 5, 6):
        jobs.begin_and_commit(checkpointer, step, explicit=False).verified.result(30)


def test_a_save_that_nobody_goes_on_with_ends_at_its_deadline(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_SEAL_DEADLINE_S", "0.2")
    with Checkpointer(tmpfs / "job") as checkpointer:
        save, unnamed = checkpointer.begin(1), checkpointer.begin()
        save.stage(jobs.state_of(0, 1))
        unnamed.stage(jobs.state_of(0, 1))
        for future in (save.committed, save.verified, unnamed.verified):
            assert isinstance(future.exception(30), DeadlineError)
        assert checkpointer.wait(30)
        monkeypatch.delenv("FLASHPOINT_SEAL_DEADLINE_S")
        jobs.begin_and_commit(checkpointer, 2).verified.result(30)


def test_a_step_that_is_known_late_and_tensors_that_another_process_reads(checkpointer: Checkpointer) -> None:
    save = checkpointer.begin(explicit=True)
    (copy, other) = save.stage(jobs.state_of(0, 7))
    assert save.step is None
    place = save.place_of(copy[10:20])
    assert place is not None
    assert call(jobs.read_at, *place, 10) == 7000.0
    assert save.place_of(copy[::2]) is None
    assert save.place_of(torch.ones(3)) is None
    again = save.tensor_at(place[1], torch.float32, (2, 5))
    assert again.data_ptr() == copy[10:].data_ptr()
    with pytest.raises(SaveError, match="nothing is staged"):
        save.tensor_at(0, torch.float32, (5,))
    save.name(7)
    with pytest.raises(SaveError, match="before it is committed"):
        save.commit()
    assert isinstance(save.verified.exception(0), SaveError)
    save = checkpointer.begin(explicit=True)
    save.fill(jobs.state_of(0, 7))
    with pytest.raises(SaveError, match="have a step"):
        save.commit()
    save = checkpointer.begin(explicit=True)
    (copy, other) = save.stage(jobs.state_of(0, 8))
    save.name(8)
    save.fill([("part", copy[10:20]), ("b", other), ("more", torch.ones(9))])
    save.commit()
    save.verified.result(30)
    found = safetensors.torch.load_file(Path(checkpointer.id(8)) / save.committed.result().object_name)
    assert [found[key].tolist() for key in ("part", "more")] == [[800.0] * 10, [1.0] * 9]
    checkpointer.begin(9).stage(jobs.state_of(0, 9))
    with pytest.raises(SkippedError):  # the slot of step 8 is not free
        checkpointer.begin(10).stage(jobs.state_of(0, 10))


def test_a_save_that_fails_while_it_gets_its_step_holds_up_no_round(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.begin_and_commit(checkpointer, 1).verified.result(30)
    save, call_board = checkpointer.begin(), Board.call

    def call_and_fail(board: Board, name: SaveId, **how: Any) -> None:
        call_board(board, name, **how)
        save.fail(SaveError("out of luck"))

    with monkeypatch.context() as patched:
        patched.setattr(Board, "call", call_and_fail)
        save.name(2)
    assert isinstance(save.committed.exception(0), SaveError)
    jobs.begin_and_commit(checkpointer, 3).verified.result(30)


def test_room_that_cannot_be_known_is_not_taken_for_none(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    checkpointer.check_room(1)
    monkeypatch.setattr("ml_flashpoint.engine.recovery.available_bytes", fail)
    with pytest.raises(UnreadableError, match=r"how much room there is: .*Too many open files"):
        checkpointer.check_room(1)


def test_the_room_of_all_versions_that_stay_is_checked(small_tmpfs: Path) -> None:
    with Checkpointer(small_tmpfs / "job") as checkpointer:
        checkpointer.check_room(1 << 20)
        with pytest.raises(CapacityError, match="2 versions"):
            checkpointer.check_room(3 << 20)


def test_a_run_that_cannot_be_marked_costs_no_save(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = mock.Mock(side_effect=SaveError("out of luck"))
    monkeypatch.setattr("ml_flashpoint.engine.recovery.mark_verified", fails)
    jobs.begin_and_commit(checkpointer, 1).verified.result(30)
    assert fails.called


@pytest.mark.parametrize("thread", ["flashpoint-board", "flashpoint-commit"])
def test_a_thread_that_cannot_be_started_is_an_error_that_says_what_to_do(tmpfs: Path, thread: str) -> None:
    start = threading.Thread.start

    def start_others(started: threading.Thread) -> None:
        if started.name == thread:
            raise RuntimeError("can't start new thread")
        start(started)

    with mock.patch.object(threading.Thread, "start", start_others), pytest.raises(SaveError, match="ulimit -u"):
        Checkpointer(tmpfs / "job")
    with Checkpointer(tmpfs / "job") as checkpointer:
        jobs.begin_and_commit(checkpointer, 1).verified.result(30)


def test_what_was_gone_back_from_is_not_opened_and_of_one_step_the_newest_save_is(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job", Config(keep=3)) as checkpointer:
        for step in (1, 2):
            jobs.begin_and_commit(checkpointer, step).verified.result(30)
        checkpointer.latest()
        jobs.begin_and_commit(checkpointer, 2).verified.result(30)
        with checkpointer.open_version(checkpointer.id(2)) as reader:
            assert reader.manifest(0).save == SaveId(2, 2)
        checkpointer.go_back(1)
        with pytest.raises(ObjectNotFoundError):
            checkpointer.open_version(checkpointer.id(2))


@pytest.mark.damages_on_purpose
def test_a_part_that_cannot_be_read_is_no_start_from_nothing(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job") as checkpointer:
        save = jobs.begin_and_commit(checkpointer, 1)
        save.verified.result(30)
    os.truncate((Path(checkpointer.id(1)) / save.committed.result().object_name).with_suffix(".manifest"), 100)
    with Checkpointer(tmpfs / "job") as checkpointer:
        assert checkpointer.run == 0
        with pytest.raises(NothingLoadableError, match="step-1_ckpt"):
            checkpointer.latest()


def test_a_persisted_version_that_cannot_be_read_is_no_start_from_nothing(tmpfs: Path) -> None:
    folder = tmpfs / "store" / "run-00000001" / "step-1_ckpt"
    folder.mkdir(parents=True)
    (folder / "complete.json").write_bytes(b"damaged")
    with Checkpointer(tmpfs / "job", Config(persist=Persist(str(tmpfs / "store"), every=1))) as checkpointer:
        assert checkpointer.run == 0
        with pytest.raises(NothingLoadableError, match="step-1_ckpt"):
            checkpointer.latest()


def test_a_version_that_goes_after_it_was_found_is_not_gone_on_from(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job") as checkpointer:
        jobs.begin_and_commit(checkpointer, 1).verified.result(30)
        found = checkpointer.newest()
        checkpointer.container.remove_part(SaveId(1, 1), 0)
        with pytest.raises(SaveError, match="not whole any more"):
            checkpointer.go_on_from(found)


def test_a_commit_that_hangs_keeps_nobody_who_closes(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_EXIT_DEADLINE_S", "0.2")
    go_on = threading.Event()

    def hang() -> tuple[list[TensorItem], list[BytesItem]]:
        assert go_on.wait(30)
        return jobs.state_of(0, 1), []

    with Checkpointer(tmpfs / "job") as checkpointer:
        save = checkpointer.begin(1)
        save.commit(items=hang)
    assert "was closed" in str(save.committed.exception(0))
    go_on.set()


def test_readers_keep_a_slot_from_being_reused(checkpointer: Checkpointer) -> None:
    with ExitStack() as stack:
        for step in range(1, 9):
            with suppress(SkippedError):
                jobs.begin_and_commit(checkpointer, step, explicit=False).verified.result(30)
                stack.enter_context(checkpointer.container.open_part(SaveId(1, step), 0))
        assert 2 <= checkpointer.status.saves <= 4
        assert checkpointer.status.saves + checkpointer.status.skipped == 8
    jobs.begin_and_commit(checkpointer, 20).verified.result(30)


def test_a_forked_child_does_nothing(tmpfs: Path) -> None:
    assert call(jobs.fork_beside_a_save, str(tmpfs / "job")) == ["JobInUseError", [(1, 1)]]


def test_a_process_that_ends_commits_what_it_has_begun(tmpfs: Path) -> None:
    script = """
import sys
from ml_flashpoint.engine.checkpointer import Checkpointer
from tests.workers.checkpointer_jobs import begin_and_commit
begin_and_commit(Checkpointer(sys.argv[1]), 1)
"""
    subprocess.run([sys.executable, "-c", script, str(tmpfs / "job")], check=True, timeout=60)
    with Checkpointer(tmpfs / "job") as checkpointer:
        assert checkpointer.latest() == checkpointer.id(1)


# ---- several ranks -------------------------------------------------------------------------------------------


def test_copies_are_made_before_a_version_is_verified(tmpfs: Path) -> None:
    found = call_team(jobs.save_steps, tmpfs, 3, 5)
    for rank, (parts, values) in enumerate(found):
        assert sorted(parts)[-2:] == [4, 5]
        assert len(parts[5]) == 2
        assert rank in parts[5]
        assert values == [500.0 + each for each in parts[5]]


@pytest.mark.parametrize("has_step", [True, False])
def test_a_save_that_one_rank_lacks_is_passed_over(tmpfs: Path, has_step: bool) -> None:
    outcomes = call_team(jobs.lose_a_save, tmpfs, 2, has_step)
    assert outcomes == [["NoneType", "SupersededError", "NoneType"], ["NoneType", "SaveError", "NoneType"]]


def test_a_save_by_two_tables_is_no_version(tmpfs: Path) -> None:
    assert call_team(jobs.save_by_two_tables, tmpfs, 2) == [["SupersededError"]] * 2


def test_a_loop_that_saves_faster_than_it_copies_goes_on_and_ends(tmpfs: Path) -> None:
    for verified, _, ended in call_team(jobs.save_in_a_loop, tmpfs, 2, 60):
        assert (verified, ended) == (60, True)
