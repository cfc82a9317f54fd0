"""megatron-core: our strategy beside its own `torch_dist`, both asynchronous, through its queue, on one tmpfs."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import Engine
from benchmarks.timing import Memcpy, Result, State, measure, of_peer


def saves(name: str, state: State, memcpy: Memcpy, folder: Path) -> Iterator[Result]:
    """Time that the caller is blocked, and until the save is finalized; nothing if megatron-core is not installed."""
    if importlib.util.find_spec("megatron") is None:
        return
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
    from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint

    if not torch.cuda.is_available():  # megatron-core puts small tensors of collectives there
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *args: None

    def sharded() -> dict[str, Any]:
        return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in state.items()}

    engine = Engine(folder / "megatron")
    for child, kind in ((False, "no process"), (True, "with a process that does nothing")):
        strategy = MLFlashpointMegatronAsyncSaveStrategy(storage_writer=engine.writer, child=child)

        def ours(_: int, strategy: Any = strategy) -> Any:
            return save_local_aware_megatron_checkpoint(
                sharded(), engine.next(), strategy, True, validate_access_integrity=False
            )

        yield from _rows(name, f"ours: megatron-core async, {kind}", ours, memcpy, lambda: engine.checkpoints.wait(5))
        assert strategy.last_error is None
    engine.close()

    place = folder / "torch_dist"

    def torch_dist() -> Iterator[Result]:
        theirs = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)

        def save(number: int) -> Any:
            path = place / str(number)
            path.mkdir(parents=True)
            return dist_checkpointing.save(
                sharded(), str(path), theirs, async_sharded_save=True, validate_access_integrity=False
            )

        yield from _rows(name, case, save, memcpy, lambda: shutil.rmtree(place))

    case = "megatron-core torch_dist async"
    yield from of_peer(name, f"{case}: caller blocked", torch_dist())


def _rows(
    name: str, case: str, start: Callable[[int], Any], memcpy: Memcpy, after: Callable[[], object]
) -> Iterator[Result]:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    queue = AsyncCallsQueue()
    totals: list[float] = []

    def save(number: int) -> float:
        began = time.perf_counter()
        queue.schedule_async_request(start(number))
        blocked = time.perf_counter() - began
        queue.maybe_finalize_async_calls(blocking=True)
        totals.append(time.perf_counter() - began)
        return blocked

    yield measure(name, f"{case}: caller blocked", save, memcpy, after=after)
    replay = iter(totals)
    yield measure(name, f"{case}: finalized", lambda _: next(replay), memcpy)
