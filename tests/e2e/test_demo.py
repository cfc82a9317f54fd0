"""`flashpoint demo`: it proves what it says, notices when that does not hold, and cleans up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.cli.demo import nodes
from tests.support.processes import child_environment, marked_processes

pytestmark = [pytest.mark.slow(200), pytest.mark.timeout(400)]

STEPS = 48
SHM = Path("/dev/shm")
FOLDERS = "flashpoint-demo-*"
_MARK = "MLF_TEST_DEMO"


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Looks for what this test's demos have started, and for folders that belong to no demo that runs: others may."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(_MARK, mark)
    before = set(SHM.glob(FOLDERS))
    yield
    assert [process.pid for process in marked_processes(**{_MARK: mark})] == []
    assert [folder for folder in set(SHM.glob(FOLDERS)) - before if not _is_in_use(folder)] == []


def _is_in_use(folder: Path) -> bool:
    owner = nodes._FOLDER.fullmatch(folder.name)
    return owner is not None and nodes._runs(pid=int(owner[1]), started_ms=int(owner[2]))


def _argv(*args: str, job: str | None = None) -> list[str]:
    if job is None:
        return [sys.executable, "-m", "ml_flashpoint.cli.main", "demo", *args]
    return [sys.executable, "-m", "tests.workers.demo_of", job, *args]


def _run(*args: str, job: str | None = None) -> tuple[int, Any, str]:
    """Exit code, JSON and progress."""
    done = subprocess.run(
        _argv("--json", *args, job=job),
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=380,
        check=False,
    )
    result = json.loads(done.stdout)
    print(result["error"], done.stderr, sep="\n")  # pytest shows it if the test fails
    return done.returncode, result, done.stderr


def test_the_job_survives_and_ends_with_the_same_weights() -> None:
    # Some twenty processes start, which a template forks; those that are interrupted start as a user starts them.
    code, result, progress = _run("--steps", str(STEPS), "--seed", "3", job="ml_flashpoint.cli.demo.job")
    assert code == 0
    assert (result["ok"], result["error"], result["steps"], result["seed"]) == (True, None, STEPS, 3)
    assert all(check["ok"] for check in result["checks"])
    claims = [check["claim"] for check in result["checks"]]
    assert claims[-1] == "final weights equal to the fault-free run: bit for bit"
    assert len(claims) == 11

    calm, faulted = result["runs"]
    assert (calm["steps"], calm["saves"], calm["faults"]) == (STEPS, STEPS, [])
    # At each kill there may be one that was committed, and not told of any more.
    assert faulted["saves"] >= STEPS - 2
    for run in (calm, faulted):
        assert 0 < run["blocked_median_ms"] <= run["blocked_max_ms"]
        assert run["wall_s"] > 0
    rank, node = faulted["faults"]
    assert (rank["kind"], node["kind"]) == ("rank", "node")
    assert (len(rank["killed_pids"]), len(node["killed_pids"])) == (1, 3)
    assert not set(rank["killed_pids"]) & set(node["killed_pids"])
    assert node["lost_bytes"] > 1 << 20
    assert (node["victim"], node["replacement"]) == ("node-0", "node-2")
    for fault in (rank, node):
        assert 0 < fault["replicated_step"] <= fault["resumed_step"] <= fault["last_step"] < STEPS
        assert fault["lost_steps"] == fault["last_step"] - fault["resumed_step"]
        phases = sum(fault[f"{phase}_s"] for phase in ("restart", "detect", "plan", "fetch", "load"))
        assert all(fault[f"{phase}_s"] > 0 for phase in ("restart", "detect", "plan", "fetch", "load"))
        assert phases <= fault["total_s"] + 0.5
    assert rank["resumed_step"] < node["resumed_step"]
    # The node of the killed rank has its memory, but for copies that were on their way to that rank.
    assert rank["fetched_bytes"] < node["fetched_bytes"]
    # Half the weights and both moments of each, in 32 bits, and little else.
    assert 391_008 // 2 * 3 * 4 < node["fetched_bytes"] < 4 * 391_008 * 4

    assert re.search(r"SIGKILL to rank 1, pid \d+", progress)
    assert re.search(r"SIGKILL to all 3 processes of node-0, and [\d.]+ MiB of memory deleted", progress)
    assert "\x1b" not in progress


def test_a_recovery_that_is_wrong_by_one_batch_is_noticed() -> None:
    code, result, _ = _run("--steps", "32", job="tests.workers.sabotaged_demo_job")
    assert code == 1
    assert (result["ok"], result["error"]) == (False, None)
    failed = {check["claim"]: check["why_not"] for check in result["checks"] if not check["ok"]}
    assert "tensors differ" in failed["final weights equal to the fault-free run: bit for bit"]
    assert "every step had the loss of the fault-free run" in failed
    assert "position is 30 instead of 32" in failed["random numbers and places in the data as in the fault-free run"]
    # What was not sabotaged still holds.
    assert len(failed) == 3


def test_a_job_that_fails_fails_the_demo_and_shows_why() -> None:
    code, result, progress = _run("--steps", "10", job="tests.workers.broken_demo_job")
    assert code == 1
    assert (result["ok"], result["runs"]) == (False, [])
    assert "the job fails as it was told to" in result["error"]
    assert "the job fails as it was told to" in progress


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(number: signal.Signals) -> None:
    # Where the tests run in the background of a shell, SIGINT is ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            _argv("--steps", "400"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=child_environment(),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            # The one while processes start, the other while they train.
            if ("node-1: starting" if number == signal.SIGINT else "rank 3 runs") in line:
                break
        assert process.poll() is None
        os.kill(process.pid, number)
        rest = process.stdout.read()
    assert process.wait(60) == 130, rest
    assert "interrupted" in rest
    assert "Traceback" not in rest


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_folders_of_other_users_are_not_swept(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmpfs / f"flashpoint-demo-{2**22}-1-theirs"  # no process has such an id
    theirs.mkdir()
    monkeypatch.setattr(nodes, "_SHM", tmpfs)
    os.chown(theirs, 54321, 54321)
    nodes.sweep_roots()
    assert theirs.is_dir()
    os.chown(theirs, 0, 0)
    nodes.sweep_roots()
    assert not theirs.exists()


def test_folders_of_killed_demos_are_swept_and_of_live_ones_kept() -> None:
    from ml_flashpoint.cli.demo.nodes import make_root, remove_root, sweep_roots

    script = "from ml_flashpoint.cli.demo.nodes import make_root; print(make_root()); print(make_root(keep=True))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    left, kept = map(Path, done.stdout.split())
    mine = make_root()
    try:
        assert left.is_dir()
        sweep_roots()
        assert not left.exists()
        assert kept.is_dir()
        assert mine.is_dir()
    finally:
        remove_root(mine)
        remove_root(kept)
