"""Managers as child processes: the ends of the creator and of the fork server, and the folders that are left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictError
from ml_flashpoint.ddict.runtime import embedded
from ml_flashpoint.ddict.runtime import folder as runtime_folder
from tests.ddict.embedded_support import (
    DEADLINE_S,
    creator,
    server_pid,
    started,
    watching,
)
from tests.support.dictionaries import wait_until_ready
from tests.support.forked import wait_until
from tests.support.processes import suspend

pytestmark = pytest.mark.slow


def test_all_end_and_nothing_stays_when_the_creator_is_killed(tmpfs: Path) -> None:
    with creator(tmpfs) as one, watching(one.fork_server, *one.managers) as watch:
        assert one.base.is_dir()
        one.process.kill()
        watch.await_end()
        assert list(tmpfs.iterdir()) == []


def test_a_creator_that_just_ends_leaves_nothing(tmpfs: Path) -> None:
    with creator(tmpfs, how="exit") as one:
        assert one.process.wait(DEADLINE_S) == 0
        assert list(tmpfs.iterdir()) == []
        assert not [pid for pid in (one.fork_server, *one.managers) if psutil.pid_exists(pid)]


def test_forked_children_of_the_creator_do_not_keep_managers_alive(tmpfs: Path) -> None:
    with creator(tmpfs, how="fork") as one, watching(*one.children, kill=True) as children:
        with watching(one.fork_server, *one.managers) as watch:
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


def test_managers_live_on_when_the_fork_server_is_killed_and_come_back_by_another(tmpfs: Path) -> None:
    with started(tmpfs, 2) as runtime, watching(*runtime.pids().values()) as watch:
        before = server_pid()
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: server_pid() != before, "another fork server")
        assert len(watch.alive()) == 2
        killed = runtime.pids()[0]
        os.kill(killed, signal.SIGKILL)
        again = wait_until_ready(runtime, 0, other_than=killed)
        assert psutil.Process(again).ppid() == server_pid()
        runtime.stop()
        assert watch.alive() == []
    assert list(tmpfs.iterdir()) == []


def test_a_stopped_manager_without_a_fork_server_is_killed(tmpfs: Path) -> None:
    with started(tmpfs, 2) as runtime, watching(*runtime.pids().values()) as watch:
        suspend(runtime.pids()[0])
        os.kill(server_pid(), signal.SIGKILL)
        runtime.stop(timeout_s=0.3)
        assert watch.alive() == []
    assert list(tmpfs.iterdir()) == []


def test_a_fork_server_that_does_not_answer_is_in_nobodys_way(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tmpfs, 2, "deaf") as runtime, watching(*runtime.pids().values()) as watch:
        before = server_pid()
        suspend(before)
        runtime.stop(timeout_s=0.1)
        assert watch.alive() == []
        end = embedded.ForkServer.end

        def end_and_be_patient(server: embedded.ForkServer) -> None:
            monkeypatch.setattr(embedded, "_ANSWER_S", DEADLINE_S)
            end(server)

        monkeypatch.setattr(embedded, "_ANSWER_S", 0.5)
        monkeypatch.setattr(embedded.ForkServer, "end", end_and_be_patient)
        forked = embedded._fork()  # what it is told to do it does not, and so another one does
        assert psutil.Process(forked.pid).ppid() == server_pid() != before
        forked.reap()
        assert not psutil.pid_exists(forked.pid)
    assert list(tmpfs.iterdir()) == []


def test_managers_remove_the_folder_when_creator_and_fork_server_are_killed(tmpfs: Path) -> None:
    with creator(tmpfs, 3) as one, watching(*one.managers) as watch:
        suspend(one.fork_server)  # so that it does nothing between the two
        one.process.kill()
        one.process.wait(DEADLINE_S)
        os.kill(one.fork_server, signal.SIGKILL)
        watch.await_end()
        assert list(tmpfs.iterdir()) == []


def test_the_next_dictionary_sweeps_what_nobody_uses(tmpfs: Path) -> None:
    with creator(tmpfs, 2) as one, started(tmpfs, 1) as in_use:
        with watching(one.fork_server, *one.managers) as watch:
            for pid in (one.fork_server, one.process.pid, *one.managers):
                suspend(pid)
            for pid in (one.process.pid, one.fork_server, *one.managers):
                os.kill(pid, signal.SIGKILL)
            watch.await_end()
        one.process.wait(DEADLINE_S)
        assert one.base.is_dir()
        (one.base / "node-0" / "pool").mkdir(parents=True)
        (one.base / "node-0" / "pool" / "slot").write_bytes(bytes(1 << 16))
        stranger = tmpfs / "0123456789ab"
        (stranger / "not-a-dictionary").mkdir(parents=True)
        with started(tmpfs, 1) as another:
            assert {f.name for f in tmpfs.iterdir()} == {in_use.base.name, another.base.name, stranger.name}
        assert psutil.pid_exists(in_use.pids()[0])


def test_a_folder_that_is_swept_while_it_is_made_is_made_anew(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[list[Path]] = []
    hold = runtime_folder.FolderHold.__init__

    def hold_late(self: runtime_folder.FolderHold, folder: Path) -> None:
        if len(swept) < 2:
            if swept:
                (folder / runtime_folder.LOCK).unlink()  # as before it is made
            swept.append(runtime_folder.sweep(tmpfs))
        hold(self, folder)

    monkeypatch.setattr(runtime_folder.FolderHold, "__init__", hold_late)
    made = runtime_folder.make_folder(tmpfs)
    assert [len(each) for each in swept] == [1, 1]
    assert list(tmpfs.iterdir()) == [made.folder]
    assert runtime_folder.sweep(tmpfs) == []
    made.close()


@pytest.mark.parametrize("at", ["the rename", "the removal"])
def test_what_a_killed_remover_leaves_is_swept(tmpfs: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    hold = runtime_folder.make_folder(tmpfs)
    (hold.folder / "node-0").mkdir()
    (hold.folder / "node-0" / "slot").write_bytes(bytes(100))
    hold.close()
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        where, name = (os, "rename") if at == "the rename" else (runtime_folder.shutil, "rmtree")
        patch.setattr(where, name, lambda *_, **__: signal.raise_signal(signal.SIGINT))
        runtime_folder.remove_now(hold.folder)
    assert len(list(tmpfs.iterdir())) == 1
    runtime_folder.sweep(tmpfs)
    assert list(tmpfs.iterdir()) == []


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


def test_a_folder_that_was_made_anew_is_not_emptied(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = runtime_folder.make_folder(tmpfs)
    folder = hold.folder
    hold.close()
    another: list[runtime_folder.FolderHold] = []
    lock = fcntl.flock

    def lock_late(descriptor: int, how: int) -> None:
        # Between opening the lock and locking it, others may remove the folder, and make one by the same name.
        if not another:
            monkeypatch.setattr(runtime_folder.fcntl, "flock", lock)
            assert runtime_folder.remove_now(folder)
            another.append(runtime_folder.make_folder(tmpfs))
            os.rename(another[0].folder, folder)
            (folder / "value").write_text("theirs")
        lock(descriptor, how)

    monkeypatch.setattr(runtime_folder.fcntl, "flock", lock_late)
    assert not runtime_folder.remove_now(folder)

    assert (folder / "value").read_text() == "theirs"
    another[0].close()
    assert runtime_folder.remove_now(folder)


def test_many_sweep_at_once(tmpfs: Path) -> None:
    failures: list[BaseException] = []
    together = threading.Barrier(5)

    def make() -> None:
        together.wait(DEADLINE_S)
        try:
            for _ in range(50):
                hold = runtime_folder.make_folder(tmpfs)
                assert (hold.folder / runtime_folder.LOCK).exists()
                hold.close()
                runtime_folder.sweep(tmpfs)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    together.wait(DEADLINE_S)
    for thread in threads:
        thread.join(DEADLINE_S)

    assert failures == []
    runtime_folder.sweep(tmpfs)
    assert list(tmpfs.iterdir()) == []
