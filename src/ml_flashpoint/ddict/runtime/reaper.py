"""Removes the folder of a dictionary when the processes that used it are gone, however they went.

Owns the removal, and a process that waits for its time. That process is for managers that are killed by others than
us, as Ray does: nobody of theirs is left then. It runs this file as a script, so this imports the standard library
only. Whose folder it is and who holds it is `folder`'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

LOCK = "owner"  # file in the folder that those who use it have a shared lock of

_LOOK_EVERY_S = 0.1
_START_S = 30.0
_END_S = 5.0


class Reaper:
    """A process that keeps a folder for some time after the one that made it is gone, and then removes it as soon as
    nobody else holds it.

    It holds the folder itself, so nobody's sweep takes it from a successor that is still on its way. It is no child of
    this process, so that whoever ends this one and its children lets it live.

    Args:
        folder: of the dictionary, held by this process.
        keep_s: seconds to keep the folder for a successor that comes back to it.
        name: of whose successor that is; a reaper keeps nothing any more once another one has the same name.
    """

    def __init__(self, folder: Path, keep_s: float, name: str = "0") -> None:
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", __file__, str(folder), str(keep_s), name],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=True,
                timeout=_START_S,
            )
        except BaseException:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)

    def dismiss(self) -> None:
        """Have it remove the folder at once, unless somebody else holds it, and wait for its end.

        The removal is not left to this process, which may be killed before it is done. Close its own hold first.
        """
        with contextlib.suppress(OSError):
            os.write(self._writer, b"x")
        # An error on this end of the pipe says that the other one is closed: the reaper has ended. One that does not
        # get to run for so long does its work when it does.
        poll = select.poll()
        poll.register(self._writer, 0)
        poll.poll(_END_S * 1000)
        os.close(self._writer)


def remove_now(folder: Path) -> bool:
    """Remove a dictionary's folder if no process holds it; whether it is gone."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # The lock is the last file to go: whoever was here before may have been killed just after.
        with contextlib.suppress(OSError):
            folder.rmdir()
        return not folder.exists()
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_file(folder / LOCK, descriptor):
            return not folder.exists()  # it was removed before the lock was free; this one is somebody else's
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
        os.unlink(folder / LOCK)
        folder.rmdir()
    except OSError:
        return not folder.exists()
    finally:
        os.close(descriptor)
    return True


def is_file(path: Path, descriptor: int) -> bool:
    """Whether a path still leads to the file that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _main(folder: Path, keep_s: float, name: str) -> None:
    hold = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    fcntl.flock(hold, fcntl.LOCK_SH | fcntl.LOCK_NB)
    ready, told = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(told)
        os._exit(0 if os.read(ready, 1) else 1)
    os.close(ready)
    os.setsid()
    os.chdir("/")
    note = folder / f"reaper-{name}"
    noted = _replace(note)  # not before it is sure that this process is there: the predecessor's reaper lets go now
    with contextlib.suppress(OSError):  # nobody waits for this any more, but the folder is its own from now on
        os.write(told, b"x")
    os.close(told)
    if os.read(0, 1):
        os.close(hold)
        remove_now(folder)
        return
    give_up = time.monotonic() + keep_s
    # Another file by the note's name is a successor's reaper, which has its own hold.
    while is_file(folder / LOCK, hold) and is_file(note, noted) and time.monotonic() < give_up:
        time.sleep(_LOOK_EVERY_S)
    os.close(hold)
    # Whoever holds the folder now may be a successor that is killed before it has a reaper.
    while not remove_now(folder) and is_file(note, noted):
        time.sleep(_LOOK_EVERY_S)


def _replace(path: Path) -> int:
    """Make a fresh file in place of what is there; its descriptor."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.rename(fresh, path)
    return descriptor


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
