"""Persisting by hand: the version that it was, from whatever is sound, or nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ml_flashpoint.format.digest import digest_blocks
from ml_flashpoint.format.errors import (
    DamagedError,
    DeadlineError,
    InvalidArgumentError,
    JobInUseError,
    MissingPartsError,
    ObjectNotFoundError,
    PrunedError,
    SaveError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, write_manifest
from ml_flashpoint.format.names import SaveId, object_name
from ml_flashpoint.memory.container import BaseContainer as JobContainer
from ml_flashpoint.memory.lineage import RunRecord, mark_begun, write_record
from ml_flashpoint.stores.bounded import while_it_moves
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.files import Directory
from ml_flashpoint.stores.location import BaseContainer, open_durable
from ml_flashpoint.stores.version_store import Version
from ml_flashpoint.tools import copy as module
from ml_flashpoint.tools.copy import copy_version, persist_version
from ml_flashpoint.tools.items import open_version
from tests.support.commands import flashpoint
from tests.support.forked import wait_until
from tests.support.processes import child_environment

RUN = "00000007"
BLOCK = 1000
pytestmark = [pytest.mark.damages_on_purpose, pytest.mark.stores_any_bytes]


def content(rank: int, number: int) -> bytes:
    return bytes((rank + number + at) % 251 for at in range(2500))


def commit(base: Path, rank: int, step: int, *, world_size: int = 4) -> Path:
    """A part as a job leaves it; returns its object."""
    data = content(rank, step)
    record = ObjectRecord(len(data), len(data) + 100, digest_blocks(data, block_size=BLOCK), BLOCK)
    folder = base / f"step-{step}_ckpt"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(SaveId(int(RUN), step), rank, world_size, f"node-{base.name}", record)
    (folder / manifest.object_name).write_bytes(data + b"\xff" * 100)
    write_manifest(folder, manifest)
    return folder / manifest.object_name


def commit_all(bases: list[Path], step: int, ranks: dict[int, list[int]]) -> None:
    for base, some in ranks.items():
        for rank in some:
            commit(bases[base], rank, step)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)


def counting(store: DurableVersions) -> list[Version]:
    return [version for version in store.versions() if version.counts]


def stored(store: DurableVersions) -> dict[int, list[bytes]]:
    """What each complete version has of the bytes that count, by step."""
    found = {}
    for version in counting(store):
        store.check_parts(version)
        records = [store.manifest(version, rank).record for rank in version.ranks]
        names = [object_name(rank, version.save_id) for rank in version.ranks]
        whole = [store.files.read(f"{version.folder}/{name}", limit=10**6) for name in names]
        assert all(each[record.size :] == bytes(100) for each, record in zip(whole, records, strict=True))
        found[version.step] = [each[: record.size] for each, record in zip(whole, records, strict=True)]
    return found


def expected(number: int) -> list[bytes]:
    return [content(rank, number) for rank in range(4)]


@pytest.fixture
def bases(tmpfs: Path) -> list[Path]:
    return [tmpfs / "a", tmpfs / "b"]


@pytest.fixture
def url(tmpfs: Path) -> str:
    return f"file://{tmpfs}/store"


@pytest.fixture
def store(tmpfs: Path) -> DurableVersions:
    return DurableVersions(Directory(tmpfs / "store"))


def test_the_newest_that_all_nodes_together_have(bases: list[Path], url: str, store: DurableVersions) -> None:
    commit_all(bases, 5, {0: [0, 1], 1: [2, 3]})
    commit_all(bases, 6, {0: [0, 1, 2, 3], 1: [2, 3]})
    commit_all(bases, 7, {0: [0, 1]})  # being saved when it died
    calls: list[tuple[int, int]] = []
    made = persist_version(bases[0], url, progress=lambda done, total: calls.append((done, total)))
    assert (made.version.step, made.version.save_id, made.was_there, made.newer) == (6, RUN, False, None)
    assert calls[-1] == (4 * 2600, 4 * 2600)
    assert sorted(store.files.list()) == ["lock", f"run-{RUN}"]
    assert persist_version(bases, url).was_there
    assert persist_version(bases, url, 5).newer == 6
    assert stored(store) == {5: expected(5), 6: expected(6)}


def test_missing_parts_are_named(
    bases: list[Path], url: str, store: DurableVersions, capsys: pytest.CaptureFixture[str]
) -> None:
    commit_all(bases, 7, {0: [0, 2], 1: [0]})
    with pytest.raises(MissingPartsError, match="of step 7, the parts of ranks 1, 3 of 4 are missing"):
        persist_version(bases, url)
    assert flashpoint("persist", *bases, "--to", url, "--json") == 1
    assert "ranks 1, 3 of 4" in json.loads(capsys.readouterr().out)["error"]
    assert flashpoint("persist", f"{bases[0]}@8", "--to", url) == 2
    capsys.readouterr()
    with pytest.raises(ObjectNotFoundError, match="no complete version of step 8"):
        persist_version(bases, url, 8)
    with pytest.raises(InvalidArgumentError, match="absolute"):
        persist_version(bases, "file://here")
    assert store.files.list() == []
    commit_all(bases, 7, {1: [1, 3]})
    assert flashpoint("persist", f"{bases[0]}@7", bases[1], "--to", url, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["world_size"], told["was_there"], told["newer"]) == (7, 4, False, None)


def test_a_damaged_part_is_taken_from_another_node_or_an_older_version_is(
    bases: list[Path], url: str, store: DurableVersions
) -> None:
    commit_all(bases, 6, {0: [0, 1, 2, 3]})
    commit_all(bases, 7, {0: [0, 1, 2, 3], 1: [1, 2, 3]})
    flip(bases[0] / "step-7_ckpt" / object_name(1, RUN))
    (bases[0] / "step-7_ckpt" / object_name(2, RUN)).unlink()
    path = bases[0] / "step-7_ckpt" / object_name(3, RUN)
    path.unlink()
    path.symlink_to(bases[1] / "step-7_ckpt" / object_name(3, RUN))
    persist_version(bases, url)
    assert stored(store) == {7: expected(7)}
    shutil.rmtree(store.path)
    flip(bases[1] / "step-7_ckpt" / object_name(1, RUN))  # damaged everywhere now
    assert persist_version(bases, url).version.step == 6
    with pytest.raises(DamagedError, match="block 1"):
        persist_version(bases, url, 7)
    assert stored(store) == {6: expected(6)}


def test_which_version_is_taken_where_one_cannot_be_read_or_was_gone_back_from(
    bases: list[Path], url: str, store: DurableVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_all(bases, 6, {0: [0, 1, 2, 3]})
    commit_all(bases, 7, {0: [0, 1, 2, 3]})

    def fail(self: BaseContainer, manifest: Manifest, *args: object) -> None:
        raise UnreadableError("too many open files", rank=manifest.rank)

    with monkeypatch.context() as patched:
        patched.setattr(BaseContainer, "read_into", fail)
        with pytest.raises(UnreadableError):
            persist_version(bases, url)
    bases[0].chmod(0o700)
    container = JobContainer(bases[0])
    write_record(container, RunRecord(8, {7: 6}))
    mark_begun(container, 8)
    assert persist_version(bases, url).version.step == 6
    assert persist_version(bases, url, 7).version.step == 7  # asked for


def test_it_goes_on_where_it_was_interrupted(
    bases: list[Path], url: str, store: DurableVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_all(bases, 7, {0: [0, 1, 2, 3]})

    def fail(*args: object) -> None:
        raise SaveError("no marker")

    with monkeypatch.context() as patched:
        patched.setattr(DurableVersions, "complete", fail)
        with pytest.raises(SaveError, match="no marker"):
            persist_version(bases[0], url)
    assert stored(store) == {}
    with monkeypatch.context() as patched:
        patched.setattr(BaseContainer, "read_into", fail)  # the parts are there
        assert not persist_version(bases[0], url).was_there
        assert persist_version(bases[0], url).was_there
    assert stored(store) == {7: expected(7)}
    [version] = counting(store)
    flip(Path(store.path, version.folder, object_name(2, RUN)))
    assert not persist_version(bases[0], url).was_there, "a part that differs is written anew"
    assert stored(store) == {7: expected(7)}


def test_what_another_job_persists_is_not_replaced(
    bases: list[Path], url: str, store: DurableVersions, tmpfs: Path
) -> None:
    commit_all(bases, 7, {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]})
    with store.owned(), pytest.raises(JobInUseError, match="a job persists at this URL"):
        persist_version(bases[0], url)
    unlocked = f"memory://{tmpfs.name}"
    persist_version(bases[0], unlocked)
    with pytest.raises(JobInUseError, match="of another job"):
        persist_version(bases[1], unlocked)
    assert stored(open_durable(unlocked)) == {7: expected(7)}
    fsspec.filesystem("memory").rm(unlocked, recursive=True)


class HangingFiles(Directory):
    """Does not come back from the second piece of an object, until it is told to."""

    go_on = threading.Event()

    def write(self, name: str, chunks: Iterable[Any]) -> int:
        def some() -> Iterator[Any]:
            for number, chunk in enumerate(chunks):
                if number:
                    self.go_on.wait()
                yield chunk

        return super().write(name, some())


def test_a_store_that_hangs_is_given_up(
    bases: list[Path], url: str, store: DurableVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_all(bases, 7, {0: [0, 1, 2, 3]})
    with monkeypatch.context() as patched:
        patched.setattr("ml_flashpoint.stores.version_store.PIECE_BYTES", BLOCK)
        patched.setattr(module, "open_durable", lambda url: DurableVersions(HangingFiles(url[len("file://") :])))
        with pytest.raises(DeadlineError, match=r"nothing has happened for 0.5 s"):
            persist_version(bases[0], url, deadline_s=0.5)
        with pytest.raises(JobInUseError):  # what hangs may go on
            persist_version(bases[0], url, deadline_s=0.5)
        HangingFiles.go_on.set()
        wait_until(lambda: is_free(store), "what was given up ends")
    assert stored(store) == {}
    assert not persist_version(bases[0], url).was_there
    assert stored(store) == {7: expected(7)}


def is_free(store: DurableVersions) -> bool:
    try:
        with store.owned():
            return True
    except JobInUseError:
        return False


@pytest.mark.slow
def test_no_process_waits_for_a_store_that_hangs(bases: list[Path], url: str) -> None:
    commit_all(bases, 7, {0: [0, 1, 2, 3]})
    script = (
        "import sys, threading\n"
        "from ml_flashpoint.stores.files import Directory\n"
        "Directory.write = lambda *_: threading.Event().wait()\n"
        "from ml_flashpoint.cli.main import app\n"
        "app(sys.argv[1:])\n"
    )
    argv = [sys.executable, "-c", script, "persist", str(bases[0]), "--to", url, "--deadline-seconds", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, env=child_environment(), timeout=60)
    assert done.returncode == 1
    assert "nothing has happened for 1 s" in done.stderr


def test_what_is_slow_does_not_hang() -> None:
    def slowly(moved: Callable[[], None]) -> str:
        for _ in range(24):
            time.sleep(0.05)
            moved()
        return "done"

    assert while_it_moves(slowly, 1.0, "somewhere") == "done"


def test_of_a_running_job_the_newest_is_taken(
    bases: list[Path], url: str, store: DurableVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_all(bases, 7, {0: [0, 1, 2, 3]})
    hold = BaseContainer.hold

    def removed(self: BaseContainer, manifest: Manifest) -> Any:
        if manifest.save.step == 7:
            shutil.rmtree(self.base / "step-7_ckpt")
            commit_all(bases, 8, {0: [0, 1, 2, 3]})
            raise PrunedError("it went")
        return hold(self, manifest)

    monkeypatch.setattr(BaseContainer, "hold", removed)
    assert persist_version(bases[0], url).version.step == 8
    assert stored(store) == {8: expected(8)}


def test_planted_links_in_the_store_are_not_followed(bases: list[Path], tmpfs: Path, url: str) -> None:
    commit_all(bases, 7, {0: [0, 1, 2, 3]})
    (tmpfs / "elsewhere").mkdir()
    (tmpfs / "store").mkdir()
    (tmpfs / "store" / f"run-{RUN}").symlink_to(tmpfs / "elsewhere")
    with pytest.raises((DamagedError, UnsafePathError)):
        persist_version(bases[0], url)
    assert list((tmpfs / "elsewhere").iterdir()) == []


def test_the_base_container_of_a_job_is_no_store(bases: list[Path]) -> None:
    commit_all(bases, 7, {0: [0, 1, 2, 3]})
    JobContainer(bases[1])
    with pytest.raises(InvalidArgumentError, match="a job's base container"):
        persist_version(bases[0], bases[1])


def test_of_persisted_versions_the_newest_that_is_sound_is_opened(
    bases: list[Path], url: str, store: DurableVersions
) -> None:
    for number in (6, 7):
        commit_all(bases, number, {0: [0, 1, 2, 3]})
        persist_version(bases[0], url, number)
    assert open_version(url).step == 7
    newest = counting(store)[0]
    store.files.remove(f"{newest.folder}/{object_name(2, newest.save_id)}")
    assert open_version(url).step == 6
    with pytest.raises(ObjectNotFoundError, match="no such file"):
        open_version(url, 7)
    with pytest.raises(ObjectNotFoundError, match="no complete version of step 8"):
        open_version(url, 8)


def test_a_persisted_version_that_goes_while_it_is_read_is_no_damage(
    bases: list[Path], tmpfs: Path, url: str, store: DurableVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job removes older versions once a newer one is persisted, whoever reads them."""
    manifest = DurableVersions.manifest
    for number in (6, 7):
        commit_all(bases, number, {0: [0, 1, 2, 3]})

    def replace(old: int, new: int) -> None:
        if old in [version.step for version in counting(store)]:
            persist_version(bases[0], url, new)
            store.remove(old)

    def replaced_first(self: DurableVersions, version: Version, rank: int) -> Manifest:
        monkeypatch.undo()
        replace(6, 7)
        return manifest(self, version, rank)

    persist_version(bases[0], url, 6)
    monkeypatch.setattr(DurableVersions, "manifest", replaced_first)
    assert open_version(url).step == 7
    replace(7, 6)
    assert copy_version(url, tmpfs / "copies", progress=lambda *_: replace(6, 7)).name == "step-7_ckpt"
    with pytest.raises(PrunedError):
        copy_version(url, tmpfs / "again", 7, progress=lambda *_: replace(7, 6))
    with open_version(url, 6) as version:
        store.remove(6)
        with pytest.raises(PrunedError):
            list(version.object(3).pieces())
