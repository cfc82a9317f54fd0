"""Promises that do not depend on the release of megatron-core: what its own entry points get from our strategies."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from ml_flashpoint.adapter.megatron import releases
from tests.support.cluster import REPOSITORY
from tests.support.megatron import Door, Layout, assert_same_state, plain, sharded_state, without_cuda

without_cuda()

_NAMES = inspect.signature(dist_checkpointing.save).parameters
QUEUES: list[dict[str, str]] = [{}]
"""What tells `dist_checkpointing.save` which queue the program has; it names one of itself, too, since 0.17."""
if "async_strategy" in _NAMES:
    QUEUES += [{"async_strategy": name} for name in ("mcore", "nvrx")]


def _save(door: Door, step: int, asynchronous: bool, **options: Any) -> None:
    door.save_by_megatron(sharded_state(Layout(), step), step, asynchronous=asynchronous, **options)
    assert door.save_strategy.last_error is None


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("options", QUEUES)
def test_what_dist_checkpointing_saves_is_in_memory(
    door: Door, asynchronous: bool, wrapped: bool, options: dict[str, str]
) -> None:
    """And not in files that megatron-core writes in place of it, without a word."""
    strategy = FullyParallelSaveStrategyWrapper(door.save_strategy) if wrapped else door.save_strategy
    loading = FullyParallelLoadStrategyWrapper(door.load_strategy) if wrapped else door.load_strategy
    content = {"version": 3}
    _save(door, 1, asynchronous, strategy=strategy, content_metadata=content, **options)
    names = os.listdir(door.version(1))
    assert not [name for name in names if name.endswith(".distcp")]
    assert [name for name in names if name.endswith(".safetensors")]
    found = door.load_megatron(sharded_state(Layout(), 0, blank=True), 1, strategy=loading)
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict=found) == content
    del found["content_metadata"]
    assert_same_state(found, plain(sharded_state(Layout(), 1)))


def test_the_common_state_is_a_file_whatever_saved_it(door: Door) -> None:
    """So that every release loads what another one has saved: no release finds it among our objects."""
    for step, itself in enumerate((True, False), 1):
        if itself:
            _save(door, step, False)
        else:
            door.save_megatron(sharded_state(Layout(), step), step)
        folder = door.version(step)
        assert {"common.pt", "metadata.json"} <= set(os.listdir(folder))
        assert dist_checkpointing.load_common_state_dict(folder)["step"] == step
        objects = door.load_strategy.load_sharded_metadata(folder)
        assert "common_state" not in {each.key for each in objects.values()}


def test_a_request_goes_into_other_queues(door: Door) -> None:
    """That of nvidia-resiliency-ext has the request itself call what finalizes it, after it was frozen and numbered."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3)), "step": 1}
    ended: list[str] = []
    request = door.save_strategy.async_save({"w": state["w"]}, door.version(1), "nvrx")
    request.add_finalize_fn(lambda: ended.append("after"))
    scheduled = request.freeze()._replace(call_idx=7)
    assert scheduled.execute_finalize_fns(validate_matching_call_idx=True) == 7
    assert (ended, door.save_strategy.last_error) == (["after"], None)
    assert door.latest() == 1


def test_a_release_that_is_newer_than_those_tested_is_warned_of() -> None:
    (bound,) = re.findall(r'"megatron-core>=0\.13,<([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    with pytest.warns(RuntimeWarning, match=f"megatron-core<{re.escape(bound)}"):
        releases.warn_if_untested(f"{bound}.0rc1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tested in ("0.13.0rc2", "0.16.1", "0.19.2"):
            releases.warn_if_untested(tested)
