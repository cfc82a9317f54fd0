"""Managers as processes of their creator: start, restart, and the end of everything, however it comes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ml_flashpoint.ddict import DDict, DDictTimeoutError, PosixCheckpointPersister
from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictError
from ml_flashpoint.ddict.runtime import embedded
from ml_flashpoint.ddict.runtime import folder as runtime_folder
from ml_flashpoint.ddict.runtime.embedded import MOST_DEATHS
from ml_flashpoint.format.errors import UnsafePathError
from tests.support import dictionaries
from tests.support.dictionaries import DEADLINE_S, await_that, is_running, runtime_of, stopped, wait_until_ready
from tests.support.processes import suspend
from tests.workers import ddict_handles

pytestmark = pytest.mark.slow

MEMORY = 32 << 20


@pytest.fixture(autouse=True)
def root(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where dictionaries make their folders."""
    monkeypatch.setenv(runtime_folder.BASE_VARIABLE, str(tmpfs))
    return tmpfs


@contextlib.contextmanager
def created(make: Callable[[Any], None]) -> Iterator[tuple[multiprocessing.Process, list[Any]]]:
    """A process that has made a dictionary, and what it says: the folder, the managers and more."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process: Any = context.Process(target=make, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert ours.poll(2 * DEADLINE_S)
        yield process, ours.recv()
    finally:
        process.kill()
        process.join(DEADLINE_S)


def descriptors(process: int | str) -> str:
    """The open files of a process; of "self": what a program inherits from this one."""
    program = ["ls", "-l", f"/proc/{process}/fd"]
    return subprocess.run(program, stdout=subprocess.PIPE, text=True, close_fds=process != "self").stdout


def test_managers_have_what_the_creator_has_but_no_secrets_on_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_TEST_PROBE", "as of the start")
    before = set(psutil.Process().children())
    with DDict(3, 1, MEMORY) as d:
        pids, secret = runtime_of(d).pids(), d._configuration.secret.hex()
        assert sorted(pids) == [0, 1, 2]
        for pid in pids.values():
            process = psutil.Process(pid)
            assert process.environ()["FLASHPOINT_TEST_PROBE"] == "as of the start"
            assert process.cwd() == os.getcwd()
            assert not [text for text in (*process.cmdline(), *process.environ().values()) if secret in text]
            assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
            assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2")
    assert not any(map(is_running, pids.values()))
    assert set(psutil.Process().children()) <= before, "a process is left, if only as a zombie"


def test_managers_run_nothing_that_lies_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ml_flashpoint", *sys.stdlib_module_names):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w'); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with DDict(1, 1, MEMORY) as d:
        d["a"] = 1
    assert not (tmp_path / "ran").exists()


def test_one_dictionary_ends_and_another_goes_on(root: Path) -> None:
    with DDict(2, 1, MEMORY) as first, DDict(1, 2, MEMORY, replication="ring", timeout=DEADLINE_S) as second:
        second["a"] = 1
        second.checkpoint()
        second.wait_for_commit()
        first.destroy()
        dictionaries.kill_manager(second, 1)
        assert [second.manager(each).get("a") for each in range(2)].count(1) == 1
        assert [folder.name for folder in root.iterdir()] == [runtime_of(second).base.name]


def test_a_manager_that_cannot_start_says_why_and_nothing_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = embedded.make_folder

    def make_with_obstacle(where: Path) -> runtime_folder.FolderHold:
        hold = make(where)
        (hold.folder / "node-1").write_text("in the way")
        return hold

    monkeypatch.setattr(embedded, "make_folder", make_with_obstacle)
    with pytest.raises(UnsafePathError, match="node-1"):
        DDict(1, 3, MEMORY)
    assert list(root.iterdir()) == []


def test_a_process_that_cannot_be_made_fails_the_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", str(root / "nowhere"))
    with pytest.raises(DDictError, match="cannot be made: what starts them ended at once"):
        DDict(1, 2, MEMORY)
    assert list(root.iterdir()) == []


def test_a_runtime_whose_thread_cannot_start_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_unless_supervising(thread: threading.Thread) -> None:
        if thread.name == "ddict-supervisor":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_supervising)
    before = set(psutil.Process().children())
    with pytest.raises(DDictError, match="can't start new thread"):
        DDict(1, 3, MEMORY)
    assert set(psutil.Process().children()) <= before, "a process is left, if only as a zombie"
    assert list(root.iterdir()) == []


def test_managers_come_back_after_their_supervisor_was_killed(root: Path) -> None:
    with DDict(1, 2, MEMORY, replication="ring", timeout=DEADLINE_S) as d:
        d["a"] = 1
        d.checkpoint()
        assert d.wait_for_commit() == 0
        before = runtime_of(d).pids()
        os.kill(psutil.Process(before[0]).ppid(), signal.SIGKILL)
        await_that(lambda: not any(map(is_running, before.values())))
        for manager, pid in before.items():
            wait_until_ready(runtime_of(d), manager, other_than=pid)
        assert d["a"] == 1


def test_a_start_has_a_deadline(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.001)
    with pytest.raises(DDictTimeoutError, match=r"within 0\.001 s"):
        DDict(1, 2, MEMORY)
    assert list(root.iterdir()) == []


def test_a_manager_that_does_not_end_is_killed(root: Path) -> None:
    d = DDict(2, 1, MEMORY)
    pids = runtime_of(d).pids()
    suspend(pids[0])
    runtime_of(d).stop(timeout_s=0.3)
    assert not any(map(is_running, pids.values()))
    assert list(root.iterdir()) == []
    with pytest.raises(DDictDestroyedError):
        runtime_of(d).start([])
    d.destroy()


def test_managers_at_work_do_without_torch(tmp_path: Path) -> None:
    value = torch.arange(200_000)
    persisting = {"persister_class": PosixCheckpointPersister, "persist_freq": 1, "persist_path": str(tmp_path)}
    with DDict(1, 2, 64 << 20, replication="ring", timeout=DEADLINE_S, **persisting) as d:
        d.update({"large": value, "small": 1, "more": value + 1, "array": value.numpy()})
        d.fetch_add("small", 2)
        d.checkpoint()
        d["large"] = value + 2
        d.checkpoint()
        d.wait_for_commit()
        killed = dictionaries.kill_manager(d, 1)
        wait_until_ready(runtime_of(d), 1, other_than=killed)
        assert torch.equal(d["large"], value + 2)
        d.checkpoint()
        for manager in range(2):
            mapped = Path(f"/proc/{dictionaries.pid_of(d, manager)}/maps").read_text()
            assert not [name for name in ("libtorch", "numpy") if name in mapped]


@pytest.mark.parametrize("within_s", [embedded.DEATHS_WITHIN_S, 0.0], ids=["at once", "in its own time"])
def test_a_manager_that_cannot_start_again_stays_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, within_s: float
) -> None:
    monkeypatch.setattr(embedded, "DEATHS_WITHIN_S", within_s)
    with DDict(1, 2, MEMORY) as d:
        killed = dictionaries.pid_of(d, 0)
        suspend(killed)
        node = d._configuration.node_folder(0)
        node.rename(node.with_name("away"))
        node.write_text("in the way")
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(AssertionError, match="manager 0 stays down: "):
            wait_until_ready(runtime_of(d), 0, other_than=killed)
        assert list(runtime_of(d).pids()) == [1]
        assert sum("is started again" in record.message for record in caplog.records) == MOST_DEATHS
        assert sum("stays down" in record.message for record in caplog.records) == 1


# ---- the end of the creator -----------------------------------------------------------------------------------------


def test_forked_children_of_the_creator_do_not_keep_managers_alive(root: Path) -> None:
    with created(ddict_handles.create_and_fork) as (creator, (_, managers, child)):
        try:
            creator.kill()
            await_that(lambda: not any(map(is_running, managers)))
            assert is_running(child)
            await_that(lambda: not list(root.iterdir()))
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_cannot_stop_its_parents_managers() -> None:
    with DDict(1, 2, MEMORY, replication="ring", timeout=DEADLINE_S) as d:
        d["a"] = 1
        child = os.fork()
        if child == 0:
            runtime_of(d).stop()
            refused = False
            try:
                runtime_of(d).start([])
            except DDictDestroyedError:
                refused = True
            os._exit(0 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        killed = dictionaries.kill_manager(d, 0)
        assert wait_until_ready(runtime_of(d), 0, other_than=killed)


def test_managers_that_were_stopped_remove_the_folder_when_they_go_on(root: Path) -> None:
    with created(ddict_handles.create_and_wait) as (creator, (_, managers)):
        with stopped(managers[0]), stopped(managers[1]):
            creator.kill()
            creator.join(DEADLINE_S)
            assert len(list(root.iterdir())) == 1
        await_that(lambda: not any(map(is_running, managers)))
        await_that(lambda: not list(root.iterdir()))


def test_the_next_dictionary_sweeps_what_nobody_uses(root: Path) -> None:
    with created(ddict_handles.create_and_wait) as (creator, (base, managers)), DDict(1, 1, MEMORY) as in_use:
        assert creator.pid is not None
        all_of_it = creator.pid, psutil.Process(managers[0]).ppid(), *managers
        for pid in all_of_it:
            suspend(pid)
        for pid in all_of_it:
            os.kill(pid, signal.SIGKILL)
        creator.join(DEADLINE_S)
        await_that(lambda: not any(map(is_running, managers)))
        assert list(Path(base).rglob("step-*"))
        stranger = root / "0123456789ab"
        (stranger / "not-a-dictionary").mkdir(parents=True)
        with DDict(1, 1, MEMORY) as another:
            bases = [runtime_of(each).base for each in (in_use, another)]
            assert set(root.iterdir()) == {*bases, stranger}
        in_use["a"] = 1
