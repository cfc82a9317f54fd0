"""The benchmark that compares us with others: what it counts as held, and what it says of those that cannot be run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.rivals import bar, environments, running, worker
from benchmarks.rivals.catalogue import KINDS
from benchmarks.rivals.kinds import Kind, Saves
from benchmarks.rivals.loops import LOOPS, Loop


class _Clock:
    now = 0.0


class Held(Saves):
    """Takes 1 s in the call, 0.25 s before the update, and 0.5 s in a hook of its own; other time is not held."""

    warmups = 1

    def __init__(self, loop: Loop, folder: Path) -> None:
        super().__init__(loop, folder)
        loop.model.register_forward_pre_hook(lambda *_: _take(8.0))
        loop.optimizer.register_step_pre_hook(lambda *_: _take(0.5))

    def save(self, step: int) -> None:
        _take(1.0)

    def before_update(self) -> None:
        _take(0.25)

    def settle(self) -> None:
        _take(16.0)


def _take(seconds: float) -> None:
    _Clock.now += seconds


@pytest.mark.slow
def test_time_held_is_what_is_spent_in_the_call_and_before_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "now", lambda: _Clock.now)
    kind = Kind("held", "held", f"{__name__}:Held")
    found = worker.measured(kind, loop := Loop("short", 0.001), 2, tmp_path)
    assert found.held == [1.75] * 4
    assert found.alone == [8.75] * 2
    assert found.saving == [9.75] * 2
    assert found.nbytes == loop.nbytes


def test_an_environment_that_is_missing_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    kind = Kind("other", "other", "nowhere:Other", "other==1.0")
    (row,) = running.results(0.001, 1, (kind,), ("long",))
    assert (row.runs, row.label, row.note) == (0, "other", "skipped: its environment is not made: make bench-peers")
    (tmp_path / "other").mkdir()
    state = f'{{"package": "{environments.TORCH} other==1.0", "reason": "pip: no such thing"}}'
    (tmp_path / "other" / "reason.json").write_text(state)
    (row,) = running.results(0.001, 1, (kind,), ("long",))
    assert row.note == "skipped: pip: no such thing"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "x\n  \x1b[31mfatal: unable to access 'https://a'\n  CMake Error at b\nERROR: Failed",
            "fatal: unable to access",
        ),
        ("WARNING: x\nERROR: No matching distribution found for other==1.0\n", "No matching distribution"),
        ("ERROR: a\nModuleNotFoundError: No module named 'b'\nERROR: c", "ModuleNotFoundError: No module"),
        ("", "it ended without a word"),
    ],
)
def test_the_reason_is_the_line_that_tells_most(output: str, reason: str) -> None:
    assert environments.why(output).startswith(reason)


def test_bars_are_told_by_the_median_of_pairs() -> None:
    found = bar.Taken(
        1 << 31, [0.1, 0.1, 1.0], [0.001, 0.003, 0.015], [0.4, 0.4, 4.0], [0.5, 0.5, 5.0], [0.5, 0.55, 5.2]
    )
    assert [line.partition(":")[0] for line in found.lines()[1:]] == ["met", "met", "missed", "met"]
    assert "held 1.50 % of a memcpy" in found.lines()[2]
    assert "x 1.040 of one with a copy alone" in found.lines()[4]


@pytest.mark.slow
def test_the_bars_are_measured_beside_a_copy(tmp_path: Path) -> None:
    found = bar.taken(Loop("long", 0.01), 1, tmp_path)
    assert [len(each) for each in (found.memcpy, found.held, found.alone, found.copying, found.saving)] == [1] * 5
    assert min(found.held + found.copying + found.saving) > 0


@pytest.mark.slow
def test_ours_and_torch_save_in_both_loops() -> None:
    kinds = tuple(kind for kind in KINDS if kind.name in ("ours", "torch-save"))
    unknown = dataclasses.replace(kinds[0], name="ours-unknown")
    rows = list(running.results(0.001, 1, (*kinds, unknown)))
    assert [row.state for row in rows] == [f"rivals, {loop} steps" for loop in LOOPS for _ in range(3)]
    for row in rows:
        if row.case == "ours-unknown":
            assert (row.runs, row.note) == (0, "failed: it ended with 1")
            continue
        assert row.note == ""
        assert 0 < row.low_s <= row.seconds <= row.high_s
        assert 0 < row.slowdown[1] <= row.slowdown[0] <= row.slowdown[2]
        assert row.stored >= row.nbytes > 0
        assert row.label in row.line()


def test_plots_have_a_bar_for_each_that_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.rivals import plots

    row = {"state": "rivals, long steps", "case": "ours", "label": "ours", "runs": 7, "seconds": 0.003, "low_s": 0.002}
    row |= {"high_s": 0.004, "slowdown": [1.1, 1.0, 1.2], "alone_s": 0.3, "memcpy_s": 0.01, "nbytes": 1 << 28}
    left_out = {"state": "rivals, long steps", "case": "other", "label": "other", "runs": 0}
    paths = list(plots.drawn([row, left_out], tmp_path))
    assert [path.read_bytes()[1:4] for path in paths] == [b"PNG", b"PNG"]
