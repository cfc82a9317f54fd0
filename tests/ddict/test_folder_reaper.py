"""The folder that several processes share, and its removal when all of them are gone, however they went."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ml_flashpoint.ddict.runtime import reaper as folder_reaper
from ml_flashpoint.ddict.runtime.folder import FolderHold, join_folder, sweep
from ml_flashpoint.ddict.runtime.reaper import Reaper, remove_now
from tests.support.forked import wait_until
from tests.support.processes import suspend

pytestmark = pytest.mark.slow

DEADLINE_S = 20.0

_HOLDER = """
import sys, time
from pathlib import Path
from ml_flashpoint.ddict.runtime.reaper import Reaper
from ml_flashpoint.ddict.runtime.folder import join_folder

hold = join_folder(Path(sys.argv[1]))
reaper = Reaper(hold.folder, float(sys.argv[2]), sys.argv[3])
print("held", flush=True)
time.sleep(600)
"""


def reapers(folder: Path) -> list[psutil.Process]:
    """The processes that wait for the end of those that hold a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if folder_reaper.__file__ in line and str(folder) in line:
            found.append(process)
    return found


@pytest.fixture
def folder(tmpfs: Path) -> Iterator[Path]:
    made = tmpfs / "0123456789ab"
    yield made
    wait_until(lambda: not reapers(made), "the reapers have ended", DEADLINE_S)


def held_by_another(folder: Path, keep_s: float, name: str = "0") -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(folder), str(keep_s), name],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def end(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=DEADLINE_S)


def test_the_folder_of_a_killed_process_goes(folder: Path) -> None:
    holder = held_by_another(folder, 0.1)
    (folder / "node-0").mkdir()
    (folder / "node-0" / "value").write_bytes(bytes(1000))
    assert not remove_now(folder)
    assert sweep(folder.parent) == []

    end(holder)

    wait_until(lambda: not folder.exists(), "the folder is gone", DEADLINE_S)


def test_no_sweep_takes_the_folder_while_it_is_kept(folder: Path) -> None:
    holder = held_by_another(folder, 600.0)
    (folder / "value").write_text("kept")
    (reaper,) = reapers(folder)

    end(holder)

    assert sweep(folder.parent) == []
    assert not remove_now(folder)
    assert (folder / "value").read_text() == "kept"
    reaper.kill()
    # Its locks go later than what names it.
    wait_until(lambda: sweep(folder.parent) == [folder], "the folder is swept", DEADLINE_S)
    assert not folder.exists()


def test_the_last_of_several_reapers_removes_the_folder(folder: Path) -> None:
    holders = [held_by_another(folder, keep_s, str(number)) for number, keep_s in enumerate((0.1, 0.1, 0.3))]
    assert len(reapers(folder)) == 3

    for holder in holders:
        end(holder)

    wait_until(lambda: not folder.exists(), "the folder is gone", DEADLINE_S)


def test_a_successor_takes_over_from_its_predecessors_reaper(folder: Path) -> None:
    killed, other = held_by_another(folder, 600.0, "0"), held_by_another(folder, 600.0, "1")
    end(killed)

    hold = join_folder(folder)
    reaper = Reaper(folder, 600.0, "0")
    wait_until(lambda: len(reapers(folder)) == 2, "one for each manager is left", DEADLINE_S)

    hold.close()
    reaper.dismiss()
    assert not remove_now(folder)
    (last,) = reapers(folder)
    last.kill()
    end(other)
    wait_until(lambda: remove_now(folder), "nobody holds the folder", DEADLINE_S)


def test_a_folder_that_was_made_anew_is_not_emptied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join_folder(folder).close()
    another: list[FolderHold] = []
    lock = fcntl.flock

    def lock_late(descriptor: int, how: int) -> None:
        # Between opening the lock and locking it, others may remove the folder and make one by the same name.
        if not another:
            monkeypatch.setattr(folder_reaper.fcntl, "flock", lock)
            assert remove_now(folder)
            another.append(join_folder(folder))
            (folder / "value").write_text("theirs")
        lock(descriptor, how)

    monkeypatch.setattr(folder_reaper.fcntl, "flock", lock_late)
    assert not remove_now(folder)

    assert (folder / "value").read_text() == "theirs"
    assert another[0].is_there()
    another[0].close()
    assert remove_now(folder)


def test_a_successor_finds_the_folder_as_it_was(folder: Path) -> None:
    holder = held_by_another(folder, 3.0, "0")
    (folder / "value").write_text("kept")
    end(holder)

    successor = held_by_another(folder, 600.0, "0")
    wait_until(lambda: len(reapers(folder)) == 1, "the reaper has given up", DEADLINE_S)
    assert (folder / "value").read_text() == "kept"

    (last,) = reapers(folder)
    last.kill()
    end(successor)
    wait_until(lambda: remove_now(folder), "nobody holds the folder", DEADLINE_S)


def test_the_folder_of_a_successor_that_is_killed_before_it_has_a_reaper_goes(folder: Path) -> None:
    end(held_by_another(folder, 0.1))
    hold = join_folder(folder)
    (folder / "value").write_text("kept")
    (reaper,) = reapers(folder)
    # It holds the folder no more: its time is over.
    wait_until(lambda: not _has_open(reaper, folder / "owner"), "the reaper lets go", DEADLINE_S)
    assert (folder / "value").read_text() == "kept"

    hold.close()

    wait_until(lambda: not folder.exists(), "the folder is gone", DEADLINE_S)


def _has_open(process: psutil.Process, path: Path) -> bool:
    return str(path) in [each.path for each in process.open_files()]


def test_a_dismissed_reaper_has_removed_the_folder_when_it_ends(folder: Path) -> None:
    hold = join_folder(folder)
    (folder / "value").write_text("gone")
    reaper = Reaper(folder, 600.0)
    (process,) = reapers(folder)
    assert process.ppid() != os.getpid()

    hold.close()
    reaper.dismiss()

    # Whoever dismisses it may be killed at once.
    assert not folder.exists()
    wait_until(lambda: not reapers(folder), "the reaper has ended", DEADLINE_S)


@pytest.mark.parametrize("others_hold_it", [False, True])
def test_a_dismissed_reaper_that_wakes_up_late_removes_the_folder_unless_others_hold_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, others_hold_it: bool
) -> None:
    hold = join_folder(folder)
    reaper = Reaper(folder, 600.0)
    (process,) = reapers(folder)
    suspend(process.pid)
    monkeypatch.setattr(folder_reaper, "_END_S", 0.1)

    if not others_hold_it:
        hold.close()
    reaper.dismiss()
    assert not remove_now(folder)
    process.resume()

    wait_until(lambda: not reapers(folder), "the reaper has ended", DEADLINE_S)
    if others_hold_it:
        assert hold.is_there()
        hold.close()
        assert remove_now(folder)
    assert not folder.exists()


@pytest.mark.parametrize("broken", ["fork", "rename"])
def test_a_reaper_that_cannot_start_leaves_the_folder_to_its_predecessor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    end(held_by_another(folder, 600.0))
    (before,) = reapers(folder)
    noted = (folder / "reaper-0").stat().st_ino
    hold = join_folder(folder)
    script = folder.parent / "broken.py"
    script.write_text(
        "import os, runpy\n"
        "def fail(*arguments): raise BlockingIOError\n"
        f"os.{broken} = fail\n"
        f"runpy.run_path({folder_reaper.__file__!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(folder_reaper, "__file__", str(script))

    with pytest.raises(subprocess.CalledProcessError):
        Reaper(folder, 600.0)
    monkeypatch.undo()
    hold.close()

    assert (folder / "reaper-0").stat().st_ino == noted, "else the one before lets go"
    assert not remove_now(folder)
    assert reapers(folder) == [before]
    before.kill()


def test_many_make_the_same_folder_while_others_sweep(folder: Path) -> None:
    failures: list[BaseException] = []
    together = threading.Barrier(9)

    def join() -> None:
        together.wait(DEADLINE_S)
        try:
            for _ in range(50):
                hold = join_folder(folder)
                assert hold.is_there()
                hold.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=join) for _ in range(8)]
    for thread in threads:
        thread.start()
    together.wait(DEADLINE_S)
    while any(thread.is_alive() for thread in threads):
        sweep(folder.parent)
        threads[0].join(0.001)
    for thread in threads:
        thread.join(DEADLINE_S)

    assert failures == []
    sweep(folder.parent)
    assert list(folder.parent.iterdir()) == []


def test_a_hold_of_a_folder_that_was_replaced_is_noticed(folder: Path) -> None:
    hold = join_folder(folder)
    assert hold.is_there()
    os.rename(folder, folder.with_name("elsewhere"))
    another = join_folder(folder)
    assert not hold.is_there()
    assert another.is_there()
    assert isinstance(another, FolderHold)
    for each in (hold, another):
        each.close()
