"""Groups of processes, barriers and what a program asks of its machine."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictError, DDictTimeoutError
from ml_flashpoint.ddict.native import (
    Barrier,
    BarrierBrokenError,
    CollectiveGroup,
    Policy,
    ProcessFailedError,
    ProcessGroup,
    ProcessTemplate,
    RankInfo,
    System,
    this_process,
)
from ml_flashpoint.ddict.native import barrier as native_barrier
from ml_flashpoint.ddict.native import processes as native_processes
from ml_flashpoint.ddict.native import ray as ports
from ml_flashpoint.ddict.native.barrier import BARRIERS
from ml_flashpoint.format.errors import AuthenticationError, InvalidArgumentError, ProtocolError
from ml_flashpoint.net.client import Connection
from tests.ddict.native_support import DEADLINE_S, barrier_elsewhere, barrier_of, group_of, in_threads, notes, puids_of
from tests.support.forked import wait_until
from tests.support.processes import child_environment, suspend
from tests.workers import ddict_members


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


def test_a_port_for_later_is_one_that_the_system_gives_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ports.free_port() in range(20_000, 32_768)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(ports, "_PORTS", [taken.getsockname()[1]])
        monkeypatch.setattr(ports, "_TRIES", 1)
        assert ports.free_port() not in (0, taken.getsockname()[1])


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


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        *(
            ("nproc", lambda nproc=nproc: ProcessGroup().add_process(nproc, ProcessTemplate(print)))
            for nproc in (0, True)
        ),
        ("target", lambda: ProcessTemplate("ls")),  # type: ignore[arg-type]
        ("policies", lambda: CollectiveGroup(print, policies=[])),
        ("node", lambda: CollectiveGroup(print, policies=[Policy(), Policy(node=1)]).init()),
        *(("parties", lambda parties=parties: Barrier(parties)) for parties in (0, True, "2")),
        ("timeout", lambda: Barrier(2, timeout=-1)),
    ],
)
def test_a_bad_argument_is_named(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    assert caught.value.argument == argument


def test_the_machine_and_the_process_are_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "FLASHPOINT_NUM_GPUS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DDictError, match="RANK is not set"):
        RankInfo()
    # Other tests play a GPU in this process, which is there to count and not available.
    assert System().primary_node.num_gpus == torch.cuda.device_count()
    monkeypatch.setenv("FLASHPOINT_NUM_GPUS", "3")
    system = System()
    assert (system.nnodes, system.primary_node.num_gpus) == (1, 3)
    assert system.primary_node.hostname == socket.gethostname()
    assert system.gpu_policies() == [Policy((gpu,), 0) for gpu in range(3)]
    for name, look in (("FLASHPOINT_RESTARTED", lambda: System().restarted), ("FLASHPOINT_NUM_GPUS", System)):
        monkeypatch.setenv(name, "perhaps")
        with pytest.raises(InvalidArgumentError, match=name):
            look()


# ---- barriers --------------------------------------------------------------------------------------------------------


def test_threads_pass_a_barrier_together() -> None:
    passed: list[int] = []
    with barrier_of(3) as barrier:
        for meeting in range(3):
            indices = in_threads(3, lambda _: (barrier.wait(timeout=DEADLINE_S), passed.append(0))[0])
            assert sorted(indices) == [0, 1, 2]
            assert len(passed) == 3 * (meeting + 1)


def test_one_who_gives_up_breaks_the_barrier_until_it_is_reset() -> None:
    with barrier_of(2) as barrier:
        with pytest.raises(DDictTimeoutError, match="barrier"):
            barrier.wait(timeout=0.05)
        wait_until(lambda: barrier.broken, "the end of the connection to be heard")
        with pytest.raises(BarrierBrokenError):
            barrier.wait(timeout=DEADLINE_S)
        with pytest.raises(threading.BrokenBarrierError):
            barrier.wait(timeout=DEADLINE_S)
        barrier.reset()
        assert not barrier.broken
        assert sorted(in_threads(2, lambda _: barrier.wait(timeout=DEADLINE_S))) == [0, 1]


def test_an_abort_is_told_to_those_who_wait() -> None:
    with barrier_of(3) as barrier:

        def wait_or_abort(index: int) -> object:
            if index < 2:
                return barrier.wait(timeout=DEADLINE_S)
            wait_until(lambda: barrier.n_waiting == 2, "two waiting")
            return barrier.abort("enough")

        first, second, _ = in_threads(3, wait_or_abort)
        assert isinstance(first, BarrierBrokenError)
        assert isinstance(second, BarrierBrokenError)
        assert "enough" in str(first)


def test_a_closed_barrier_is_gone_for_all_handles() -> None:
    with barrier_of(2) as barrier:
        copy = pickle.loads(pickle.dumps(barrier))
        assert (copy.parties, copy.n_waiting) == (2, 0)
        barrier.close()
        with pytest.raises(DDictDestroyedError):
            copy.wait(timeout=DEADLINE_S)


def test_a_question_without_an_answer_in_time_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with barrier_elsewhere(tmp_path) as (maker, barrier):

        def meet() -> None:
            other = threading.Thread(target=barrier.wait, args=(DEADLINE_S,))
            other.start()
            assert barrier.wait(DEADLINE_S) in (0, 1)
            other.join(DEADLINE_S)

        meet()  # so this process has connections that have waited
        suspend(maker.pid)
        with monkeypatch.context() as patched:
            patched.setattr(native_barrier, "_REPLY_S", 0.1)
            for ask in (lambda: barrier.n_waiting, lambda: barrier.broken, barrier.reset):
                with pytest.raises(DDictTimeoutError, match="did not answer"):
                    ask()
        maker.send_signal(signal.SIGCONT)
        assert (barrier.n_waiting, barrier.broken) == (0, False)
        meet()


def test_a_barrier_of_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    with barrier_elsewhere(tmp_path) as (maker, barrier):
        assert barrier.n_waiting == 0
        maker.kill()
        maker.wait(DEADLINE_S)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(DDictDestroyedError):
            barrier.wait(timeout=DEADLINE_S)


def test_strangers_and_nonsense_disturb_nobody() -> None:
    with barrier_of(2) as barrier:
        for greeting in (b"wrong\n", b'{"op": "abort"}\n', bytes(10_000), b"\n" * 100):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(barrier._address[1])
                with contextlib.suppress(OSError):
                    stranger.sendall(greeting)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(100) == b""
        with Connection(barrier._address, barrier._secret, BARRIERS, connect_timeout_s=DEADLINE_S) as confused:
            for op, fields in (("abort", {}), ("dance", {})):
                with pytest.raises(ProtocolError):
                    confused.request(op, fields, timeout_s=DEADLINE_S)
        with pytest.raises(AuthenticationError):
            Connection(barrier._address, b"another secret of a barrier", BARRIERS, connect_timeout_s=DEADLINE_S)
        assert not barrier.broken
        assert sorted(in_threads(2, lambda _: barrier.wait(timeout=DEADLINE_S))) == [0, 1]
