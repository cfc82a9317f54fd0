"""Persisted checkpoints: which count, who may write them, damage, killed writers, and stores that fail."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ml_flashpoint.ddict import (
    CheckpointPersister,
    DAOSCheckpointPersister,
    DDict,
    FsspecCheckpointPersister,
    NullCheckpointPersister,
    PosixCheckpointPersister,
)
from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.errors import REQUESTS, DDictPersistError
from ml_flashpoint.ddict.manager.parts import PersistedParts
from ml_flashpoint.ddict.manager.store import ValueSlots
from ml_flashpoint.ddict.options import Configuration, Options
from ml_flashpoint.ddict.persistence import History, open_part, write_part
from ml_flashpoint.format.errors import DamagedError, FlashpointError, InvalidArgumentError, JobInUseError, SaveError
from ml_flashpoint.net.channel import ConnectionLostError
from ml_flashpoint.net.client import Connection
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.files import Directory, Files
from ml_flashpoint.stores.version_store import Version
from tests.ddict.support import BIG, Make, other
from tests.ddict.value_support import INCARNATION, open_store
from tests.support.dictionaries import DEADLINE_S

MANAGERS = 2
SECRET = b"a secret of the test"


@pytest.fixture(autouse=True)
def _short_wait_for_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_LOCK_DEADLINE_S", "0.05")


class Program:
    """A dictionary, as far as its store is concerned."""

    def __init__(self, kind: type[CheckpointPersister], path: str, name: str = "name", **options: Any) -> None:
        given = Options(MANAGERS, persister_class=kind, persist_path=path, name=name, **options)
        self.configuration = Configuration("d", given, "", None, (), b"")
        self.history = History(self.configuration)
        self.history.begin()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.history.close()

    def persist(self, *checkpoint_ids: int, keep: int = -1, text: str = "") -> None:
        for checkpoint_id in checkpoint_ids:
            version = self.history.new_attempt(checkpoint_id)
            self.write(checkpoint_id, version, text)
            self.history.complete(version, keep, lambda: False)

    def write(self, checkpoint_id: int, version: Version, text: str = "") -> None:
        for manager in range(MANAGERS):
            write_part(self.history.store, version, manager, items(checkpoint_id, manager, text))

    def roll_back(self, to: int) -> None:
        self.history.take_back(to)
        self.history.record()

    def restore(self, checkpoint_id: int) -> None:
        self.history.locate(checkpoint_id)
        self.history.restored(checkpoint_id)

    def check(self, *checkpoint_ids: int, text: str = "") -> None:
        """Fails unless these can be restored, and are what was written."""
        assert self.history.ids() == list(checkpoint_ids)
        for checkpoint_id in checkpoint_ids:
            version = self.history.locate(checkpoint_id)
            for manager in range(version.world_size):
                part = open_part(self.history.store, version, manager)
                for name, content in items(checkpoint_id, manager, text):
                    assert bytes(part.bytes_of(name)) == content


def items(checkpoint_id: int, manager: int, text: str) -> list[tuple[str, bytes]]:
    seed = f"{checkpoint_id}, {manager}{text}".encode()
    return [("index", seed), ("empty", b""), ("large", seed * 500_000)]


def mount_dfuse(monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
    """Have the list of mounts say that a folder is one of dfuse: DAOS needs a cluster of its own."""
    mounts = [*psutil.disk_partitions(all=True), SimpleNamespace(mountpoint=str(where), fstype="fuse.daos")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)


Open = Callable[[], Program]


@pytest.fixture(params=["posix", "file", "memory", "daos"])
def program(request: pytest.FixtureRequest, tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens programs of one place and name, which come one after the other."""
    path, kind = str(tmpfs / "persisted"), PosixCheckpointPersister
    if request.param == "daos":
        mount_dfuse(monkeypatch, tmpfs)
        kind = DAOSCheckpointPersister
    if request.param in ("file", "memory"):
        path = f"file://{path}" if request.param == "file" else f"memory://{tmpfs.name}"
        return lambda: Program(FsspecCheckpointPersister, path)
    return lambda: Program(kind, path)


@pytest.fixture
def posix(tmpfs: Path) -> Open:
    return lambda: Program(PosixCheckpointPersister, str(tmpfs))


# ---- what counts ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_counts_once_all_managers_have_written_it(program: Open) -> None:
    with program() as first:
        version = first.history.new_attempt(3)
        write_part(first.history.store, version, 0, items(3, 0, ""))
        with pytest.raises(FlashpointError):
            first.history.complete(version, -1, lambda: False)
        with pytest.raises(DDictPersistError, match="there are: none"):
            first.history.locate(3)
        first.persist(10, 3)
        first.check(3, 10)
        with pytest.raises(DDictPersistError, match="there are: 3, 10"):
            first.history.locate(4)
    with program() as second:
        second.check(3, 10)


def test_a_program_that_restores_goes_on_from_there_and_another_one_begins_anew(program: Open) -> None:
    with program() as first:
        first.persist(1, 2, 3, 4)
    with program() as second:
        second.check(1, 2, 3, 4)
        second.restore(3)
        second.check(1, 2, 3)
        second.persist(5)
        second.check(1, 2, 3, 5)
    with program() as third:
        third.check(1, 2, 3, 5)
        third.persist(7)
        third.check(7)
    with program() as fourth:
        fourth.check(7)


def test_a_program_that_was_started_by_mistake_destroys_nothing(posix: Open, tmpfs: Path) -> None:
    with posix() as first:
        first.persist(1, 2, 3)
    with posix() as second:
        second.persist(1, keep=1, text="mistaken")
    newest = max((tmpfs / "name").glob("history-*.json"))
    newest.unlink()
    with posix() as third:
        third.check(1, 2, 3)


def test_a_checkpoint_that_is_persisted_again_takes_the_place_of_the_first(posix: Open, tmpfs: Path) -> None:
    with posix() as first:
        first.persist(1)
        first.persist(1, text="again")
        first.check(1, text="again")
        assert len(list((tmpfs / "name").glob("run-*"))) == 1


def test_only_the_newest_stay_and_what_is_not_gone_on_from(posix: Open, tmpfs: Path) -> None:
    def attempts() -> int:
        return len(list((tmpfs / "name").glob("run-*")))

    with posix() as first:
        first.persist(1, 2, 3, keep=2)
        first.check(2, 3)
        assert attempts() == 2
    with posix() as second:
        second.restore(3)
        second.persist(4, keep=2)
        second.check(3, 4)
        assert attempts() == 2
    with posix() as third:
        third.persist(1, 2, keep=1)
        third.check(2)
        assert attempts() == 3


def test_what_others_have_not_completed_goes(posix: Open, tmpfs: Path) -> None:
    with posix() as first:
        first.persist(1)
        write_part(first.history.store, first.history.new_attempt(2), 0, items(2, 0, ""))
        assert len(list((tmpfs / "name").glob("run-*"))) == 2
    with posix() as second:
        second.check(1)
        assert len(list((tmpfs / "name").glob("run-*"))) == 1


def test_a_second_live_dictionary_is_refused(posix: Open, tmpfs: Path) -> None:
    with posix() as first:
        with pytest.raises(JobInUseError, match=r"'name'.*name, or a persist_path"):
            posix()
        with Program(PosixCheckpointPersister, str(tmpfs), "other"):
            first.persist(1)
        with Program(PosixCheckpointPersister, str(tmpfs), read_only=True) as reader:
            reader.check(1)  # which takes no lock
    posix().history.close()


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["truncated", "missing", "empty", "altered"])
def test_what_is_not_valid_is_not_listed(posix: Open, how: str) -> None:
    with posix() as first:
        first.persist(1, 2)
        path = Path(first.history.store.path, first.history.locate(2).folder)
        files = sorted(path.iterdir())
        assert len(files) == 1 + 2 * MANAGERS
        for file in files:
            if how == "altered" and file.suffix == ".safetensors":
                continue  # found when it is read
            good = file.read_bytes()
            middle = len(good) // 2
            altered = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
            file.write_bytes({"truncated": good[:-1], "empty": b"", "altered": altered, "missing": b""}[how])
            if how == "missing":
                file.unlink()
            assert first.history.ids() == [1], file.name
            file.write_bytes(good)
        assert first.history.ids() == [1, 2]


@pytest.mark.damages_on_purpose
def test_altered_content_is_refused_when_read(posix: Open) -> None:
    with posix() as first:
        first.persist(1, 2)
        version = first.history.locate(2)
        part = Path(first.history.store.path, version.folder, f"rank-00001-{version.save_id}.safetensors")
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
        with pytest.raises(DamagedError, match=part.name):
            open_part(first.history.store, version, 1).bytes_of("large")
        assert bytes(open_part(first.history.store, version, 0).bytes_of("large"))


@pytest.mark.parametrize("how", ["truncated", "of another kind", "names what it should not"])
def test_a_damaged_list_gives_way_to_an_older_one(
    posix: Open, tmpfs: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with posix() as first:
        first.persist(1)
    with posix() as second:
        second.restore(1)
        second.persist(2)
    newest = max((tmpfs / "name").glob("history-*.json"))
    text = newest.read_text()
    damaged = {
        "truncated": text[:-1],
        "of another kind": text.replace("dictionary-1", "dictionary-0"),
        "names what it should not": text.replace('"step":2', '"step":-2'),
    }
    newest.write_text(damaged[how])
    with caplog.at_level(logging.WARNING), posix() as third:
        third.check(1)
    assert "an older one is" in caplog.text


# ---- killed writers, and stores that fail ---------------------------------------------------------------------------


def _kill_at(steps: int) -> None:
    """Have this process killed at the n-th step of what it does to files."""
    left = [steps]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            tick()
            return function(*args, **options)

        return counted

    for name in ("replace", "fsync", "unlink", "rmdir", "mkdir"):
        setattr(os, name, before(getattr(os, name)))
    write = Directory.write

    def in_pieces(store: Directory, name: str, chunks: Iterable[Any]) -> int:
        def counted() -> Iterator[Any]:
            for chunk in chunks:
                tick()
                yield chunk

        return write(store, name, counted())

    Directory.write = in_pieces  # type: ignore[method-assign]


def _persist_in_a_child(folder: Path, steps: int) -> tuple[bool, bool]:
    """Persist checkpoint 2, keeping only that, in a child that is killed at a step. Returns whether it was, and whether
    it had said that it was done before."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            _kill_at(steps)
            with Program(PosixCheckpointPersister, str(folder)) as second:
                second.restore(1)
                second.persist(2, keep=1)
                (folder / "done").touch()
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status), (folder / "done").exists()


@pytest.mark.slow
def test_a_kill_at_any_step_loses_nothing_complete(tmpfs: Path) -> None:
    origin, outcomes, steps, killed = tmpfs / "origin", set(), 0, True
    with Program(PosixCheckpointPersister, str(origin)) as first:
        first.persist(1)
    while killed:
        steps += 1
        folder = tmpfs / f"killed-{steps}"
        shutil.copytree(origin, folder)
        killed, done = _persist_in_a_child(folder, steps)
        with Program(PosixCheckpointPersister, str(folder)) as after:
            there = after.history.ids()
            outcomes.add(tuple(there))
            assert there == [2] if done else there in ([1], [2])
            after.check(*there)
            after.restore(there[-1])
            after.persist(3, keep=1)
            after.check(3)
        shutil.rmtree(folder)
    assert outcomes == {(1,), (2,)}
    assert steps > 20


@pytest.mark.parametrize("fails_at", range(1, 14))
def test_a_store_that_fails_is_reported_and_loses_nothing(
    posix: Open, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with posix() as first:
        first.persist(1)
        left, fsync = [fails_at], os.fsync

        def failing(descriptor: int) -> None:
            left[0] -= 1
            if not left[0]:
                raise OSError(5, "Input/output error")
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(FlashpointError, match="Input/output error"):
                first.persist(2)
        first.check(1)
        first.persist(2)
        first.check(1, 2)


@pytest.fixture
def dictionary(tmpfs: Path) -> Iterator[DDict]:
    """A dictionary that persists each checkpoint, and keeps one, with one committed checkpoint more in each turn."""
    named = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmpfs), "name": "name"}
    with DDict(MANAGERS, 1, 64 << 20, **named, persist_count=1, working_set_size=4, timeout=DEADLINE_S) as dictionary:  # type: ignore[arg-type]
        yield dictionary


def write(dictionary: DDict, value: int) -> None:
    dictionary["key"] = value
    dictionary.checkpoint()
    dictionary.wait_for_commit()


def test_what_a_list_names_stays_though_its_writer_saw_an_error(
    dictionary: DDict, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory_write = Directory.write

    def written_all_the_same(files: Directory, name: str, chunks: Iterable[Any]) -> int:
        count = directory_write(files, name, chunks)
        if name.startswith("history"):
            raise SaveError("the folder was not synchronized")
        return count

    write(dictionary, 0)
    assert dictionary.persist() == 0
    write(dictionary, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "write", written_all_the_same)
        with pytest.raises(SaveError):
            dictionary.persist()
    found = Program(PosixCheckpointPersister, str(tmpfs), read_only=True)  # who finds this one killed
    assert found.history.ids() == [1]
    assert dictionary.persist() == 1
    assert dictionary.persisted_ids() == [1]
    assert len(list((tmpfs / "name").glob("run-*"))) == 1


def test_a_store_that_raises_its_own_errors_ends_no_persisting(
    dictionary: DDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> int:
        raise ConnectionError("the storage is down")

    write(dictionary, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "write", refused)
        patch.setattr(Directory, "remove", refused)
        with pytest.raises(DDictPersistError, match="the storage is down"):
            dictionary.persist()
    assert dictionary.persist() == 0
    assert dictionary.persisted_ids() == [0]


def test_a_part_is_written_by_one_request_only(tmpfs: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    class Failing(Directory):
        def write(self, name: str, chunks: Iterable[Any]) -> int:
            if not has_begun.is_set():
                has_begun.set()
                assert may_end.wait(DEADLINE_S)
                raise SaveError("the upload broke, and what is there is removed")
            return super().write(name, chunks)

    files = Failing(tmpfs / "mine")

    class Mine(CheckpointPersister):
        def open_store(self) -> Files:
            return files

    with (
        Program(Mine, "ignored") as program,
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(open_store(tmpfs / "base")) as store,
    ):
        parts = PersistedParts(program.configuration, 0, ValueSlots(store, INCARNATION))
        version, another = program.history.new_attempt(1), program.history.new_attempt(1)
        first = pool.submit(parts.write, version, [])
        assert has_begun.wait(DEADLINE_S)
        try:
            with pytest.raises(DDictPersistError, match="begun before"):
                parts.write(version, [])
        finally:
            may_end.set()
        assert isinstance(first.exception(DEADLINE_S), SaveError)
        parts.write(another, [])


# ---- dictionaries that have ended ----------------------------------------------------------------------------------


def test_what_a_dictionary_lists_after_its_end_hides_nothing_of_the_next_one(posix: Open) -> None:
    with posix() as first:
        first.write(1, first.history.new_attempt(1))
    with posix() as second:
        second.persist(10)
        first.persist(2)  # its thread hung until now
        second.persist(11)
        second.check(10, 11)
    with posix() as third:
        third.check(10, 11)
        first.persist(3)
        first.restore(3)
        third.check(10, 11)


def test_a_dictionary_removes_nothing_after_its_end_that_the_next_one_goes_on_from(posix: Open) -> None:
    with posix() as first:
        first.persist(1, 2)
    with posix() as second:
        second.restore(2)
        first.roll_back(1)
        second.check(1, 2)
        first.persist(3, keep=1)
        second.check(1, 2)


def test_what_is_persisted_while_a_dictionary_ends_does_not_count(
    dictionary: DDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, has_begun, may_end = DurableVersions.complete, threading.Event(), threading.Event()

    def complete_late(*args: Any) -> Any:
        has_begun.set()
        assert may_end.wait(DEADLINE_S)
        return complete(*args)

    write(dictionary, 0)
    monkeypatch.setattr(DurableVersions, "complete", complete_late)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dictionary.persist)
        assert has_begun.wait(DEADLINE_S)
        assert dictionary._coordinator is not None
        dictionary._coordinator.close()
        may_end.set()
    for each in threading.enumerate():
        if each.name == "ddict-persist":
            each.join(DEADLINE_S)
            assert not each.is_alive()
    options = dictionary._configuration.options
    with contextlib.suppress(FlashpointError):
        dictionary.destroy()
    assert Program(PosixCheckpointPersister, options.persist_path, read_only=True).history.ids() == []


def test_a_name_is_given_up_when_nothing_is_answered_any_more(tmpfs: Path) -> None:
    answers: list[bool] = []

    class Watched(Directory):
        def lock(self, name: str, timeout_s: float) -> contextlib.ExitStack:
            held = contextlib.ExitStack()
            held.enter_context(super().lock(name, timeout_s) or contextlib.nullcontext())
            held.callback(look)
            return held

    class Mine(CheckpointPersister):
        def open_store(self) -> Files:
            return Watched(tmpfs / self.home)

    def look() -> None:
        try:
            Connection(server.address, SECRET, REQUESTS, connect_timeout_s=DEADLINE_S).close()
        except ConnectionLostError:
            answers.append(False)
        else:
            answers.append(True)

    options = Options(1, 2, persister_class=Mine, name="name")
    server = Coordinator(Configuration("0" * 12, options, "", ("tcp", "127.0.0.1", 1), ((), ()), SECRET), "127.0.0.1")
    assert answers == []
    server.close()
    assert answers == [False]


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../up", "a/b", ".", "..", ".hidden", "nul\0", "x" * 256])
def test_names_that_escape(name: str, tmpfs: Path) -> None:
    for kind in (PosixCheckpointPersister, FsspecCheckpointPersister):
        with pytest.raises(InvalidArgumentError, match="name="):
            kind(str(tmpfs), name=name)


def test_an_empty_path_is_the_current_directory(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmpfs)
    assert PosixCheckpointPersister.resolve_path("") == str(tmpfs)
    assert FsspecCheckpointPersister.resolve_path("") == str(tmpfs)
    assert FsspecCheckpointPersister.resolve_path("s3://bucket/x") == "s3://bucket/x"
    with Program(PosixCheckpointPersister, str(tmpfs), ""):
        assert os.listdir(tmpfs) == ["unnamed"]


def test_construction_touches_nothing(tmpfs: Path) -> None:
    FsspecCheckpointPersister("nosuch://x")
    assert PosixCheckpointPersister(str(tmpfs / "new"), name="x").open_store().list() == []
    assert os.listdir(tmpfs) == []


def test_daos_is_a_mount_of_dfuse(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DDictPersistError, match=r"needs a dfuse mount.*PosixCheckpointPersister"):
        DAOSCheckpointPersister(str(tmpfs), name="x")
    mount_dfuse(monkeypatch, tmpfs / "mount")
    assert DAOSCheckpointPersister(str(tmpfs / "mount" / "new"), name="x").open_store().list() == []
    for elsewhere in (tmpfs, tmpfs / "mount-too"):
        with pytest.raises(DDictPersistError, match="needs a dfuse mount"):
            DAOSCheckpointPersister(str(elsewhere), name="x")


def test_a_persister_may_be_null_or_given_by_its_name() -> None:
    options = Options(persister_class=NullCheckpointPersister, persist_path="anything", name="../x").named()
    assert options.make_persister() is None
    name = "ml_flashpoint.ddict:PosixCheckpointPersister"
    assert isinstance(Options(persister_class=name, name="x").named().make_persister(), PosixCheckpointPersister)
    for wrong in ("nowhere:Persister", "os:path", "ml_flashpoint.ddict:Nobody", "os"):
        with pytest.raises(InvalidArgumentError, match="persister_class"):
            Options(persister_class=wrong).named()


def test_files_of_ones_own_have_the_methods_that_the_page_names(tmpfs: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "ddict-persistence.md").read_text()
    named = re.findall(r"^\* `(\w+)`: ", page.partition("## A persister of your own")[2], re.MULTILINE)

    class Mine(CheckpointPersister):
        def open_store(self) -> Files:
            return kept

    directory = Directory(tmpfs / "mine")
    kept = type("Kept", (Files,), {name: getattr(directory, name) for name in named})("nowhere://kept")
    with Program(Mine, "ignored") as first:
        first.persist(1, 2, keep=1)
        first.roll_back(1)
        first.persist(3)
        first.check(3)


# ---- as users of a dictionary have it --------------------------------------------------------------------------------


# ---- persistence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("managers", [1, 2, 3])
def test_what_was_persisted_comes_back_into_any_number_of_managers(make: Make, tmp_path: Path, managers: int) -> None:
    named = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "name": "moved"}
    dictionary = make(2, persist_count=-1, working_set_size=2, **named)
    expected: dict[Any, Any] = {number: f"value {number}" for number in range(30)}
    dictionary.update(expected)
    dictionary["tensor"] = torch.arange(BIG)
    dictionary.bput("everywhere", 1)
    dictionary.pput("lasting", 2)
    dictionary["deleted"] = 3
    del dictionary["deleted"]
    dictionary.checkpoint()
    assert dictionary.persist() == 0
    dictionary["after"] = 4
    dictionary.destroy()

    again = make(managers, **named)
    again["before"] = 5
    assert again.persisted_ids() == [0]
    again.restore(0)

    assert again.checkpoint_id == 0
    tensor = again.pop("tensor")
    assert torch.equal(tensor, torch.arange(BIG))
    assert dict(again) == {**expected, "everywhere": 1, "lasting": 2}
    assert [again.manager(manager)["everywhere"] for manager in range(managers)] == [1] * managers
    reader = other(again)
    assert reader.sync_to_newest_checkpoint() == 0
    assert reader[7] == "value 7"


def test_restoring_what_is_not_there_leaves_all_as_it_was(make: Make, tmp_path: Path) -> None:
    dictionary = make(persister_class=PosixCheckpointPersister, persist_path=str(tmp_path))
    dictionary["key"] = 1
    with pytest.raises(DDictPersistError):
        dictionary.restore(3)

    assert dictionary["key"] == 1
    dictionary.destroy()
    with pytest.raises(DDictPersistError):
        DDict(persister_class=PosixCheckpointPersister, persist_path=str(tmp_path), restore_from=3)


def test_rolled_back_checkpoints_are_not_offered(make: Make, tmp_path: Path) -> None:
    dictionary = make(
        persister_class=PosixCheckpointPersister,
        persist_path=str(tmp_path),
        persist_freq=1,
        persist_count=-1,
        working_set_size=4,
    )
    for number in range(3):
        dictionary["key"] = number
        dictionary.checkpoint()
    assert dictionary.persist() == 2
    dictionary.rollback(to=1)
    assert dictionary.persisted_ids() == [0, 1]
    dictionary["key"] = "again"
    dictionary.checkpoint_id = 3
    assert dictionary.persist() == 2
    dictionary.restore(2)

    assert dictionary["key"] == "again"


def test_what_was_written_late_is_persisted_with_its_checkpoint(make: Make, tmp_path: Path) -> None:
    named: dict[str, Any] = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path)}
    dictionary = make(persist_count=-1, working_set_size=4, **named)
    dictionary["key"] = "early"
    dictionary.checkpoint()
    assert dictionary.persist() == 0
    assert dictionary.sync_to_newest_checkpoint() == 0
    dictionary["key"] = "late"
    dictionary.checkpoint()
    assert dictionary.wait_for_commit() == 0
    assert dictionary.persist() == 0
    dictionary.destroy()

    again = make(**named)
    again.restore(0)
    assert again["key"] == "late"


# ---- another number of managers ---------------------------------------------------------------------------


def persisted(make: Make, tmp_path: Path, managers: int, fill: Any) -> dict[str, Any]:
    """What to make a dictionary with that can restore what ``fill`` has written, as checkpoint 0."""
    named = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "name": "moved"}
    dictionary = make(managers, persist_count=-1, **named)
    dictionary["writes"] = True
    fill(dictionary)
    dictionary.checkpoint()
    assert dictionary.persist() == 0
    dictionary.destroy()
    return named


@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 2), (2, 1)])
def test_values_that_would_collide_are_refused_and_not_dropped(
    make: Make, tmp_path: Path, before: int, after: int
) -> None:
    keys = [f"key {number}" for number in range(20)]

    def fill(dictionary: DDict) -> None:
        for manager in range(before):
            with dictionary.manager(manager) as handle:
                handle.update(dict.fromkeys(keys, f"of {manager}"))

    named = persisted(make, tmp_path, before, fill)
    again = make(after, **named)
    again["here"] = 1
    with pytest.raises(DDictPersistError, match=r"key\(s\).*'key \d+'") as raised:
        again.restore(0)

    assert raised.value.checkpoint_id == 0
    assert f"with {before} managers" in str(raised.value)
    assert dict(again) == {"here": 1}
    again.destroy()
    whole = make(before, **named)
    whole.restore(0)
    assert [whole.manager(each)[keys[7]] for each in range(before)] == [f"of {each}" for each in range(before)]


def test_values_that_do_not_collide_are_all_there_in_another_number_of_managers(make: Make, tmp_path: Path) -> None:
    def fill(dictionary: DDict) -> None:
        for manager in range(4):
            with dictionary.manager(manager) as handle:
                handle[f"only at {manager}"] = manager
        with dictionary.manager(3) as handle:
            handle.bput("everywhere, by one", 3)
        for key in range(20):
            dictionary.bput(key, "by all")
        dictionary.bput("gone", 1)
        del dictionary["gone"]

    named = persisted(make, tmp_path, 4, fill)
    again = make(3, **named)
    again.restore(0)

    assert {key: again.manager(key % 3)[f"only at {key}"] for key in range(4)} == {key: key for key in range(4)}
    assert [again.manager(each)["everywhere, by one"] for each in range(3)] == [3] * 3
    for key in range(20):
        assert [again.manager(each)[key] for each in range(3)] == ["by all"] * 3
    assert all("gone" not in again.manager(each) for each in range(3))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 2), (2, 3)])
def test_what_was_put_through_a_manager_is_found_through_that_again(
    make: Make, tmp_path: Path, before: int, after: int
) -> None:
    def fill(dictionary: DDict) -> None:
        for manager in range(before):
            with dictionary.manager(manager) as handle:
                handle.update({(manager, number): number for number in range(30)})
                handle["step"] = 7  # the same everywhere
                if after > before:
                    handle["same key"] = manager

    again = make(after, **persisted(make, tmp_path, before, fill))
    again.restore(0)
    for manager in range(before):
        handle = again.manager(manager % after)
        assert [handle[manager, number] for number in range(30)] == list(range(30))
        assert handle["step"] == 7
        assert handle.get("same key") == (manager if after > before else None)


@pytest.mark.parametrize("is_large", [False, True])
def test_what_several_handles_have_put_everywhere_is_one_value_only_where_it_is_the_same(
    make: Make, tmp_path: Path, is_large: bool
) -> None:
    value: Any = torch.zeros(BIG) if is_large else "the same"

    def fill(dictionary: DDict) -> None:
        for manager in range(2):
            with dictionary.manager(manager) as handle:
                handle.bput("same", "the same")
                handle.bput("other", value if is_large else manager)

    with pytest.raises(DDictPersistError, match=r"1 key.*'other'"):
        make(3, **persisted(make, tmp_path, 2, fill)).restore(0)


# ---- what a rollback takes back ---------------------------------------------------------------------------


def refuse(*_: object, **__: object) -> None:
    """What a store does that nothing may be removed from."""
    raise SaveError("the storage is read-only")


def persisting(make: Make, tmp_path: Path) -> DDict:
    """A dictionary at 3 that has persisted 0 to 2."""
    named: dict[str, Any] = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path)}
    dictionary = make(persist_count=-1, working_set_size=4, **named)
    for number in range(3):
        dictionary["key"] = number
        dictionary.checkpoint()
        assert dictionary.persist() == number
    return dictionary


def offered(make: Make, tmp_path: Path) -> list[int]:
    """What the next program can restore."""
    return make(persister_class=PosixCheckpointPersister, persist_path=str(tmp_path)).persisted_ids()


def test_what_was_rolled_back_does_not_return_though_the_store_keeps_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = persisting(make, tmp_path)
    with monkeypatch.context() as refusing:
        refusing.setattr(Directory, "remove_folder", refuse)
        assert dictionary.rollback(to=1) == 1
    assert dictionary.persisted_ids() == [0, 1]
    dictionary["key"] = "again"
    dictionary.checkpoint()
    assert (dictionary.persist(), dictionary.persisted_ids()) == (1, [0, 1])
    dictionary["key"] = "more"
    dictionary.checkpoint()
    assert (dictionary.persist(), dictionary.persisted_ids()) == (2, [0, 1, 2])
    assert dictionary.rollback(to=0) == 0
    dictionary.destroy()

    assert offered(make, tmp_path) == [0]


def test_a_rollback_says_that_the_store_does_not_know_of_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = persisting(make, tmp_path)
    with monkeypatch.context() as refusing:
        refusing.setattr(Directory, "remove_folder", refuse)
        refusing.setattr(Directory, "write", refuse)
        with pytest.raises(DDictPersistError, match="read-only") as raised:
            dictionary.rollback(to=1)
        assert raised.value.checkpoint_id == 1
        assert (dictionary.checkpoint_id, dictionary["key"]) == (1, 1), "all has gone back"
        with pytest.raises(DDictPersistError):
            dictionary.rollback()

    assert dictionary.rollback() == 0  # or whatever persists next does that
    assert dictionary.persisted_ids() == [0]
    dictionary.destroy()
    assert offered(make, tmp_path) == [0]


def test_what_is_completed_after_it_was_rolled_back_does_not_count(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = persisting(make, tmp_path)
    complete, has_begun, may_end = DurableVersions.complete, threading.Event(), threading.Event()

    def complete_late(*args: Any) -> Any:
        has_begun.set()
        assert may_end.wait(DEADLINE_S)
        return complete(*args)

    dictionary["key"] = 3
    dictionary.checkpoint()
    colleague = other(dictionary)
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as slow:
        slow.setattr(DurableVersions, "complete", complete_late)
        persisting_it = pool.submit(colleague.persist)
        assert has_begun.wait(DEADLINE_S)
        assert dictionary.rollback(to=2) == 2
        may_end.set()
        assert isinstance(persisting_it.exception(DEADLINE_S), DDictPersistError)
    assert dictionary.persisted_ids() == [0, 1, 2]
    dictionary.destroy()
    assert offered(make, tmp_path) == [0, 1, 2]


# ---- who is told, and who may lock ------------------------------------------------------------------------


def test_nobody_else_can_lock_a_name(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    make(persister_class=PosixCheckpointPersister, persist_path=str(tmp_path), name="mine", persist_count=-1)

    assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600


def test_a_dictionary_says_that_it_persists_nothing_by_itself(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named: dict[str, Any] = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path)}
    with caplog.at_level(logging.WARNING, "ml_flashpoint.ddict"):
        make(**named, persist_count=1).destroy()
        assert "persist_count" not in caplog.text
        make(**named).destroy()
    assert "persist_count is 0" in caplog.text
