"""Saves in another process, where taking over what it has made fails, or goes on for long."""

from __future__ import annotations

import errno
import pickle
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager import arena, rank_store, version_files
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.mailbox import Mailbox
from ml_flashpoint.core.save import Save, SaveState
from ml_flashpoint.core.saving_process import HandedOffSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import ObjectNotFoundError, SaveError, UnreadableError
from tests.support.forked import wait_until
from tests.support.injector import Fault, Injector

TENSORS = [("weight", torch.arange(100_000.0))]


def version(base: Path, step: int) -> CheckpointContainerId:
    name = CheckpointContainerId.format_version_container(step)
    return CheckpointContainerId.create_child(CheckpointContainerId(base), name)


@pytest.fixture
def saver() -> Iterator[DefaultMLFlashpointCheckpointSaver]:
    saver = DefaultMLFlashpointCheckpointSaver()
    yield saver
    saver.close(0.1)
    saver._objects.close()


def save_elsewhere(saver: DefaultMLFlashpointCheckpointSaver, base: Path, step: int) -> Save:
    """As a saving process does, in a thread: what comes with pickle is all that it has."""
    handed_off = saver.hand_off()
    save = handed_off.save
    there: HandedOffSaver = pickle.loads(pickle.dumps(handed_off))
    there.save(version(base, step), TENSORS)
    assert save.finished.wait(20)
    return save


def arenas(base: Path) -> list[Path]:
    return sorted(base.glob(".flashpoint/rank-*/arena-*"))


@pytest.mark.parametrize("lent", [True, False], ids=["lent", "own"])
@pytest.mark.parametrize("what", ["manifest", "arena"])
def test_a_part_that_cannot_be_taken_over_is_withdrawn(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, what: str, lent: bool
) -> None:
    """Its arena is used again, so nothing may lead to it. Until the save's deadline it is tried again."""
    monkeypatch.setenv("FLASHPOINT_SEAL_DEADLINE_S", "1")
    if lent:
        saver.save(version(tmpfs, 1), TENSORS)
    else:
        saver._objects.open(tmpfs, 0)

    def failing(*args: Any) -> Any:
        raise UnreadableError("too many open files") if what == "manifest" else OSError(errno.EMFILE, "too many")

    with monkeypatch.context() as context:
        if what == "manifest":
            context.setattr(rank_store, "read_manifest", failing)
        else:
            context.setattr(RankStore, "arena_by_path", failing)
        assert save_elsewhere(saver, tmpfs, 2).error is not None
    assert "step-2_ckpt" not in list_versions(tmpfs)
    for step in range(3, 6):
        assert save_elsewhere(saver, tmpfs, step).state is SaveState.VERIFIED
    assert list_versions(tmpfs) == ["step-5_ckpt"]
    assert len(arenas(tmpfs)) <= 3


@pytest.mark.parametrize("what", ["manifest", "arena"])
def test_a_part_that_cannot_be_read_at_once_is_taken_over_later(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """All ranks have been told that the save is complete: were it withdrawn here, a restart would miss it."""
    saver._objects.open(tmpfs, 0)
    owner, name = (rank_store, "read_manifest") if what == "manifest" else (RankStore, "arena_by_path")
    reads, failures = getattr(owner, name), [UnreadableError("too many"), OSError(errno.EMFILE, "too many")]

    def failing_at_first(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return reads(*args)

    monkeypatch.setattr(owner, name, failing_at_first)
    assert save_elsewhere(saver, tmpfs, 1).state is SaveState.VERIFIED
    assert failures == []
    assert list_versions(tmpfs) == ["step-1_ckpt"]


def test_a_save_that_has_made_way_before_it_was_taken_over_takes_no_arena_with_it(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recoveries find what a saving process has committed before the trainer hears of it, and drop the older one."""
    may_hear, record_of = threading.Event(), Mailbox.record_of
    monkeypatch.setattr(Mailbox, "record_of", lambda *args: record_of(*args) if may_hear.is_set() else None)
    loader = DefaultMLFlashpointCheckpointLoader(saver._objects)
    saves = []
    for step in (1, 2):
        handed_off = saver.hand_off()
        saves.append(handed_off.save)
        pickle.loads(pickle.dumps(handed_off)).save(version(tmpfs, step), TENSORS)
        found = loader.get_latest_complete_checkpoint(CheckpointContainerId(tmpfs))
        assert found is not None
        assert found.step == step
    third = saver.begin()
    saver.stage(third, TENSORS)
    assert third.staged is not None
    may_hear.set()
    assert saves[0].finished.wait(20)
    assert isinstance(saves[0].error, ObjectNotFoundError)
    assert third.staged.arena_path.exists()
    saver.write(third, version(tmpfs, 3), TENSORS)
    saver.commit(third)
    assert saver.wait(20)
    assert [saves[1].state, third.state] == [SaveState.VERIFIED] * 2
    assert list_versions(tmpfs) == ["step-3_ckpt"]


def test_a_notice_that_cannot_be_posted_leaves_nothing(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.save(version(tmpfs, 1), TENSORS)
    post, posted = Mailbox.post, []

    def failing(mailbox: Mailbox, save_id: str, record: Any) -> None:
        posted.append(record)
        if len(posted) == 1:
            raise OSError(errno.ENOSPC, "no space left")
        post(mailbox, save_id, record)

    monkeypatch.setattr(Mailbox, "post", failing)
    with pytest.raises(OSError, match="no space"):
        save_elsewhere(saver, tmpfs, 2)
    assert saver.wait(20)
    assert len(posted) == 2
    assert list_versions(tmpfs) == ["step-1_ckpt"]
    assert save_elsewhere(saver, tmpfs, 3).state is SaveState.VERIFIED
    assert list_versions(tmpfs) == ["step-3_ckpt"]


def test_arenas_of_a_saving_process_do_not_pile_up(saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path) -> None:
    """Where nothing is ever staged, all come from there."""
    for step in range(1, 12):
        assert save_elsewhere(saver, tmpfs, step).state is SaveState.VERIFIED
        assert len(arenas(tmpfs)) <= 3, step


def test_a_hand_off_without_an_arena_fails_in_its_turn(saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path) -> None:
    """And not here, where other ranks would be left waiting."""
    saver.save(version(tmpfs, 1), TENSORS)
    store = saver._objects.store
    assert store is not None
    store.arenas.delete_free(0)
    fault = Fault(rank=0, step=0, point="open", action="emfile")
    with Injector(0, [fault], base=str(store.directory)) as injector:
        handed_off = saver.hand_off()
        assert injector.fired
    there: HandedOffSaver = pickle.loads(pickle.dumps(handed_off))
    with pytest.raises(SaveError, match="staging failed"):
        there.save(version(tmpfs, 2), TENSORS)
    assert saver.wait(20)
    assert save_elsewhere(saver, tmpfs, 3).state is SaveState.VERIFIED


@pytest.mark.parametrize("instant", ["making", "made", "committing"])
def test_a_trainer_that_first_hears_of_the_base_container_leaves_its_next_save_there_alone(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    """It opens its store for the first save, and what it finds is not all of an earlier run."""
    first = pickle.loads(pickle.dumps(one := saver.hand_off()))
    second = pickle.loads(pickle.dumps(two := saver.hand_off()))

    def before(module: Any, name: str) -> None:
        real = getattr(module, name)

        def patched(*args: Any) -> Any:
            if threading.current_thread() is saving:  # and not the saver's own, which may be making a spare arena
                monkeypatch.setattr(module, name, real)
                hear()
            return real(*args)

        saving = threading.current_thread()
        monkeypatch.setattr(module, name, patched)

    def hear() -> None:
        first.save(version(tmpfs, 1), TENSORS)
        assert one.save.finished.wait(20)

    if instant == "making":
        before(arena, "_reserve")
    save = second.begin()
    second.write(save, version(tmpfs, 2), TENSORS)
    if instant == "made":
        hear()
    if instant == "committing":
        before(version_files, "write_manifest")
    second.commit(save)
    assert saver.wait(20)
    assert [(each.save.state, each.save.error) for each in (one, two)] == [(SaveState.VERIFIED, None)] * 2
    assert save_elsewhere(saver, tmpfs, 3).state is SaveState.VERIFIED
    assert list_versions(tmpfs) == ["step-3_ckpt"]
    assert len(arenas(tmpfs)) <= 3


def test_what_an_orphaned_saving_process_commits_while_a_trainer_starts_is_not_written_over(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = DefaultMLFlashpointCheckpointSaver()
    before.save(version(tmpfs, 1), TENSORS)
    orphan: HandedOffSaver = pickle.loads(pickle.dumps(before.hand_off()))
    orphans_save = orphan.begin()
    orphan.write(orphans_save, version(tmpfs, 2), TENSORS)
    before.close(0.1)
    before._objects.close()
    adopt = rank_store.inherit_parts

    def adopting(*args: Any) -> Any:
        yield from adopt(*args)
        with pytest.raises(OSError, match="No such file"):  # the old trainer's mailbox is gone with it
            orphan.commit(orphans_save)
        orphan._end_work()  # as its end does

    monkeypatch.setattr(rank_store, "inherit_parts", adopting)
    after = DefaultMLFlashpointCheckpointSaver()
    try:
        after._objects.open(tmpfs, 0).asked = True
        for step in (3, 4, 5):
            after.save(version(tmpfs, step), [("weight", torch.full((100_000,), float(step)))])
            assert after.wait(20)
        assert "step-2_ckpt" in list_versions(tmpfs)  # whole, as the fixture finds
    finally:
        after.close(0.1)
        after._objects.close()


def test_staged_tensors_whose_arena_is_gone_fail_their_save_and_not_the_saving_process(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path
) -> None:
    """What cannot be unpickled would end torch's saving process, and with it all later saves."""
    saver.save(version(tmpfs, 1), TENSORS)
    save = saver.begin()
    (staged,) = saver.stage(save, TENSORS) or []
    pickled = ForkingPickler.dumps(staged)
    saver.fail(save, SaveError("given up"))
    assert save.staged is not None
    save.staged.arena_path.unlink()
    arrived = pickle.loads(pickled)
    assert arrived.is_meta
    assert (arrived.shape, arrived.dtype) == (staged.shape, staged.dtype)


@pytest.mark.parametrize("what", ["signature", "note", "record"])
def test_a_shortage_while_a_report_is_read_is_waited_out(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The part is committed: it would be lost, and its version with it, for a descriptor that is free again soon."""
    saver.save(version(tmpfs, 1), TENSORS)
    assert saver.wait(20)
    read_text, refused = Path.read_text, []

    def short(path: Path, *args: Any, **kwargs: Any) -> str:
        kind = {".pid": "signature", ".as": "note"}.get(path.suffix, "record")
        if path.parent.name.startswith("flashpoint-mailbox-") and kind == what and path.exists() and len(refused) < 3:
            refused.append(path)
            raise OSError(errno.EMFILE, "too many open files")
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", short)
    assert save_elsewhere(saver, tmpfs, 2).state is SaveState.VERIFIED
    assert len(refused) == 3
    assert list_versions(tmpfs) == ["step-2_ckpt"]
    assert saver._mailbox is not None
    assert [path.name for path in saver._mailbox.directory.iterdir()] == [".owner"]


def test_a_shortage_while_what_a_dead_process_left_is_removed_costs_no_arena(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.save(version(tmpfs, 1), TENSORS)
    assert saver.wait(20)
    listed = []

    def short(base: Path) -> list[str]:
        listed.append(base)
        if len(listed) < 3:
            raise OSError(errno.EMFILE, "too many open files")
        return list_versions(base)

    monkeypatch.setattr(rank_store, "list_versions", short)
    monkeypatch.setattr(Mailbox, "process_of", lambda *_: 2**22 + 1)  # of no process
    handed_off = saver.hand_off()
    assert handed_off.save.finished.wait(20)
    assert handed_off.save.state is SaveState.FAILED
    assert "its process is gone" in str(handed_off.save.error)
    assert len(listed) == 3
    monkeypatch.undo()
    for step in range(3, 6):
        assert save_elsewhere(saver, tmpfs, step).state is SaveState.VERIFIED
    assert len(arenas(tmpfs)) <= 2


def test_a_save_that_is_being_handed_off_while_it_is_looked_at_is_not_given_up(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue's thread has seen that nobody was handed it, and is then held up."""
    looked, go_on, main = threading.Event(), threading.Event(), threading.current_thread()
    begin, is_worked_on = saver.begin, saver._is_worked_on

    def begin_and_wait(**how: Any) -> Any:
        begun = begin(**how)
        assert looked.wait(20)
        return begun

    def held(save: Any) -> bool:
        if threading.current_thread() is not main and not looked.is_set():
            looked.set()
            assert go_on.wait(20)
        return is_worked_on(save)

    monkeypatch.setattr(saver, "_is_worked_on", held)
    monkeypatch.setattr(saver, "begin", begin_and_wait)
    saves = [saver.hand_off(), saver.hand_off()]
    go_on.set()
    for step, each in enumerate(saves, 1):
        pickle.loads(pickle.dumps(each)).save(version(tmpfs, step), TENSORS)
        assert each.save.finished.wait(20)
    assert [each.save.state for each in saves] == [SaveState.VERIFIED] * 2


def test_the_trainer_learns_that_all_ranks_have_committed_a_save(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only for such a save may an older one make way: see the same test of saves in this process."""
    verdict = threading.Event()
    monkeypatch.setattr(saver._commits, "_finish", lambda save: verdict.wait(60))
    monkeypatch.setattr(saver._commits, "is_queue_thread", lambda: True)
    saver._objects.open(tmpfs, 0)
    away: list[tuple[HandedOffSaver, Save]] = []
    try:
        for step in range(1, 5):
            handed_off = saver.hand_off()
            there: HandedOffSaver = pickle.loads(pickle.dumps(handed_off))
            save = there.begin()
            save.complete = False  # as a door says whose ranks tell each other
            there.write(save, version(tmpfs, step), TENSORS)
            there.commit(save)
            away.append((there, save))
            record = handed_off.save
            wait_until(lambda record=record: saver._watch(record) is not None and record.part is not None, "taken", 20)
        assert [save.complete for save in saver._saves] == [False] * 4
        assert not saver._evict_one(None, full=False)
        there, save = away[2]
        there.note_complete(save)
        assert saver._evict_one(None, full=False)
        assert [save.complete for save in saver._saves_with_arenas()] == [False, True, False]
        assert sorted(list_versions(tmpfs)) == ["step-1_ckpt", "step-3_ckpt", "step-4_ckpt"], "1 is being verified"
        assert not saver._evict_one(None, full=False)
    finally:
        verdict.set()
        assert saver.wait(20)
