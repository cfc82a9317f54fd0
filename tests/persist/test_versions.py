"""The format of persisted versions: what counts as one, what is distrusted, and what goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.errors import (
    DamagedError,
    InvalidArgumentError,
    ManifestError,
    ObjectNotFoundError,
    SaveError,
)
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, manifest_name, object_name
from ml_flashpoint.persist.directory_store import DirectoryStore
from ml_flashpoint.persist.fsspec_store import FsspecStore
from ml_flashpoint.persist.records import MAX_RECORD_BYTES, decode_record, encode_record
from ml_flashpoint.persist.store import DurableStore
from ml_flashpoint.persist.versions import (
    MARKER,
    MARKER_KIND,
    PersistedVersion,
    check_parts,
    complete,
    folder_of,
    keep_newest,
    list_persisted,
    ranks_there,
    read_part_manifest,
    remove_failed,
    write_part,
)

RUN, LATER = "1700000000000-0000000a", "1700000000001-0000000b"
pytestmark = pytest.mark.damages_on_purpose


def save_id(number: int, run: str = RUN) -> str:
    return f"{run}-{number:019d}"


def part(number: int, rank: int = 0, world_size: int = 2, run: str = RUN, step: int | None = None) -> Manifest:
    name = object_name(rank, save_id(number, run))
    record = ObjectRecord(name, 5, 8, (digest_block(b"hello"),), 4096)
    version = f"step-{number if step is None else step}_ckpt"
    return Manifest(version, rank, world_size, save_id(number, run), "node", (record,))


def content(record: ObjectRecord) -> Iterator[bytes]:
    yield b"hello"
    yield bytes(3)


def persist(store: DurableStore, number: int, run: str = RUN, step: int | None = None) -> PersistedVersion:
    for rank in range(2):
        write_part(store, part(number, rank, run=run, step=step), content)
    return complete(store, part(number, run=run, step=step).version, save_id(number, run), 2)


@pytest.fixture
def root(tmpfs: Path) -> Path:
    return tmpfs / "store"


@pytest.fixture(params=["directory", "file"])
def store(request: pytest.FixtureRequest, root: Path) -> DurableStore:
    return DirectoryStore(root) if request.param == "directory" else FsspecStore(f"file://{root}")


def test_a_version_exists_once_its_marker_does(store: DurableStore) -> None:
    first = part(3)
    write_part(store, first, content)
    assert list_persisted(store)[0] == []
    assert ranks_there(store, first.version, first.save_id) == {0}
    with pytest.raises(ObjectNotFoundError):
        complete(store, first.version, first.save_id, 2)
    assert list_persisted(store)[0] == []
    found = persist(store, 3)
    assert list_persisted(store)[0] == [found]
    assert (found.step, found.save_id, found.world_size, found.run) == (3, save_id(3), 2, RUN)
    assert read_part_manifest(store, found, 1) == part(3, 1)
    with pytest.raises(ObjectNotFoundError):
        read_part_manifest(store, found, 2)


def test_a_part_that_is_there_is_not_written_again(store: DurableStore) -> None:
    def never(record: ObjectRecord) -> Iterator[bytes]:
        raise AssertionError

    receipt = write_part(store, part(3), content)
    assert write_part(store, part(3), never) == receipt
    store.write(f"{folder_of('step-3_ckpt', save_id(3))}/{object_name(0, save_id(3))}", [b"short"])
    with pytest.raises((AssertionError, SaveError)):
        write_part(store, part(3), never)


def test_content_of_another_length_makes_no_part(store: DurableStore) -> None:
    with pytest.raises(SaveError, match="5 bytes"):
        write_part(store, part(3), lambda record: [b"hello"])
    assert ranks_there(store, "step-3_ckpt", save_id(3)) == set()


def test_the_newest_is_that_of_the_latest_save(store: DurableStore) -> None:
    persist(store, 9)
    persist(store, 4, LATER)
    assert [version.step for version in list_persisted(store)[0]] == [4, 9]


def test_a_step_that_is_saved_again_replaces_the_earlier_one(store: DurableStore) -> None:
    persist(store, 1, step=7)
    found = persist(store, 2, step=7)
    assert list_persisted(store)[0] == [found]
    assert found.save_id == save_id(2)
    assert all(save_id(1) not in name for name in store.list(found.folder))


def test_only_the_newest_stay(store: DurableStore) -> None:
    versions = [persist(store, number) for number in (1, 2, 3)] + [persist(store, 1, LATER)]
    assert keep_newest(store, 2, LATER) == [versions[3], versions[2]]
    assert list_persisted(store) == ([versions[3], versions[2]], [])
    keep_newest(store, 1, LATER)
    assert store.list() == [f"run-{LATER}"]


def test_what_dead_writers_left_goes_and_what_is_being_written_stays(store: DurableStore) -> None:
    write_part(store, part(1), content)  # of a run that is over
    store.write(f"run-{RUN}/step-2_ckpt/.0123456789abcdef.tmp", [b"half"])
    write_part(store, part(4, run=LATER), content)  # given up
    newest = persist(store, 5, LATER)
    write_part(store, part(6, run=LATER), content)  # a rank is ahead
    store.write(f"run-{LATER}/step-7_ckpt/.0123456789abcdef.tmp", [b"half"])
    store.write("run-of-somebody-else/step-1_ckpt/file", [b"not ours"])
    store.write("notes.txt", [b"not ours"])
    keep_newest(store, 3, LATER)
    assert store.list() == ["notes.txt", f"run-{LATER}", "run-of-somebody-else"]
    assert store.list(f"run-{LATER}") == ["step-5_ckpt", "step-6_ckpt", "step-7_ckpt"]
    check_parts(store, newest)


def test_what_failed_goes_before_the_next_one_is_written(store: DurableStore) -> None:
    newest = persist(store, 3)
    for number in (4, 5, 6, 7):
        write_part(store, part(number), content)
    write_part(store, part(5, run=LATER), content)
    remove_failed(store, "step-6_ckpt", save_id(6))
    assert store.list(f"run-{RUN}") == ["step-3_ckpt", "step-6_ckpt", "step-7_ckpt"]
    assert store.list(f"run-{LATER}"), "a rank is ahead, in a later run"
    keep_newest(store, 1, RUN)
    assert store.list(f"run-{LATER}")
    check_parts(store, newest)


def test_dictionaries_in_the_same_folder_are_let_alone(store: DurableStore) -> None:
    marker = encode_record(MARKER_KIND, {"checkpoint_id": 1, "run": "18c0ffee00000000-0000000a", "parts": []})
    store.write(f"run-18c0ffee00000000-0000000a/step-1_ckpt/{MARKER}", [marker])
    newest = persist(store, 5)
    keep_newest(store, 1, RUN)
    assert len(store.list()) == 2
    assert list_persisted(store) == ([newest], [])


# ---- what is distrusted ---------------------------------------------------------------------------------------


def alter(store: DurableStore, version: PersistedVersion, **fields: object) -> None:
    store.write(f"{version.folder}/{MARKER}", [encode_record(MARKER_KIND, {**version.to_fields(), **fields})])


@pytest.mark.parametrize(
    "fields",
    [
        {"checkpoint_id": 4},
        {"checkpoint_id": True},
        {"checkpoint_id": "../3"},
        {"run": LATER},
        {"run": "../../etc"},
        {"managers": 3},
        {"parts": []},
        {"parts": ["../../etc/passwd:" + "0" * 32] * 2},
        {"parts": [f"{manifest_name(1, save_id(3))}:{'0' * 32}"] * 2},
        {"parts": [f"{manifest_name(0, save_id(3))}:{'0' * 31}/"] * 2},
        {"parts": [f"{manifest_name(0, '../../x' if False else save_id(3))}:{'0' * 32}", 7]},
        {"parts": "x" * 10},
    ],
)
def test_markers_are_distrusted(store: DurableStore, fields: dict[str, object]) -> None:
    older, newest = persist(store, 2), persist(store, 3)
    alter(store, newest, **fields)
    found, unusable = list_persisted(store)
    assert found == [older]
    assert [(each.folder, each.marked) for each in unusable] == [(newest.folder, True)]
    keep_newest(store, 3, LATER)
    assert store.list(newest.folder), "what may be of use is not removed as long as it is the newest"


def test_manifests_of_other_parts_are_refused(store: DurableStore) -> None:
    newest = persist(store, 3)
    alter(store, newest, parts=[f"{each.manifest}:{'0' * 32}" for each in newest.parts])
    (forged,) = list_persisted(store)[0]
    with pytest.raises(ManifestError):
        check_parts(store, forged)


def test_records_and_manifests_that_are_too_large_are_not_read(root: Path) -> None:
    store = DirectoryStore(root)
    newest = persist(store, 3)
    path = root / newest.folder / newest.parts[0].manifest
    os.truncate(path, 2**40)
    with pytest.raises(DamagedError, match="more than"):
        check_parts(store, newest)
    os.truncate(root / newest.folder / MARKER, MAX_RECORD_BYTES + 1)
    assert list_persisted(store)[0] == []


@pytest.mark.parametrize("what", ["object", "manifest", "marker", "version", "run"])
def test_links_are_not_followed(root: Path, what: str) -> None:
    store = DirectoryStore(root)
    newest = persist(store, 3)
    victim = root.parent / "victim"
    path = {
        "object": root / newest.folder / newest.parts[0].files[0],
        "manifest": root / newest.folder / newest.parts[0].manifest,
        "marker": root / newest.folder / MARKER,
        "version": root / newest.folder,
        "run": (root / newest.folder).parent,
    }[what]
    path.rename(victim)
    path.symlink_to(victim)
    before = sorted(victim.rglob("*"))
    if what in ("object", "manifest"):
        with pytest.raises(DamagedError, match="symbolic link"):
            check_parts(store, newest)
    else:
        assert list_persisted(store)[0] == []
    persist(store, 4, LATER)
    keep_newest(store, 1, LATER)
    assert sorted(victim.rglob("*")) == before
    assert victim.exists()
    if victim.is_dir():
        shutil.rmtree(victim)


def test_save_ids_of_no_training_job_are_refused(store: DurableStore) -> None:
    for wrong in ("", "plain", "../..-0", f"{RUN}/x-1", "17000000000000-0000000a-1"):
        with pytest.raises(InvalidArgumentError):
            folder_of("step-1_ckpt", wrong)


def test_markers_have_the_form_of_those_of_dictionaries(store: DurableStore) -> None:
    version = persist(store, 3)
    content = decode_record(MARKER_KIND, store.read(f"{version.folder}/{MARKER}", limit=10**6))
    assert set(content) == {"checkpoint_id", "run", "managers", "parts"}
    assert PersistedVersion.from_fields(content) == version
