"""The format of persisted versions: what counts as one, what is distrusted, what goes, and what is read of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ml_flashpoint.engine.reader import ObjectReader
from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.errors import DamagedError, ManifestError, ObjectFormatError, ObjectNotFoundError, SaveError
from ml_flashpoint.format.manifest import JOB_LABEL, MAX_RECORD_BYTES, Manifest, ObjectRecord, encode, encode_record
from ml_flashpoint.format.names import SaveId, manifest_name, object_name
from ml_flashpoint.format.object_format import encode_header, plan_layout
from ml_flashpoint.stores import version_store as module
from ml_flashpoint.stores.durable import MARKER, DurableVersions, folder_of, save_of
from ml_flashpoint.stores.files import Directory, Files
from ml_flashpoint.stores.version_store import StoredObject, Version

RUN, LATER = "00000007", "00000012"
pytestmark = pytest.mark.damages_on_purpose


def part(step: int, rank: int = 0, world_size: int = 2, run: str = RUN) -> Manifest:
    record = ObjectRecord(5, 8, (digest_block(b"hello"),), 4096)
    return Manifest(SaveId(int(run), step), rank, world_size, "node", record)


def content() -> Iterator[bytes]:
    yield b"hello"
    yield bytes(3)


def persist(store: DurableVersions, step: int, run: str = RUN) -> Version:
    for rank in range(2):
        store.write_part(part(step, rank, run=run), content)
    return store.complete(SaveId(int(run), step), 2)


def counting(store: DurableVersions) -> list[Version]:
    return [version for version in store.versions() if version.counts]


@pytest.fixture
def root(tmpfs: Path) -> Path:
    return tmpfs / "store"


@pytest.fixture(params=["directory", "file"])
def store(request: pytest.FixtureRequest, root: Path) -> DurableVersions:
    return DurableVersions(Directory(root) if request.param == "directory" else Files(f"file://{root}"))


def test_a_version_exists_once_its_marker_does(store: DurableVersions) -> None:
    first = part(3)
    store.write_part(first, content)
    assert counting(store) == []
    assert store.ranks_there(SaveId(7, 3)) == {0}
    with pytest.raises(ObjectNotFoundError):
        store.complete(SaveId(7, 3), 2)
    assert counting(store) == []
    found = persist(store, 3)
    assert counting(store) == [found]
    assert (found.step, found.save_id, found.world_size, found.folder) == (3, RUN, 2, f"run-{RUN}/step-3_ckpt")
    assert store.manifest(found, 1) == part(3, 1)
    with pytest.raises(ObjectNotFoundError):
        store.manifest(found, 2)


def test_a_part_that_is_there_is_not_written_again(store: DurableVersions) -> None:
    def never() -> Iterator[bytes]:
        raise AssertionError

    with pytest.raises(SaveError, match="5 bytes"):
        store.write_part(part(3), lambda: [b"hello"])
    assert store.ranks_there(SaveId(7, 3)) == set(), "content of another length makes no part"
    assert store.write_part(part(3), content)
    assert not store.write_part(part(3), never)
    for damaged in (b"short", b"hallo\0\0\0"):
        store.files.write(f"{folder_of(SaveId(7, 3))}/{object_name(0, RUN)}", [damaged])
        with pytest.raises((AssertionError, SaveError)):
            store.write_part(part(3), never)
        assert store.write_part(part(3), content), "a part that differs is written anew"
        assert not store.write_part(part(3), never)


def test_the_newest_is_that_of_the_latest_run_and_of_it_the_highest_step(store: DurableVersions) -> None:
    order = [(9, RUN), (10, RUN), (100, LATER), (1, "100000000")]
    for step, run in order:
        persist(store, step, run)
    assert [(version.step, version.save_id) for version in counting(store)] == order[::-1]


def test_only_the_newest_stay(store: DurableVersions) -> None:
    versions = [persist(store, number) for number in (1, 2, 3)] + [persist(store, 1, LATER)]
    store.keep_newest(2, versions[3].save)
    assert store.versions() == [versions[3], versions[2]]
    store.keep_newest(1, versions[3].save)
    assert store.files.list() == [f"run-{LATER}"]


def test_what_dead_writers_left_goes_and_what_is_being_written_stays(store: DurableVersions) -> None:
    store.write_part(part(1), content)  # of a run that is over
    store.files.write(f"run-{RUN}/step-2_ckpt/.0123456789abcdef.tmp", [b"half"])
    store.write_part(part(4, run=LATER), content)  # given up
    newest = persist(store, 5, LATER)
    store.write_part(part(6, run=LATER), content)  # a rank is ahead
    store.files.write(f"run-{LATER}/step-7_ckpt/.0123456789abcdef.tmp", [b"half"])
    store.files.write("run-of-somebody-else/step-1_ckpt/file", [b"not ours"])
    store.files.write("notes.txt", [b"not ours"])
    marker = encode_record("another-1", {"run": "18c0ffee00000000-0000000a"})
    store.files.write(f"run-18c0ffee00000000-0000000a/step-1_ckpt/{MARKER}", [marker])
    store.keep_newest(3, newest.save)
    strange = ["run-18c0ffee00000000-0000000a", "run-of-somebody-else"]
    assert store.files.list() == ["notes.txt", f"run-{LATER}", *strange]
    assert counting(store) == [newest]
    assert store.files.list(f"run-{LATER}") == ["step-5_ckpt", "step-6_ckpt", "step-7_ckpt"]
    store.check_parts(newest)


def test_what_failed_goes_before_the_next_one_is_written(store: DurableVersions) -> None:
    newest = persist(store, 3)
    for number in (4, 5, 6, 7):
        store.write_part(part(number), content)
    store.write_part(part(5, run=LATER), content)
    store.keep_newest(1, SaveId(7, 6))
    assert store.files.list(f"run-{RUN}") == ["step-3_ckpt", "step-6_ckpt", "step-7_ckpt"]
    assert store.files.list(f"run-{LATER}"), "a rank is ahead, in a later run"
    store.check_parts(newest)


# ---- what is distrusted --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 4},
        {"step": "../3"},
        {"save_id": LATER},
        {"save_id": "../../etc"},
        {"world_size": 2**30},
        {"job": 7},
        {"save_id": "000000007"},
        {"save_id": 7},
        {"world_size": 0},
        {"world_size": "2"},
    ],
)
def test_markers_are_distrusted(store: DurableVersions, fields: dict[str, object]) -> None:
    older, newest = persist(store, 2), persist(store, 3)
    marker = encode_record("mlflashpoint-version-3", {**save_of(newest), **fields})
    store.files.write(f"{newest.folder}/{MARKER}", [marker])
    damaged, found = store.versions()
    assert found == older
    assert (damaged.folder, damaged.counts, bool(damaged.problem)) == (newest.folder, False, True)
    store.keep_newest(3, SaveId(12, 9))
    assert store.files.list(newest.folder), "what may be of use is not removed as long as it is the newest"


def test_parts_of_two_jobs_are_no_version(store: DurableVersions) -> None:
    one, other = ([replace(part(3, rank), labels={JOB_LABEL: job}) for rank in range(2)] for job in ("one", "other"))
    store.write_part(one[0], content)
    store.write_part(other[1], content)
    with pytest.raises(ManifestError, match="another job has written this part"):
        store.complete(SaveId(7, 3), 2)
    assert counting(store) == []
    store.files.write(f"{folder_of(SaveId(7, 3))}/{manifest_name(1, RUN)}", [encode(one[1])])
    found = store.complete(SaveId(7, 3), 2)
    assert counting(store) == [found]
    assert store.manifest(found, 1) == one[1]
    store.files.write(f"{found.folder}/{manifest_name(1, RUN)}", [encode(other[1])])  # by a writer that was slow
    with pytest.raises(ManifestError, match="another job has written this part"):
        store.manifest(counting(store)[0], 1)


def test_manifests_of_other_parts_and_files_that_are_too_large_are_refused(root: Path) -> None:
    store = DurableVersions(Directory(root))
    newest = persist(store, 3)
    path = root / newest.folder / manifest_name(0, newest.save_id)
    path.write_bytes(encode(part(3, world_size=3)))
    with pytest.raises(ManifestError):
        store.check_parts(newest)
    os.truncate(path, 2**40)
    with pytest.raises(DamagedError, match="more than"):
        store.check_parts(newest)
    os.truncate(root / newest.folder / MARKER, MAX_RECORD_BYTES + 1)
    assert counting(store) == []


@pytest.mark.parametrize("what", ["object", "manifest", "marker", "version", "run"])
def test_links_are_not_followed(root: Path, what: str) -> None:
    store = DurableVersions(Directory(root))
    newest = persist(store, 3)
    victim = root.parent / "victim"
    path = {
        "object": root / newest.folder / object_name(0, newest.save_id),
        "manifest": root / newest.folder / manifest_name(0, newest.save_id),
        "marker": root / newest.folder / MARKER,
        "version": root / newest.folder,
        "run": (root / newest.folder).parent,
    }[what]
    path.rename(victim)
    path.symlink_to(victim)
    before = sorted(victim.rglob("*"))
    if what in ("object", "manifest"):
        with pytest.raises(DamagedError, match="symbolic link"):
            store.check_parts(newest)
    else:
        assert counting(store) == []
    persist(store, 4, LATER)
    store.keep_newest(1, SaveId(12, 4))
    assert sorted(victim.rglob("*")) == before
    assert victim.exists()
    if victim.is_dir():
        shutil.rmtree(victim)


# ---- objects that are read: their bytes, then zeros, whatever the memory was used for before -------------------------


BLOCK = 1000


def written(root: Path, size: int, file_size: int) -> tuple[bytes, StoredObject]:
    data = os.urandom(size)
    digests = tuple(digest_block(data[at : at + BLOCK]) for at in range(0, size, BLOCK))
    manifest = Manifest(SaveId(1, size), 0, 1, "node", ObjectRecord(size, file_size, digests, BLOCK))
    store = DurableVersions(Directory(root))
    store.write_part(manifest, lambda: [data + b"\xff" * (file_size - size)])
    store.complete(manifest.save, 1)
    return data, StoredObject(manifest, [store])


def file_of(stored: StoredObject) -> bytes:
    return b"".join(map(bytes, stored.file()))


def test_the_whole_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 2 * BLOCK)
    monkeypatch.setattr(module, "_ZEROS", bytes(300))
    for size, file_size in ((5500, 6500), (700, 700), (0, 1), (4000, 4299)):
        data, stored = written(tmp_path, size, file_size)
        assert file_of(stored) == data + bytes(file_size - size)


def test_an_item_past_the_bytes_that_count_is_damage(tmp_path: Path) -> None:
    layout = plan_layout([("weight", "float32", (3000,))])
    data = encode_header(layout, layout.size) + bytes(layout.size - layout.data_start)
    data = data[: layout.data_start + 1000]
    digests = tuple(digest_block(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    manifest = Manifest(SaveId(1, 1), 0, 1, "node", ObjectRecord(len(data), layout.size, digests, BLOCK))
    store = DurableVersions(Directory(tmp_path))
    store.write_part(manifest, lambda: [data + bytes(layout.size - len(data))])
    with pytest.raises(ObjectFormatError, match=f"up to byte {layout.size}"):
        StoredObject(manifest, [store]).bytes_of("weight")
    with pytest.raises(ObjectFormatError, match=f"up to byte {layout.size}"):
        ObjectReader(manifest, local=memoryview(bytearray(data))).tensor("weight")


@pytest.mark.parametrize("change", [0, 4999])
def test_what_is_damaged_is_not_handed_out(tmp_path: Path, change: int) -> None:
    data, stored = written(tmp_path, 5000, 5000)
    Path(stored.path).write_bytes(data[:change] + bytes([data[change] ^ 1]) + data[change + 1 :])
    with pytest.raises(DamagedError):
        file_of(stored)
    Path(stored.path).write_bytes(data[:-1])
    with pytest.raises(DamagedError, match="ends before byte"):
        file_of(stored)
