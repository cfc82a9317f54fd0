"""A base container is a store of versions, private, and clean after crashes."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    InvalidNameError,
    JobInUseError,
    ManifestError,
    ObjectNotFoundError,
    SaveError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.container import BaseContainer, JobLock, Owner, locked_out
from ml_flashpoint.memory.lineage import read_records
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.memory.slot import PAGE, Slot
from tests.memory.support import commit, fill, fill_up, layout_of, slot_files, taken, value_in, value_of
from tests.support.forked import Child, Report

SAVE = SaveId(7, 40)
SIZE = layout_of().size


def pool_of(container: BaseContainer, rank: int = 0) -> Pool:
    return Pool(container, Owner(4, rank), keep=1, owners=[Owner(4, each) for each in range(4)])


def with_part(base: Path, save: SaveId = SAVE, rank: int = 0) -> BaseContainer:
    container = BaseContainer(base)
    pool = pool_of(container, rank)
    slot = taken(pool, SIZE, SlotRequest(save, ()))
    commit(pool, slot, save)
    pool.close()
    return container


def test_everything_is_private_and_where_it_is_said_to_be(tmpfs: Path) -> None:
    before = os.umask(0)
    try:
        with_part(tmpfs / "job")
    finally:
        os.umask(before)
    found = {str(path.relative_to(tmpfs / "job")): stat.S_IMODE(path.stat().st_mode) for path in tmpfs.rglob("*")}
    assert found.pop(".") == 0o700
    assert found == {
        ".flashpoint": 0o700,
        ".flashpoint/runs": 0o700,
        ".flashpoint/slots": 0o700,
        ".flashpoint/slots/00004-00000": 0o700,
        ".flashpoint/slots/00004-00000/0": 0o600,
        "step-40_ckpt": 0o700,
        "step-40_ckpt/rank-00000-00000007.manifest": 0o600,
        "step-40_ckpt/rank-00000-00000007.safetensors": 0o600,
    }


@pytest.mark.damages_on_purpose  # files that are no parts
def test_versions_manifests_and_byte_ranges_are_read(tmpfs: Path) -> None:
    container = with_part(tmpfs)
    with_part(tmpfs, SAVE, 2)
    with_part(tmpfs, SaveId(8, 40), 0)
    (tmpfs / "step-50_ckpt").symlink_to(tmpfs / "step-40_ckpt")
    (tmpfs / "step-40_ckpt" / "rank-00000-abc.manifest").write_bytes(b"of an earlier format")
    assert container.list_versions() == {(7, 40): {0, 2}, (8, 40): {0}}
    manifest = container.read_manifest(SAVE, 2)
    assert (manifest.rank, manifest.save.step, manifest.save) == (2, 40, SAVE)
    assert value_in(container, SAVE, 2) == value_of(SAVE, 2)
    with pytest.raises(ObjectNotFoundError):
        container.read_manifest(SAVE, 1)
    with pytest.raises(ObjectNotFoundError), container.open_part(SaveId(7, 41), 0):
        pass


def test_who_only_reads_makes_nothing(tmpfs: Path) -> None:
    with pytest.raises(ObjectNotFoundError):
        BaseContainer(tmpfs / "job", make=False)
    (tmpfs / "job/.flashpoint").mkdir(parents=True)
    (tmpfs / "job").chmod(0o700)
    container = BaseContainer(tmpfs / "job", make=False)
    assert (container.list_versions(), container.slot_paths(), read_records(container)) == ({}, [], [])
    assert os.listdir(tmpfs / "job/.flashpoint") == []


def test_a_part_is_reclaimed_only_while_nobody_reads_it_also_where_a_child_was_forked_meanwhile(tmpfs: Path) -> None:
    container = with_part(tmpfs)
    pool = pool_of(container)
    told, tell = os.pipe()
    with container.open_part(SAVE, 0):
        assert not container.reclaim(pool.slots[0], 0)
        assert container.list_versions() == {SAVE: {0}}
        child = os.fork()
        if child == 0:
            os.read(told, 1)
            os._exit(0)
    try:
        assert container.reclaim(pool.slots[0], 0)
        assert container.list_versions() == {}
    finally:
        os.write(tell, b"x")
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
    pool.close()


def test_a_slot_that_stays_locked_is_waited_for_to_a_deadline(tmpfs: Path) -> None:
    container = with_part(tmpfs)
    pool = pool_of(container)
    assert pool.slots[0].lock()  # by a process that is stopped then
    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda seconds: None)
    with mock.patch("ml_flashpoint.memory.container.time", clock), pytest.raises(UnreadableError, match="be locked"):
        container.open_part(SAVE, 0).__enter__()
    pool.slots[0].unlock()
    assert value_in(container, SAVE) == value_of(SAVE)
    pool.close()


def test_the_manifest_of_a_part_goes_first(tmpfs: Path) -> None:
    container, unlink = with_part(tmpfs), Path.unlink

    def unlink_one(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        raise OSError("killed")

    with mock.patch.object(Path, "unlink", unlink_one), pytest.raises(OSError, match="killed"):
        container.remove_part(SAVE, 0)
    assert container.list_versions() == {}


def test_sidecars_come_and_go_with_the_parts(tmpfs: Path) -> None:
    container = with_part(tmpfs)
    with_part(tmpfs, SaveId(8, 40), 1)
    container.write_sidecars(SAVE, {"metadata.json": b"{}", "common.pt": b"1"})
    container.write_sidecars(SAVE, {"metadata.json": b"[]", "common.pt": b"1"})
    assert (tmpfs / "step-40_ckpt/metadata.json").read_bytes() == b"[]"
    for name in (".hidden", "a/b", "rank-00000-00000007.manifest"):
        with pytest.raises(InvalidNameError):
            container.write_sidecars(SAVE, {name: b""})
    container.remove(SAVE)
    assert (tmpfs / "step-40_ckpt/common.pt").exists(), "another save of the step is there"
    container.remove(SaveId(8, 40))
    assert not (tmpfs / "step-40_ckpt").exists()
    container.write_sidecars(SAVE, {"metadata.json": b"{}"})
    container.clean()
    assert not (tmpfs / "step-40_ckpt").exists(), "without a part"


def test_sidecars_stay_as_long_as_a_part_and_go_where_others_were_expected(tmpfs: Path) -> None:
    container = with_part(tmpfs)
    container.write_sidecars(SAVE, {"metadata.json": b"{}", "extra.bin": b"1"})
    container.expect_sidecars(SAVE, ["metadata.json", "common.pt"])
    again = Slot.make(container.slot_folder(Owner(4, 0)) / "9", SIZE, prepare=False)
    container.commit(again, fill(again, SAVE))
    assert value_in(container, SAVE) == value_of(SAVE)
    assert (tmpfs / "step-40_ckpt/metadata.json").read_bytes() == b"{}", "the only part is committed again"
    container.remove(SAVE)
    assert not (tmpfs / "step-40_ckpt").exists()


@pytest.mark.damages_on_purpose
def test_damaged_parts_are_refused(tmpfs: Path) -> None:
    container = with_part(tmpfs)
    path = next((tmpfs / "step-40_ckpt").glob("*.safetensors"))
    os.truncate(path, PAGE)
    with pytest.raises(DamagedError), container.open_part(SAVE, 0):
        pass
    next((tmpfs / "step-40_ckpt").glob("*.manifest")).write_bytes(b'{"kind":"mlflashpoint-manifest-9"}')
    with pytest.raises(ManifestError):
        container.read_manifest(SAVE, 0)


def test_a_full_tmpfs_fails_the_commit_and_leaves_no_part(small_tmpfs: Path) -> None:
    container = BaseContainer(small_tmpfs)
    pool = pool_of(container)
    slot = taken(pool, SIZE, SlotRequest(SAVE, ()))
    others = fill_up(small_tmpfs)
    with pytest.raises(CapacityError):
        commit(pool, slot, SAVE)
    assert container.list_versions() == {}
    assert not (small_tmpfs / SAVE.version).exists()
    others.unlink()
    slot = taken(pool, SIZE, SlotRequest(SAVE, ()))
    commit(pool, slot, SAVE)
    pool.close()


def test_planted_links_and_folders_are_refused(tmpfs: Path) -> None:
    elsewhere = tmpfs / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    container = BaseContainer(tmpfs / "job")
    pool = pool_of(container)
    slot = taken(pool, SIZE, SlotRequest(SAVE, ()))
    (tmpfs / "job" / SAVE.version).symlink_to(elsewhere)
    with pytest.raises(SaveError, match="cannot be used as a folder"):
        commit(pool, slot, SAVE)
    assert os.listdir(elsewhere) == []
    pool.close()
    (tmpfs / "linked").symlink_to(elsewhere)
    BaseContainer(tmpfs / "linked")  # a link of this user's own leads where it says
    (tmpfs / "open").mkdir()
    (tmpfs / "open").chmod(0o777)
    with pytest.raises(UnsafePathError):
        BaseContainer(tmpfs / "open")
    (tmpfs / "bad").mkdir(mode=0o700)
    (tmpfs / "bad" / ".flashpoint").symlink_to(elsewhere)
    with pytest.raises(UnsafePathError):
        BaseContainer(tmpfs / "bad")


def test_what_a_crash_has_cut_short_is_cleaned_up(tmpfs: Path) -> None:
    container = with_part(tmpfs)
    folder, slots = tmpfs / SAVE.version, tmpfs / ".flashpoint/slots/00004-00000"
    Slot.make(slots / "3", 16 * PAGE).close()
    os.link(slots / "3", folder / "rank-00001-00000007.safetensors")  # killed before the manifest
    (folder / ".rank-00001-00000007.manifest.77-abc.tmp").write_bytes(b"half")
    (slots / "4.tmp").write_bytes(b"half")
    status = tmpfs / ".flashpoint/status"
    status.mkdir()
    for name in ("0", ".0123456789abcdef.tmp"):
        (status / name).write_bytes(b"{}")
    (tmpfs / "step-41_ckpt").mkdir()
    (tmpfs / "step-42_ckpt").mkdir()
    (tmpfs / "step-42_ckpt" / "mine.txt").write_bytes(b"a user's")
    assert list(container.committed().values()) == [SAVE]
    container.clean()
    assert sorted(os.listdir(folder)) == ["rank-00000-00000007.manifest", "rank-00000-00000007.safetensors"]
    assert sorted(os.listdir(slots)) == ["0", "3"]
    assert os.listdir(status) == ["0"]
    assert not (tmpfs / "step-41_ckpt").exists()
    assert (tmpfs / "step-42_ckpt" / "mine.txt").exists()
    assert container.list_versions() == {SAVE: {0}}
    assert [slot.save for slot in pool_of(container).slots] == [None, SAVE]


def test_versions_and_all_are_removed(tmpfs: Path) -> None:
    container = with_part(tmpfs / "job")
    with_part(tmpfs / "job", SAVE, 1)
    with_part(tmpfs / "job", SaveId(7, 41), 1)
    with locked_out(tmpfs / "job"):
        container.remove(SAVE)
        assert container.list_versions() == {(7, 41): {1}}
        assert slot_files(tmpfs / "job") == ["00004-00001/1"]
        (tmpfs / "job" / "mine.txt").write_bytes(b"a user's")
        container.remove_all()
        assert os.listdir(tmpfs / "job") == ["mine.txt"]
        (tmpfs / "job" / "mine.txt").unlink()
        BaseContainer(tmpfs / "job").remove_all()
    assert not (tmpfs / "job").exists()


def test_a_job_whose_base_container_was_removed_commits_into_no_other(tmpfs: Path) -> None:
    base = tmpfs / "job"
    lock = JobLock(base, "job-1", 0)
    container = BaseContainer(base, lock)
    pool = pool_of(container)
    slot = taken(pool, SIZE, SlotRequest(SAVE, ()))
    base.rename(tmpfs / "old")
    with pytest.raises(JobInUseError, match="removed while the job had it open"):
        commit(pool, slot, SAVE)
    with Child(open_base, str(base)) as other:
        other.next_report("open")
        assert pool.slots == (), "its file is gone"
        with pytest.raises(JobInUseError):
            lock.check()
        assert BaseContainer(base).list_versions() == {}
        other.say("end")
    pool.close()
    lock.release()


def open_base(report: Report, base: str) -> None:
    lock = JobLock(Path(base), "job-2", 0)
    report("open")
    report.listen()
    lock.release()
