"""The harness itself: what other tests rely on when they kill, damage and inject; and `make matrix`."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ml_flashpoint import Flashpoint
from ml_flashpoint.net.channel import Channel
from tests.support import matrix, warm
from tests.support import tmpfs as tmpfs_folders
from tests.support.cluster import Cluster, ClusterError, run_ranks
from tests.support.forked import wait_until
from tests.support.injector import POINTS, Fault, Injector, Interrupted
from tests.support.part_checker import PartChecker
from tests.support.processes import CapturedProcess, child_environment, kill_marked, marked_processes


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# ---- clusters of real processes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_failure_of_a_rank_is_raised_with_its_output(tmpfs: Path) -> None:
    with pytest.raises(ClusterError, match="the probe fails as it was told to") as caught:
        run_ranks(tmpfs, "harness_probe", 2, args=["fail"])
    # -6 if rank 0 noticed the loss of its peer, and failed, before the peer was gone.
    assert re.search(r"rank 1 failed with (1|-6)\b", str(caught.value))
    assert "--- rank 0 ---" in str(caught.value)


@pytest.mark.slow
def test_a_hang_is_raised_with_the_stacks_of_the_ranks(tmpfs: Path) -> None:
    with Cluster(tmpfs, "harness_probe", args=["hang"]) as cluster:
        cluster.wait_for_output('"child"', rank=0)
        child = cluster.reports(0)[-1]["child"]
        with pytest.raises(ClusterError, match=r"no end of all processes within 0\.1 s") as caught:
            cluster.wait(timeout_s=0.1)
    assert 'harness_probe.py", line' in str(caught.value)
    assert not _runs(child)


@pytest.mark.slow
def test_killed_node_is_gone_with_everything_on_it(tmpfs: Path) -> None:
    with Cluster(tmpfs, "harness_probe", placement=(0, 1, 0, 1), args=["hang"]) as cluster:
        pids = {}
        for rank in range(4):
            cluster.wait_for_output('"child"', rank=rank)
            first, second = cluster.reports(rank)
            assert (first["node"], first["total"]) == (f"node-{rank % 2}", 10)
            pids[rank] = {first["pid"], second["child"]}
        cluster.kill_node(1)
        assert not any(_runs(pid) for rank in (1, 3) for pid in pids[rank])
        # The survivors are about to fail, since their peers are gone; what they have started does not know of that.
        assert all(_runs(cluster.reports(rank)[1]["child"]) for rank in (0, 2))
        assert not cluster.node_folder(1).exists()
        assert (cluster.base_of(0) / "rank-2").exists()
        assert cluster.kill_rank(2) in pids[2]
    assert not any(_runs(pid) for rank in range(4) for pid in pids[rank])


def test_folders_of_dead_runs_are_swept_and_of_live_ones_kept(tmpfs: Path) -> None:
    if tmpfs.parent != tmpfs_folders.SHM:
        pytest.skip("no tmpfs here")
    script = "from tests.support.tmpfs import make_folder; print(make_folder())"
    left = Path(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout[:-1])
    assert left.exists()
    tmpfs_folders.sweep()  # unless another run's is faster
    assert not left.exists()
    assert tmpfs.exists()


# ---- programs that are forked from a template ------------------------------------------------------------------

_SEEN = """
import atexit, json, os, random, signal, sys, threading
import numpy, torch
import multiprocessing
atexit.register(print, "at exit")
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "main": sys.modules["__main__"].__dict__ is globals(),
    "session": os.getsid(0) == os.getpid(), "env": dict(os.environ), "name": __name__,
    "spec": getattr(__spec__, "name", None),
    "file": globals().get("__file__"), "alone": threading.active_count(), "parent": multiprocessing.parent_process(),
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "descriptors": len(os.listdir("/proc/self/fd")), "threads": torch.get_num_threads(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
}))
authkey = multiprocessing.current_process().authkey.hex()
print(json.dumps([random.random(), torch.initial_seed(), numpy.random.rand(), authkey]))
"""


def env(**more: str) -> dict[str, str]:
    return child_environment(PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1", OMP_NUM_THREADS="1", **more)


def described(how: str, argv: list[str]) -> tuple[dict[str, Any], list[Any]]:
    if how == "warm":
        done = warm.run(argv, env(PROBE="1"))
    else:
        done = subprocess.run(argv, env=env(PROBE="1"), capture_output=True, text=True, start_new_session=True)
    seen, drawn, last = done.stdout.splitlines()
    assert (done.returncode, done.stderr, last) == (0, "", "at exit")
    return json.loads(seen), json.loads(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a module", "code"])
def test_a_program_finds_what_it_finds_after_a_cold_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probe.py").write_text(_SEEN)
    argv = {"a module": ["-m", "probe"], "code": ["-c", _SEEN]}[kind]
    (first, cold), (second, one), (third, other) = (
        described(how, [sys.executable, *argv, "more", "arguments"]) for how in ("cold", "warm", "warm")
    )
    first["descriptors"] += 1  # what it is marked with
    assert second == third == first
    assert len({*cold, *one, *other}) == 12


@pytest.mark.slow
def test_the_end_of_a_program_is_reported_and_an_import_that_fails_is_shown() -> None:
    for code, ended in (
        ("raise SystemExit(3)", 3),
        ("raise ValueError('so it is')", 1),
        ("import os; os._exit(4)", 4),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ):
        done = warm.run([sys.executable, "-c", code], env())
        assert done.returncode == ended
        assert ("so it is" in done.stderr) == (ended == 1)
    made = warm.Template(["there_is_no_such_module"], env())
    with open(os.devnull, "r+b") as nothing, pytest.raises(ChildProcessError, match="there_is_no_such_module"):
        made.start([sys.executable, "-c", ""], env(), (nothing.fileno(),) * 3)
    made.close()


@pytest.mark.slow
def test_what_a_program_forks_and_what_it_starts_is_found_and_killed() -> None:
    code = """
import os, signal, subprocess, sys
if os.fork() == 0:
    os.setsid()
    print("forked", flush=True)
    signal.pause()
subprocess.Popen([sys.executable, "-c", "import signal; print('started', flush=True); signal.pause()"])
signal.pause()
"""
    process = CapturedProcess([sys.executable, "-c", code], env(PROBE="of this test"), lambda: None, cold=False)
    wait_until(lambda: {"forked\n", "started\n"} <= set(process.lines), "it has forked, and started one")
    assert len(marked_processes(PROBE="of this test")) == 3
    assert kill_marked(PROBE="of this test") == 3
    assert process.join(60)
    assert process.returncode == -signal.SIGKILL
    assert marked_processes(PROBE="of this test") == []


@pytest.mark.slow
def test_all_programs_end_with_their_template() -> None:
    made = warm.Template([], env())
    with open(os.devnull, "r+b") as nothing:
        argv = [sys.executable, "-c", "import signal; signal.pause()"]
        programs = [made.start(argv, env(), (nothing.fileno(),) * 3) for _ in range(2)]
    assert [program.poll() for program in programs] == [None, None]
    made.close()
    assert [program.wait(60) for program in programs] == [-signal.SIGKILL] * 2
    assert not any(_runs(program.pid) for program in programs)


# ---- faults and damage -----------------------------------------------------------------------------------------


def test_the_nth_call_from_a_step_on_fails_once_on_one_rank_in_one_folder(tmp_path: Path) -> None:
    fault = Fault(rank=1, step=3, point="mkdir", action="enospc", nth=2)
    for rank, base, hurts in ((1, "here", True), (0, "here", False), (1, "elsewhere", False)):
        folder = tmp_path / f"{rank}-{base}"
        folder.mkdir()
        with Injector(rank, [fault], base=str(folder if base == "here" else tmp_path / base)) as injector:
            os.mkdir(folder / "before")
            injector.at(3)
            os.mkdir(folder / "first")
            if hurts:
                with pytest.raises(OSError, match="injected at mkdir") as caught:
                    os.mkdir(folder / "second")
                assert caught.value.errno == errno.ENOSPC
            os.mkdir(folder / "third")
            assert injector.fired == [(fault, 3)] * hurts
        assert not (folder / "second").exists()


def test_every_point_is_there_and_is_put_back_and_clocks_and_signals_are_off() -> None:
    send, opens = Channel.send_payload, open
    faults = [Fault(rank=0, step=9, point=point, action="slow") for point in POINTS]
    with Injector(0, faults, clock_s=-3600.0), Interrupted():
        assert Channel.send_payload is not send
        assert open is not opens
        off = time.time()
        time.sleep(0.05)
    assert 3500 < time.time() - off < 3700
    assert Channel.send_payload is send
    assert open is opens


def _flipped(at: int) -> Any:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize(
    ("kind", "damage", "what"),
    [
        ("safetensors", _flipped(5000), r"blocks \[.*\] .* are not what was committed"),
        ("safetensors", _flipped(3), "are not what was committed"),
        ("safetensors", lambda path: os.truncate(path, path.stat().st_size // 2), "the manifest says"),
        ("safetensors", Path.unlink, "FileNotFoundError"),
        ("manifest", _flipped(60), "digest does not fit"),
        ("manifest", _flipped(20), "digest does not fit"),
        (None, lambda folder: folder.rename(folder.with_name("step-4_ckpt")), "it is the manifest step-3_ckpt"),
    ],
)
def test_damage_that_a_test_leaves_is_found(tmpfs: Path, kind: str | None, damage: Any, what: str) -> None:
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(model=torch.nn.Linear(40, 30)).save(3)
    checker, version = PartChecker(), tmpfs / "job" / "step-3_ckpt"
    assert checker.problems(version.parent) == []
    path = version if kind is None else next(version.glob(f"rank-*.{kind}"))
    damage(path)
    (problem,) = checker.problems(version.parent)
    assert re.search(what, problem)
    assert kind is None or str(version) in problem


# ---- make matrix -----------------------------------------------------------------------------------------------

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/><testcase classname="tests.a" name="bad"><failure>no</failure></testcase>
<testcase classname="tests.b" name="worse"><error>no</error></testcase>
<testcase classname="tests.b" name="none"><skipped/></testcase></testsuite></testsuites>"""


def test_outcomes_of_the_matrix_are_counted_and_shown() -> None:
    found = matrix.counted(matrix.Result("3.12", "2.6"), "Python 3.12.1, torch 2.6.0", REPORT)
    assert (found.passed, found.failed, found.skipped) == (1, 2, 1)
    assert found.failures == ("tests.a::bad", "tests.b::worse")
    assert found.cell == "2 of 3 failed"
    text = matrix.table([matrix.Result("3.12", "2.6", passed=5), matrix.Result("3.13", "2.6", why="no torch")])
    assert "| 2.6 | not run | not run | 5 passed | skipped |" in text
    assert text.count("not run") == len(matrix.TORCHES) * len(matrix.PYTHONS) - 2
    assert "* Python 3.13, torch 2.6 (): skipped, no torch" in text
    page, results = matrix.PAGE.read_text(encoding="utf-8"), matrix.read_results(matrix.RESULTS).values()
    assert matrix.written(matrix.written(page, []), results) == page, "the page is what its results say"


def test_the_pythons_and_torches_of_the_matrix_are_those_that_are_supported() -> None:
    project = (matrix.REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={matrix.PYTHONS[0]}"' in project
    assert f'"torch>={matrix.TORCHES[0]}"' in project
    pinned = re.search(r"^TORCH \?= torch==(\d+\.\d+)", (matrix.REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] == matrix.TORCHES[-1]
