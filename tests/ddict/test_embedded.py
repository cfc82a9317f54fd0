"""Managers as children of their creator: start, restart, and the end of everything, however it comes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictError, DDictTimeoutError
from ml_flashpoint.ddict.runtime import embedded
from ml_flashpoint.ddict.runtime import folder as runtime_folder
from ml_flashpoint.ddict.runtime.embedded import MOST_DEATHS
from tests.ddict.embedded_support import (
    DEADLINE_S,
    configs_of,
    runtime_of,
    seen_by,
    server_pid,
    started,
    watching,
)
from tests.support import dictionaries
from tests.support.dictionaries import wait_until_ready
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
            assert "s-" not in " ".join(process.cmdline()[3:])
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


def test_one_dictionary_ends_and_another_goes_on(tmpfs: Path) -> None:
    with started(tmpfs, 2) as first, started(tmpfs, 2) as second:
        assert {psutil.Process(pid).ppid() for one in (first, second) for pid in one.pids().values()} == {server_pid()}
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
        ("die_second", "its process ended without a word"),
    ],
)
def test_a_manager_that_cannot_start_is_named_and_nothing_is_left(tmpfs: Path, entry: str, said: str) -> None:
    runtime = runtime_of(tmpfs, entry)
    server = psutil.Process(server_pid())
    before = set(server.children())
    with pytest.raises(DDictError, match=said) as caught:
        runtime.start(configs_of(runtime, 3))
    assert caught.value.manager == 1
    assert set(server.children()) <= before
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
        "import sys, ml_flashpoint.ddict.manager.manager, ml_flashpoint.ddict.native; "
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


@pytest.mark.parametrize("within_s", [embedded.DEATHS_WITHIN_S, 0.0], ids=["at once", "in its own time"])
def test_a_manager_that_cannot_start_again_stays_down(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, within_s: float
) -> None:
    monkeypatch.setattr(embedded, "DEATHS_WITHIN_S", within_s)
    with started(tmpfs, 2, "fail_when_restarted") as runtime:
        killed = runtime.pids()[0]
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(AssertionError, match="manager 0 stays down: failed: RuntimeError: cannot come back"):
            wait_until_ready(runtime, 0, other_than=killed)
        assert list(runtime.pids()) == [1]
        assert sum("is started again" in record.message for record in caplog.records) == MOST_DEATHS
        assert sum("stays down" in record.message for record in caplog.records) == 1


@contextlib.contextmanager
def descriptors_left(pid: int, count: int) -> Iterator[Callable[[], None]]:
    """A process may open this many files more, until the function that this gives is called, or the block ends."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = [number for number in range(len(taken) + count) if number not in taken]

    def give_back() -> None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    # The limit is one of their numbers.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[count - 1] + 1 if count else 3, hard))
    try:
        yield give_back
    finally:
        give_back()


def said_so_far(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_a_manager_that_cannot_be_forked_fails_the_start_and_nothing_else(tmpfs: Path) -> None:
    with started(tmpfs, 1) as other:
        runtime = runtime_of(tmpfs)
        with (
            descriptors_left(server_pid(), 0),
            pytest.raises(DDictError, match=r"cannot be made: .*Too many open files") as caught,
        ):
            runtime.start(configs_of(runtime, 3))
        assert caught.value.manager in (0, 1, 2)
        assert [folder.name for folder in tmpfs.iterdir()] == [other.base.name]
        before = server_pid()
        with started(tmpfs, 2):
            assert server_pid() == before
        assert psutil.pid_exists(other.pids()[0])


def test_a_manager_that_cannot_be_forked_again_comes_back_when_it_can(
    tmpfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmpfs, 2) as runtime:
        killed = runtime.pids()[1]
        with descriptors_left(server_pid(), 0) as give_back:
            os.kill(killed, signal.SIGKILL)
            # More often than it may die.
            wait_until(
                lambda: said_so_far(caplog, "could not be forked again") > MOST_DEATHS, "the attempts", DEADLINE_S
            )
            assert list(runtime.pids()) == [0]
            give_back()
            assert wait_until_ready(runtime, 1, other_than=killed) != killed
        assert seen_by(runtime, 1)["restarted"] is True
        assert said_so_far(caplog, f"(pid {killed})") == said_so_far(caplog, "is started again") == 1
        # What could not be made has not died: the deaths that it may have are left.
        for _ in range(MOST_DEATHS - 1):
            killed = runtime.pids()[1]
            os.kill(killed, signal.SIGKILL)
            wait_until_ready(runtime, 1, other_than=killed)


def test_a_stop_does_not_wait_for_a_manager_that_cannot_be_forked_again(
    tmpfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmpfs, 1) as runtime, descriptors_left(server_pid(), 0):
        os.kill(runtime.pids()[0], signal.SIGKILL)
        wait_until(lambda: said_so_far(caplog, "could not be forked again") >= 1, "an attempt")
        runtime.stop()
    assert list(tmpfs.iterdir()) == []
