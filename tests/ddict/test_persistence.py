from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict import stored_checkpoints
from ml_flashpoint.ddict.errors import DDictPersistError
from ml_flashpoint.ddict.persistence import (
    CheckpointPersister,
    DAOSCheckpointPersister,
    FsspecCheckpointPersister,
    NullCheckpointPersister,
    PersistedCheckpoint,
    PosixCheckpointPersister,
    new_run_id,
)
from ml_flashpoint.format.errors import (
    DamagedError,
    DeadlineError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    ObjectNotFoundError,
)
from ml_flashpoint.persist.directory_store import DirectoryStore
from ml_flashpoint.persist.records import encode_record
from ml_flashpoint.persist.store import DurableStore
from tests.persist import pydaos_stand_in

MANAGERS = 2
DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def _short_wait_for_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_LOCK_DEADLINE_S", "0.05")


@pytest.fixture
def opened() -> Iterator[Callable[[CheckpointPersister], CheckpointPersister]]:
    """Closes persisters in the end."""
    with contextlib.ExitStack() as stack:

        def register(persister: CheckpointPersister) -> CheckpointPersister:
            stack.callback(persister.close)
            return persister

        yield register


@pytest.fixture(params=["posix", "file", "memory", "daos"])
def make(
    request: pytest.FixtureRequest, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Any]
) -> Callable[..., CheckpointPersister]:
    """Makes persisters of one place and name, as dictionaries that come one after the other do."""
    if request.param == "posix":
        kind: type[CheckpointPersister] = PosixCheckpointPersister
        path = str(tmpfs / "persisted")
    elif request.param == "daos":
        module = pydaos_stand_in.module({("pool", "cont"): {}})
        monkeypatch.setitem(sys.modules, "pydaos", module)
        kind, path = DAOSCheckpointPersister, "daos://pool/cont"
    else:
        kind = FsspecCheckpointPersister
        path = f"file://{tmpfs}/persisted" if request.param == "file" else f"memory://{secrets.token_hex(8)}"

    def make_one(name: str = "name", managers: int = MANAGERS) -> CheckpointPersister:
        persister: CheckpointPersister = opened(kind(path, name=name, managers=managers))
        return persister

    return make_one


def _items(run: str, checkpoint_id: int, manager: int) -> list[tuple[str, bytes]]:
    seed = f"{run}, {checkpoint_id}, {manager}".encode()
    return [("small", seed), ("empty", b""), ("large", seed * 2000)]


def _write(persister: CheckpointPersister, run: str, checkpoint_id: int) -> list[str]:
    return [
        persister.write_part(checkpoint_id, manager, f"index {manager}".encode(), _items(run, checkpoint_id, manager))
        for manager in range(persister.managers)
    ]


def _persist(persister: CheckpointPersister, run: str, *checkpoint_ids: int) -> None:
    for checkpoint_id in checkpoint_ids:
        persister.complete(checkpoint_id, _write(persister, run, checkpoint_id))


def _begun(persister: CheckpointPersister, run: str, restored: PersistedCheckpoint | None = None) -> Any:
    persister.begin_run(run, restored=restored)
    return persister


def _assert_whole(persister: CheckpointPersister, checkpoint_id: int, run: str) -> None:
    checkpoint = PersistedCheckpoint.from_fields(persister.locate(checkpoint_id).to_fields())
    assert (checkpoint.run, checkpoint.checkpoint_id) == (run, checkpoint_id)
    for part in range(checkpoint.managers):
        assert persister.read_index(checkpoint, part) == f"index {part}".encode()
        for name, content in _items(run, checkpoint_id, part):
            assert persister.read_item(checkpoint, part, name) == content
            into = bytearray(len(content) + 1)
            assert persister.read_item(checkpoint, part, name, into) == content


# -- what is persisted comes back


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


# -- runs


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


def test_a_restarted_coordinator_goes_on_with_its_run(make: Callable[..., CheckpointPersister]) -> None:
    first = _begun(make(), "a")
    _persist(first, "a", 1, 2)
    restored = first.locate(1)
    _begun(first, "b", restored)
    first.close()
    again = _begun(make(), "b", restored)
    assert again.ids() == [1]
    with pytest.raises(InvalidArgumentError, match="restored"):
        again.begin_run("b")
    with pytest.raises(InvalidArgumentError, match="run_id"):
        again.begin_run("new", restored=PersistedCheckpoint(1, "new", 1, ("x",)))


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


# -- keep and remove


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


# -- damage


@pytest.fixture
def damaged(tmpfs: Path, opened: Callable[..., Any]) -> tuple[CheckpointPersister, Path]:
    """A persister with checkpoints 1 and 2, and the folder of 2."""
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS)), "a")
    _persist(persister, "a", 1, 2)
    persister.close()
    fresh = opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS))
    return fresh, tmpfs / "name" / "run-a" / "step-2_ckpt"


@pytest.mark.parametrize("how", ["truncated", "missing", "empty", "altered"])
def test_what_is_not_valid_is_not_listed(damaged: tuple[CheckpointPersister, Path], how: str) -> None:
    persister, folder = damaged
    files = sorted(folder.iterdir())
    assert len(files) == 1 + 2 * MANAGERS
    for file in files:
        if how == "altered" and file.suffix == ".safetensors":
            continue  # found when it is read
        good = file.read_bytes()
        file.unlink()
        if how != "missing":
            middle = len(good) // 2
            other = {
                "truncated": good[:-1],
                "empty": b"",
                "altered": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            }
            file.write_bytes(other[how])
        assert persister.ids() == [1], file.name
        file.write_bytes(good)
        assert persister.ids() == [1, 2]


@pytest.mark.damages_on_purpose
def test_altered_content_is_refused_when_read(damaged: tuple[CheckpointPersister, Path]) -> None:
    persister, folder = damaged
    pack = sorted(folder.glob("*.safetensors"))[1]
    content = bytearray(pack.read_bytes())
    content[-1] ^= 1
    pack.write_bytes(content)
    assert persister.ids() == [1, 2]
    checkpoint = persister.locate(2)
    _assert_part(persister, checkpoint, 0)
    with pytest.raises(DamagedError, match=pack.name):
        persister.read_item(checkpoint, 1, "large")
    _assert_whole(persister, 1, "a")


def _assert_part(persister: CheckpointPersister, checkpoint: PersistedCheckpoint, part: int) -> None:
    for name, content in _items(checkpoint.run, checkpoint.checkpoint_id, part):
        assert persister.read_item(checkpoint, part, name) == content


@pytest.mark.damages_on_purpose
def test_a_checkpoint_in_the_wrong_place_is_not_taken_for_one(damaged: tuple[CheckpointPersister, Path]) -> None:
    persister, folder = damaged
    run = folder.parent
    shutil.copytree(run, run.parent / "run-z")
    shutil.copytree(folder, run / "step-3_ckpt")
    assert persister.ids() == [1, 2]
    # Nor with a marker that fits: the parts say what they are of.
    (first, second) = persister.locate(2).parts
    for run_id, checkpoint_id, parts in [
        ("a", 2, (second, first)),
        ("a", 3, (first, second)),
        ("z", 2, (first, second)),
    ]:
        place = run.parent / f"run-{run_id}" / f"step-{checkpoint_id}_ckpt"
        fields = PersistedCheckpoint(checkpoint_id, run_id, MANAGERS, parts).to_fields()
        (place / "complete.json").write_bytes(encode_record(stored_checkpoints._MARKER_KIND, fields))
        if run_id == "z":
            shutil.rmtree(run.parent / "run-z" / "step-1_ckpt")
    assert persister.ids() == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"checkpoint_id": 2, "run": "../a", "managers": 1, "parts": ["x"]},
        {"checkpoint_id": 2, "run": "a", "managers": 10**9, "parts": []},
        {"checkpoint_id": 2, "run": "a", "managers": 1, "parts": ["../../../etc/passwd:" + "0" * 32]},
        {"checkpoint_id": 2, "run": "a", "managers": 1, "parts": [["x"]]},
        {"checkpoint_id": True, "run": "a", "managers": 1, "parts": ["x"]},
        {"checkpoint_id": 2, "run": "a", "managers": 2, "parts": "ab"},
    ],
)
def test_markers_are_distrusted(damaged: tuple[CheckpointPersister, Path], fields: dict[str, Any]) -> None:
    persister, folder = damaged
    (folder / "complete.json").write_bytes(encode_record(stored_checkpoints._MARKER_KIND, fields))
    assert persister.ids() == [1]
    with contextlib.suppress(InvalidArgumentError):
        checkpoint = PersistedCheckpoint.from_fields(fields)
        with pytest.raises(FlashpointError):
            persister.read_index(checkpoint, 0)


def test_a_damaged_history_ends_there(tmpfs: Path, opened: Callable[..., Any]) -> None:
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS)), "a")
    _persist(persister, "a", 1)
    _begun(persister, "b", persister.locate(1))
    _persist(persister, "b", 2)
    assert persister.ids() == [1, 2]
    record = tmpfs / "name" / "run-b" / "run.json"
    record.write_bytes(record.read_bytes()[:-1])
    assert persister.ids() == [2]
    # One that leads in a circle ends, too.
    circle = {"run": "b", "sequence": 2, "parent": "b", "restored": 9}
    record.write_bytes(encode_record(stored_checkpoints._RUN_KIND, circle))
    assert persister.ids() == [2]


# -- names and arguments


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


def test_daos_without_pydaos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pydaos", raising=False)
    with pytest.raises(DDictPersistError, match="PosixCheckpointPersister"):
        DAOSCheckpointPersister("pool/cont", name="x")
    with pytest.raises(InvalidArgumentError, match="pool"):
        DAOSCheckpointPersister("", name="x")


def test_the_null_persister_persists_nothing() -> None:
    persister = NullCheckpointPersister("anything", name="../x", managers=2)
    assert not persister.persists
    persister.begin_run("a")
    done = persister.complete(1, [persister.write_part(1, m, b"", [("a", b"b")]) for m in range(2)])
    assert persister.ids() == []
    with pytest.raises(DDictPersistError):
        persister.locate(1)
    with pytest.raises(DDictPersistError):
        persister.read_index(done, 0)
    with pytest.raises(DDictPersistError):
        persister.read_item(done, 0, "a")
    persister.keep(1)
    persister.close()


def test_new_run_ids_rise_and_differ() -> None:
    ids = [new_run_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert [i.split("-")[0] for i in ids] == sorted(i.split("-")[0] for i in ids)


def test_a_persister_of_ones_own(tmpfs: Path) -> None:
    class Mine(stored_checkpoints.StoredCheckpointPersister):
        def open_store(self) -> DurableStore:
            return DirectoryStore(tmpfs / "mine")

    persister = _begun(Mine("ignored", name="x", managers=MANAGERS), "a")
    _persist(persister, "a", 1)
    _assert_whole(persister, 1, "a")
    persister.close()


# -- two at a time, and kills


def test_a_second_live_dictionary_is_refused(tmpfs: Path, opened: Callable[..., Any]) -> None:
    make = lambda name: opened(PosixCheckpointPersister(str(tmpfs), name=name, managers=MANAGERS))  # noqa: E731
    first = _begun(make("name"), "a")
    with pytest.raises(JobInUseError, match=r"'name'.*name, or a persist_path"):
        make("name").begin_run("b")
    _begun(make("other"), "b")
    _persist(first, "a", 1)
    assert make("name").ids() == [1]  # reading takes no lock
    first.close()
    _begun(make("name"), "c")


def test_parts_may_be_written_and_read_at_the_same_time(tmpfs: Path, opened: Callable[..., Any]) -> None:
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=8)), "a")
    receipts: list[str] = [""] * 8
    errors: list[BaseException] = []

    def run(job: Callable[[int], None]) -> None:
        def guarded(manager: int) -> None:
            try:
                job(manager)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(m,), daemon=True) for m in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert not errors

    def write(manager: int) -> None:
        receipts[manager] = persister.write_part(1, manager, f"index {manager}".encode(), _items("a", 1, manager))

    run(write)
    persister.complete(1, receipts)
    run(lambda manager: _assert_whole(persister, 1, "a"))


class _Countdown:
    """Kills its process at the n-th step of what the process does to files."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.tick()
            return function(*args, **options)

        return counted

    def arm(self) -> None:
        for name in ("replace", "fsync", "unlink", "rmdir", "mkdir"):
            setattr(os, name, self.before(getattr(os, name)))
        write = DirectoryStore.write

        def in_pieces(store: DirectoryStore, name: str, chunks: Iterable[Any]) -> int:
            def counted() -> Iterator[Any]:
                for chunk in chunks:
                    self.tick()
                    yield chunk

            return write(store, name, counted())

        DirectoryStore.write = in_pieces  # type: ignore[method-assign]


def _persist_in_a_child(folder: Path, steps: int) -> tuple[bool, set[bytes]]:
    """Persists checkpoint 2, keeping only that, in a child that is killed at a step; whether it was, and its news."""
    news, say = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            persister = PosixCheckpointPersister(str(folder), name="name", managers=MANAGERS)
            _Countdown(steps).arm()
            persister.begin_run("a")
            receipts = _write(persister, "a", 2)
            persister.complete(2, receipts)
            os.write(say, b"c")
            persister.keep(1)
            os.write(say, b"k")
            code = 0
        finally:
            os._exit(code)
    os.close(say)
    said = set()
    give_up = time.monotonic() + DEADLINE_S
    try:
        while True:
            if not select.select([news], [], [], max(0.0, give_up - time.monotonic()))[0]:
                os.kill(child, signal.SIGKILL)
                raise DeadlineError("the child does not end")
            data = os.read(news, 1)
            if not data:
                break
            said.add(data)
    finally:
        os.close(news)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True, said
    assert os.WEXITSTATUS(status) == 0
    return False, said


@pytest.mark.slow
def test_a_kill_at_any_step_loses_nothing_complete(tmpfs: Path) -> None:
    origin = tmpfs / "origin"
    persister = _begun(PosixCheckpointPersister(str(origin), name="name", managers=MANAGERS), "a")
    _persist(persister, "a", 1)
    persister.close()
    outcomes = set()
    steps = 0
    killed = True
    while killed:
        steps += 1
        folder = tmpfs / f"killed-{steps}"
        shutil.copytree(origin, folder)
        killed, said = _persist_in_a_child(folder, steps)
        after = PosixCheckpointPersister(str(folder), name="name", managers=MANAGERS)
        there = after.ids()
        outcomes.add(tuple(there))
        for checkpoint_id in there:
            _assert_whole(after, checkpoint_id, "a")
        assert there in ([1], [1, 2], [2])
        assert 2 in there or b"c" not in said
        assert there == [2] or b"k" not in said
        # And whoever comes next is not in the way of what is left.
        after.begin_run("a")
        _persist(after, "a", 2)
        after.keep(1)
        assert after.ids() == [2]
        _assert_whole(after, 2, "a")
        run = folder / "name" / "run-a"
        assert sorted(p.name for p in run.iterdir()) == ["run.json", "step-2_ckpt"]
        assert len(list((run / "step-2_ckpt").iterdir())) == 1 + 2 * MANAGERS
        after.close()
        shutil.rmtree(folder)
    assert outcomes == {(1,), (1, 2), (2,)}
    assert steps > 30


@pytest.mark.parametrize("fails_at", range(1, 12))
def test_a_store_that_fails_is_reported_and_loses_nothing(
    tmpfs: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Any]
) -> None:
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS)), "a")
    _persist(persister, "a", 1)
    left = [fails_at]
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(FlashpointError, match="Input/output error"):
            _persist(persister, "a", 2)
    # The last one comes after the marker has its name, which then may or may not outlast a power cut.
    assert persister.ids() == ([1] if fails_at < 11 else [1, 2])
    _assert_whole(persister, 1, "a")
    _persist(persister, "a", 2)
    assert persister.ids() == [1, 2]
    _assert_whole(persister, 2, "a")
