"""megatron-core's optimizers are watched: a save returns before what they update is copied, and is what it was then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer

from ml_flashpoint.adapter.megatron.optimizers import watch_optimizers
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from ml_flashpoint.core.overlap import Overlap
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.support.copied_bytes import CopiedBytes
from tests.support.megatron import Door, without_cuda
from tests.support.megatron_gpt import SHARDING, Gpt, PlayedCuda
from tests.support.megatron_states import assert_same_state, tensors_of

without_cuda()

KINDS = {
    "distributed": {},
    "distributed-half": {"half": True},
    "plain": {"distributed": False},
    "plain-half": {"distributed": False, "half": True},
}


@pytest.fixture
def door(tmpfs: Path) -> Iterator[Door]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    door = Door(tmpfs / "job", child=False)
    with PlayedCuda():
        yield door
    door.close()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def nobody_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies gets no processor time before a step waits for it."""
    monkeypatch.setattr(Overlap, "_start", lambda self, late: None)


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
def test_each_version_is_the_state_at_the_call(door: Door, nobody_copies: None, kind: str) -> None:
    blank, trained = _gpt(kind, seed=7), _gpt(kind)
    door.save_strategy.watch(trained.optimizer)
    for step in range(1, 6):
        trained.step(step)
        expected = _async_save(door, trained, step)
        late = door.writer._overlap._late
        assert late is not None
        assert not late.over
        trained.step(100 + step)
        assert late.over
        _finalize(door)
        assert door.save_strategy.last_error is None
        found = tensors_of(door.load_megatron(blank.sharded_state(is_loading=True), step))
        assert_same_state({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_copies_next_to_nothing_of_what_is_watched(
    door: Door, nobody_copies: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Parameters, those in 32 bits, and moments."""
    gpt, copied = _gpt(kind), CopiedBytes(monkeypatch)
    for step in (1, 2):
        _async_save(door, gpt, step)
        _finalize(door)
    copied.here()
    _async_save(door, gpt, 3)
    blocking = copied.here()
    _finalize(door)
    door.save_strategy.watch(gpt.optimizer)
    _async_save(door, gpt, 4)
    held = copied.here()
    gpt.step(4)
    assert held + copied.here() == blocking
    assert held < 0.02 * blocking
    _finalize(door)
    assert door.save_strategy.last_error is None


def test_a_change_that_nobody_announced_fails_the_save_and_no_later_one(door: Door, nobody_copies: None) -> None:
    gpt = _gpt("distributed")
    door.save_strategy.watch(gpt.optimizer)
    weight = next(gpt.model.parameters())
    for step in (1, 2):
        _async_save(door, gpt, step)
        with torch.no_grad():
            weight.add_(1)
        gpt.step(step)
        _finalize(door)
        if step == 1:
            assert "was changed while it was copied" in str(door.save_strategy.last_error)
        else:
            assert door.save_strategy.last_error is None
    assert door.latest() == 2


def test_a_change_that_was_announced_is_none_of_the_version(door: Door, nobody_copies: None) -> None:
    blank, gpt = _gpt("distributed", seed=7), _gpt("distributed")
    door.save_strategy.watch(gpt.optimizer)
    saved = gpt.parameters()
    _async_save(door, gpt, 1)
    door.save_strategy.before_update()
    with torch.no_grad():
        for parameter in gpt.model.parameters():
            parameter.add_(1)
    _finalize(door)
    assert door.save_strategy.last_error is None
    blank.load(door.load_megatron(blank.sharded_state(is_loading=True), 1))
    assert_same_state(blank.parameters(), saved)


def test_a_save_that_waits_anyway_helps_to_copy(door: Door, nobody_copies: None) -> None:
    gpt = _gpt("distributed")
    door.save_strategy.watch(gpt.optimizer)
    door.save_megatron(gpt.sharded_state(), 1)
    assert door.save_strategy.last_error is None
    assert door.latest() == 1


def test_parameters_that_are_gathered_while_forward_runs_are_copied_at_once(door: Door) -> None:
    gpt = _gpt("distributed-half")
    door.save_strategy.watch(gpt.optimizer)
    names = {each.data_ptr() for each in gpt.model.parameters()}
    assert names & door.writer._overlap.owned().keys()
    gpt.model.ddp_config.overlap_param_gather = True
    assert not names & door.writer._overlap.owned().keys()


def test_a_rank_with_nothing_to_train_has_nothing_to_watch(door: Door) -> None:
    class Stub:
        optimizer = None
        is_stub_optimizer = True

    door.save_strategy.watch(Stub(), ChainedOptimizer([]))
    assert door.writer._overlap.owned() == {}


def test_torch_optimizers_are_watched_as_they_are(door: Door) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    door.save_strategy.watch(torch.optim.SGD([weight], lr=1.0))
    assert door.writer._overlap.owned().keys() == {weight.data_ptr()}


def test_so_are_megatron_cores_by_a_local_manager(door: Door, tmpfs: Path, nobody_copies: None) -> None:
    gpt = _gpt("distributed-half")
    manager = LocalCheckpointManager(tmpfs, "local")
    watch_optimizers(manager, gpt.optimizer)
    saved = gpt.parameters()
    state = {name: parameter.detach() for name, parameter in gpt.model.named_parameters()}
    request = manager.save(BasicTensorAwareStateDict(state), 1, is_async=True)
    assert request is not None
    late = manager._overlap._late
    assert late is not None
    assert not late.over
    gpt.step(1)
    request.execute_sync()
    loaded, _ = manager.load()
    assert_same_state(loaded.state_dict, saved)  # type: ignore[attr-defined]
    manager.close()


def test_bad_arguments(door: Door) -> None:
    with pytest.raises(InvalidArgumentError, match=r"optimizer=.*Linear"):
        door.save_strategy.watch(torch.nn.Linear(1, 1))
