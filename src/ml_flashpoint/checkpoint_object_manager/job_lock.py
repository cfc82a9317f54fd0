"""The lock by which one job at a time has a base container on a node, whichever its ranks are.

Owns the protocol. ``<base>/.flashpoint/job`` is a file. A digest of a job's id names one byte of that file, and every
process of the job holds a read lock on this byte. A process that comes takes a write lock on byte 0 first, and looks
whether any other byte is locked. Only locks of the kernel count: they end with their process, however the process ends;
forked children do not inherit them; and they need no page of a full filesystem. The text in the file is for messages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.format.errors import JobInUseError
from ml_flashpoint.format.private_folders import is_at, make_tree, open_own

JOB = "job"
"""Name of the file."""

_log = logging.getLogger(__name__)

_PAUSE_S = 0.05
_GATE = 0
# struct flock: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_HELD = (BlockingIOError, PermissionError)
_EXITING = 0x4
"""PF_EXITING of the kernel, among the flags in ``/proc/<pid>/stat``."""


@dataclass
class _Held:
    """The lock of this process on one file. Closing another descriptor of the file would end it, so there is one.

    Attributes:
        descriptor: holds the lock.
        users: number of `JobLock` objects.
    """

    descriptor: int
    users: int = 0


@dataclass(frozen=True)
class _Holder:
    """Another process that keeps this one from the lock.

    Attributes:
        pid: its process id here; 0 where it runs in another pid namespace.
        deciding: True if it holds the gate only: it looks at the lock just now, or removes the base container.
    """

    pid: int
    deciding: bool


_held: dict[tuple[int, int], _Held] = {}
_mutex = threading.Lock()


def _forget() -> None:
    global _mutex
    _mutex = threading.Lock()
    _held.clear()  # a child has none of the locks


os.register_at_fork(after_in_child=_forget)


@dataclass(frozen=True)
class JobFile:
    """The file that a job has locked in its base container. Travels to processes that save for the job.

    Attributes:
        base: the base container.
        device, inode: of the file. While the job lives, no other file has both.
    """

    base: Path
    device: int
    inode: int

    def check(self) -> None:
        """Raise unless this file is still the one at its path.

        Raises:
            JobInUseError: somebody has removed the base container, or moved it. What lies there now is another job's.
        """
        try:
            status = os.stat(self.base / PRIVATE_DIR / JOB, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            found = "nothing is there now"
        else:
            if (status.st_dev, status.st_ino) == (self.device, self.inode):
                return
            found = "another job has made it anew"
        raise JobInUseError(
            f"this base container was removed while the job had it open, and {found}",
            path=self.base,
            hint="this job can save nothing any more: end it, and give each job a base container of its own",
        )


class JobLock:
    """This process's share in the lock of its job. Processes of one job share it, and so do openings of one process.

    A process that is ending, because it was killed and its memory is being freed, is waited for. Any other one is not.

    Args:
        base: the base container; made if it is missing.
        job: id of the job, the same in all its processes.
        deadline_s: seconds to wait for a process that is ending.

    Attributes:
        file: the file that is locked.

    Raises:
        JobInUseError: a process of another job has the base container open. Names its host and process id.
        UnsafePathError: others could have planted the base container, or may write to it.
    """

    file: JobFile

    def __init__(self, base: Path, job: str, deadline_s: float) -> None:
        self._path = base / PRIVATE_DIR / JOB
        self._base = base
        self._byte = 1 + (int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "big") >> 3)
        self._held: _Held | None = None
        give_up, told = time.monotonic() + deadline_s, False
        while (holder := self._take()) is not None:
            ending = holder.deciding or _is_ending(holder.pid)
            if not ending or time.monotonic() > give_up:
                raise self._in_use(holder)
            if not told and not holder.deciding:
                told = True
                _log.warning("waiting for process %d, which has %s open and is ending", holder.pid, base)
            time.sleep(_PAUSE_S)

    def _take(self) -> _Holder | None:
        """Take the lock, or say who has it."""
        with _mutex:
            while True:
                make_tree(self._base, self._path.parent)
                known = _known(self._path)
                if known is None:
                    descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT)
                    holder = _lock(descriptor, self._byte)
                    if holder is not None:
                        os.close(descriptor)
                        return holder
                    if not is_at(descriptor, self._path):  # `flashpoint rm` has removed the file just before
                        os.close(descriptor)
                        continue
                    known = _Held(descriptor)
                status = os.fstat(known.descriptor)
                _held[status.st_dev, status.st_ino] = known
                self.file = JobFile(self._base, status.st_dev, status.st_ino)
                known.users += 1
                self._held = known
                return None

    def _in_use(self, holder: _Holder) -> JobInUseError:
        pid, host = _described(self._path)
        if holder.pid not in (0, pid):
            pid, host = holder.pid, host or socket.gethostname()
        return JobInUseError(
            f"another job has this base container open (process {pid or 'unknown'} on {host or 'an unknown host'})",
            path=self._base,
            hint="stop that process, or give each job a base container of its own",
        )

    def release(self) -> None:
        """Let go. Safe to call twice."""
        with _mutex:
            held, self._held = self._held, None
            if held is None:
                return
            held.users -= 1
            if not held.users:
                for key in [key for key, each in _held.items() if each is held]:
                    del _held[key]
                os.close(held.descriptor)


def lock_out_jobs(base: Path) -> int:
    """Take the lock of a base container so that no job can open it, for whoever removes it. Returns the descriptor.

    Raises:
        JobInUseError: a job has it open.
        UnsafePathError: the file is somebody else's.
        OSError: the file cannot be opened.
    """
    path = base / PRIVATE_DIR / JOB
    with _mutex:
        if _known(path) is not None:
            raise JobInUseError("this process has it open", path=base, hint="close it first")
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except _HELD as error:
            holder = _holder(descriptor, _GATE, 0)
            os.close(descriptor)
            pid, host = _described(path)
            pid = holder.pid if holder is not None and holder.pid else pid
            text = f"a live process ({pid or 'unknown'} on {host or socket.gethostname()}) has it open"
            raise JobInUseError(text, path=base, hint="end the job first") from error
        return descriptor


def _known(path: Path) -> _Held | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return _held.get((status.st_dev, status.st_ino))


def _lock(descriptor: int, byte: int) -> _Holder | None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _GATE)
    except _HELD:
        gate = _holder(descriptor, _GATE, 1)
        return _Holder(0 if gate is None else gate.pid, deciding=True)
    other = _holder(descriptor, 1, byte - 1) or _holder(descriptor, byte + 1, 0)
    if other is None:
        if _holder(descriptor, byte, 1) is None:
            _describe(descriptor)
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, byte)
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, _GATE)
    return other


def _holder(descriptor: int, start: int, length: int) -> _Holder | None:
    """Somebody else who has locked a part of the range; a length of 0 is all that follows."""
    if length < 0 or (length == 0 and start == 1):
        return None
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else _Holder(max(pid, 0), deciding=False)


def _describe(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the filesystem may be full
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)


def _described(path: Path) -> tuple[int, str]:
    """The process that was first of the job that has the lock, and its host; 0 and nothing where that is not known."""
    with contextlib.suppress(OSError, ValueError):
        pid, _, host = path.read_text(errors="replace").partition(" ")
        return int(pid), "".join(each for each in host if each.isprintable())
    return 0, ""


def _is_ending(pid: int) -> bool:
    """Return True if a process exits just now, or has been killed and has not noticed yet."""
    if pid <= 0:
        return False
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, ValueError):
        return not os.path.exists(f"/proc/{pid}")  # it has ended since
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    killed = any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)
    return state in "ZX" or bool(int(fields[5]) & _EXITING) or killed
