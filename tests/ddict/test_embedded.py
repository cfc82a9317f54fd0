"""Managers as children of their creator: start, restart, and the end of everything, however it comes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictError, DDictTimeoutError
from ml_flashpoint.ddict.runtime import folder as runtime_folder
from ml_flashpoint.ddict.runtime import supervisor
from ml_flashpoint.ddict.runtime.embedded import EmbeddedRuntime
from ml_flashpoint.ddict.runtime.supervisor import MOST_DEATHS
from tests.ddict.embedded_support import (
    DEADLINE_S,
    configs_of,
    runtime_of,
    seen_by,
    started,
    watching,
)
from tests.support import dictionaries
from tests.support.dictionaries import is_running, wait_until_ready
from tests.support.forked import wait_until
from tests.support.processes import child_environment

pytestmark = pytest.mark.slow


def test_every_manager_gets_its_configuration_and_all_end(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_TEST_PROBE", "as of the start")
    with started(tmpfs, 3) as runtime:
        pids = runtime.pids()
        assert sorted(pids) == [0, 1, 2]
        incarnations = set()
        for number, pid in pids.items():
            seen = seen_by(runtime, number)
            assert (seen["number"], seen["pid"], seen["secret"]) == (number, pid, f"s-{number}")
            assert seen["restarted"] is False
            assert seen["probe"] == "as of the start"
            assert seen["cwd"] == os.getcwd()
            assert len(bytes.fromhex(seen["incarnation"])) == 8
            incarnations.add(seen["incarnation"])
            process = psutil.Process(pid)
            assert "s-" not in " ".join(process.cmdline())
            assert not [value for value in process.environ().values() if value.startswith("s-")]
            assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
            assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2")
        assert len(incarnations) == 3
        with watching(*pids.values()) as watch:
            runtime.stop()
            assert watch.alive() == []
    assert runtime.pids() == {}
    assert list(tmpfs.iterdir()) == []
    with pytest.raises(DDictDestroyedError):
        runtime.start([])


def test_the_creator_has_one_thread_a_manager(tmpfs: Path) -> None:
    before = set(threading.enumerate())
    with started(tmpfs, 2), started(tmpfs, 1):
        names = sorted(thread.name for thread in set(threading.enumerate()) - before)
        assert names == ["ddict-supervisor-0", "ddict-supervisor-0", "ddict-supervisor-1"]
    assert set(threading.enumerate()) <= before


def test_one_dictionary_ends_and_another_goes_on(tmpfs: Path) -> None:
    with started(tmpfs, 2) as first, started(tmpfs, 2) as second:
        with watching(*second.pids().values()) as watch:
            first.stop()
            assert len(watch.alive()) == 2
        killed = second.pids()[1]
        os.kill(killed, signal.SIGKILL)
        assert wait_until_ready(second, 1, other_than=killed) != killed
        assert [folder.name for folder in tmpfs.iterdir()] == [second.base.name]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("fail_second", "RuntimeError: no room for manager 1"),
        ("die_second", "was killed by SIGKILL"),
    ],
)
def test_a_manager_that_cannot_start_is_named_and_nothing_is_left(tmpfs: Path, entry: str, said: str) -> None:
    runtime = runtime_of(tmpfs, entry)
    before = set(psutil.Process().children())
    with pytest.raises(DDictError, match=said) as caught:
        runtime.start(configs_of(runtime, 3))
    assert caught.value.manager == 1
    assert set(psutil.Process().children()) <= before
    assert list(tmpfs.iterdir()) == []


def test_code_that_cannot_be_imported_is_told(tmpfs: Path) -> None:
    runtime = EmbeddedRuntime(entry="tests.workers.no_such_module:run", root=tmpfs)
    with pytest.raises(DDictError, match="no_such_module"):
        runtime.start(configs_of(runtime, 1))
    assert list(tmpfs.iterdir()) == []


def test_a_start_has_a_deadline(tmpfs: Path) -> None:
    runtime = runtime_of(tmpfs, "never_ready")
    with pytest.raises(DDictTimeoutError, match=r"within 0\.3 s"):
        runtime.start(configs_of(runtime, 2), timeout_s=0.3)
    assert list(tmpfs.iterdir()) == []


def test_a_manager_that_does_not_end_is_killed(tmpfs: Path) -> None:
    with started(tmpfs, 2, "deaf") as runtime, watching(*runtime.pids().values()) as watch:
        begun = time.monotonic()
        runtime.stop(timeout_s=0.3)
        assert watch.alive() == []
        assert 0.3 <= time.monotonic() - begun < 9  # else it has END_GRACE_S
    assert list(tmpfs.iterdir()) == []


def test_managers_import_neither_torch_nor_numpy() -> None:
    """They start in a tenth of the time: each killed one is started again while users wait for it."""
    program = (
        "import sys, ml_flashpoint.ddict.manager.served, ml_flashpoint.ddict.native; "
        "sys.exit(' '.join({'torch', 'numpy', 'ray'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=child_environment())
    assert (done.returncode, done.stderr) == (0, "")


def test_managers_at_work_do_without_torch(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime_folder.BASE_VARIABLE, str(tmpfs / "dictionaries"))
    value = torch.arange(200_000)
    persisting = {"persister_class": PosixCheckpointPersister, "persist_freq": 1, "persist_path": str(tmpfs / "kept")}
    with DDict(1, 2, 64 << 20, replication="ring", timeout=DEADLINE_S, **persisting) as d:
        d.update({"large": value, "small": 1, "more": value + 1, "array": value.numpy()})
        d.fetch_add("small", 2)
        d.checkpoint()
        d["large"] = value + 2
        d.checkpoint()
        d.wait_for_commit()
        killed = dictionaries.kill_manager(d, 1)
        wait_until_ready(dictionaries.runtime_of(d), 1, other_than=killed)
        assert torch.equal(d["large"], value + 2)
        d.checkpoint()
        for manager in range(2):
            mapped = Path(f"/proc/{dictionaries.pid_of(d, manager)}/maps").read_text()
            assert not [name for name in ("libtorch", "numpy") if name in mapped]


def test_a_killed_manager_comes_back_as_another_incarnation(tmpfs: Path) -> None:
    with started(tmpfs, 3) as runtime:
        before, first = runtime.pids(), seen_by(runtime, 1)
        for _ in range(3):
            killed = runtime.pids()[1]
            os.kill(killed, signal.SIGKILL)
            again = wait_until_ready(runtime, 1, other_than=killed)
            seen = seen_by(runtime, 1)
            assert seen["pid"] == again != killed
            assert seen["restarted"] is True
            assert seen["incarnation"] != first["incarnation"]
            assert seen["secret"] == first["secret"]
            first = seen
        after = runtime.pids()
        assert (after[0], after[2]) == (before[0], before[2])
        assert seen_by(runtime, 0)["restarted"] is False


@pytest.mark.parametrize("within_s", [supervisor.DEATHS_WITHIN_S, 0.0], ids=["at once", "in its own time"])
def test_a_manager_that_cannot_start_again_stays_down(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, within_s: float
) -> None:
    monkeypatch.setattr(supervisor, "DEATHS_WITHIN_S", within_s)
    with started(tmpfs, 2, "fail_when_restarted") as runtime:
        killed = runtime.pids()[0]
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(AssertionError, match="manager 0 stays down: ended with exit code 1"):
            wait_until_ready(runtime, 0, other_than=killed)
        assert list(runtime.pids()) == [1]
        assert sum("is started again" in record.message for record in caplog.records) == MOST_DEATHS
        assert sum("stays down" in record.message for record in caplog.records) == 1


class Processes:
    """The processes that can still be made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1000
        make = subprocess.Popen

        def make_if_any(*args: Any, **named: Any) -> Any:
            if self.left <= 0:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.left -= 1
            return make(*args, **named)

        monkeypatch.setattr(supervisor.subprocess, "Popen", make_if_any)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def said_so_far(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_a_manager_that_cannot_be_made_fails_the_start_and_nothing_else(tmpfs: Path, processes: Processes) -> None:
    with started(tmpfs, 1) as other:
        runtime = runtime_of(tmpfs)
        processes.left = 1
        with pytest.raises(DDictError, match=r"cannot be made: .*Too many open files") as caught:
            runtime.start(configs_of(runtime, 3))
        assert caught.value.manager in (0, 1, 2)
        assert [folder.name for folder in tmpfs.iterdir()] == [other.base.name]
        processes.left = 2
        with started(tmpfs, 2):
            assert psutil.pid_exists(other.pids()[0])


def test_a_manager_that_cannot_be_made_again_comes_back_when_it_can(
    tmpfs: Path, caplog: pytest.LogCaptureFixture, processes: Processes
) -> None:
    with started(tmpfs, 2) as runtime:
        killed = runtime.pids()[1]
        processes.left = 0
        os.kill(killed, signal.SIGKILL)
        # More often than it may die.
        wait_until(lambda: said_so_far(caplog, "could not be started again") > MOST_DEATHS, "the attempts", DEADLINE_S)
        assert list(runtime.pids()) == [0]
        processes.left = 1000
        assert wait_until_ready(runtime, 1, other_than=killed) != killed
        assert seen_by(runtime, 1)["restarted"] is True
        assert said_so_far(caplog, f"(pid {killed})") == said_so_far(caplog, "is started again") == 1
        # What could not be made has not died: the deaths that it may have are left.
        for _ in range(MOST_DEATHS - 1):
            killed = runtime.pids()[1]
            os.kill(killed, signal.SIGKILL)
            wait_until_ready(runtime, 1, other_than=killed)


def test_a_stop_does_not_wait_for_a_manager_that_cannot_be_made_again(
    tmpfs: Path, caplog: pytest.LogCaptureFixture, processes: Processes
) -> None:
    with started(tmpfs, 1) as runtime:
        processes.left = 0
        os.kill(runtime.pids()[0], signal.SIGKILL)
        wait_until(lambda: said_so_far(caplog, "could not be started again") >= 1, "an attempt")
        runtime.stop()
    assert list(tmpfs.iterdir()) == []


def test_a_manager_that_dies_is_replaced_by_one_that_was_ready(tmpfs: Path) -> None:
    def others() -> set[int]:
        return {child.pid for child in psutil.Process().children()} - before

    before = {child.pid for child in psutil.Process().children()}
    runtime = runtime_of(tmpfs)
    runtime.start(configs_of(runtime, 2), spare=True)
    try:
        wait_until(lambda: len(others()) == 3, "the spare one")
        (spare,) = others() - set(runtime.pids().values())
        killed = runtime.pids()[1]
        os.kill(killed, signal.SIGKILL)
        assert wait_until_ready(runtime, 1, other_than=killed) == spare
        wait_until(lambda: len(others()) == 3, "the next spare one")
        (spare,) = others() - set(runtime.pids().values())
        os.kill(spare, signal.SIGKILL)  # it may be gone as well
        wait_until(lambda: not is_running(spare), "its end")
        killed = runtime.pids()[0]
        os.kill(killed, signal.SIGKILL)
        assert wait_until_ready(runtime, 0, other_than=killed) not in (killed, spare)
    finally:
        runtime.stop()
    assert others() == set()
