"""Removes the folder of a dictionary when the processes that used it are gone, however they went.

Owns the removal, and a process that waits for its time. That process is for managers that are killed by others than
us, as Ray does: nobody of theirs is left then. It runs this file as a script, so this imports the standard library
only. Whose folder it is and who holds it is `runtime_folder`'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

LOCK = "owner"
"""File in the folder that those who use it have a shared lock of."""

_LOOK_EVERY_S = 0.1


class Janitor:
    """A process that removes a folder after the one that made it is gone, unless somebody holds the folder then.

    It is no child of this process, so that whoever ends this one and its children lets it live.

    Args:
        folder: of the dictionary.
        keep_s: seconds to keep the folder for a successor that comes back to it.
    """

    def __init__(self, folder: Path, keep_s: float) -> None:
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", __file__, str(folder), str(keep_s)],
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
        """End it: nothing is left to be done."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"x")
        os.close(self._writer)


_START_S = 30.0


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


def _main(folder: Path, keep_s: float) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    if os.read(0, 1):
        return
    give_up = time.monotonic() + keep_s
    while folder.exists() and time.monotonic() < give_up:
        time.sleep(_LOOK_EVERY_S)
    remove_now(folder)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]))
