"""The lock of a base container on one node: one job has it, through all its processes there.

``<base>/.flashpoint/job`` is a file. A digest of the job's id names one byte of it, which every process of the job
locks for reading. A new process first locks byte 0 for writing, then looks for a lock on any other byte. POSIX locks
end with their process, forked children do not inherit them, and they need no page of a full filesystem. The text in the
file is for messages only.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from ml_flashpoint.format.errors import JobInUseError
from ml_flashpoint.format.files import is_at, make_tree, open_own

PRIVATE: Final = ".flashpoint"
"""Folder of a base container for what is not a version."""

JOB: Final = "job"
"""Name of the lock's file in that folder."""

_log = logging.getLogger(__name__)

_PAUSE_S = 0.05
_TRIES = 100
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_EXITING, _SIGKILL_BIT = 0x4, 1 << 8  # PF_EXITING of the kernel; signal 9 in a mask


@dataclass(slots=True)
class _Held:
    """The one descriptor of a lock's file: closing another descriptor of the file would end this process's locks."""

    descriptor: int
    users: int = 0


_held: dict[tuple[int, int], _Held] = {}
_mutex = threading.Lock()


def _forget() -> None:
    global _mutex
    _mutex = threading.Lock()
    _held.clear()  # a forked child has none of the locks


os.register_at_fork(after_in_child=_forget)


class JobLock:
    """This process's share in the lock of its job. All openings in one process share it.

    A process that is ending (killed, while its memory is being freed) is waited for.

    Args:
        base: base container; made if it is missing.
        job: id of the job, the same in all its processes, and of no other job or earlier start of it.
        deadline_s: seconds to wait for processes that are ending.

    Raises:
        JobInUseError: a process of another job has the base container open. Names its process id and host.
        UnsafePathError: others could have planted the base container, or may write to it.
    """

    def __init__(self, base: Path, job: str, deadline_s: float) -> None:
        self.base = base
        self._path = base / PRIVATE / JOB
        self._byte = 1 + (xxhash.xxh3_64_intdigest(job.encode()) >> 3)
        self._held: _Held | None = None
        self._file = (0, 0)
        give_up, waited = time.monotonic() + deadline_s, 0
        while (pid := self._take()) is not None:
            if (pid > 0 and not _is_ending(pid)) or time.monotonic() > give_up:
                raise _in_use(self._path, pid)
            if pid > 0 and pid != waited:
                waited = pid
                _log.warning("waiting for process %d, which has %s open and is ending", pid, base)
            time.sleep(_PAUSE_S)

    def _take(self) -> int | None:
        """Take the lock. Return None, or the process that has it: -1 for one that is only looking."""
        with _mutex:
            for tries_left in reversed(range(_TRIES)):
                try:
                    make_tree(self.base, self._path.parent)
                    if (held := _known(self._path)) is None:
                        held = _Held(open_own(self._path, os.O_RDWR | os.O_CREAT))
                        pid = _lock(held.descriptor, self._byte)
                        if pid is not None or not is_at(held.descriptor, self._path):
                            os.close(held.descriptor)
                            if pid is not None:
                                return pid
                            raise FileNotFoundError(self._path)
                except FileNotFoundError:  # a removal takes the file and the folders in the midst of this
                    if not tries_left:
                        raise
                    continue
                status = os.fstat(held.descriptor)
                self._file = status.st_dev, status.st_ino
                _held[self._file] = held
                held.users += 1
                self._held = held
                return None
        raise AssertionError

    def check(self) -> None:
        """Raise if somebody has removed the base container meanwhile: a folder at its path is another job's.

        Raises:
            JobInUseError: the lock's file is not the one that this process has locked.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(self._path, follow_symlinks=False)
            if (status.st_dev, status.st_ino) == self._file:
                return
        raise JobInUseError(
            "this base container was removed while the job had it open",
            path=self.base,
            hint="the job can save nothing any more: end it, and give each job a base container of its own",
        )

    def release(self) -> None:
        """Let go of the share. Safe to call twice."""
        with _mutex:
            held, self._held = self._held, None
            if held is not None:
                held.users -= 1
                if not held.users:
                    _held.pop(self._file, None)
                    os.close(held.descriptor)


@contextlib.contextmanager
def locked_out(base: Path) -> Iterator[None]:
    """Keep every job out of a base container, for a process that removes something in it.

    Raises:
        JobInUseError: a job has it open.
    """
    path = base / PRIVATE / JOB
    with _mutex:
        if _known(path) is not None:
            raise JobInUseError("this process has it open", path=base, hint="close it first")
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise _in_use(path, _holder(descriptor, 0, 0) or 0) from None
        yield
    finally:
        os.close(descriptor)


def is_open(base: Path) -> bool:
    """Return True if a process has a base container open. Not for a process of the job: its lock would end."""
    try:
        descriptor = os.open(base / PRIVATE / JOB, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _holder(descriptor, 0, 0) is not None
    finally:
        os.close(descriptor)


def _known(path: Path) -> _Held | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return _held.get((status.st_dev, status.st_ino))


def _lock(descriptor: int, byte: int) -> int | None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except (BlockingIOError, PermissionError):
        return -1
    other = _holder(descriptor, 1, byte - 1) if byte > 1 else None
    other = _holder(descriptor, byte + 1, 0) if other is None else other
    if other is None:
        if _holder(descriptor, byte, 1) is None:
            with contextlib.suppress(OSError):  # the filesystem may be full
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, byte)
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, 0)
    return other


def _holder(descriptor: int, start: int, length: int) -> int | None:
    """Return the process that has locked a part of a range, 0 if it runs in another pid namespace; None if none has."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def _in_use(path: Path, pid: int) -> JobInUseError:
    text = ""
    with contextlib.suppress(OSError):
        text = "".join(filter(str.isprintable, path.read_text(errors="replace")))
    first, _, host = text.partition(" ")
    process = pid if pid > 0 else first or "unknown"
    return JobInUseError(
        f"another job has this base container open (process {process} on {host or 'an unknown host'})",
        path=path.parent.parent,
        hint="stop that process, or give each job a base container of its own",
    )


def _is_ending(pid: int) -> bool:
    """Return True if a process exits just now, or has been killed and has not noticed yet."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, ValueError):
        return not os.path.exists(f"/proc/{pid}")  # it has ended since
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return state in "ZX" or bool(int(fields[5]) & _EXITING) or any(mask & _SIGKILL_BIT for mask in pending)
