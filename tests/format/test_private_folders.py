"""What others planted is not followed, not overwritten and not waited for. Others are played by their files' owner."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.checkpoint_object_manager import rank_store, version_files
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.version_files import write_sidecars
from ml_flashpoint.format.errors import FlashpointError, SaveError, UnreadableError, UnsafePathError
from ml_flashpoint.format.private_folders import check_unplanted, check_way, make_base, open_folder
from tests.checkpoint_object_manager.store_support import commit
from tests.support.descriptors import NoDescriptors

OTHER = 54321
pytestmark = pytest.mark.stores_any_bytes
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def victim(tmpfs: Path) -> Path:
    """A folder of files that nobody may touch."""
    folder = tmpfs / "victim"
    folder.mkdir(mode=0o700)
    for name in ("precious", "arena-0", "arena-7", "lock"):
        (folder / name).write_bytes(b"precious" * 512)
    return folder


def _untouched(victim: Path) -> bool:
    return len(os.listdir(victim)) == 4 and all(each.read_bytes() == b"precious" * 512 for each in victim.iterdir())


def _is_refused(base: Path, match: str) -> None:
    for attempt in (
        lambda: RankStore(base, 0, lock_deadline_s=0).close(),
        lambda: write_sidecars(base, "step-1_ckpt", {"x": b""}),
    ):
        with pytest.raises(UnsafePathError, match=match) as caught:
            attempt()
        assert caught.value.hint


def _plant(link: Path, target: Path) -> None:
    link.symlink_to(target)
    os.lchown(link, OTHER, OTHER)


@as_root
def test_a_link_of_somebody_else_is_refused(tmpfs: Path, victim: Path) -> None:
    _plant(tmpfs / "jobs", victim)
    _is_refused(tmpfs / "jobs", "belongs to user 54321")
    _is_refused(tmpfs / "jobs" / "job", "belongs to user 54321")
    assert _untouched(victim)


@as_root
def test_a_link_of_somebody_else_behind_one_of_ours_is_refused(tmpfs: Path, victim: Path) -> None:
    _plant(tmpfs / "theirs", victim)
    (tmpfs / "ours").symlink_to("theirs/../theirs")
    _is_refused(tmpfs / "ours" / "job", "belongs to user 54321")
    assert _untouched(victim)


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_base_of_somebody_else_is_refused(tmpfs: Path, mode: int) -> None:
    base = tmpfs / "job"
    base.mkdir()
    base.chmod(mode)
    os.chown(base, OTHER, OTHER)
    _is_refused(base, "belongs to user 54321")
    _is_refused(base / "below", "belongs to user 54321")
    assert not list(base.iterdir())


def test_a_base_that_others_may_write_to_is_refused(tmpfs: Path) -> None:
    base = tmpfs / "job"
    for mode in (0o777, 0o1777, 0o770, 0o722):
        base.mkdir(exist_ok=True)
        base.chmod(mode)
        _is_refused(base, f"{mode:04o}")
    base.chmod(0o755)
    RankStore(base, 0).close()


def test_a_folder_on_the_way_that_everybody_may_write_to_must_be_sticky(tmpfs: Path) -> None:
    parent = tmpfs / "parent"
    parent.mkdir()
    parent.chmod(0o777)
    _is_refused(parent / "job", "everybody")
    assert not list(parent.iterdir())
    parent.chmod(0o1777)
    RankStore(parent / "job", 0).close()


def test_a_link_of_ones_own_is_followed(tmpfs: Path) -> None:
    (tmpfs / "real").mkdir(mode=0o700)
    (tmpfs / "link").symlink_to("real")
    (tmpfs / "absolute").symlink_to(tmpfs / "link")
    RankStore(tmpfs / "absolute", 0).close()
    RankStore(tmpfs / "link" / "job", 0).close()
    assert sorted(os.listdir(tmpfs / "real")) == [".flashpoint", "job"]
    assert check_way(tmpfs / "absolute" / "x" / "y") == tmpfs.resolve() / "real" / "x" / "y"


def test_links_in_a_circle_end(tmpfs: Path) -> None:
    (tmpfs / "a").symlink_to("b")
    (tmpfs / "b").symlink_to("a")
    _is_refused_way = pytest.raises(UnsafePathError, match="too many")
    with _is_refused_way:
        make_base(tmpfs / "a" / "job")


def test_a_base_that_cannot_be_made_says_what_to_do(tmpfs: Path) -> None:
    (tmpfs / "file").touch()
    with pytest.raises(FlashpointError) as caught:
        RankStore(tmpfs / "file" / "job", 0)
    assert caught.value.hint


@pytest.mark.parametrize("name", [".flashpoint", ".flashpoint/rank-00000"])
def test_private_folders_are_no_links(tmpfs: Path, victim: Path, name: str) -> None:
    link = tmpfs / "job" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    with pytest.raises(UnsafePathError):
        RankStore(tmpfs / "job", 0, lock_deadline_s=0)
    assert _untouched(victim)


@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("name", ["arena-0", "lock", "anything"])
def test_files_planted_in_a_private_folder_are_not_written(tmpfs: Path, victim: Path, name: str, fifo: bool) -> None:
    folder = tmpfs / "job" / ".flashpoint" / "rank-00000"
    folder.mkdir(parents=True)
    if fifo:
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(victim / "precious")
    try:
        store = RankStore(tmpfs / "job", 0, lock_deadline_s=0)
    except UnsafePathError:
        assert name == "lock"
    else:
        commit(store, 1, "a1")
        store.close()
    assert _untouched(victim)


def test_a_base_that_is_exchanged_after_its_check_has_nothing_deleted_elsewhere(
    tmpfs: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As who shares a group with this user can, in a folder that the group may write to."""
    (tmpfs / "trap" / ".flashpoint").mkdir(parents=True)
    (tmpfs / "trap" / ".flashpoint" / "rank-00000").symlink_to(victim)

    def exchange(_: Path) -> None:
        (tmpfs / "job").rename(tmpfs / "away")
        (tmpfs / "job").symlink_to(tmpfs / "trap")

    monkeypatch.setattr(rank_store, "warn_unless_memory", exchange)
    with pytest.raises(UnsafePathError):
        RankStore(tmpfs / "job", 0)
    assert _untouched(victim)


def test_companions_go_into_the_folder_that_was_checked(
    tmpfs: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = version_files._replace

    def exchange_and_replace(*args: Any) -> None:
        folder = tmpfs / "job" / "step-1_ckpt"
        if not folder.is_symlink():
            folder.rename(tmpfs / "away")
            folder.symlink_to(victim)
        real(*args)

    monkeypatch.setattr(version_files, "_replace", exchange_and_replace)
    write_sidecars(tmpfs / "job", "step-1_ckpt", {"precious": b"not any more"})
    assert _untouched(victim)
    assert (tmpfs / "away" / "precious").read_bytes() == b"not any more"


def test_a_fifo_in_the_place_of_a_companion_is_replaced(tmpfs: Path) -> None:
    (tmpfs / "job" / "step-1_ckpt").mkdir(parents=True, mode=0o700)
    os.mkfifo(tmpfs / "job" / "step-1_ckpt" / "config")
    os.chmod(tmpfs / "job", 0o700)
    write_sidecars(tmpfs / "job", "step-1_ckpt", {"config": b"x"})
    assert (tmpfs / "job" / "step-1_ckpt" / "config").read_bytes() == b"x"


@as_root
def test_an_arena_of_somebody_else_is_not_taken(tmpfs: Path) -> None:
    RankStore(tmpfs / "job", 0).close()
    planted = tmpfs / "job" / ".flashpoint" / "rank-00000" / "arena-0"
    planted.write_bytes(bytes(1 << 16))
    os.chown(planted, OTHER, OTHER)
    store = RankStore(tmpfs / "job", 0)
    assert store.arenas.resident_bytes() == (0, 0)
    store.close()


def test_a_version_that_is_a_link_is_not_written_to(tmpfs: Path, victim: Path) -> None:
    store = RankStore(tmpfs / "job", 0)
    (tmpfs / "job" / "step-1_ckpt").symlink_to(victim)
    with pytest.raises(SaveError, match="cannot be used as a folder"):
        commit(store, 1, "a1")
    with pytest.raises(UnsafePathError):
        write_sidecars(tmpfs / "job", "step-1_ckpt", {"x": b""})
    store.close()
    assert _untouched(victim)


def test_all_that_is_made_is_for_this_user_alone(tmpfs: Path) -> None:
    before = os.umask(0)
    try:
        store = RankStore(tmpfs / "jobs" / "job", 0)
        commit(store, 1, "a1")
        write_sidecars(store.base, "step-1_ckpt", {"x": b""})
        store.close()
    finally:
        os.umask(before)
    for path in (tmpfs / "jobs", *(tmpfs / "jobs").rglob("*")):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_folders_of_an_earlier_version_become_private(tmpfs: Path) -> None:
    RankStore(tmpfs / "job", 0).close()
    for path in (tmpfs / "job" / ".flashpoint", tmpfs / "job" / ".flashpoint" / "rank-00000"):
        path.chmod(0o755)
    RankStore(tmpfs / "job", 0).close()
    assert stat.S_IMODE((tmpfs / "job" / ".flashpoint" / "rank-00000").lstat().st_mode) == 0o700


def _as_other(work: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            work()
        except UnsafePathError:
            os._exit(3)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@as_root
def test_a_folder_that_root_made_for_a_user_is_the_users(tmpfs: Path) -> None:
    tmpfs.chmod(0o755)
    base = tmpfs / "job"
    base.mkdir(mode=0o700)
    os.chown(base, OTHER, OTHER)
    assert _as_other(lambda: RankStore(base, 0).close()) == 0
    roots = tmpfs / "of-root"
    roots.mkdir()
    roots.chmod(0o777)
    assert _as_other(lambda: RankStore(roots, 0).close()) == 3
    assert _as_other(lambda: RankStore(roots / "job", 0).close()) == 3
    roots.chmod(0o1777)
    assert _as_other(lambda: RankStore(roots / "job", 0).close()) == 0


@as_root
def test_storage_of_others_is_used_but_nothing_that_they_planted(tmpfs: Path, victim: Path) -> None:
    project = tmpfs / "project"
    project.mkdir()
    os.chown(project, OTHER, OTHER)
    check_unplanted(project / "mine")
    shared = tmpfs / "shared"
    shared.mkdir()
    for mode in (0o777, 0o1777):
        shared.chmod(mode)
        check_unplanted(shared / "mine")
    (shared / "theirs").mkdir()
    os.chown(shared / "theirs", OTHER, OTHER)
    _plant(shared / "link", victim)
    os.mkfifo(shared / "pipe")
    os.chown(shared / "pipe", OTHER, OTHER)
    for name in ("theirs", "link", "pipe"):
        with pytest.raises(UnsafePathError, match="user 54321 has put it there") as caught:
            check_unplanted(shared / name / "below")
        assert caught.value.hint
    os.chown(shared, OTHER, OTHER)  # whose folder it is may do anything there
    check_unplanted(shared / "link" / "below")


def test_want_of_descriptors_says_nothing_about_a_folder(tmpfs: Path) -> None:
    with NoDescriptors():
        with pytest.raises(OSError, match="Too many open files") as caught:
            open_folder(tmpfs)
        with pytest.raises(UnreadableError, match="Too many open files"):
            make_base(tmpfs)
    assert caught.value.errno == errno.EMFILE
    os.close(open_folder(tmpfs))
