"""Jobs of 256 MiB a rank through the local door and Lightning's, which are killed; for `tests.support.forked.Team`.

Owns what one rank does. Local states are functions of rank and step, so that what is loaded can be compared bit for
bit with what no checkpoint has touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ml_flashpoint.local import AsyncCallsQueue, BasicTensorAwareStateDict, LocalCheckpointManager
from ml_flashpoint.local.replication import LazyCliqueReplicationStrategy
from tests.local.states import assert_equal
from tests.workers.distributed_training import base

Report = Callable[..., None]
MIB = 1 << 20


def local_state(rank: int, step: int) -> dict[str, Any]:
    """Tensors that end in the midst of blocks, and as large values of other kinds beside them."""
    torch.set_num_threads(1)
    first = torch.arange(90 * MIB // 4 + rank, dtype=torch.int32) * step
    return {
        "model": {"first": first, "second": torch.arange(47 * MIB // 4 + 3, dtype=torch.float32) + step},
        "tied": first.view(-1),
        "moments": [torch.full((30 * MIB // 2 + 1,), step, dtype=torch.bfloat16), torch.empty(0, 3)],
        "complex": torch.complex(torch.arange(MIB // 4).float(), torch.full((MIB // 4,), -1.0 * step)).conj(),
        "array": (np.arange(60 * MIB // 8) * step).astype(">f8"),
        "bytes": bytes([step]) * (30 * MIB + 1),
        "rank, step": (rank, step),
    }


def save_locally(report: Report, rank: int, first: int, last: int, hangs: bool) -> None:
    """Saves from one iteration to another; the last one is under way when it waits to be killed."""
    manager = LocalCheckpointManager(base(), "job", LazyCliqueReplicationStrategy(1, 2))
    manager.find_latest()
    queue = AsyncCallsQueue()
    for step in range(first, last + 1):
        request = manager.save(BasicTensorAwareStateDict(local_state(rank, step)), step, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)
        if not (hangs and step == last):
            queue.maybe_finalize_async_calls(blocking=True)
        report("complete", manager.latest_iteration)
    if hangs:
        threading.Event().wait()
    queue.close()
    manager.close()


def load_locally(report: Report, rank: int) -> int:
    """Loads and checks the newest iteration; its number."""
    manager = LocalCheckpointManager(base(), "job", LazyCliqueReplicationStrategy(1, 2))
    state, found = manager.load()
    assert isinstance(state, BasicTensorAwareStateDict)
    assert_equal(state.state_dict, local_state(rank, found.iteration))
    assert found.rank == rank
    manager.close()
    return found.iteration
