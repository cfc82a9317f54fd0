"""A run that crashes anywhere is the undisturbed run; and recoveries that do not find what they look for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.config import Config
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError, LoadError, NothingLoadableError
from ml_flashpoint.memory.pool import slot_size
from tests.support.dcp import Door
from tests.support.forked import Report, call_team, preload
from tests.support.loops import (
    Stored,
    damage,
    resumed,
    save,
    saved_twice,
    train,
    trained_model,
    versions,
)
from tests.support.settings import SETTINGS
from tests.support.tensors import assert_same
from tests.support.worker import base_path
from tests.workers import training
from tests.workers.training import Job

preload("torch._dynamo")


# ---- the same run ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
def test_resumed_runs_are_the_undisturbed_run(base: Path) -> None:
    for life, until in enumerate((3, 4, 11, 17)):
        job = Job(seed=life)
        fp = train(base, job, until)
        assert fp.last_saved == fp.steps_done == until
        assert fp.health.failures == 0
    assert job.digests() == training.undisturbed(17)


def test_resume_again_goes_back_to_the_newest_version(base: Path) -> None:
    job = Job()
    with Flashpoint(base, every_n_steps=3) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(5):
            job.step()
            fp.step()
            fp.wait()
        assert fp.resume() == fp.steps_done == fp.last_saved == 3
        assert job.digests() == training.undisturbed(3)
        for _ in range(5):
            job.step()
            fp.step()
            fp.wait()
        assert (fp.last_saved, fp.steps_done, fp.health.saves) == (6, 8, 2)
        fp.save()
    again = Job(seed=3)
    train(base, again, 9)
    assert again.digests() == training.undisturbed(9)


def round_trips(report: Report, rank: int, kind: str) -> None:
    """Save a job under each setting, and resume a new one, which must go on the same without the setting."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"strict": True, "handle_sigterm": False, "deadline_s": 30}
    for number, (name, setting) in enumerate(SETTINGS.items()):
        folder = base_path().parent / f"job-{number}"
        job, other = Job(kind), Job(kind)
        job.step(), job.step()
        with setting(), Flashpoint(folder, **options) as fp:
            fp.track(**job.tracked).save(2)
        job.step()
        with setting(), Flashpoint(folder, **options) as fp:
            assert fp.track(**other.tracked).resume() == 2, name
        other.step()
        assert other.digests() == job.digests(), name


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("ddp", 2), ("fsdp2", 2)])
def test_a_job_goes_on_bit_for_bit_under_every_default_and_mode(tmpfs: Path, kind: str, ranks: int) -> None:
    call_team(round_trips, tmpfs, ranks, kind)


def test_each_save_is_made_or_skipped_where_the_loop_does_not_wait(base: Path) -> None:
    stored = Stored(torch.zeros(1000))
    with Flashpoint(base) as fp:
        fp.track(stored=stored)
        for _ in range(30):
            stored.value += 1
            fp.step()
        assert fp.wait()
        assert (fp.health.saves + fp.health.skipped, fp.health.failures) == (30, 0)
        stored.value += 1
        fp.step()
    assert resumed(base, stored=stored) == 31
    assert stored.value.unique().tolist() == [31]


# ---- what is found, and what is not ----------------------------------------------------------------------------


@pytest.mark.damages_on_purpose
def test_a_damaged_version_is_left_for_an_older_one_and_the_step_back_is_told(base: Path) -> None:
    saved_twice(base, stored=Stored(10))
    damage(base, 2)
    stored, told = Stored(), list[events.Event]()
    with Flashpoint(base, on_event=told.append) as fp:
        assert fp.track(stored=stored).resume() == 1
        found = fp.last_recovery
        assert found is not None
        assert (found.source, found.step, found.version) == ("memory", 1, "step-1_ckpt")
        assert 0 < found.load_s < found.seconds
    assert stored.value == 10
    assert [type(event) for event in told if event.step == 2] == [events.SteppedBack]
    kinds = [events.VersionRecovered, events.RunBegun, events.Resumed]
    assert [type(event) for event in told if event.step == 1] == kinds


def test_fallback_is_called_when_nothing_is_left(base: Path) -> None:
    saved_twice(base, stored=Stored(10))
    damage(base, 1)
    damage(base, 2)
    stored = Stored("long-term")
    with Flashpoint(base) as fp:
        assert fp.track(stored=stored).resume(fallback=lambda: 40) == fp.steps_done == 40
        assert fp.last_recovery is not None
        assert fp.last_recovery.source == "fallback"
        assert fp.step() == 41
    with Flashpoint(base) as fp:
        assert fp.track(stored=stored).resume(lambda: pytest.fail("called")) == 41


@pytest.mark.damages_on_purpose
def test_without_fallback_damage_is_an_error_and_no_fresh_start(base: Path) -> None:
    save(base, stored=Stored(1))
    damage(base, 1)
    with pytest.raises(NothingLoadableError, match=r"step-1_ckpt .*digest.*discard_existing=True"):
        resumed(base, stored=Stored(5))
    assert versions(base) == [1]
    with Flashpoint(base, discard_existing=True) as fp:
        assert fp.track(stored=Stored(5)).resume() == 0
    assert versions(base) == []


def test_a_version_in_another_format_is_refused_by_its_format(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr("ml_flashpoint.format.object_format._FORMAT", "1")
        save(base, stored=Stored(1))
    with pytest.raises(NothingLoadableError, match=r"step-1_ckpt.*format '1'.*the ml_flashpoint that saved it"):
        resumed(base, stored=Stored(5))


def test_what_a_fallback_returns(base: Path) -> None:
    with Flashpoint(base) as fp:
        fp.track(stored=Stored())
        for returned, step in ((None, 0), (0, 0), (12, 12)):
            assert fp.resume(lambda returned=returned: returned) == step
        for wrong in (-1, True, "7", 1.0):
            with pytest.raises(InvalidArgumentError, match="fallback must be"):
                fp.resume(lambda wrong=wrong: wrong)
        with pytest.raises(InvalidArgumentError, match="must be a function without arguments"):
            fp.resume(fallback=7)  # type: ignore[arg-type]


def test_another_program_does_not_bury_what_is_saved(base: Path) -> None:
    saved = trained_model()
    save(base, **saved, stored=Stored(1))
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    generators = torch.get_rng_state()
    with pytest.raises(LoadError, match=r"step-1_ckpt does not fit.*weight.*to start anew"):
        resumed(base, model=model, optimizer=optimizer, stored=Stored())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), generators)
    with pytest.raises(LoadError, match=r"has model\.bias, for which there is no place"):
        resumed(base, model=nn.Linear(4, 2, bias=False), stored=Stored())
    assert resumed(base, **saved, stored=Stored()) == 1


class _Layers(nn.Module):
    def __init__(self, **widths: int) -> None:
        super().__init__()
        for name, width in widths.items():
            self.add_module(name, nn.Linear(4, width))


def test_a_changed_program_is_told_of_all_differences_whatever_its_fallback(base: Path) -> None:
    saved = _Layers(kept=2, wider=2, renamed=2)
    save(base, model=saved, optimizer=torch.optim.SGD(saved.parameters(), lr=0.1), stored=Stored(1))
    changed = _Layers(kept=2, wider=3, called=2)
    weight = changed.kept.weight.detach().clone()
    tracked = {"model": changed, "optimizer": torch.optim.Adagrad(changed.parameters()), "other": Stored()}
    fallback = Stored(0)
    with Flashpoint(base) as fp, pytest.raises(LoadError, match="step-1_ckpt does not fit what is tracked") as caught:
        fp.track(**tracked).resume(lambda: fallback.load_state_dict({"value": 40}))
    for told in (
        "no state of 'other'",
        "model.called.weight, model.called.bias, optimizer.param_groups.0.lr_decay",
        "optimizer.param_groups.0.initial_accumulator_value",
        "has model.renamed.weight, model.renamed.bias",
        "model.wider.weight has the shape (3, 4), and had (2, 4) when it was saved",
        "model.wider.bias has the shape (3,), and had (2,)",
        "discard_existing=True",
    ):
        assert told in str(caught.value)
    assert "kept" not in str(caught.value)
    assert (fallback.value, versions(base)) == (0, [1])
    assert torch.equal(changed.kept.weight, weight)
    with Flashpoint(base, discard_existing=True) as fp:
        assert fp.track(**tracked).resume(lambda: 40) == 40
    assert versions(base) == []


@pytest.mark.parametrize(
    ("before", "now", "lacking"),
    [
        (torch.optim.AdamW, torch.optim.Adamax, "state.weight.exp_inf, optimizer.state.bias.exp_inf"),
        (torch.optim.LBFGS, torch.optim.SGD, "param_groups.0.momentum"),
    ],
)
def test_an_optimizer_of_another_class_is_told_what_the_checkpoint_lacks(
    base: Path, before: Any, now: Any, lacking: str
) -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer, changed, again = before(model.parameters()), now(other.parameters()), before(other.parameters())

    def loss() -> torch.Tensor:
        value = model(torch.ones(3, 4)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    save(base, model=model, optimizer=optimizer)
    with pytest.raises(LoadError, match="lacks .*optimizer." + re.escape(lacking)):
        resumed(base, model=other, optimizer=changed)
    assert not changed.state
    assert resumed(base, model=other, optimizer=again) == 1
    assert_same(again.state_dict(), optimizer.state_dict())


def test_an_older_version_that_happens_to_fit_does_not_bury_a_newer_one(base: Path) -> None:
    """Nobody would see that a step back was taken, and the next saves overwrite what could have been gone on from."""
    save(base, stored=Stored(1), other=Stored(1))
    with Flashpoint(base, keep=2) as fp:
        fp.track(stored=Stored(1)).resume()
        fp.save(2)
        fp.wait()
    assert versions(base) == [1, 2]
    with pytest.raises(LoadError, match=r"step-2_ckpt does not fit.*no state of 'other'"):
        resumed(base, stored=Stored(), other=Stored())
    assert resumed(base, stored=Stored()) == 2


def test_what_is_not_tracked_any_more_is_told(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(base, stored=Stored(1), other=Stored(2), model=nn.Linear(2, 2))
    assert resumed(base, stored=Stored()) == 1
    assert "also has state of 'model', 'other', which is not tracked now" in caplog.text


class Refusing(Stored):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"] > 10:
            torch.rand(3)
            raise ValueError("too much")
        super().load_state_dict(state)


def test_object_that_refuses_its_state(base: Path) -> None:
    saved_twice(base, stored=Stored(10))
    refusing = Refusing()
    assert resumed(base, stored=refusing) == 1
    assert refusing.value == 10
    shutil.rmtree(base / "step-1_ckpt")
    generators = torch.get_rng_state()
    with pytest.raises(NothingLoadableError, match=r"step-2_ckpt of run 1 .the job has gone back from it."):
        resumed(base, stored=refusing)
    assert torch.equal(torch.get_rng_state(), generators)


def test_a_load_that_fails_leaves_the_generators_as_they_were(base: Path) -> None:
    save(base, stored=Stored(11))
    generators = torch.get_rng_state()
    with pytest.raises(LoadError, match="too much"):
        resumed(base, stored=Refusing())
    assert torch.equal(torch.get_rng_state(), generators)


def test_what_another_way_in_has_saved_is_neither_loaded_nor_passed_over(base: Path) -> None:
    """Nobody would see that an older version is gone back to, and what is newer would be overwritten."""
    save(base, stored=Stored(1))
    with Checkpointer(base, Config(keep=2)) as engine:
        assert engine.latest() == engine.id(1)
        made = engine.begin(2, explicit=True)
        made.fill([("a", torch.ones(10))])
        made.commit()
        made.verified.result(20)
    with pytest.raises(LoadError, match="not saved through DCP"):
        resumed(base, stored=Stored())
    door = Door(base)
    door.latest()
    door.save({"stored": torch.ones(3)}, 3)
    door.close()
    with pytest.raises(LoadError, match="not saved by a Flashpoint"):
        resumed(base, stored=Stored())


def test_no_room_is_told_before_training(base: Path) -> None:
    huge = nn.Linear(10**6, 10**6, device="meta")
    with Flashpoint(base) as fp:
        fp.track(huge=huge, optimizer=torch.optim.AdamW(huge.parameters()))
        with pytest.raises(CapacityError, match="enlarge the tmpfs") as caught:
            fp.resume()
    # Two slots, which have headroom, for the parameters and AdamW's two moments.
    assert caught.value.needed_bytes == 2 * slot_size(3 * sum(p.nbytes for p in huge.parameters()))
    assert caught.value.available_bytes is not None
