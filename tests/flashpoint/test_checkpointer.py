"""The public `Checkpointer`, as a program uses it that saves and loads by itself."""

from __future__ import annotations

import os
import shutil
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ml_flashpoint import Checkpointer, Config, Flashpoint
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, ReshardError, SaveError, UnaskedVersionsError
from tests.support.forked import Report, Team, call_team
from tests.workers.persisting_doors import Toy, undisturbed


class Counter:
    def __init__(self) -> None:
        self.tokens = 0

    def state_dict(self) -> dict[str, int]:
        if self.tokens < 0:
            raise ValueError("not now")
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tokens = state["tokens"]


def train(report: Report, rank: int, until: int) -> tuple[int, int, str]:
    """The step gone on from, what the counter has then, and the digest of the state at the end."""
    toy, counter = Toy(sharded=True), Counter()
    state: dict[str, Any] = {"model": toy.model, "optimizer": toy.optimizer, "counter": counter}
    base = os.environ["FLASHPOINT_TEST_BASE"]

    def sum_up(states: list[Any], rank: int, ranks: int) -> dict[str, int]:
        return {"tokens": sum(each["tokens"] for each in states) if rank == 0 else 0}

    with Checkpointer(base, Config(replication="pairwise", keep=2)) as ckpt:
        if os.environ.get("FLASHPOINT_TEST_ASKS"):
            with pytest.raises(ReshardError, match="counter"):
                ckpt.load(state)
        began = step = ckpt.load(state, reshard={"counter": sum_up})
        loaded = counter.tokens
        while step < until:
            step += 1
            toy.step(step)
            counter.tokens += 1 + rank
            save = ckpt.save(step, state)
            assert save.staged.result(60) is None
            assert save.committed.result(60).rank == rank
            save.verified.result(60)
            report("verified", step)
    return began, loaded, toy.digest()


def test_a_job_of_two_nodes_goes_on_after_it_is_killed_and_a_node_is_lost(tmpfs: Path) -> None:
    with Team(train, tmpfs, 2, 10**6) as team:
        for rank in (0, 1):
            team[rank].next_report("verified", 3)
    shutil.rmtree(tmpfs / "node-1")
    with Team(train, tmpfs, 2, 0) as team:
        found = team.results()
    step = found[0][0]
    assert step >= 3
    assert [each[:2] for each in found] == [(step, step), (step, 2 * step)]
    digest = found[0][2]
    assert [each[2] for each in found] == call_team(undisturbed, tmpfs / "undisturbed", 2, "dcp", step) == [digest] * 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_loads_it(tmpfs: Path, ranks: int) -> None:
    digest = call_team(train, tmpfs, 2, 3)[0][2]
    with Team(train, tmpfs, ranks, 0, placement=[0, 1, 0][:ranks], env={"FLASHPOINT_TEST_ASKS": "1"}) as team:
        found = team.results()
    assert found == [(3, 9 if rank == 0 else 0, digest) for rank in range(ranks)]


def job() -> dict[str, Any]:
    model = nn.Linear(8, 8)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "counter": Counter(),
    }


def test_load_is_in_place_and_a_loop_of_the_facade_goes_on_from_it(base: Path) -> None:
    state = job()
    with Checkpointer(base) as ckpt:
        assert ckpt.load(state) == 0
        for step in (1, 2):
            state["counter"].tokens = step
            state["model"](torch.ones(8)).sum().backward()
            state["optimizer"].step()
            assert ckpt.save(step, state).id == (ckpt.run, step)
        assert ckpt.wait(30)
        assert str(ckpt.id(2)) == f"{base}/step-2_ckpt"
    other, weight = job(), state["model"].weight.detach().clone()
    with Checkpointer(base) as ckpt:
        with pytest.raises(UnaskedVersionsError, match=r"load\(state\)"):
            ckpt.save(3, other)
        assert ckpt.load(other) == 2
        assert ckpt.last_load is not None
        assert (ckpt.last_load.source, ckpt.last_load.version) == ("memory", "step-2_ckpt")
    assert torch.equal(other["model"].weight, weight)
    assert other["counter"].tokens == 2
    third = job()
    with Flashpoint(str(base)).track(**third) as fp:
        assert fp.resume() == 2
    assert torch.equal(third["model"].weight, weight)


def test_a_step_is_saved_once_unless_its_save_failed(base: Path) -> None:
    state = job()
    with Checkpointer(base) as ckpt:
        ckpt.load(state)
        save = ckpt.save(1, state, explicit=False)
        assert not save.terms.explicit
        assert ckpt.save(1, state) is save
        assert save.terms.explicit, "somebody waits for it now"
        state["counter"].tokens = -1
        failed = ckpt.save(2, state)
        for future in (failed.staged, failed.committed, failed.verified):
            with pytest.raises(SaveError, match="not now"):
                future.result(30)
        with pytest.raises(InvalidArgumentError, match="step"):
            ckpt.save(1, state)
        for step in (2, 2**63 - 1):
            state["counter"].tokens = step
            ckpt.save(step, state).verified.result(30)
            assert ckpt.load(state, step=step) == step
            assert state["counter"].tokens == step
        for step in (-1, 2**63):
            with pytest.raises(InvalidArgumentError, match="step"):
                ckpt.save(step, state)
        with pytest.raises(LoadError, match="step 5"):
            ckpt.load(state, step=5)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="errors have notes since Python 3.11")
def test_the_error_of_a_save_says_where_the_programs_code_raised_it(base: Path) -> None:
    state = job()
    with Checkpointer(base) as ckpt:
        ckpt.load(state)
        state["counter"].tokens = -1
        error = ckpt.save(1, state).committed.exception(30)
    assert error is not None
    text = "".join(traceback.format_exception(error))
    assert 'raise ValueError("not now")' in text
    assert "in state_dict" in text


def test_what_a_state_is(base: Path) -> None:
    with Checkpointer(base) as ckpt:
        for state in ({}, 3, {"model": nn.Linear(1, 1), "number": 3}):
            with pytest.raises(InvalidArgumentError):
                ckpt.load(state)  # type: ignore[arg-type]
        assert ckpt.load(job(), fallback=lambda: 12) == 12
        assert ckpt.last_load is not None
        assert ckpt.last_load.source == "fallback"


def test_saves_of_dcp_and_of_objects_stand_side_by_side(base: Path) -> None:
    state = job()
    with Checkpointer(base, Config(keep=2)) as ckpt:
        ckpt.load(state)
        state["counter"].tokens = 1
        ckpt.save(1, state)
        dcp.save({"weight": torch.ones(8)}, checkpoint_id=ckpt.id(2), storage_writer=ckpt.writer())
        assert ckpt.wait(30)
        found = {"weight": torch.zeros(8)}
        dcp.load(found, checkpoint_id=ckpt.id(2), storage_reader=ckpt.reader())
        assert torch.equal(found["weight"], torch.ones(8))
        assert [each.step for each in ckpt.versions()] == [2, 1]
        state["counter"].tokens = 0
        assert ckpt.load(state, step=1) == 1
        assert state["counter"].tokens == 1
