"""Groups of processes, barriers and what a program asks of its machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError
from ml_flashpoint.ddict.native import (
    CollectiveGroup,
    Policy,
    ProcessFailedError,
    ProcessGroup,
    ProcessTemplate,
    RankInfo,
    System,
    this_process,
)
from ml_flashpoint.ddict.native import processes as native_processes
from ml_flashpoint.ddict.native import ray as ports
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.ddict.native_support import DEADLINE_S, barrier_elsewhere, barrier_of, group_of, notes, puids_of
from tests.support.forked import wait_until
from tests.support.processes import child_environment, suspend
from tests.workers import ddict_members

pytestmark = pytest.mark.slow


def test_thirty_processes_start_quickly_and_pass_a_barrier_together(tmp_path: Path) -> None:
    times = 10
    with barrier_of(30) as barrier, group_of(30, ddict_members.pass_often, barrier, times, str(tmp_path)) as group:
        puids = puids_of(group)
        group.join(timeout=DEADLINE_S)
        assert group.inactive_puids == [(puid, 0) for puid in puids]
        assert group.puids == []
        assert not barrier.broken, "an orderly end is no death"
    assert len(set(puids)) == 30
    for together in zip(*notes(tmp_path, puids), strict=True):
        assert sorted(together) == list(range(30))
    assert this_process.my_puid == os.getpid()


def test_exit_codes_are_known_by_puid() -> None:
    group = ProcessGroup(ignore_error_on_exit=True)
    with group:
        for code in (0, 3, 0):
            group.add_process(1, ProcessTemplate(ddict_members.exit_with, (code,)))
        puids = puids_of(group)
        group.start()
        group.join(timeout=DEADLINE_S)
        assert group.inactive_puids == list(zip(puids, (0, 3, 0), strict=True))


def test_a_member_that_fails_is_named_with_its_error_and_ends_the_others(tmp_path: Path) -> None:
    with barrier_of(3) as barrier, group_of(3, ddict_members.fail_if, "me", barrier, str(tmp_path)) as group:
        puids = puids_of(group)
        with pytest.raises(ProcessFailedError, match="ValueError: no luck for me") as caught:
            group.join(timeout=DEADLINE_S)
        assert caught.value.puid in puids
        assert caught.value.exit_code == 1
        assert "fail_if" in str(caught.value)
        wait_until(lambda: not group.puids, "the end of the others")
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (copy.puid, str(copy)) == (caught.value.puid, str(caught.value))


@pytest.mark.parametrize("first", [True, False], ids=["before it ever waited", "after it waited once"])
def test_the_death_of_a_member_breaks_the_barrier_for_the_others(tmp_path: Path, first: bool) -> None:
    work = (ddict_members.wait_for_lost,)
    with (
        barrier_of(3) as barrier,
        group_of(3, *work, barrier, str(tmp_path), first, ignore_error_on_exit=True) as group,
    ):
        puids = puids_of(group)
        wait_until(lambda: (tmp_path / "lost").exists() and barrier.n_waiting == 2, "two waiting for the third")
        wait_until(lambda: any((tmp_path / str(puid)).exists() for puid in puids), "the name of the third")
        lost = next(puid for puid in puids if (tmp_path / str(puid)).exists())
        os.kill(group.pids[lost], signal.SIGKILL)
        group.join(timeout=DEADLINE_S)
        assert dict(group.inactive_puids)[lost] == -signal.SIGKILL
        told = notes(tmp_path, [puid for puid in puids if puid != lost])
        assert len(told) == 2
        assert all("the barrier is broken" in text for text in told)
        assert barrier.broken


def test_a_killed_member_is_an_error(tmp_path: Path) -> None:
    with group_of(2, ddict_members.hang, str(tmp_path)) as group:
        lost = group.puids[1]
        os.kill(group.pids[lost], signal.SIGKILL)
        with pytest.raises(ProcessFailedError, match="was killed by signal 9") as caught:
            group.join(timeout=DEADLINE_S)
        assert (caught.value.puid, caught.value.exit_code) == (lost, -9)


def test_exit_codes_are_right_although_others_look_after_their_children(tmp_path: Path) -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            multiprocessing.active_children()

    looking = [threading.Thread(target=look, daemon=True) for _ in range(2)]
    for each in looking:
        each.start()
    try:
        with group_of(30, ddict_members.exit_with, 0) as group:
            group.join(DEADLINE_S)
            assert {code for _, code in group.inactive_puids} == {0}
    finally:
        over.set()
        for each in looking:
            each.join(DEADLINE_S)


def test_a_join_has_a_deadline_and_close_ends_the_members(tmp_path: Path) -> None:
    with group_of(2, ddict_members.hang, str(tmp_path)) as group:
        puids, pids = puids_of(group), list(group.pids.values())
        with pytest.raises(DDictTimeoutError, match="still run"):
            group.join(timeout=0.05)
        group.close()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        assert [puid for puid, _ in group.inactive_puids] == puids
        group.join(timeout=0)  # ended by the group itself: no failure
        with pytest.raises(DDictError):
            group.start()


def test_a_member_that_does_not_heed_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_processes, "TERMINATION_GRACE_S", 0.2)
    with group_of(1, ddict_members.hang, str(tmp_path), True) as group:
        (puid,) = puids_of(group)
        wait_until(lambda: (tmp_path / str(puid)).exists(), "the start of the member")
        group.close()
        assert group.inactive_puids == [(puid, -signal.SIGKILL)]


def test_the_others_end_although_a_barrier_does_not_answer(tmp_path: Path) -> None:
    with barrier_elsewhere(tmp_path) as (maker, barrier):
        assert barrier.n_waiting == 0
        suspend(maker.pid)
        with group_of(2, ddict_members.hang, str(tmp_path), False, barrier) as group:
            lost = group.puids[0]
            os.kill(group.pids[lost], signal.SIGKILL)
            with pytest.raises(ProcessFailedError, match="was killed by signal 9"):
                group.join(timeout=15)


def test_who_ends_by_a_signal_of_its_group_has_not_failed(tmp_path: Path) -> None:
    with group_of(2, ddict_members.hang, str(tmp_path)) as group:
        group.kill(signal.SIGUSR2)
        group.join(timeout=DEADLINE_S)
        assert [code for _, code in group.inactive_puids] == [-signal.SIGUSR2] * 2


def test_a_signal_that_a_member_has_blocked_waits_for_it(tmp_path: Path) -> None:
    with group_of(1, ddict_members.take_blocked_signal) as group:
        group.join(timeout=DEADLINE_S)


def test_members_end_when_their_creator_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, ddict_members.__file__, str(tmp_path)]
    creator = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment())
    try:
        assert creator.stdout is not None
        assert creator.stdin is not None
        pids = json.loads(creator.stdout.readline())
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "the start of the members")
        watches = [os.pidfd_open(pid) for pid in pids]
    finally:
        creator.kill()
        creator.wait(DEADLINE_S)
        creator.stdin.close()
        creator.stdout.close()
    for watch in watches:
        assert select.select([watch], [], [], DEADLINE_S)[0]
        os.close(watch)


def test_a_member_has_its_own_environment_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "work").mkdir()
    group = ProcessGroup()
    with group:
        monkeypatch.setenv("FLASHPOINT_TEST_PROBE", "of the creator")
        plain = ProcessTemplate(ddict_members.look_around, (str(tmp_path),))
        own = ProcessTemplate(
            ddict_members.look_around,
            (str(tmp_path),),
            cwd=str(tmp_path / "work"),
            env={"FLASHPOINT_TEST_PROBE": "its own"},
            policy=Policy((1, 3)),
        )
        group.add_process(1, plain)
        group.add_process(1, own)
        puids = puids_of(group)
        group.start()
        group.join(timeout=DEADLINE_S)
    first, second = notes(tmp_path, puids)
    assert first == {"cwd": os.getcwd(), "FLASHPOINT_TEST_PROBE": "of the creator", "CUDA_VISIBLE_DEVICES": None}
    assert second == {
        "cwd": str(tmp_path / "work"),
        "FLASHPOINT_TEST_PROBE": "its own",
        "CUDA_VISIBLE_DEVICES": "1,3",
    }


SCRIPT = """
import sys
from ml_flashpoint.ddict.native import Barrier, ProcessGroup, ProcessTemplate, this_process

def work(barrier, folder):
    barrier.wait()
    with open(f"{folder}/{this_process.my_puid}", "w") as out:
        out.write(str(factor * 7))

if __name__ == "__main__":
    factor = 6
    barrier = Barrier(3)
    group = ProcessGroup()
    group.add_process(template=ProcessTemplate(target=work, args=(barrier, sys.argv[1])), nproc=3)
    group.init()
    group.start()
    group.join()
    print([open(f"{sys.argv[1]}/{puid}").read() for puid, _ in group.inactive_puids])
    group.close()
"""


def test_functions_of_a_script_run_with_the_globals_of_its_guarded_part(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    argv = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, env=child_environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['42', '42', '42']\n"
    assert done.stderr == ""


@pytest.mark.parametrize("nproc", [0, -1, True, 1.5])
def test_a_group_takes_a_positive_number_of_processes(nproc: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="nproc"):
        ProcessGroup().add_process(nproc, ProcessTemplate(print))


def test_a_template_takes_a_function() -> None:
    with pytest.raises(InvalidArgumentError, match="target"):
        ProcessTemplate("ls")  # type: ignore[arg-type]


def test_ranks_of_a_collective_group_reduce_together(tmp_path: Path) -> None:
    with CollectiveGroup(ddict_members.reduce_ranks, (str(tmp_path),), policies=[Policy()] * 2) as group:
        group.init()
        puids = puids_of(group)
        group.start()
        group.join(timeout=DEADLINE_S)
        assert group.inactive_puids == [(puid, 0) for puid in puids]
    seen = notes(tmp_path, puids)
    assert [one["total"] for one in seen] == [3, 3]
    assert [one["place"] for one in seen] == [[0, 0, 2, 0, 2], [1, 1, 2, 0, 2]]
    assert [one["threads"] for one in seen] == [int(os.environ["OMP_NUM_THREADS"])] * 2


def test_a_collective_group_needs_policies() -> None:
    with pytest.raises(InvalidArgumentError, match="policies"):
        CollectiveGroup(ddict_members.reduce_ranks, policies=[])


@pytest.mark.parametrize("node", [-1, 1])
def test_a_collective_group_knows_its_nodes(node: int) -> None:
    group = CollectiveGroup(ddict_members.reduce_ranks, policies=[Policy(), Policy(node=node)])
    with pytest.raises(InvalidArgumentError, match="no such node") as caught:
        group.init()
    assert (caught.value.argument, caught.value.value) == ("node", str(node))


def test_a_collective_group_is_made_ready_without_torch() -> None:
    program = (
        "import sys; from ml_flashpoint.ddict.native import CollectiveGroup, Policy\n"
        "with CollectiveGroup(print, policies=[Policy()] * 2) as group: group.init()\n"
        "assert 'torch' not in sys.modules"
    )
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, env=child_environment())
    assert done.returncode == 0, done.stderr


def test_a_port_for_later_is_one_that_the_system_gives_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ports.free_port() in range(20_000, 32_768)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(ports, "_PORTS", [taken.getsockname()[1]])
        monkeypatch.setattr(ports, "_TRIES", 1)
        assert ports.free_port() not in (0, taken.getsockname()[1])


def test_a_process_without_a_rank_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(DDictError, match="RANK is not set"):
        RankInfo()


def test_the_machine_is_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_NUM_GPUS", "3")
    system = System()
    assert (system.nnodes, system.primary_node.num_gpus) == (1, 3)
    assert system.primary_node.hostname == socket.gethostname()
    assert system.gpu_policies() == [Policy((gpu,), 0) for gpu in range(3)]
    monkeypatch.setenv("FLASHPOINT_NUM_GPUS", "many")
    with pytest.raises(InvalidArgumentError, match="FLASHPOINT_NUM_GPUS"):
        System()


def test_gpus_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("FLASHPOINT_NUM_GPUS", raising=False)
    # Other tests play a GPU in this process, which is there to count and not available.
    assert System().primary_node.num_gpus == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("said", "count", "restarted"),
    [(None, None, False), ("0", "0", False), ("1", None, True), (None, "2", True), ("0", "1", True)],
)
def test_a_restart_is_known(
    monkeypatch: pytest.MonkeyPatch, said: str | None, count: str | None, restarted: bool
) -> None:
    for name, value in (("FLASHPOINT_RESTARTED", said), ("TORCHELASTIC_RESTART_COUNT", count)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert System().restarted is restarted


def test_an_odd_word_about_restarts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_RESTARTED", "perhaps")
    with pytest.raises(InvalidArgumentError, match="FLASHPOINT_RESTARTED"):
        _ = System().restarted
