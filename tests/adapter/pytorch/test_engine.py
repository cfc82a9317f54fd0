"""`Checkpointer`: opening, saving, loading and ending by one object, in one process and on two nodes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ml_flashpoint import Checkpointer, Config, events
from ml_flashpoint.format.errors import InvalidArgumentError, UnsafeContentError
from ml_flashpoint.ranks.collectives import Collectives
from tests.support.forked import Report, call_team


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((300, 7), value), "epoch": int(value)}


def in_background(*args: Any, **options: Any) -> None:
    saving: Any = dcp.async_save(*args, **options)
    saving.result()


def loaded(engine: Checkpointer) -> tuple[int | None, float]:
    into = state(-1)
    latest = engine.latest()
    if latest is None:
        return None, -1.0
    dcp.load(into, checkpoint_id=latest, storage_reader=engine.reader(latest))
    assert bool((into["weight"] == into["epoch"]).all())
    return latest.step, float(into["epoch"])


def test_saves_and_loads(tmpfs: Path, process_group: None) -> None:
    with Checkpointer(tmpfs / "job") as engine:
        assert loaded(engine) == (None, -1.0)
        for step in (1, 2):
            dcp.save(state(step), checkpoint_id=engine.id(step), storage_writer=engine.writer())
        assert engine.writer() is engine.writer()
        assert engine.wait(30)
        assert loaded(engine) == (2, 2.0)
    engine.close()  # once more does no harm
    with Checkpointer(tmpfs / "job") as engine:
        assert loaded(engine) == (2, 2.0)
    with Checkpointer(tmpfs / "job", discard_existing=True) as engine:
        assert loaded(engine) == (None, -1.0)


@pytest.mark.parametrize("save", [dcp.save, in_background])
def test_a_path_says_which_version_and_not_which_storage(tmpfs: Path, process_group: None, save: Any) -> None:
    """DCP looks only for storages of its own by a path; if that is no longer so, the page on DCP is to be changed."""
    base, step = tmpfs / "job", 5
    with Checkpointer(base) as engine:
        save(state(5), checkpoint_id=f"{base}/step-{step}_ckpt", storage_writer=engine.writer())
        assert engine.wait(30)
        into = state(-1)
        with pytest.raises(CheckpointException):
            dcp.load(into, checkpoint_id=f"{base}/step-{step}_ckpt")
        dcp.load(into, checkpoint_id=f"{base}/step-{step}_ckpt", storage_reader=engine.reader())
        assert into["epoch"] == 5
        save(state(6), checkpoint_id=f"{base}/step-6_ckpt")
        assert loaded(engine) == (5, 5.0), "what DCP has written there by itself is no version"


def test_how_long_saves_hold_the_loop_is_told(tmpfs: Path, process_group: None) -> None:
    told: list[events.Event] = []
    with Checkpointer(tmpfs / "job") as engine, events.subscribe(told.append):
        dcp.save(state(1), checkpoint_id=engine.id(1), storage_writer=engine.writer())
        began = time.perf_counter()
        future: Any = dcp.async_save(
            state(2), checkpoint_id=engine.id(2), storage_writer=engine.writer(), async_stager=engine.writer()
        )
        held_s = time.perf_counter() - began
        future.result()
        assert engine.wait(30)
        assert events.flush()
        assert engine.status.held_s > 0
    held = [event for event in told if isinstance(event, events.LoopHeld)]
    assert [event.step for event in held] == [1, 2]
    assert held[0].seconds > 0
    assert 0 < held[1].seconds <= held_s, "what the background does counts for nothing"


def test_refuses_to_bury_what_nobody_asked_about(tmpfs: Path, process_group: None) -> None:
    with Checkpointer(tmpfs / "job") as engine:
        dcp.save(state(1), checkpoint_id=engine.id(1), storage_writer=engine.writer())
    with Checkpointer(tmpfs / "job") as engine:
        for call in (dcp.save, in_background):
            with pytest.raises(CheckpointException, match="saving would overwrite them"):
                call(state(2), checkpoint_id=engine.id(2), storage_writer=engine.writer())
        assert loaded(engine) == (1, 1.0)
        dcp.save(state(2), checkpoint_id=engine.id(2), storage_writer=engine.writer())


def test_a_closed_one_says_so(tmpfs: Path, process_group: None) -> None:
    with Checkpointer(tmpfs / "job") as engine:
        dcp.save(state(1), checkpoint_id=engine.id(1), storage_writer=engine.writer())
    for call in (dcp.save, in_background):
        with pytest.raises(CheckpointException, match=r"(?s)closed"):
            call(state(2), checkpoint_id=engine.id(2), storage_writer=engine.writer())


class Unknown:
    """Nothing that anybody has allowed."""


def test_what_may_be_unpickled_is_that_of_writer_and_reader(tmpfs: Path, process_group: None) -> None:
    with Checkpointer(tmpfs / "job") as engine, pytest.raises(CheckpointException) as refused:
        dcp.save({"x": Unknown()}, checkpoint_id=engine.id(1), storage_writer=engine.writer())
    assert isinstance(refused.value.failures[0][0], UnsafeContentError)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"replication": "both"}, "replication"),
        ({"replication": 2}, "replication"),
        ({"safe_globals": "x"}, "safe_globals"),
        ({"keep": 0}, "keep"),
        ({"overlap": 1}, "overlap"),
        ({"on_world_size_change": "ask"}, "on_world_size_change"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"sigterm_grace_s": 0}, "sigterm_grace_s"),
        ({"persist": "s3://bucket"}, "persist"),
    ],
)
def test_refuses_bad_arguments(tmpfs: Path, options: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Config(**options)
    assert refused.value.argument == argument
    with pytest.raises(InvalidArgumentError, match="discard_existing"):
        Checkpointer(tmpfs / "job", discard_existing=1)  # type: ignore[arg-type]
    Checkpointer(tmpfs / "job").close()  # nothing is left open


def on_two_nodes(report: Report, rank: int, replication: str) -> tuple[list[int], int | None, float]:
    base = Path(os.environ["FLASHPOINT_TEST_BASE"])
    with Checkpointer(base, Config(replication=replication)) as engine:
        for step in (1, 2):
            dcp.save(state(step), checkpoint_id=engine.id(step), storage_writer=engine.writer())
        assert engine.wait(60)
        copies = list(engine.strategy.copies_of(rank, engine.ranks.topology))
    dist.barrier()
    if rank == 1 and replication != "none":
        shutil.rmtree(base)  # the node was replaced
    dist.barrier()
    with Checkpointer(base, Config(replication=replication)) as engine:
        return copies, *loaded(engine)


@pytest.mark.parametrize(
    ("replication", "copies"), [("pairwise", [[1], [0]]), ("ring", [[1], [0]]), ("none", [[], []])]
)
def test_strategies_by_name_on_two_nodes(tmpfs: Path, replication: str, copies: list[list[int]]) -> None:
    results = call_team(on_two_nodes, tmpfs, 2, replication)
    assert results == [(each, 2, 2.0) for each in copies]


def collectives_of_opening_and_looking(report: Report, rank: int) -> tuple[int, int | None]:
    calls: list[str] = []

    def counted(collective: Any) -> Any:
        def run(group: Collectives, what: str, *args: Any) -> None:
            calls.append(what)
            collective(group, what, *args)

        return run

    Collectives.reduce = counted(Collectives.reduce)  # type: ignore[method-assign]
    base = Path(os.environ["FLASHPOINT_TEST_BASE"])
    with Checkpointer(base) as engine:
        found = engine.latest()
        if found is None:
            dcp.save(state(1), checkpoint_id=engine.id(1), storage_writer=engine.writer())
            assert engine.wait(60)
    return len(calls), found and found.step


@pytest.mark.slow
def test_starting_takes_no_more_collectives_with_more_ranks(tmpfs: Path) -> None:
    counts = set()
    for size in (2, 4):
        for found in (None, 1):
            for calls, step in call_team(collectives_of_opening_and_looking, tmpfs / str(size), size):
                assert step == found
                counts.add((found, calls))
    assert len(counts) == 2, counts
