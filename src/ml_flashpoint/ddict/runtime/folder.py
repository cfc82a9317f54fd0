"""The folder of one dictionary on this machine: made, held by a lock while a process needs it, and swept after."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from ml_flashpoint.ddict.errors import DDictError
from ml_flashpoint.format.errors import UnsafePathError
from ml_flashpoint.format.files import check_way, close_in_children, is_at, open_own

BASE_VARIABLE = "FLASHPOINT_DDICT_BASE"
"""Environment variable: folder in which dictionaries make theirs, in place of one in ``/dev/shm``."""

LOCK = "owner"  # file in the folder that those who use it have a shared lock of
_SHM = Path("/dev/shm")
_REMOVED = ".gone-"  # before the name of a folder that nobody holds any more
_NAME = re.compile(rf"({re.escape(_REMOVED)})?[0-9a-f]{{12}}")
_TRIES = 100
_LOOK_EVERY_S = 0.005

LAST_WORDS_S = 0.5  # for `remove_unused` by a process that was told of the end of another by a socket


class FolderHold:
    """A process's shared lock on the folder of a dictionary: while there is one, nobody removes the folder. A forked
    child lets go of it. Raises `DDictError` if the folder is gone, or is being removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with contextlib.ExitStack() as undo:
            try:
                self._lock = undo.enter_context(open(open_own(folder / LOCK, os.O_RDWR), "rb"))
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if not is_at(self._lock.fileno(), folder / LOCK):
                    raise FileNotFoundError("it was removed")
            except (OSError, UnsafePathError) as error:
                raise DDictError(f"the dictionary's folder is gone: {error}", path=folder) from error
            undo.pop_all()
        close_in_children(self._lock)

    def close(self) -> None:
        """Let go. A second call does nothing."""
        self._lock.close()


def runtime_root() -> Path:
    """The folder that holds the folders of dictionaries, made if need be."""
    chosen = os.environ.get(BASE_VARIABLE)
    root = Path(chosen).absolute() if chosen else _default_root()
    try:
        check_way(root)
        root.mkdir(mode=0o700, parents=chosen is not None, exist_ok=True)
        status = root.lstat()
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not chosen and not mine:  # in a folder that everybody may write to: somebody else may have been there first
            raise UnsafePathError("it is not a private folder of this user", path=root)
    except (OSError, UnsafePathError) as error:
        raise DDictError(
            f"no safe folder for dictionaries: {error}",
            path=root,
            hint=f"set {BASE_VARIABLE} to a folder of your own in memory, such as /dev/shm/<user>/ddict",
        ) from error
    return root


def _default_root() -> Path:
    parent = _SHM if os.access(_SHM, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return parent / f"mlf-ddict-{os.geteuid()}"


def make_folder(root: Path) -> FolderHold:
    """Make a fresh folder in `root`, held by this process. Raises `DDictError`: it cannot be made."""
    for tries_left in reversed(range(_TRIES)):
        folder = root / secrets.token_hex(6)
        try:
            folder.mkdir(mode=0o700)
            (folder / LOCK).touch(mode=0o600)
            return FolderHold(folder)
        except (OSError, DDictError) as error:
            # Before it is held it may be swept; and who had the last folder here may have taken the root away.
            if not tries_left or not isinstance(error, (FileNotFoundError, DDictError)):
                raise DDictError(f"no folder for the dictionary: {error}", path=root) from error
            _default_root().mkdir(mode=0o700, exist_ok=True)
    raise AssertionError("the last try returns or raises")


def remove_now(folder: Path) -> bool:
    """Remove a dictionary's folder if no process holds it; whether it is gone."""
    with contextlib.suppress(OSError, UnsafePathError), open(open_own(folder / LOCK, os.O_RDWR), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(lock.fileno(), folder / LOCK):  # else somebody was faster, and what is there now is another one's
            removed = folder.with_name(_REMOVED + folder.name)
            os.rename(folder, removed)
            shutil.rmtree(removed, ignore_errors=True)
    return not folder.exists()


def remove_unused(folder: Path, wait_s: float = 0.0) -> bool:
    """Remove a dictionary's folder if no process holds it, and with the last one the folder of them all, if that is not
    one of the user's choice; whether it is gone."""
    give_up = time.monotonic() + wait_s
    while not (gone := remove_now(folder)) and time.monotonic() < give_up:
        time.sleep(_LOOK_EVERY_S)  # nothing tells of the end of a lock but asking for it
    if gone and folder.parent == _default_root():
        with contextlib.suppress(OSError):  # others have theirs there
            folder.parent.rmdir()
    return gone


def sweep(root: Path) -> list[Path]:
    """Remove the folders in `root` whose processes are all gone, and return them."""
    swept = []
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(root)):
            found, path = _NAME.fullmatch(entry.name), Path(entry.path)
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if not found or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                    continue
                if found[1]:
                    shutil.rmtree(path, ignore_errors=True)  # its remover was killed
                elif not remove_unused(path):
                    path.rmdir()  # works where it is empty: its maker was killed, or will make another one
                swept.append(path)
    return swept
