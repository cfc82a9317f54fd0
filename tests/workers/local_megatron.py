"""megatron-core's own tensor-aware state and its own asynchronous queue, over local checkpoints."""

from __future__ import annotations

import argparse
import io
from typing import Any

import torch
import torch.distributed as dist

from ml_flashpoint.local import (
    AsyncCallsQueue,
    LocalCheckpointManager,
    TensorAwareStateDict,
    compat,
)
from tests.support.worker import base_path, leave, rank, report, world_size


def stand_in_for_cuda() -> None:
    """Others' queues ask for a device to vote on; without a GPU, the CPU is one."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *_: None


def sharded_state(value: float) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    mine = torch.arange(12.0).view(3, 4) + value + 100 * rank()
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", mine, (0, rank(), world_size())),
        "rng": ShardedObject("rng", {"state": torch.arange(5), "n": value}, (world_size(),), (rank(),)),
        "extra": ShardedObject("extra", io.BytesIO(b"opaque"), (world_size(),), (rank(),)),
        "args": argparse.Namespace(lr=0.1, name="job", shape=torch.Size([2])),
        "iteration": int(value),
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
    }


def main() -> None:
    compat.install()
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue as MegatronQueue
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

    assert issubclass(MCoreTensorAwareStateDict, TensorAwareStateDict)
    stand_in_for_cuda()
    dist.init_process_group("gloo")
    manager = LocalCheckpointManager(base_path())
    # Of nvidia-resiliency-ext where that is installed, else ours again.
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue as TheirQueue

    queues: list[Any] = [MegatronQueue(persistent=False), AsyncCallsQueue(), TheirQueue(persistent=False)]
    for iteration, queue in enumerate([None, *queues], 1):
        state, _ = MCoreTensorAwareStateDict.from_state_dict(sharded_state(iteration), algo="atomic")
        before = [tensor.clone() for tensor in state.tensors]
        request = manager.save(state, iteration, is_async=queue is not None)
        assert not state.is_hollow
        assert all(torch.equal(one, other) for one, other in zip(before, state.tensors, strict=True))
        if queue is not None:
            assert request is not None
            queue.schedule_async_request(request)
            if isinstance(queue, MegatronQueue):
                assert queue.async_calls[0].async_caller.process is not None, "it has something to wait for"
            while queue.get_num_unfinalized_calls():
                queue.maybe_finalize_async_calls()
            queue.close()
        assert manager.latest_iteration == iteration
        loaded: Any = manager.load()[0]
        assert type(loaded) is MCoreTensorAwareStateDict
        popped = loaded.pop_tensors()
        assert loaded.is_hollow
        loaded.insert_tensors(popped)
        got = loaded.to_state_dict(sharded_state(0))
        expected = sharded_state(iteration)
        assert torch.equal(got["weight"], expected["weight"].data)
        assert got["rng"]["n"] == iteration
        assert torch.equal(got["rng"]["state"], torch.arange(5))
        assert got["extra"].getvalue() == b"opaque"
        assert got["args"] == expected["args"]
        assert (got["iteration"], got["optimizer"]) == (iteration, expected["optimizer"])
        report(iteration=iteration, queue=type(queue).__module__)
    manager.close()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
