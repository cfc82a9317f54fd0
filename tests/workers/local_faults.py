"""What ranks do in tests/e2e/test_local_faults.py; each function runs on every rank of a `Team`."""

from __future__ import annotations

import os
import shutil
import unittest
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.local import (
    AsyncCallsQueue,
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
    NoReplicasAvailableError,
    ReplicationStrategy,
    parse_group_sequence,
)
from ml_flashpoint.ranks.strategies import RingReplicationStrategy
from tests.local.states import assert_equal, everything
from tests.support.worker import base_path
from tests.workers.fault_engine import flip

Layout = tuple[str, int, int]
LAYOUTS: dict[int, list[Layout]] = {
    2: [("params", 1, 2), ("lazy", 1, 2), ("groups", 1, 2), ("ring", 1, 2)],
    4: [("params", 1, 2), ("params", 2, 2), ("groups", 2, 2), ("lists", 1, 4)],
}


def state_of(rank: int, iteration: int) -> dict[Any, Any]:
    """Everything that a state may hold, another one for each rank and iteration, of different sizes."""
    torch.manual_seed(1000 * iteration + rank)
    np.random.seed(1000 * iteration + rank)
    return {**everything(), "own": torch.randn(1000 * (rank + 1)), "who": (rank, iteration)}


def strategy_of(layout: Layout | None, world_size: int) -> ReplicationStrategy | None:
    if layout is None:
        return None
    kind, jump, factor = layout
    if kind == "params":
        return CliqueReplicationStrategy.from_replication_params(jump, factor)
    if kind == "lazy":
        return LazyCliqueReplicationStrategy(jump, factor)
    if kind == "ring":
        return RingReplicationStrategy()
    sequence = parse_group_sequence(jump, factor, world_size)
    if kind == "lists":
        return CliqueReplicationStrategy(next(group for group in sequence if dist.get_rank() in group))
    groups = [dist.new_group(ranks, backend="gloo") for ranks in sequence]
    return CliqueReplicationStrategy(
        next(group for group, ranks in zip(groups, sequence, strict=True) if dist.get_rank() in ranks)
    )


def finish(request: Any) -> None:
    if request is not None:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]


def expect(manager: LocalCheckpointManager, iteration: int) -> None:
    """This iteration is found, and loads bit for bit."""
    rank = dist.get_rank()
    assert manager.find_latest() == iteration
    loaded, checkpoint_id = manager.load()
    assert checkpoint_id == (iteration, rank, manager.session_id)
    assert_equal(loaded.state_dict, state_of(rank, iteration))  # type: ignore[attr-defined]


def raised(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Type and text of the error that a call ends with."""
    try:
        function(*args, **kwargs)
    except FlashpointError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def every_loss(report: Any, rank: int) -> int:
    """Every rank in turn loses its folder, in every layout; nothing is saved in between. Returns how often."""
    world_size = dist.get_world_size()
    losses = 0
    for number, layout in enumerate(LAYOUTS[world_size]):
        session = f"session-{number}"
        manager = LocalCheckpointManager(base_path(), session, strategy_of(layout, world_size))
        for iteration in (1, 2):
            state = BasicTensorAwareStateDict(state_of(rank, iteration))
            finish(manager.save(state, iteration, is_async=bool((number + iteration) % 2)))
        expect(manager, 2)
        for victim in range(world_size):
            manager.close()
            dist.barrier()
            if rank == victim:
                shutil.rmtree(base_path() / session)
            dist.barrier()
            # With the strategy, lost parts and lost copies are written back, so the next loss is survived too.
            manager = LocalCheckpointManager(base_path(), session, strategy_of(layout, world_size))
            expect(manager, 2)
            losses += 1
        manager.close()
        dist.barrier()
        if rank == world_size - 1:
            shutil.rmtree(base_path() / session)
        dist.barrier()
        # Without it, copies are used all the same.
        manager = LocalCheckpointManager(base_path(), session)
        expect(manager, 2)
        finish(manager.save(BasicTensorAwareStateDict(state_of(rank, 3)), 3, is_async=True))
        expect(manager, 3)
        manager.close()
    return losses


def damage(report: Any, rank: int) -> None:
    """A bit flips, or a part is cut short: the copy is used. Without copies, a lost part is named, on all ranks."""
    copied = LocalCheckpointManager(base_path(), "copied", LazyCliqueReplicationStrategy(1, 2))
    copied.save(BasicTensorAwareStateDict(state_of(rank, 4)), 4)
    copied.close()
    dist.barrier()
    (path,) = (base_path() / "copied/step-4_ckpt").glob(f"rank-{rank:05d}-*.safetensors")
    size = path.stat().st_size
    os.truncate(path, size // 2) if rank == 1 else flip(path, size // 3, 4)
    dist.barrier()
    copied = LocalCheckpointManager(base_path(), "copied", LazyCliqueReplicationStrategy(1, 2))
    expect(copied, 4)
    copied.close()
    alone = LocalCheckpointManager(base_path(), "alone")
    alone.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    alone.close()
    dist.barrier()
    if rank == 1:
        shutil.rmtree(base_path() / "alone")
    dist.barrier()
    alone = LocalCheckpointManager(base_path(), "alone")
    with unittest.TestCase().assertLogs("ml_flashpoint.local.local_manager", "ERROR") as said:
        assert alone.find_latest() == -1
    assert "the parts of ranks 1 of 2 are on no node of this job" in said.output[0]
    kind, _ = raised(alone.load)
    assert kind == NoReplicasAvailableError.__name__
    alone.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    expect(alone, 1)
    alone.close()


def one_rank_fails(report: Any, rank: int) -> dict[str, Any]:
    """Saves that one rank cannot do fail on all, and can be repeated at once."""
    manager = LocalCheckpointManager(base_path(), "fails", LazyCliqueReplicationStrategy(1, 2))
    manager.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    bad = {"bad": (lambda: 0) if rank == 1 else 1}
    errors: dict[str, Any] = {}
    errors["sync"] = raised(manager.save, BasicTensorAwareStateDict(bad), 2)
    expect(manager, 1)
    request = manager.save(BasicTensorAwareStateDict(bad), 2, is_async=True)
    errors["async"] = raised(finish, request)
    expect(manager, 1)
    errors["argument"] = raised(manager.save, BasicTensorAwareStateDict(state_of(rank, 2)), -1 if rank == 1 else 2)
    expect(manager, 1)
    errors["differ"] = raised(manager.save, BasicTensorAwareStateDict(state_of(rank, 2)), 2 + rank)
    expect(manager, 1)
    # The repeated save must be newer than what its failed predecessors left, on every rank.
    again = LocalCheckpointManager(base_path(), "fails", LazyCliqueReplicationStrategy(1, 2))
    expect(again, 1)
    again.save(BasicTensorAwareStateDict(state_of(rank, 2)), 2)
    expect(again, 2)
    again.close()
    foreign = LocalCheckpointManager(base_path(), "foreign")
    foreign.save(BasicTensorAwareStateDict({"x": OnlyHere(3)} if rank == 1 else {"x": 3}), 1)
    errors["load"] = raised(_load_without, rank)
    return errors


class OnlyHere(NamedTuple):
    """Stands for a type that one rank cannot find again: see `_load_without`."""

    value: Any


def _load_without(rank: int) -> Any:
    found, name = globals().pop("OnlyHere"), "OnlyHere"
    try:
        manager = LocalCheckpointManager(base_path(), "foreign")
        assert manager.find_latest() == 1
        return manager.load()
    finally:
        globals()[name] = found


def rank_dies(report: Any, rank: int, mode: str) -> Any:
    """Rank 1 ends, or hangs, before it saves; the other one saves."""
    manager = LocalCheckpointManager(base_path(), "dies", LazyCliqueReplicationStrategy(1, 2))
    manager.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    report("ready")
    report.listen()  # rank 1 is killed or stopped here
    iteration = -1 if mode == "argument" else 2
    error = raised(
        lambda: finish(manager.save(BasicTensorAwareStateDict(state_of(rank, 2)), iteration, mode == "async"))
    )
    report("told", *error)
    os._exit(0)  # the process group cannot be left in order: its other rank is gone


def save_one(report: Any, rank: int, iteration: int, session: str = "moved", copies: bool = True) -> None:
    strategy = LazyCliqueReplicationStrategy(1, 2) if copies else None
    manager = LocalCheckpointManager(base_path(), session, strategy)
    manager.save(BasicTensorAwareStateDict(state_of(rank, iteration)), iteration)
    manager.close()


def load_one(report: Any, rank: int, iteration: int) -> None:
    manager = LocalCheckpointManager(base_path(), "moved")
    expect(manager, iteration)
    # What is fetched is written back, where this rank runs now.
    assert list((base_path() / f"moved/step-{iteration}_ckpt").glob(f"rank-{rank:05d}-*.manifest"))
    manager.close()


def refusals(report: Any, rank: int, session: str = "moved") -> list[tuple[str, str]]:
    """What is said to a job of other ranks that looks for an iteration, and that loads one."""
    manager = LocalCheckpointManager(base_path(), session)
    errors = [raised(manager.find_latest), raised(manager.load)]
    manager.close()
    return errors


def dtensors(report: Any, rank: int) -> None:
    """Sharded parameters and optimizer state, of FSDP and by hand, one mesh known to some ranks only."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    world_size = dist.get_world_size()
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    uneven = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)])
    single = DeviceMesh("cpu", [0])  # collective, but only rank 0 has a tensor on it
    lone = DTensor.from_local(torch.full((2,), float(rank)), single, [Replicate()]) if rank == 0 else None
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "nested": [(uneven, {"lone": lone}), torch.ones(1)],
        "parameter": torch.nn.Parameter(uneven),
    }
    wrapped = BasicTensorAwareStateDict(state)
    popped = wrapped.pop_tensors()
    assert not any(isinstance(tensor, DTensor) for tensor in popped)
    wrapped.insert_tensors(popped)
    strategy = LazyCliqueReplicationStrategy(1, 2)
    manager = LocalCheckpointManager(base_path(), "dtensors", strategy)
    finish(manager.save(wrapped, 1, is_async=True))
    manager.close()
    dist.barrier()
    if rank == 1:
        shutil.rmtree(base_path() / "dtensors")
    dist.barrier()
    manager = LocalCheckpointManager(base_path(), "dtensors", strategy)
    loaded: Any = manager.load()[0].state_dict  # type: ignore[attr-defined]
    for one, other in [
        *zip(state["model"].values(), loaded["model"].values(), strict=True),
        (uneven, loaded["nested"][0][0]),
        (state["parameter"], loaded["parameter"]),
        (
            state["optimizer"]["state"][0]["exp_avg"],
            loaded["optimizer"]["state"][0]["exp_avg"],
        ),
    ]:
        assert isinstance(other, DTensor)
        assert (one.placements, one.shape, one.stride()) == (other.placements, other.shape, other.stride())
        assert one.device_mesh == other.device_mesh
        assert torch.equal(one.to_local(), other.to_local())
        assert torch.equal(one.full_tensor(), other.full_tensor()), "it takes part in collectives"
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert (loaded["nested"][0][1]["lone"] is None) == (lone is None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    manager.close()
