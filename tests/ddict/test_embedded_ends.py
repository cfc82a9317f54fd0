"""Managers as child processes: the end of the creator, and the folders that are left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictError
from ml_flashpoint.ddict.runtime import folder as runtime_folder
from tests.ddict.embedded_support import (
    DEADLINE_S,
    creator,
    started,
    watching,
)
from tests.support.dictionaries import wait_until_ready
from tests.support.processes import suspend

pytestmark = pytest.mark.slow


def test_all_end_and_nothing_stays_when_the_creator_is_killed(tmpfs: Path) -> None:
    with creator(tmpfs) as one, watching(*one.managers) as watch:
        assert one.base.is_dir()
        one.process.kill()
        watch.await_end()
        assert list(tmpfs.iterdir()) == []


def test_a_creator_that_just_ends_leaves_nothing(tmpfs: Path) -> None:
    with creator(tmpfs, how="exit") as one:
        assert one.process.wait(DEADLINE_S) == 0
        assert list(tmpfs.iterdir()) == []
        assert not [pid for pid in one.managers if psutil.pid_exists(pid)]


def test_forked_children_of_the_creator_do_not_keep_managers_alive(tmpfs: Path) -> None:
    with creator(tmpfs, how="fork") as one, watching(*one.children, kill=True) as children:
        with watching(*one.managers) as watch:
            one.process.kill()
            watch.await_end()
        assert sorted(children.alive()) == sorted(one.children)
        assert list(tmpfs.iterdir()) == []


def test_a_forked_child_cannot_stop_its_parents_managers(tmpfs: Path) -> None:
    with started(tmpfs, 1) as runtime, watching(*runtime.pids().values()) as watch:
        child = os.fork()
        if child == 0:
            runtime.stop()
            refused = False
            try:
                runtime.start([])
            except DDictDestroyedError:
                refused = True
            os._exit(0 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(watch.alive()) == 1
        assert runtime.base.is_dir()
        killed = runtime.pids()[0]
        os.kill(killed, signal.SIGKILL)
        assert wait_until_ready(runtime, 0, other_than=killed)


def test_a_manager_that_is_stopped_is_killed_at_the_end(tmpfs: Path) -> None:
    with started(tmpfs, 2) as runtime, watching(*runtime.pids().values()) as watch:
        suspend(runtime.pids()[0])
        runtime.stop(timeout_s=0.3)
        assert watch.alive() == []
    assert list(tmpfs.iterdir()) == []


def test_the_next_dictionary_sweeps_what_nobody_uses(tmpfs: Path) -> None:
    with creator(tmpfs, 2) as one, started(tmpfs, 1) as in_use:
        with watching(*one.managers) as watch:
            for pid in (one.process.pid, *one.managers):
                suspend(pid)
            for pid in (one.process.pid, *one.managers):
                os.kill(pid, signal.SIGKILL)
            watch.await_end()
        one.process.wait(DEADLINE_S)
        assert one.base.is_dir()
        (one.base / "node-0" / "pool").mkdir(parents=True)
        (one.base / "node-0" / "pool" / "arena").write_bytes(bytes(1 << 16))
        stranger = tmpfs / "0123456789ab"
        (stranger / "not-a-dictionary").mkdir(parents=True)
        with started(tmpfs, 1) as another:
            assert {f.name for f in tmpfs.iterdir()} == {in_use.base.name, another.base.name, stranger.name}
        assert psutil.pid_exists(in_use.pids()[0])


def test_a_folder_that_is_being_made_is_not_swept(tmpfs: Path) -> None:
    unfinished = tmpfs / ".new-0123456789ab"
    unfinished.mkdir()
    (unfinished / "owner").touch()
    assert runtime_folder.sweep(tmpfs) == []
    os.utime(unfinished, (0, 0))
    assert runtime_folder.sweep(tmpfs) == [unfinished]


def test_the_folder_of_dictionaries_may_be_chosen(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime_folder.BASE_VARIABLE, str(tmpfs / "a" / "b"))
    assert runtime_folder.runtime_root() == tmpfs / "a" / "b"
    assert (tmpfs / "a" / "b").is_dir()


def test_a_folder_of_dictionaries_that_others_may_enter_is_refused(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(runtime_folder.BASE_VARIABLE, raising=False)
    monkeypatch.setattr(runtime_folder, "_SHM", tmpfs)
    root = runtime_folder.runtime_root()
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o755)
    with pytest.raises(DDictError, match="private"):
        runtime_folder.runtime_root()
    root.rmdir()
    (tmpfs / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmpfs / "elsewhere")
    with pytest.raises(DDictError):
        runtime_folder.runtime_root()
    tmpfs.chmod(0o777)  # anybody may replace what is there
    with pytest.raises(DDictError) as caught:
        runtime_folder.runtime_root()
    assert runtime_folder.BASE_VARIABLE in str(caught.value)
