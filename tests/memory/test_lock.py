"""One job at a time has a base container on a node, whichever processes it has."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path

import pytest

from ml_flashpoint.format.errors import JobInUseError, UnsafePathError
from ml_flashpoint.format.files import open_own
from ml_flashpoint.memory.container import JobLock, is_open, locked_out
from tests.support.forked import Child, Report, wait_until


def stay(report: Report, base: str, job: str) -> str:
    """Hold the lock until told to end; or return the error."""
    try:
        lock = JobLock(Path(base), job, 1000)  # longer than any test: a wait for a live job fails it
    except JobInUseError as error:
        return str(error)
    report("open")
    report.listen()
    lock.release()
    return "ended"


def refused(base: Path, by: int, job: str = "another") -> bool:
    with Child(stay, str(base), job) as child:
        return f"another job has this base container open (process {by} on {socket.gethostname()})" in child.result()


def test_another_job_is_refused_as_long_as_any_process_of_the_first_lives(tmpfs: Path) -> None:
    assert not is_open(tmpfs)
    with Child(stay, str(tmpfs), "job") as one, Child(stay, str(tmpfs), "job") as other:
        one.next_report("open")
        assert is_open(tmpfs)
        other.next_report("open")
        assert refused(tmpfs, one.pid) or refused(tmpfs, other.pid)
        one.kill()
        assert refused(tmpfs, other.pid)
        other.say("end")
        assert other.result() == "ended"
        with Child(stay, str(tmpfs), "another") as third:
            third.next_report("open")


def test_openings_of_one_process_share_the_lock_and_forked_children_have_none(tmpfs: Path) -> None:
    locks = [JobLock(tmpfs, "job", 0) for _ in range(2)]
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)
        os._exit(0)
    locks[0].release()
    locks[0].release()
    assert refused(tmpfs, os.getpid())
    with pytest.raises(JobInUseError, match="this process"), locked_out(tmpfs):
        pass
    locks[1].release()
    with locked_out(tmpfs):
        assert not (tmpfs / "step-1_ckpt").exists()
    os.write(tell, b"x")
    os.waitpid(child, 0)
    os.close(told)
    os.close(tell)


def test_another_job_id_in_the_same_process_shares_the_lock_of_its_job(tmpfs: Path) -> None:
    first = JobLock(tmpfs, "job", 0)
    with Child(stay, str(tmpfs), "job") as other:
        other.next_report("open")
        second = JobLock(tmpfs, "another", 0)
        second.check()
        first.check()
        other.say("end")
        assert other.result() == "ended"
    assert refused(tmpfs, os.getpid())


def test_a_lock_that_the_process_has_lost_is_taken_again_or_missed(tmpfs: Path) -> None:
    """POSIX ends it as any code of the process closes the file, such as what copies the folder."""
    lock = JobLock(tmpfs, "job", 0)
    (tmpfs / ".flashpoint/job").read_bytes()
    with Child(stay, str(tmpfs), "another") as other:
        other.next_report("open")
        with pytest.raises(JobInUseError, match=f"process {other.pid} on"):
            lock.check()
        other.say("end")
        assert other.result() == "ended"
    lock.check()
    assert refused(tmpfs, os.getpid())


def end_slowly(report: Report, base: str) -> None:
    """Let the main thread end as if the process had been killed and its memory took long to be freed."""
    JobLock(Path(base), "job", 0)

    def end_when_told() -> None:
        report.listen()
        os._exit(0)

    threading.Thread(target=end_when_told).start()
    report("open")
    ctypes.CDLL(None).pthread_exit(None)


def test_a_process_that_is_ending_is_waited_for(tmpfs: Path) -> None:
    with Child(end_slowly, str(tmpfs)) as before:
        before.next_report("open")
        wait_until(lambda: Path(f"/proc/{before.pid}/stat").read_text().rpartition(") ")[2][0] == "Z", "it ends")
        with Child(stay, str(tmpfs), "another") as after:
            wait_until(lambda: f"waiting for process {before.pid}" in after.log, "it is waited for")
            before.say("end")
            after.next_report("open")


def remove_meanwhile(report: Report, base: str) -> None:
    with locked_out(Path(base)):
        report("locked")
        report.listen()
        (Path(base) / ".flashpoint/job").unlink()


def test_who_waits_while_the_base_container_is_removed_locks_the_new_file(tmpfs: Path) -> None:
    JobLock(tmpfs, "first", 0).release()
    with Child(remove_meanwhile, str(tmpfs)) as remover:
        remover.next_report("locked")
        with pytest.raises(JobInUseError):
            JobLock(tmpfs, "second", 0)
        with Child(stay, str(tmpfs), "second") as second:
            remover.say("go on")
            second.next_report("open")
            assert (tmpfs / ".flashpoint/job").exists()
            assert refused(tmpfs, second.pid)


def test_a_job_that_opens_in_the_midst_of_a_removal_makes_its_folders_anew(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmpfs / "base" / ".flashpoint"

    def removed(path: Path, flags: int) -> int:
        monkeypatch.undo()
        private.rmdir()
        private.parent.rmdir()
        return open_own(path, flags)

    monkeypatch.setattr("ml_flashpoint.memory.container.open_own", removed)
    lock = JobLock(tmpfs / "base", "a", 0.0)
    lock.check()
    lock.release()


def test_a_lock_whose_file_is_gone_is_worth_nothing(tmpfs: Path) -> None:
    lock = JobLock(tmpfs, "job", 0)
    lock.check()
    (tmpfs / ".flashpoint/job").unlink()
    with pytest.raises(JobInUseError, match="was removed"):
        lock.check()
    JobLock(tmpfs, "job", 0).release()
    with pytest.raises(JobInUseError, match="was removed"):
        lock.check()
    lock.release()
    (tmpfs / ".flashpoint/job").unlink()
    (tmpfs / ".flashpoint/job").symlink_to("/etc/passwd")
    with pytest.raises(UnsafePathError):
        JobLock(tmpfs, "job", 0)
