"""Both example programs of the dictionary: what they compute, and what they compute after they lost something."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support.cluster import REPOSITORY, Cluster
from tests.support.processes import suspend

pytestmark = [pytest.mark.slow(190), pytest.mark.timeout(600)]

EXAMPLES = REPOSITORY / "examples" / "ddict"
DEADLINE_S = 250.0


class Program(Cluster):
    """A running example."""

    def __init__(self, name: str, temporary: Path, tmpfs: Path, args: tuple[object, ...]) -> None:
        env = {"FLASHPOINT_DDICT_BASE": str(tmpfs), "TMPDIR": str(temporary)}
        super().__init__(temporary / "root", EXAMPLES / f"{name}.py", args=args, env=env)
        self._temporary, self._tmpfs = temporary, tmpfs

    def end(self, code: int = 0) -> str:
        """Wait for the end, check that nothing is left of the program, and return its output."""
        codes, output = self.wait(DEADLINE_S, check=False), self.outputs()[0]
        assert codes == [code], output
        # The managers and multiprocessing's tracker end when they see that the program has.
        _, left = psutil.wait_procs(self.processes(), timeout=20)
        assert not left
        assert list(self._tmpfs.iterdir()) == []
        assert list(self._temporary.glob("mlf-*")) == []
        return output

    def manager_pid(self, manager: int) -> int:
        """Process id of a manager: of the one that serves at its socket."""
        (pid,) = [each.pid for each in self.processes() if f"m-{manager}.sock" in sockets_of(each)]
        return pid


def sockets_of(process: psutil.Process) -> set[str]:
    """The names of the Unix sockets that a process serves at; none of one that has ended since it was found."""
    try:
        return {Path(str(its.laddr)).name for its in process.net_connections("unix")}
    except psutil.NoSuchProcess:
        return set()


@contextlib.contextmanager
def running(name: str, tmpfs: Path, *args: object) -> Iterator[Program]:
    # pytest's own folders have names so long that multiprocessing's socket does not fit into them.
    with tempfile.TemporaryDirectory() as temporary, Program(name, Path(temporary), tmpfs, args) as program:
        yield program


def run(name: str, tmpfs: Path, *args: object, code: int = 0) -> str:
    with running(name, tmpfs, *args) as program:
        return program.end(code)


# -- averaging --------------------------------------------------------------------------------------------------


def plain_loop(seed: int, processes: int) -> tuple[float, int]:
    """The average of the same draws, and how often they are thrown away, without any dictionary."""
    total, rollbacks = 0.0, 0
    for index in range(processes):
        draws = random.Random(seed * 1_000_000 + index)
        hundreds: list[float] = []
        since, count = 0.0, 0
        while len(hundreds) < 10:
            sample = draws.normalvariate(0.0, 1.0)
            since, count = since + sample, count + 1
            if abs(sample) >= 4 and 100 * len(hundreds) + count > 100:
                since, count, rollbacks = 0.0, 0, rollbacks + 1
            elif count == 100:
                hundreds.append(since)
                since, count = 0.0, 0
        total += sum(hundreds)
    return total / (processes * 1000), rollbacks


@pytest.mark.parametrize("processes", [12, pytest.param(30, marks=pytest.mark.soak)])
def test_processes_average_what_a_plain_loop_does(tmpfs: Path, processes: int) -> None:
    seed = next(seed for seed in range(1000) if plain_loop(seed, processes)[1] >= 3)
    expected, rollbacks = plain_loop(seed, processes)
    output = run("averaging", tmpfs, "--seed", seed, "--processes", processes)
    (average,) = re.findall(r"^Final average from all processes is (\S+)$", output, re.MULTILINE)
    # Summed in another order, hence not bit for bit.
    assert math.isclose(float(average), expected, rel_tol=1e-9, abs_tol=1e-12)
    assert len(re.findall(r"^Process \d+ rolling back to checkpoint \d+$", output, re.MULTILINE)) == rollbacks


# -- training ---------------------------------------------------------------------------------------------------

EPOCHS = 60


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the training comes to when nothing happens."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "base").mkdir()
    output = run("training", folder / "base", *training_args(folder))
    assert epochs_of(output) == list(range(1, EPOCHS + 1))
    return saved(folder)


def training_args(folder: Path, *more: object) -> tuple[object, ...]:
    return ("--epochs", EPOCHS, "--persist-path", folder / "disk", "--save", folder / "final.pt", *more)


def saved(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "final.pt", weights_only=True)
    return state


def epochs_of(output: str) -> list[int]:
    return [int(found) for found in re.findall(rf"^Epoch \[(\d+)/{EPOCHS}\], Loss: ", output, re.MULTILINE)]


def assert_same_bits(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["model"].keys() == wanted["model"].keys()
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
    assert found["optimizer"]["state"].keys() == wanted["optimizer"]["state"].keys()
    for number, state in wanted["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(found["optimizer"]["state"][number][name], tensor), (number, name)


def test_a_killed_training_goes_on_from_disk_at_the_last_finished_epoch(
    tmp_path: Path, tmpfs: Path, uninterrupted: dict[str, Any]
) -> None:
    output = run("training", tmpfs, *training_args(tmp_path, "--crash-at-epoch", 7), code=1)
    # The other rank fails because of it, and may be seen first.
    assert re.search(r"in training_fn, (was killed by signal 9|ended with exit code 1)", output)
    assert epochs_of(output) == list(range(1, 8))
    assert not (tmp_path / "final.pt").exists()
    output = run("training", tmpfs, *training_args(tmp_path, "--restart"))
    # Every second one persists by itself, and the last one at the end of the program: 6 is the state after epoch 7.
    assert "available persisted checkpoints: [5, 6]" in output
    assert epochs_of(output) == list(range(8, EPOCHS + 1))
    assert_same_bits(saved(tmp_path), uninterrupted)


def test_a_killed_training_goes_on_from_memory_at_the_last_finished_epoch(
    tmp_path: Path, tmpfs: Path, uninterrupted: dict[str, Any]
) -> None:
    output = run("training", tmpfs, *training_args(tmp_path, "--in-memory", "--crash-at-epoch", 7))
    assert "going on from memory, from checkpoint 6" in output
    assert epochs_of(output) == list(range(1, EPOCHS + 1))
    assert not (tmp_path / "disk").exists()
    assert_same_bits(saved(tmp_path), uninterrupted)


def test_a_training_that_lost_a_manager_with_its_memory_goes_on_from_memory(
    tmp_path: Path, tmpfs: Path, uninterrupted: dict[str, Any]
) -> None:
    with running("training", tmpfs, *training_args(tmp_path, "--in-memory")) as program:
        program.wait_for_output(rf"^Epoch \[5/{EPOCHS}\]", timeout_s=DEADLINE_S)
        lost = program.manager_pid(0)
        lose_node(lost, tmpfs, 0)
        output = program.end()
        assert re.search(rf"manager 0 of \S+ \(pid {lost}\) ended without a word and is started again", output)
        assert output.index("is started again") < output.index(f"Epoch [{EPOCHS}/{EPOCHS}]"), "too late"
    finished = epochs_of(output)
    assert finished == sorted(set(finished)), "an epoch that was finished was trained again"
    went_on_with = [int(epoch) for epoch in re.findall(r"^Rank 0 goes on with epoch (\d+)$", output, re.MULTILINE)]
    for epoch in set(range(1, EPOCHS + 1)) - set(finished):
        assert epoch + 1 in went_on_with, "an epoch was left out"  # else its rank ended before it could print
    assert_same_bits(saved(tmp_path), uninterrupted)


def lose_node(lost: int, tmpfs: Path, manager: int) -> None:
    """A manager and all that it has in memory, gone before anything starts it again."""
    suspend(lost)
    (base,) = tmpfs.iterdir()
    folder = base / f"node-{manager}"
    assert folder.is_dir()
    shutil.rmtree(folder)
    os.kill(lost, signal.SIGKILL)
