"""One job at a time has a base container on a node, whichever its ranks are."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint import Flashpoint
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError
from tests.support.dcp import Door
from tests.support.forked import Child, Report, Team, wait_until
from tests.support.loops import Stored

# Longer than any test: whoever waits for a live job fails it.
PATIENT = {"FLASHPOINT_LOCK_DEADLINE_S": "1000"}


def open_base(base: str, how: str) -> Any:
    if how == "engine":
        return CheckpointEngine(base)
    if how == "facade":
        fp = Flashpoint(base)
        fp.track(value=Stored(1)).resume()
        return fp
    saver = DefaultMLFlashpointCheckpointSaver()
    saver.save(CheckpointContainerId(f"{base}/step-1_ckpt"), [("t", torch.ones(10))])
    return saver


def stay(report: Report, rank: int, how: str = "engine", base: str | None = None) -> str:
    """Open the base container of this node and stay until told to end; or the error."""
    try:
        opened = open_base(base or os.environ["FLASHPOINT_TEST_BASE"], how)
    except FlashpointError as error:
        return f"{type(error).__name__}: {error}"
    report("open")
    report.listen()
    opened.close()
    return "ended"


def alone(root: Path, node: int, how: str = "engine") -> Child:
    env = {"FLASHPOINT_NODE_ID": f"node-{node}", **PATIENT}
    return Child(stay, 0, how, str(root / f"node-{node}" / "job"), env=env)


def refused(said: str, holder: Child) -> bool:
    expected = f"another job has this base container open (process {holder.pid} on {socket.gethostname()})"
    return said.startswith("JobInUseError") and expected in said


def opened(team: Team) -> None:
    for child in team.ranks:
        child.next_report("open")


@pytest.mark.parametrize("how", ["engine", "facade", "saver"])
def test_a_job_with_other_ranks_is_refused_at_once(tmpfs: Path, how: str) -> None:
    with Team(stay, tmpfs, 2) as job:
        opened(job)
        for node in (1, 0):  # the second time with equal ranks
            with alone(tmpfs, node, how) as other:
                assert refused(other.result(), job[node])


def test_a_job_that_shares_one_node_of_two_is_refused_on_both(tmpfs: Path) -> None:
    with Team(stay, tmpfs, 2) as job:
        opened(job)
        with Team(stay, tmpfs, 2, placement=[2, 1], env=PATIENT) as other:
            elsewhere, here = other.results()
            assert refused(here, job[1])
            assert "another rank cannot use its base container" in elsewhere
        with alone(tmpfs, 2) as third:
            third.next_report("open")


def test_the_lock_lasts_as_long_as_any_rank_of_the_node(tmpfs: Path) -> None:
    with Team(stay, tmpfs, 3, placement=[0, 0, 0]) as job:
        opened(job)
        for dead, alive in ((0, 2), (2, 1)):
            job[dead].kill()
            with alone(tmpfs, 0) as other:
                said = other.result()
                assert any(refused(said, job[rank]) for rank in {1, alive})
        job[1].kill()
        with alone(tmpfs, 0) as other:
            other.next_report("open")


def test_openings_of_one_process_are_one_job(tmpfs: Path) -> None:
    with CheckpointEngine(tmpfs / "node-0" / "job"):
        CheckpointEngine(tmpfs / "node-0" / "job").close()
        with alone(tmpfs, 0) as other:
            assert f"process {os.getpid()} on" in other.result()
    with alone(tmpfs, 0) as other:
        other.next_report("open")


def save_when_told(report: Report, how: str, base: str, value: float) -> None:
    """Save a step each time that the test names one; report the error of the save, or None."""
    tensor = torch.full((1000,), value)
    door = fp = None
    if how == "facade":
        fp = Flashpoint(base, strict=True, deadline_s=30)
        fp.track(value=Stored(tensor)).resume()
    else:
        if how == "process":
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        door = Door(Path(base))
        door.latest()
    report("open")
    while (step := report.listen()[0]) is not None:
        try:
            if fp is not None:
                fp.save(step)
                fp.wait()
            elif door is not None:
                door.save_by(how, {"value": tensor}, step)
                door.settle()
        except BaseException as error:  # of DCP's
            report("saved", step, f"{type(error).__name__}: {error}")
        else:
            report("saved", step, None)


def saved(child: Child, step: int) -> str | None:
    child.say(step)
    return child.next_report("saved", step)[2]  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["facade", "sync", "thread", "process"])
def test_a_job_whose_base_container_was_removed_saves_nothing_in_that_of_a_later_job(tmpfs: Path, how: str) -> None:
    base = tmpfs / "job"
    with Child(save_when_told, how, str(base), 1.0) as first:
        first.next_report("open")
        assert saved(first, 1) is None
        base.rename(tmpfs / "gone") if how == "sync" else shutil.rmtree(base)
        assert "nothing is there now" in str(saved(first, 2))
        with Child(save_when_told, how, str(base), 2.0) as second:
            second.next_report("open")
            for step in (3, 4):
                assert saved(second, step) is None
                assert "another job has made it anew" in str(saved(first, step))
                assert "another job has made it anew" in str(saved(first, step + 10))
        found = Door(base)
        try:
            state = {"value": torch.zeros(1000)}
            if how != "facade":
                found.load(state, 4)
                assert state["value"].eq(2.0).all()
            assert found.latest() == 4
        finally:
            found.close()


def end_slowly(report: Report, base: str) -> None:
    """Open, and let the main thread end as if the process had been killed and its memory took long to be freed."""
    CheckpointEngine(base)

    def end_when_told() -> None:
        report.listen()
        os._exit(0)

    threading.Thread(target=end_when_told).start()
    report("open")
    ctypes.CDLL(None).pthread_exit(None)


def test_a_process_that_is_ending_is_waited_for(tmpfs: Path) -> None:
    base = tmpfs / "node-0" / "job"
    with Child(end_slowly, str(base)) as before:
        before.next_report("open")
        wait_until(lambda: Path(f"/proc/{before.pid}/stat").read_text().rpartition(") ")[2][0] == "Z", "it ends")
        with alone(tmpfs, 0) as after:
            wait_until(lambda: f"waiting for process {before.pid}" in after.log, "it is waited for")
            before.say("end")
            after.next_report("open")
