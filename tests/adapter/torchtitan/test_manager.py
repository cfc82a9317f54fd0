"""The manager in jobs of one rank. Ranks and nodes that are killed: tests/e2e/test_torchtitan.py."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

pytest.importorskip("torchtitan")

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader

from ml_flashpoint.adapter.torchtitan import FlashpointManager, attach
from ml_flashpoint.adapter.torchtitan.state import LoaderPlace
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError
from tests.support import forked
from tests.support.loops import damage, versions
from tests.support.processes import REPOSITORY
from tests.workers import titan

pytestmark = pytest.mark.slow(60)
forked.preload("tests.support.titan")


@pytest.fixture
def alone(tmpfs: Path) -> Callable[..., Any]:
    """Calls a function in a new process, which is a job of one rank."""
    return lambda function, *arguments, **named: forked.call(titan.alone, tmpfs, function, arguments, named)


def manager(base: object, **config: Any) -> FlashpointManager:
    """Of a job that has nothing."""
    return FlashpointManager(
        FlashpointManager.Config(**{"enable": True, "base": base, "keep_latest_k": 0, **config}),
        dataloader=None,
        model_parts=[],
        optimizers=[],
        lr_schedulers=SimpleNamespace(),
        states={},
        sd_adapter=None,
    )


# ---- jobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"workers": 2, "validates": 5}], ids=str)
def test_a_job_that_failed_goes_on_bit_for_bit(tmpfs: Path, alone: Callable[..., Any], how: dict[str, int]) -> None:
    expected = alone(titan.trained, 8, tmpfs / "undisturbed", None, **how)
    assert alone(titan.trained, 8, tmpfs / "own", tmpfs / "job", until=5, **how) is None
    found = alone(titan.trained, 8, tmpfs / "own", tmpfs / "job", seed=8, **how)
    assert found.pop("losses") == {step: expected["losses"][step] for step in ("6", "7", "8")}
    assert found == {name: value for name, value in expected.items() if name != "losses"}


def test_its_own_checkpoints_are_the_stock_managers(tmpfs: Path, alone: Callable[..., Any]) -> None:
    alone(titan.trained, 5, tmpfs / "with", tmpfs / "job", interval=2, every_n_steps=3)
    alone(titan.stock, 5, tmpfs / "without", interval=2)
    of_steps = []
    for folder in (tmpfs / "with" / "checkpoint", tmpfs / "without" / "checkpoint"):
        steps = sorted(each.name for each in folder.iterdir())
        assert steps == ["step-2", "step-4", "step-5"]
        of_steps.append([FileSystemReader(folder / step).read_metadata().state_dict_metadata for step in steps])
    assert of_steps[0] == of_steps[1]
    versions = {each.name for each in (tmpfs / "job").glob("step-*")}
    assert versions <= {"step-3_ckpt", "step-5_ckpt"}
    assert "step-5_ckpt" in versions, "the last step, though none is due"


def test_the_newest_is_gone_on_from_in_memory_or_not(tmpfs: Path, alone: Callable[..., Any]) -> None:
    own, job = tmpfs / "own", tmpfs / "job"
    assert alone(titan.loaded, own, job) == (False, 0, None)
    alone(titan.trained, 9, own, job, until=3, interval=2)
    assert alone(titan.loaded, own, job) == (True, 3, "memory")
    shutil.rmtree(job)
    assert alone(titan.loaded, own, job) == (True, 2, None), "torchtitan's own, where memory has nothing"
    alone(titan.trained, 9, own, job, until=4)
    assert alone(titan.loaded, own, job) == (True, 4, "memory")
    alone(titan.stock, 6, own, interval=100)
    assert alone(titan.loaded, own, job) == (True, 6, None), "what was made without ours is newer"


def test_a_step_that_is_asked_for(tmpfs: Path, alone: Callable[..., Any]) -> None:
    own, job = tmpfs / "own", tmpfs / "job"
    alone(titan.trained, 9, own, job, until=5, interval=2, every_n_steps=3)
    assert alone(titan.loaded, own, job, keep=2, load_step=2) == (True, 2, None)
    with pytest.raises(AssertionError, match="step=77 not found"):
        alone(titan.loaded, own, job, keep=2, load_step=77)
    alone(titan.trained, 9, own, job, until=6, keep=2)
    assert alone(titan.loaded, own, job, keep=2, load_step=6) == (True, 6, "memory")


@pytest.mark.damages_on_purpose
def test_damaged_memory_is_left_for_the_checkpoint_that_ranks_have_agreed_on(
    tmpfs: Path, alone: Callable[..., Any]
) -> None:
    own, job = tmpfs / "own", tmpfs / "job"
    alone(titan.trained, 9, own, job, until=5, interval=2, enable=True)
    for step in versions(job):
        damage(job, step)
    with pytest.raises(AssertionError, match="NothingLoadableError"):
        alone(titan.loaded, tmpfs / "nothing", job)
    for base in (job, tmpfs / "no memory"):
        (own / "checkpoint" / "step-4").rename(own / "checkpoint" / "late")
        assert alone(titan.loaded, own, base, late="step-4")[:2] == (True, 2)


def test_seed_checkpoints_and_load_only_save_nothing_of_ours(tmpfs: Path, alone: Callable[..., Any]) -> None:
    assert alone(titan.seeded, tmpfs / "own", tmpfs / "job") is None
    assert alone(titan.loaded, tmpfs / "own", tmpfs / "job") == (True, 0, None)
    alone(titan.trained, 2, tmpfs / "own", tmpfs / "job", load_only=True)
    assert not list((tmpfs / "job").glob("step-*"))


# ---- settings -----------------------------------------------------------------------------------------------------


def test_unusable_settings_are_refused_and_disabled_it_does_nothing(tmpfs: Path) -> None:
    unusable: list[tuple[dict[str, Any], str]] = [
        ({"base": "job-145"}, "base"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"options": [1]}, "options"),
        ({"options": {"keep": 0}}, "keep"),
    ]
    for config, argument in unusable:
        with pytest.raises(InvalidArgumentError) as raised:
            manager(**{"base": str(tmpfs / "job"), **config})
        assert raised.value.argument == argument
    disabled = manager(str(tmpfs / "job"), enable=False)
    assert disabled.load() is False
    assert disabled.save(1) is False
    disabled.maybe_wait_for_staging()
    disabled.close()
    assert not (tmpfs / "job").exists()


def test_attach_keeps_the_settings_and_refuses_other_managers(tmpfs: Path) -> None:
    config = SimpleNamespace(checkpoint=CheckpointManager.Config(interval=7, async_mode="async"))
    attached = attach(config, tmpfs / "job", every_n_steps=3, keep=2)
    assert attached is config
    made = config.checkpoint
    assert isinstance(made, FlashpointManager.Config)
    assert (made.enable, made.interval, made.async_mode) == (True, 7, "async")
    assert (made.base, made.every_n_steps, made.options) == (str(tmpfs / "job"), 3, {"keep": 2})
    with pytest.raises(InvalidArgumentError, match="CheckpointManager"):
        attach(config, tmpfs / "job")


def test_the_guides_registry_takes_the_command_lines_settings(tmpfs: Path, alone: Callable[..., Any]) -> None:
    page = (REPOSITORY / "docs" / "torchtitan.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmpfs / "my_configs.py").write_text(block)
    found = alone(titan.parsed, tmpfs, ["--checkpoint.every_n_steps", "5", "--checkpoint.interval", "50"])
    assert found == {"enable": True, "base": "/dev/shm/mlf-jobs/job-145", "every_n_steps": 5, "interval": 50}


# ---- the place in the data ----------------------------------------------------------------------------------------


class Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_the_place_of_another_data_parallel_rank_is_refused() -> None:
    first, second = (LoaderPlace(ParallelAwareDataloader(Numbers(), rank, 2, batch_size=1)) for rank in range(2))
    next(iter(first.loader))
    with pytest.raises(LoadError, match="data-parallel rank 0 of 2"):
        second.load_state_dict(first.state_dict())
    assert list(second.loader) == [torch.tensor([number]) for number in range(8)]


def test_a_load_that_failed_elsewhere_leaves_the_loader_as_it_was() -> None:
    place = LoaderPlace(ParallelAwareDataloader(Numbers(), 0, 1, batch_size=2))
    batches = iter(place.loader)
    next(batches)
    state = place.state_dict()
    fresh = LoaderPlace(ParallelAwareDataloader(Numbers(), 0, 1, batch_size=2))
    fresh.load_state_dict(state)
    fresh.forget()
    assert len(list(fresh.loader)) == 4
    fresh.load_state_dict(state)
    assert len(list(fresh.loader)) == 3
