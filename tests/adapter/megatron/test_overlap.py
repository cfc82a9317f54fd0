"""megatron-core's optimizers are watched: a save returns before what they update is copied, and is what it was then.

The device that it is copied from is played: its memory is the host's, and its streams lag behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer

from ml_flashpoint.adapter.megatron.optimizers import watch_optimizers
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local import LocalCheckpointManager
from tests.support.megatron import Door, assert_same_state, tensors_of, without_cuda
from tests.support.megatron_gpt import SHARDING, Gpt, PlayedCuda
from tests.support.played_cuda import PlayedDevice, lock_slots

without_cuda()

KINDS = {
    "distributed-half": {"half": True},
    "plain": {"distributed": False},
    "plain-half": {"distributed": False, "half": True},
}

LOCKED = 4
"""Saves after which all memory is page-locked, so that later ones are copied late."""


@pytest.fixture(autouse=True)
def _played(door: Door) -> Iterator[None]:
    with PlayedCuda():
        yield
    parallel_state.destroy_model_parallel()


def _on_a_device(door: Door, gpt: Gpt, monkeypatch: pytest.MonkeyPatch, *, watched: bool = True) -> PlayedDevice:
    """The next save is copied late, and is not over before something waits for that."""
    inner = [each.optimizer for each in getattr(gpt.optimizer, "chained_optimizers", [gpt.optimizer])]
    current_device = torch.cuda.current_device
    device = PlayedDevice(monkeypatch, [gpt.model.module], inner)  # the wrapper has other `buffers`
    monkeypatch.setattr(torch.cuda, "current_device", current_device)  # megatron-core's own tensors stay on the CPU
    for step in range(1, LOCKED + 1):
        gpt.step(step)
        _async_save(door, gpt, step)
        _finalize(door)
        lock_slots(door.checkpointer._pool)
    if watched:
        door.save_strategy.watch(gpt.optimizer)
    gpt.step(LOCKED)
    device.lag()
    return device


def _gpt(kind: str, *, seed: int = 1) -> Gpt:
    made = Gpt(1, SHARDING, seed=seed, **KINDS[kind])
    made.step(0)  # torch's optimizers have no state before
    return made


def _async_save(door: Door, gpt: Gpt, step: int) -> dict[str, torch.Tensor]:
    """Copies of all tensors that are saved, as they are now. The queue finalizes the save."""
    state = gpt.sharded_state()  # which has padding that is never the same
    copies = tensors_of(state)
    request = save_local_aware_megatron_checkpoint(state, door.version(step), door.save_strategy, async_save=True)
    door.queue.schedule_async_request(request)
    return copies


def _finalize(door: Door) -> None:
    door.queue.maybe_finalize_async_calls(blocking=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_version_is_the_state_at_the_call(door: Door, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    blank, trained = _gpt(kind, seed=7), _gpt(kind)
    device = _on_a_device(door, trained, monkeypatch)
    for step in range(LOCKED + 1, LOCKED + 3):
        trained.step(step)
        expected = _async_save(door, trained, step)
        trained.step(100 + step)
        _finalize(door)
        lock_slots(door.checkpointer._pool)
        assert door.save_strategy.last_error is None
        found = tensors_of(door.load_megatron(blank.sharded_state(is_loading=True), step))
        assert_same_state({name: found[name] for name in expected}, expected)
    assert len(device.late) == 2


def test_a_change_that_was_announced_is_none_of_the_version(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    blank, gpt = _gpt("distributed-half", seed=7), _gpt("distributed-half")
    device = _on_a_device(door, gpt, monkeypatch)
    device.lag(False)
    door.save_megatron(gpt.sharded_state(), LOCKED + 1)  # which waits anyway, and so waits for the copy
    assert door.latest() == LOCKED + 1
    device.lag()
    saved = gpt.parameters()
    _async_save(door, gpt, LOCKED + 2)
    door.save_strategy.before_update()
    with torch.no_grad():
        for parameter in gpt.model.parameters():
            parameter.add_(1)
    _finalize(door)
    assert len(device.late) == 2
    assert door.save_strategy.last_error is None
    blank.load(door.load_megatron(blank.sharded_state(is_loading=True), LOCKED + 2))
    assert_same_state(blank.parameters(), saved)


def test_a_rank_with_nothing_to_train_has_nothing_to_watch(door: Door) -> None:
    class Stub:
        optimizer = None
        is_stub_optimizer = True

    door.save_strategy.watch(Stub(), ChainedOptimizer([]))
    assert not door.writer._overlap._updated()
    with pytest.raises(InvalidArgumentError, match=r"optimizer must be .*Linear"):
        door.save_strategy.watch(torch.nn.Linear(1, 1))


def test_what_is_copied_late(door: Door, tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not parameters that are gathered while forward runs. Torch's optimizers are watched, too, and by any manager."""
    gpt = _gpt("distributed-half")
    _on_a_device(door, gpt, monkeypatch, watched=False)
    parameters = list(gpt.model.parameters())
    door.save_strategy.watch(torch.optim.SGD(gpt.model.parameters(), lr=1.0))
    late = door.writer._overlap.begin(parameters)
    assert late is not None
    assert late.numbers == set(range(len(parameters)))
    manager = LocalCheckpointManager(tmpfs, "local")
    watch_optimizers(manager, gpt.optimizer)
    assert manager._overlap.begin(parameters) is not None
    gpt.model.ddp_config.overlap_param_gather = True
    assert manager._overlap.begin(parameters) is None
    manager.close()
