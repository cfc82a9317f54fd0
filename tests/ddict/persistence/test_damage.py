"""Persisted checkpoints that are damaged, killed writers, and stores that fail."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict.persistence import (
    CheckpointPersister,
    PersistedCheckpoint,
    PosixCheckpointPersister,
)
from ml_flashpoint.ddict.persistence import stored as stored_checkpoints
from ml_flashpoint.format.errors import (
    DamagedError,
    DeadlineError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
)
from ml_flashpoint.format.records import encode_record
from ml_flashpoint.stores.files import Directory
from tests.ddict.persistence.support import MANAGERS, _assert_whole, _begun, _items, _persist, _write

DEADLINE_S = 20.0


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
        (place / "complete.json").write_bytes(encode_record(stored_checkpoints.MARKER_KIND, fields))
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
    (folder / "complete.json").write_bytes(encode_record(stored_checkpoints.MARKER_KIND, fields))
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
    persister.close()
    fresh = opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS))
    assert fresh.ids() == [1], "the newest run whose place is known comes first"
    # One that names itself gains nothing by it.
    for lineage, ids in (
        ([["b", 9]], [2]),
        ([["a", 1], ["a", 1]], [1, 2]),
        ([["a"]], [2]),
        ([["../a", 1]], [2]),
        (7, [2]),
    ):
        content = {"run": "b", "sequence": 2, "lineage": lineage}
        record.write_bytes(encode_record(stored_checkpoints._RUN_KIND, content))
        fresh.join_run("b")
        assert fresh.ids() == ids


def test_a_run_that_another_version_wrote_is_listed_with_a_word(
    tmpfs: Path, opened: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS)), "a")
    _persist(persister, "a", 1)
    persister.close()
    old = encode_record("mlflashpoint-run-1", {"run": "a", "sequence": 1, "parent": None, "restored": None})
    (tmpfs / "name" / "run-a" / "run.json").write_bytes(old)
    fresh = opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS))
    assert fresh.ids() == [1]
    assert "another version may have written" in caplog.text


def test_a_history_does_not_need_the_records_of_earlier_runs(tmpfs: Path, opened: Callable[..., Any]) -> None:
    persister = _begun(opened(PosixCheckpointPersister(str(tmpfs), name="name", managers=MANAGERS)), "a")
    _persist(persister, "a", 1, 2)
    _begun(persister, "b", persister.locate(2))
    _persist(persister, "b", 3)
    _begun(persister, "c", persister.locate(3))
    (tmpfs / "name" / "run-b" / "run.json").unlink()
    assert persister.ids() == [1, 2, 3]


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
        write = Directory.write

        def in_pieces(store: Directory, name: str, chunks: Iterable[Any]) -> int:
            def counted() -> Iterator[Any]:
                for chunk in chunks:
                    self.tick()
                    yield chunk

            return write(store, name, counted())

        Directory.write = in_pieces  # type: ignore[method-assign]


def _persist_in_a_child(folder: Path, steps: int) -> tuple[bool, set[bytes]]:
    """Persists checkpoint 2, keeping only that, in a child that is killed at a step; whether it was, and its news."""
    news, say = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            persister = PosixCheckpointPersister(str(folder), name="name", managers=MANAGERS)
            _Countdown(steps).arm()
            persister.begin_run("b", continues=(persister.locate(1).run, 1))
            receipts = _write(persister, "b", 2)
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
            _assert_whole(after, checkpoint_id, {1: "a", 2: "b"}[checkpoint_id])
        assert there in ([1], [1, 2], [2])
        assert 2 in there or b"c" not in said
        assert there == [2] or b"k" not in said
        # And whoever comes next is not in the way of what is left.
        after.begin_run("c", continues=(after.locate(there[-1]).run, there[-1]))
        _persist(after, "c", 3)
        after.keep(1)
        assert after.ids() == [3]
        _assert_whole(after, 3, "c")
        run = folder / "name" / "run-c"
        assert sorted(p.name for p in run.iterdir()) == ["run.json", "step-3_ckpt"]
        assert len(list((run / "step-3_ckpt").iterdir())) == 1 + 2 * MANAGERS
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
