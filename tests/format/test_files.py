"""Files that others planted are not followed, not overwritten and not waited for. Files of another user play others."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ml_flashpoint.format.errors import FlashpointError, UnreadableError, UnsafePathError
from ml_flashpoint.format.files import check_folder, check_unplanted, check_way, close_in_children, make_tree
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.container import BaseContainer, JobLock, Owner
from ml_flashpoint.memory.pool import Pool
from tests.support.descriptors import NoDescriptors
from tests.workers.cli_bases import Part, commit

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


def opened(base: Path) -> BaseContainer:
    """A base container that a job has opened, and closed again."""
    JobLock(base, "a job", 0.0).release()
    return BaseContainer(base)


def _untouched(victim: Path) -> bool:
    return len(os.listdir(victim)) == 4 and all(each.read_bytes() == b"precious" * 512 for each in victim.iterdir())


def _is_refused(base: Path, match: str) -> None:
    with pytest.raises(UnsafePathError, match=match) as caught:
        opened(base)
    assert caught.value.hint


def _plant(link: Path, target: Path) -> None:
    link.symlink_to(target)
    os.lchown(link, OTHER, OTHER)


@as_root
def test_a_link_of_somebody_else_is_refused(tmpfs: Path, victim: Path) -> None:
    _plant(tmpfs / "theirs", victim)
    (tmpfs / "ours").symlink_to("theirs/../theirs")
    for base in (tmpfs / "theirs", tmpfs / "theirs" / "job", tmpfs / "ours" / "job"):
        _is_refused(base, "belongs to user 54321")
    assert _untouched(victim)


@as_root
def test_a_base_of_somebody_else_is_refused(tmpfs: Path) -> None:
    base = tmpfs / "job"
    base.mkdir()
    os.chown(base, OTHER, OTHER)
    for mode in (0o700, 0o755, 0o777):
        base.chmod(mode)
        _is_refused(base, "belongs to user 54321")
        _is_refused(base / "below", "belongs to user 54321")
    assert not list(base.iterdir())


def test_what_others_may_write_to_is_refused(tmpfs: Path) -> None:
    base = tmpfs / "job"
    for mode in (0o777, 0o1777, 0o770, 0o722):
        base.mkdir(exist_ok=True)
        base.chmod(mode)
        _is_refused(base, f"{mode:04o}")
    base.chmod(0o755)
    opened(base)
    for path in (base / ".flashpoint", base / ".flashpoint" / "slots"):
        path.chmod(0o755)
    opened(base)
    assert stat.S_IMODE((base / ".flashpoint" / "slots").lstat().st_mode) == 0o700, "it is private again"


def test_a_folder_on_the_way_that_everybody_may_write_to_must_be_sticky(tmpfs: Path) -> None:
    parent = tmpfs / "parent"
    parent.mkdir()
    parent.chmod(0o777)
    _is_refused(parent / "job", "everybody")
    assert not list(parent.iterdir())
    parent.chmod(0o1777)
    opened(parent / "job")


def test_a_link_of_ones_own_is_followed(tmpfs: Path) -> None:
    (tmpfs / "real").mkdir(mode=0o700)
    (tmpfs / "link").symlink_to("real")
    (tmpfs / "absolute").symlink_to(tmpfs / "link")
    opened(tmpfs / "absolute")
    opened(tmpfs / "link" / "job")
    assert sorted(os.listdir(tmpfs / "real")) == [".flashpoint", "job"]
    assert check_way(tmpfs / "absolute" / "x" / "y") == tmpfs.resolve() / "real" / "x" / "y"
    (tmpfs / "a").symlink_to("b")
    (tmpfs / "b").symlink_to("a")
    with pytest.raises(UnsafePathError, match="too many"):
        opened(tmpfs / "a" / "job")
    (tmpfs / "file").touch()
    with pytest.raises(FlashpointError) as caught:
        opened(tmpfs / "file" / "job")
    assert caught.value.hint


@pytest.mark.parametrize("name", ["", "slots", "runs", "slots/00001-00000/0", "job", "anything"])
def test_what_is_planted_in_the_private_folder_is_not_followed(tmpfs: Path, victim: Path, name: str) -> None:
    for number, kind in enumerate(("link", "fifo")):
        base = tmpfs / f"job-{number}"
        path = base / ".flashpoint" / name
        path.parent.mkdir(parents=True)
        if kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(victim / "precious" if name in ("slots/00001-00000/0", "job", "anything") else victim)
        try:
            container = opened(base)
        except UnsafePathError:
            assert name not in ("slots/00001-00000/0", "anything")
        else:
            assert name in ("slots/00001-00000/0", "anything")
            Pool(container, Owner(1, 0), keep=1, owners=[Owner(1, 0)]).close()
            commit(container, Part(0, 1, world_size=1, run=1))
    assert _untouched(victim)


@as_root
def test_a_slot_of_somebody_else_is_not_taken(tmpfs: Path) -> None:
    owner = Owner(1, 0)
    planted = opened(tmpfs / "job").slot_folder(owner) / "0"
    planted.write_bytes(bytes(1 << 16))
    os.chown(planted, OTHER, OTHER)
    pool = Pool(opened(tmpfs / "job"), owner, keep=1, owners=[owner])
    assert pool.slots == ()
    pool.close()


def test_a_version_that_is_a_link_is_not_written_to(tmpfs: Path, victim: Path) -> None:
    container = opened(tmpfs / "job")
    (tmpfs / "job" / "step-1_ckpt").symlink_to(victim)
    with pytest.raises(UnsafePathError):
        container.write_sidecars(SaveId(1, 1), {"x": b""})
    assert _untouched(victim)


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
    assert _as_other(lambda: opened(base)) == 0
    roots = tmpfs / "of-root"
    roots.mkdir()
    roots.chmod(0o777)
    assert _as_other(lambda: opened(roots)) == 3
    assert _as_other(lambda: opened(roots / "job")) == 3
    roots.chmod(0o1777)
    assert _as_other(lambda: opened(roots / "job")) == 0


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
            check_folder(tmpfs)
        with pytest.raises(UnreadableError, match="Too many open files"):
            make_tree(tmpfs, tmpfs)
    assert caught.value.errno == errno.EMFILE
    check_folder(tmpfs, mend=True)


def test_forked_children_hold_neither_pipes_nor_locks_of_their_parent(tmp_path: Path) -> None:
    theirs, ours = multiprocessing.Pipe()
    lock = open(tmp_path / "lock", "wb")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    for opened in (ours, lock):
        close_in_children(opened)
    runs = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=lambda: (runs.set(), threading.Event().wait()))
    child.start()
    try:
        assert runs.wait(20)
        ours.close()
        lock.close()
        assert theirs.poll(0), "the child has it open"
        with theirs, pytest.raises(EOFError):
            theirs.recv()
        with open(tmp_path / "lock", "rb") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.kill()
        child.join()
