"""Persisted checkpoints: what there is, who may write and read it, and what goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict.errors import DDictPersistError
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ddict.persistence import (
    CheckpointPersister,
    DAOSCheckpointPersister,
    FsspecCheckpointPersister,
    NullCheckpointPersister,
    PersistedCheckpoint,
    PosixCheckpointPersister,
    new_run_id,
)
from ml_flashpoint.ddict.persistence import stored as stored_checkpoints
from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
)
from ml_flashpoint.stores.files import Directory, Files
from tests.ddict.persistence.support import MANAGERS, _assert_whole, _begun, _items, _persist, _write, mount_dfuse


def test_a_checkpoint_exists_once_it_is_complete(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "run-a")
    assert persister.ids() == []
    receipts = _write(persister, "run-a", 3)
    assert persister.ids() == []
    with pytest.raises(DDictPersistError, match="there are: none") as caught:
        persister.locate(3)
    assert caught.value.checkpoint_id == 3
    done = persister.complete(3, receipts)
    assert persister.ids() == [3]
    assert persister.locate(3) == done
    _assert_whole(persister, 3, "run-a")
    with pytest.raises(DDictPersistError, match="there are: 3"):
        persister.locate(4)


def test_another_process_may_write_and_read_with_other_managers(make: Callable[..., CheckpointPersister]) -> None:
    coordinator = _begun(make(), "run-a")
    other = make()
    other.join_run("run-a")
    receipts = [
        coordinator.write_part(1, 0, b"index 0", _items("run-a", 1, 0)),
        other.write_part(1, 1, b"index 1", _items("run-a", 1, 1)),
    ]
    coordinator.complete(1, receipts)
    coordinator.close()
    reader = make(managers=5)
    assert reader.locate(1).managers == 2
    _assert_whole(reader, 1, "run-a")


def test_ids_are_in_order_of_number(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "run-a")
    _persist(persister, "run-a", 10, 9, 2, 0)
    assert persister.ids() == [0, 2, 9, 10]


def test_a_checkpoint_may_be_written_again(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "run-a")
    _persist(persister, "run-a", 1)
    before = persister.locate(1)
    abandoned = _write(persister, "run-b", 1)
    _assert_whole(persister, 1, "run-a")  # as long as the new one is not complete
    _persist_as(persister, 1, "run-b")
    after = persister.locate(1)
    assert after.parts != before.parts
    assert persister.read_item(after, 1, "small") == _items("run-b", 1, 1)[0][1]
    for old in (before, PersistedCheckpoint(1, "run-a", MANAGERS, tuple(abandoned))):
        fresh = make()
        with pytest.raises(ObjectNotFoundError):
            fresh.read_index(old, 0)


def _persist_as(persister: CheckpointPersister, checkpoint_id: int, content: str) -> None:
    persister.complete(checkpoint_id, _write(persister, content, checkpoint_id))


def test_a_part_that_is_not_there_cannot_be_completed(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "run-a")
    _persist(persister, "run-a", 1)
    first, second = _write(persister, "run-a", 2)
    elsewhere = _write(persister, "run-a", 3)
    for receipts in ([first], [first, second, second], [second, first], [first, elsewhere[1]], [first, ""]):
        with pytest.raises(FlashpointError):
            persister.complete(2, receipts)
    assert persister.ids() == [1]
    persister.complete(2, [first, second])
    assert persister.ids() == [1, 2]


def test_a_fresh_dictionary_sees_the_newest_run_that_has_something(make: Callable[..., CheckpointPersister]) -> None:
    # The names of the runs do not rise: a clock may go back.
    for run, checkpoint_ids in [("c", (1, 2)), ("b", (1, 2, 3)), ("a", (7,)), ("d", ())]:
        persister = _begun(make(), run)
        _persist(persister, run, *checkpoint_ids)
        persister.close()
    assert make().ids() == [7]
    fresh = _begun(make(), "e")
    assert fresh.ids() == [7]
    _assert_whole(fresh, 7, "a")
    _persist(fresh, "e", 1)
    assert fresh.ids() == [1]  # it went another way
    _assert_whole(fresh, 1, "e")
    assert make(name="other").ids() == []


def test_a_restored_run_continues_the_history(make: Callable[..., CheckpointPersister]) -> None:
    first = _begun(make(), "a")
    _persist(first, "a", 1, 2, 3, 4)
    first.close()
    second = _begun(make(), "b")
    _begun(second, "c", second.locate(3))
    assert second.ids() == [1, 2, 3]
    _persist(second, "c", 4, 5)
    assert second.ids() == [1, 2, 3, 4, 5]
    second.close()
    third = make()
    assert third.ids() == [1, 2, 3, 4, 5]
    _assert_whole(third, 3, "a")
    _assert_whole(third, 4, "c")
    _begun(third, "d", third.locate(2))
    assert third.ids() == [1, 2]
    _persist(third, "d", 9)
    assert third.ids() == [1, 2, 9]


def test_a_run_that_is_restored_within_does_not_mix(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "a")
    _persist(persister, "a", 1, 2, 3)
    _begun(persister, "b", persister.locate(2))
    _persist(persister, "b", 3)
    assert persister.ids() == [1, 2, 3]
    _assert_whole(persister, 3, "b")


def test_an_older_restore_bounds_what_a_later_one_brings(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "a")
    _persist(persister, "a", 1, 2, 3, 4, 5)
    _begun(persister, "b", persister.locate(4))
    _persist(persister, "b", 3)
    _assert_whole(persister, 3, "b")
    _begun(persister, "c", persister.locate(3))
    assert persister.ids() == [1, 2, 3]
    _begun(persister, "d", persister.locate(2))
    assert persister.ids() == [1, 2]


def test_a_run_that_others_continue_stays_although_it_is_empty(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "a")
    _persist(persister, "a", 1, 2)
    _begun(persister, "b", persister.locate(2))
    _persist(persister, "b", 3)
    _begun(persister, "c", persister.locate(3))
    _persist(persister, "c", 5)
    persister.remove(3)
    persister.close()
    _begun(make(), "d").close()
    assert make().ids() == [1, 2, 5]


def test_what_the_newest_run_has_left_behind_is_not_found_again(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "a")
    _persist(persister, "a", 1, 2, 3)
    persister.begin_run("b", continues=("a", 1))
    persister.close()
    _begun(make(), "c").close()

    assert make().ids() == [1]
    last = _begun(make(), "d")
    last.begin_run("e", continues=("b", 0))
    assert last.ids() == make().ids() == []


def test_a_run_begins_once(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "a")
    for again, continues in (("a", None), ("new", ("new", 1))):
        with pytest.raises(InvalidArgumentError, match="run_id"):
            persister.begin_run(again, continues=continues)


def test_a_run_whose_record_could_not_be_written_can_begin_after_all(tmpfs: Path, opened: Callable[..., Any]) -> None:
    (tmpfs / "name" / "run-a").mkdir(parents=True)  # as a directory store leaves it where there is no room
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS)), "a")
    _persist(persister, "a", 1)
    assert persister.ids() == [1]


def test_runs_that_never_completed_anything_go(tmpfs: Path, opened: Callable[..., Any]) -> None:
    make = lambda: opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS))  # noqa: E731
    for run in ("a", "b"):
        persister = _begun(make(), run)
        _write(persister, run, 1)
        persister.close()
    persister = _begun(make(), "c")
    assert sorted(os.listdir(tmpfs / "name")) == ["lock", "run-c"]
    with pytest.raises(DDictPersistError, match="begin_run"):
        make().write_part(1, 0, b"", [])
    del persister


def test_nothing_lies_where_the_layout_does_not_say(tmpfs: Path, opened: Callable[..., Any]) -> None:
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS)), "a")
    _persist_as(persister, 5, "x")
    _persist_as(persister, 5, "y")
    folder = tmpfs / "name" / "run-a" / "step-5_ckpt"
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", *[".manifest"] * 2, *[".safetensors"] * 2]


def test_keep(make: Callable[..., CheckpointPersister]) -> None:
    first = _begun(make(), "a")
    _persist(first, "a", 1, 2, 3, 4)
    first.keep(-1)
    first.keep(0)
    assert first.ids() == [1, 2, 3, 4]
    first.keep(3)
    assert first.ids() == [2, 3, 4]
    first.close()
    second = _begun(make(), "b", make().locate(3))
    second.keep(2)
    assert second.ids() == [2, 3]
    _persist(second, "b", 4)
    second.keep(2)
    assert second.ids() == [3, 4]
    _assert_whole(second, 3, "a")
    _persist(second, "b", 5)
    second.keep(2)
    assert second.ids() == [4, 5]
    with pytest.raises(InvalidArgumentError, match="count"):
        second.keep(-2)


def test_keep_touches_no_run_that_is_not_continued(make: Callable[..., CheckpointPersister]) -> None:
    first = _begun(make(), "a")
    _persist(first, "a", 1, 2, 3)
    first.close()
    second = _begun(make(), "b")
    assert second.ids() == [1, 2, 3]
    second.keep(1)
    assert second.ids() == [1, 2, 3]
    _persist(second, "b", 1, 2)
    second.keep(1)
    assert second.ids() == [2]
    second.close()
    # As if b had not been.
    third = make()
    third.join_run("a")
    assert third.ids() == [1, 2, 3]


def test_keep_does_not_count_what_cannot_be_used(tmpfs: Path, opened: Callable[..., Any]) -> None:
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS)), "a")
    _persist(persister, "a", 1, 2, 3, 4)
    folder = tmpfs / "name" / "run-a"
    for damaged in (2, 4):
        (folder / f"step-{damaged}_ckpt" / "complete.json").write_bytes(b"{}")
    persister.keep(2)
    assert persister.ids() == [1, 3]
    persister.keep(1)
    assert persister.ids() == [3]
    assert sorted(p.name for p in folder.iterdir()) == ["run.json", "step-3_ckpt", "step-4_ckpt"]


def test_remove(make: Callable[..., CheckpointPersister]) -> None:
    persister = _begun(make(), "a")
    _persist(persister, "a", 1, 2, 3)
    persister.remove(2)
    persister.remove(2)
    persister.remove(77)
    assert persister.ids() == [1, 3]


@pytest.fixture
def damaged(tmpfs: Path, opened: Callable[..., Any]) -> tuple[CheckpointPersister, Path]:
    """A persister with checkpoints 1 and 2, and the folder of 2."""
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS)), "a")
    _persist(persister, "a", 1, 2)
    persister.close()
    fresh = opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS))
    return fresh, tmpfs / "name" / "run-a" / "step-2_ckpt"


@pytest.mark.parametrize("name", ["../up", "a/b", ".", "..", ".hidden", "nul\0", "x" * 256])
def test_names_that_escape(name: str, tmpfs: Path) -> None:
    for kind in (PosixCheckpointPersister, FsspecCheckpointPersister):
        with pytest.raises(InvalidArgumentError, match="name="):
            kind(str(tmpfs), name=name)


def test_run_ids_that_escape(make: Callable[..., CheckpointPersister]) -> None:
    persister = make()
    for run in ["", "../a", "a/b", ".", "x" * 101]:
        with pytest.raises(InvalidArgumentError, match="run_id"):
            persister.begin_run(run)
        with pytest.raises(InvalidArgumentError, match="run_id"):
            persister.join_run(run)


def test_arguments(tmpfs: Path) -> None:
    for wrong in ({"managers": 0}, {"managers": True}, {"name": 3}, {"persist_path": None}):
        with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
            PosixCheckpointPersister(**{"persist_path": str(tmpfs), **wrong})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="checkpoint_id"):
        PersistedCheckpoint(-1, "a", 1, ("x",))


def test_an_empty_path_is_the_current_directory(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmpfs)
    assert PosixCheckpointPersister.resolve_path("") == str(tmpfs)
    assert FsspecCheckpointPersister.resolve_path("") == str(tmpfs)
    assert FsspecCheckpointPersister.resolve_path("s3://bucket/x") == "s3://bucket/x"
    persister = PosixCheckpointPersister(PosixCheckpointPersister.resolve_path(""))
    _begun(persister, "a")
    persister.close()
    assert os.listdir(tmpfs) == ["unnamed"]


def test_construction_touches_nothing(tmpfs: Path) -> None:
    PosixCheckpointPersister(str(tmpfs / "new"), name="x").close()
    FsspecCheckpointPersister("nosuch://x").close()
    assert os.listdir(tmpfs) == []
    assert PosixCheckpointPersister(str(tmpfs / "new"), name="x").ids() == []
    assert os.listdir(tmpfs) == []


def test_daos_is_a_mount_of_dfuse(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DDictPersistError, match=r"needs a dfuse mount.*PosixCheckpointPersister"):
        DAOSCheckpointPersister(str(tmpfs), name="x")
    mount_dfuse(monkeypatch, tmpfs / "mount")
    assert DAOSCheckpointPersister(str(tmpfs / "mount" / "new"), name="x").ids() == []
    for elsewhere in (tmpfs, tmpfs / "mount-too"):
        with pytest.raises(DDictPersistError, match="needs a dfuse mount"):
            DAOSCheckpointPersister(str(elsewhere), name="x")


def test_the_null_persister_persists_nothing() -> None:
    options = Options(persister_class=NullCheckpointPersister, persist_path="anything", name="../x").named()
    assert options.make_persister() is None


def test_a_persister_may_be_given_by_its_name() -> None:
    name = "ml_flashpoint.ddict.persistence:PosixCheckpointPersister"
    made = Options(persister_class=name, name="x").named()
    assert made == Options(persister_class=PosixCheckpointPersister, name="x").named()
    assert isinstance(made.make_persister(), PosixCheckpointPersister)
    for wrong in ("nowhere:Persister", "os:path", "ml_flashpoint.ddict.persistence:Nobody", "os"):
        with pytest.raises(InvalidArgumentError, match="persister_class"):
            Options(persister_class=wrong).named()


def test_new_run_ids_rise_and_differ() -> None:
    ids = [new_run_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert [i.split("-")[0] for i in ids] == sorted(i.split("-")[0] for i in ids)


def test_a_persister_of_ones_own(tmpfs: Path) -> None:
    class Mine(stored_checkpoints.StoredCheckpointPersister):
        def open_store(self) -> Files:
            return Directory(tmpfs / "mine")

    persister = _begun(Mine("ignored", name="x", managers=MANAGERS), "a")
    _persist(persister, "a", 1)
    _assert_whole(persister, 1, "a")
    persister.close()
