"""`examples/lose_a_machine.py`: it proves what it says, notices when that does not hold, and leaves nothing behind."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.cluster import ClusterError
from tests.support.processes import REPOSITORY, child_environment, marked_processes

pytestmark = [pytest.mark.slow(100), pytest.mark.timeout(500)]

EXAMPLE = REPOSITORY / "examples" / "lose_a_machine.py"
SHM = Path("/dev/shm")
_MARK = "MLF_TEST_DEMO"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lose_a_machine", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["lose_a_machine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Both runs, of processes that a template forks: some twenty start."""
    root = Path(os.path.realpath(tmp_path_factory.mktemp("runs")))
    calm = example.Show(root / "undisturbed", 16, 3, cold=False).play()
    return calm, example.Show(root / "faulted", 16, 3, cold=False).play(3, 8)


def test_the_job_survives_and_ends_with_the_same_weights(example: ModuleType, runs: tuple[Any, Any]) -> None:
    claims = example.judge(*runs)
    assert all(claims.values()), claims
    assert len(claims) == 12
    rank, node = runs[1].faults
    assert (rank.victim, node.victim) == ("rank 1", "node-0")
    # Half the weights and both moments of each, in 32 bits, and little else.
    parameters = sum(each.numel() for each in example.GPT().parameters())
    assert parameters // 2 * 3 * 4 < sum(each["fetched"] for each in node.begins) < parameters * 4 * 4


def _another_loss(run: Any) -> None:
    run.reports[2][-1]["losses"][0] += 1e-7


def _a_step_less(run: Any) -> None:
    run.reports[3][-1]["losses"].pop()


def _other_weights(run: Any) -> None:
    digests = run.reports[1][-1]["digests"]
    digests[next(iter(digests))] = "0" * 64


BROKEN: dict[str, tuple[str, Callable[[Any], object]]] = {
    "step": ("each rank made each step", _a_step_less),
    "save": ("no save failed", lambda run: run.reports[0][-1].update(failures=1)),
    "copy": ("no save failed", lambda run: run.reports[0][-1].update(copied=15)),
    "fault": ("a rank was killed", lambda run: run.faults.pop(0)),
    "alive": ("rank 1 was really gone", lambda run: setattr(run.faults[0], "gone", False)),
    "disk": ("rank 1: all ranks resumed", lambda run: run.faults[0].begins[1].update(source="persisted")),
    "anew": ("node-0: all ranks resumed", lambda run: [each.update(step=0) for each in run.faults[1].begins]),
    "mix": ("node-0: all ranks resumed", lambda run: run.faults[1].begins[2].update(step=1)),
    "peers": ("the replacement node", lambda run: [each.update(fetched=0) for each in run.faults[1].begins]),
    "loss": ("each step had the same loss", _another_loss),
    "place": ("random numbers and positions", lambda run: run.reports[0][-1].update(place=15)),
    "verify": ("finds no damage on any node", lambda run: run.verified.pop()),
    "weights": ("weights and optimizer", _other_weights),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_each_claim_fails_when_it_does_not_hold(example: ModuleType, runs: tuple[Any, Any], broken: str) -> None:
    claim, damage = BROKEN[broken]
    faulted = copy.deepcopy(runs[1])
    damage(faulted)
    failed = [each for each, holds in example.judge(runs[0], faulted).items() if not holds]
    assert any(claim in each for each in failed), failed


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Looks for what this test's processes leave behind."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(_MARK, mark)
    before = set(SHM.glob("flashpoint-demo-*"))
    yield
    assert [process.pid for process in marked_processes(**{_MARK: mark})] == []
    assert set(SHM.glob("flashpoint-demo-*")) <= before


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_when_it_is_interrupted_it_leaves_nothing_behind(number: signal.Signals) -> None:
    # Where the tests run in the background of a shell, SIGINT is ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, EXAMPLE, "--steps", "400"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=child_environment(PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'src'}"),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    with process.stdout:
        wanted = "are starting" if number == signal.SIGINT else r"step \d+/400"
        assert any(re.search(wanted, line) for line in process.stdout)
        os.kill(process.pid, number)
        rest = process.stdout.read()
    assert process.wait(60) == 128 + number, rest
    assert "Traceback" not in rest


@pytest.mark.usefixtures("marked")
def test_a_job_that_fails_is_shown_with_what_it_printed(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("raise SystemExit('it fails as it was told to')")
    monkeypatch.setattr(example, "__file__", str(tmp_path / "job.py"))
    with pytest.raises(ClusterError, match="it fails as it was told to"):
        example.show(10, 0, cold=False)
