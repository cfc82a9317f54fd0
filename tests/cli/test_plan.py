"""`flashpoint plan`: memory that jobs really take, formulas against a simulation, and what is printed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli.main import app
from ml_flashpoint.cli.plan import Job, Memory, best_interval_s, goodput, memory_of, text_plot, ways_of
from ml_flashpoint.format.errors import CapacityError
from ml_flashpoint.ranks.strategies import STRATEGIES
from tests.support.processes import REPOSITORY
from tests.support.tmpfs import mounted

JOB = Job(
    params=70e9,
    optimizer="adam",
    dtype="bf16",
    main_copy=True,
    nodes=64,
    ranks=8,
    mtbf_hours=3.0,
    replication="pairwise",
    keep=1,
    step_seconds=10.0,
    restart_seconds=120.0,
    copy_gbs=10.0,
    network_gbs=10.0,
    storage_gbs=20.0,
)


def _memory(**changes: Any) -> Memory:
    job = dataclasses.replace(JOB, **changes)
    return memory_of(job, STRATEGIES[job.replication]())


def _run(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *options])
    return done.exit_code, done.stdout


def test_bytes_of_a_parameter() -> None:
    def of(**changes: Any) -> int:
        return dataclasses.replace(JOB, **changes).bytes_per_parameter

    assert of() == 14, "of weights 2, main copy 4, two moments 8: what is left of ZeRO's 16 without gradients"
    assert of(dtype="fp32") == of(dtype="fp32", main_copy=False) == 12
    assert of(main_copy=False) == 6
    assert of(optimizer="sgd") == 6
    assert of(optimizer="muon", main_copy=False) == 4


@pytest.mark.parametrize(("keep", "times"), [(1, 4), (3, 8)])
def test_memory_is_what_the_documentation_says(keep: int, times: int) -> None:
    page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    assert "So 4 × S a rank with the default strategy, and 8 × S with `keep=3`, plus a 64th" in page
    memory = _memory(keep=keep)
    assert times <= memory.node_bytes / (8 * memory.part_bytes) <= times * 1.02
    assert 2 <= (memory.roomy_bytes - memory.node_bytes) / (8 * memory.part_bytes) <= 2.04
    assert (_memory(nodes=3).copies_held, _memory(nodes=2, ranks=1, replication="ring").survives) == (1, 1)
    alone = _memory(nodes=1, keep=keep)
    assert (alone.copies_held, alone.survives, _memory(replication="none").copies_held) == (0, 0, 0)
    assert alone.node_bytes * 2 == pytest.approx(_memory(nodes=1, keep=2 * keep + 1).node_bytes)


def _save_five_times(base: Path) -> int:
    model = torch.nn.Linear(256, 1023)
    with Flashpoint(base, replication="none", strict=True) as fp:
        fp.track(model=model).resume()
        for _ in range(5):
            fp.step()
            assert fp.wait()
        return fp.health.bytes


def test_a_job_runs_in_the_memory_that_it_must_have_and_not_in_less(tmpfs: Path, tmp_path: Path) -> None:
    state_bytes = _save_five_times(tmpfs / "job")
    memory = _memory(params=state_bytes / 4, dtype="fp32", optimizer="sgd", nodes=1, ranks=1, replication="none")
    assert memory.part_bytes == state_bytes
    (tmp_path / "mount").mkdir()
    try:
        with mounted(tmp_path / "mount", memory.node_bytes + (512 << 10)) as folder:  # and room for manifests
            assert _save_five_times(folder / "job") == state_bytes
        with mounted(tmp_path / "mount", memory.node_bytes // 2) as folder, pytest.raises(CapacityError):
            _save_five_times(folder / "job")
    except PermissionError as error:
        pytest.skip(f"cannot mount a small tmpfs here, which takes root: {error}")


@pytest.mark.parametrize(("held_s", "restart_s"), [(50.0, 170.0), (0.2, 120.0), (700.0, 900.0)])
def test_the_best_interval_is_the_best(held_s: float, restart_s: float) -> None:
    mtbf_s = 7200.0
    interval_s = best_interval_s(held_s, mtbf_s)
    told = goodput(interval_s, held_s, restart_s, mtbf_s)
    for factor in (0.7, 1.4):
        assert goodput(interval_s * factor, held_s, restart_s, mtbf_s) < told
    rarely = goodput(100.0, 25.0, 10.0, 1e6)  # a fifth for saves, and for each failure half an interval and the restart
    assert rarely == pytest.approx(0.8 * (1 - 72.5 / 1e6), rel=1e-6)
    assert best_interval_s(3.0, 1.0) == 1.0
    assert goodput(1e6, 1.0, 1.0, 1.0) == 0.0


def test_intervals_are_whole_steps_and_no_shorter_than_a_version_takes_to_be_safe() -> None:
    for storage_gbs in (1.0, 20.0, 1e6):
        job = dataclasses.replace(JOB, storage_gbs=storage_gbs)
        for way in ways_of(job, memory_of(job, STRATEGIES[job.replication]())):
            assert way.interval_s == way.interval_steps * 10.0 >= way.safe_after_s
            assert 0 <= way.goodput < 1
    blocking, background, memory = ways_of(JOB, _memory())
    assert blocking.goodput < background.goodput < memory.goodput


ISSUE = ["--params", "70e9", "--optimizer", "adam", "--dtype", "bf16", "--nodes", "64", "--ranks", "8"]


def test_what_is_printed_as_json() -> None:
    code, text = _run(*ISSUE, "--mtbf-hours", "3", "--replication", "pairwise", "--json")
    assert code == 0
    told = json.loads(text)
    assert set(told) == {"job", "memory", "ways", "curves", "notes"}
    for drawn, way in zip(told["curves"], told["ways"], strict=True):
        assert drawn["name"] == way["name"]
        points = drawn["interval_s_and_goodput"]
        assert points[0][0] >= max(10.0, way["safe_after_s"]) * 0.999
        assert points[-1][0] == pytest.approx(3 * 3600)
        assert max(y for _, y in points) == pytest.approx(way["goodput"], abs=0.005), "the plan takes the best"
    assert told["job"] == {**dataclasses.asdict(JOB), "bytes_per_parameter": 14}
    assert told["memory"]["version_bytes"] == 980e9
    size = re.fullmatch(r"mount -t tmpfs -o size=(\d+)g tmpfs /mnt/mlf-jobs", told["memory"]["mount"])
    assert size is not None
    assert 0 <= int(size[1]) * 2**30 - told["memory"]["roomy_bytes"] < 2**30
    assert [way["name"] for way in told["ways"]][-1] == "memory and peers"
    assert any("Young 1974, Daly 2006" in note for note in told["notes"])


def test_what_the_page_shows_is_what_is_printed() -> None:
    page = (REPOSITORY / "docs/plan.md").read_text(encoding="utf-8")
    line = re.search(r"^\$ flashpoint plan (.*)", page, re.MULTILINE)
    assert line is not None
    code, text = _run(*line[1].split())
    assert code == 0
    for told in ("57.9 GiB", "86.9 GiB", "mount -t tmpfs -o size=87g tmpfs /mnt/mlf-jobs"):
        assert told in page
        assert told in text
    shares = re.findall(r"[\d.]+ %$", text, re.MULTILINE)
    assert len(shares) == 3
    assert all(share in page for share in shares)
    code, text = _run(*ISSUE, "--replication", "none")
    assert re.search(r"^survives the loss of +no node$", text, re.MULTILINE)
    assert "Some part has no copy on another node" in text


@pytest.mark.parametrize(
    ("option", "value"),
    [("--optimizer", "sgdd"), ("--dtype", "int8"), ("--replication", "x"), ("--mtbf-hours", "nan"), ("--params", "-1")],
)
def test_what_is_refused(option: str, value: str) -> None:
    given = [each for pair in zip(ISSUE[::2], ISSUE[1::2], strict=True) for each in pair if pair[0] != option]
    code, text = _run(*given, option, value, "--json")
    assert code == 2
    assert option in json.loads(text)["error"]


@pytest.mark.parametrize("extreme", [("--mtbf-hours", "0.0001"), ("--step-seconds", "1e9"), ("--mtbf-hours", "3")])
def test_curves_are_drawn(extreme: tuple[str, str]) -> None:
    code, text = _run(*ISSUE, *extreme, "--json")
    assert code == 0
    curves = [each["interval_s_and_goodput"] for each in json.loads(text)["curves"]]
    assert all(curves)
    drawn = text_plot(curves, [curve[0] for curve in curves], str).splitlines()
    found = {letter for line in drawn for letter in "ABC" if letter in line}
    assert found == set("ABC") if extreme == ("--mtbf-hours", "3") else found
    assert all(len(line) <= 80 for line in drawn)
