"""The folders of dictionaries: made, swept and removed, whoever else does so at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from ml_flashpoint.ddict.errors import DDictError
from ml_flashpoint.ddict.runtime import folder as runtime_folder

DEADLINE_S = 30.0


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
