"""Local checkpoints: saves of one rank, beside another package's where it is installed, and what replication adds."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.timing import RUNS, WARMUPS, Memcpy, Result, State, measure
from ml_flashpoint.local import (
    AsyncCallsQueue,
    BasicTensorAwareStateDict,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
)

PEER = "nvidia_resiliency_ext"
REPLICATED_BYTES = 256 << 20


def saves(name: str, state: State, memcpy: Memcpy, folder: Path) -> Iterator[Result]:
    """Saving in steady state, and loading."""
    manager = LocalCheckpointManager(folder)
    wrapped = BasicTensorAwareStateDict(state)
    iteration = iter(range(1 << 30))
    yield measure(name, "ours: local save, sync", lambda _: manager.save(wrapped, next(iteration)), memcpy)
    totals: list[float] = []
    queue = AsyncCallsQueue()

    def save(_: int) -> float:
        began = time.perf_counter()
        queue.schedule_async_request(manager.save(wrapped, next(iteration), is_async=True))  # type: ignore[arg-type]
        blocked = time.perf_counter() - began
        queue.maybe_finalize_async_calls(blocking=True)
        totals.append(time.perf_counter() - began)
        return blocked

    yield measure(name, "ours: local save, async, caller blocked", save, memcpy)
    replay = iter(totals)
    yield measure(name, "ours: local save, async, to finalized", lambda _: next(replay), memcpy)
    manager.find_latest()
    yield measure(name, "ours: local load", lambda _: drop(manager.load()), memcpy, note="into new tensors")
    manager.close()
    shutil.rmtree(folder)


def peer_saves(name: str, state: State, memcpy: Memcpy, folder: Path) -> Iterator[Result]:
    """The same state through the other package, with a state class made for CPU tensors, which its own refuses."""
    if importlib.util.find_spec(PEER) is None:
        yield Result(name, f"{PEER}: local save", 0, 0, 0, None, 0, note="skipped: not installed")
        return
    from importlib.metadata import version

    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (  # type: ignore[import-not-found]
        AsyncCallsQueue as PeerQueue,
    )
    from nvidia_resiliency_ext.checkpointing.local.base_state_dict import (  # type: ignore[import-not-found]
        TensorAwareStateDict as PeerState,
    )
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (  # type: ignore[import-not-found]
        LocalCheckpointManager as PeerManager,
    )

    # Of a module's own, since it is pickled by name.
    global CpuState
    CpuState = type("CpuState", (PeerState,), {"__module__": __name__, **_cpu_state_methods()})
    note = f"{PEER} {version(PEER.replace('_', '-'))}, CPU tensors"
    manager = PeerManager(folder)
    manager.find_latest()
    iteration = iter(range(1 << 30))
    yield measure(
        name,
        f"{PEER}: local save, sync",
        lambda _: manager.save(CpuState(dict(state)), next(iteration)),
        memcpy,
        note=note,
    )
    if not torch.cuda.is_available():
        yield Result(name, f"{PEER}: local save, async", 0, 0, 0, None, 0, note="skipped: its queue needs a GPU")
    else:
        queue = PeerQueue()

        def save(_: int) -> float:
            began = time.perf_counter()
            queue.schedule_async_request(manager.save(CpuState(dict(state)), next(iteration), is_async=True))
            blocked = time.perf_counter() - began
            queue.maybe_finalize_async_calls(blocking=True)
            return blocked

        yield measure(name, f"{PEER}: local save, async, caller blocked", save, memcpy, note=note)
        queue.close()
    shutil.rmtree(folder)


CpuState: Any = None


def _cpu_state_methods() -> dict[str, Any]:
    def __init__(self: Any, state: State | None) -> None:
        self.state: Any = state

    def pop_tensors(self: Any) -> list[torch.Tensor]:
        tensors, self.state = list(self.state.values()), list(self.state)
        return tensors

    def insert_tensors(self: Any, tensors: Any) -> None:
        self.state = dict(zip(self.state, tensors, strict=True))

    def copy_tensors_to_cpu(self: Any, non_blocking: bool = False) -> None:
        self.state = {key: tensor.clone() for key, tensor in self.state.items()}

    return {
        "__init__": __init__,
        "pop_tensors": pop_tensors,
        "insert_tensors": insert_tensors,
        "copy_tensors_to_cpu": copy_tensors_to_cpu,
        "init_tensors": lambda self: None,
        "restore_tensor_device": lambda self, non_blocking=True: None,
        "tensors": property(lambda self: iter(self.state.values())),
        "is_hollow": property(lambda self: isinstance(self.state, list)),
    }


# ---- replication ------------------------------------------------------------------------------------------


def replication(folder: Path) -> Iterator[Result]:
    """Two ranks on two nodes of one machine; the time that a save blocks, with and without a clique, in turn."""
    rendezvous = tempfile.mkdtemp()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.local", str(folder), f"{rendezvous}/store"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "FLASHPOINT_NODE_ID": f"node-{rank}"},
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    shutil.rmtree(rendezvous, ignore_errors=True)
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"the ranks ended with {[rank.returncode for rank in ranks]}")
    alone, copied = json.loads(outputs[0].splitlines()[-1])
    ratio = sorted(a / c for a, c in zip(alone, copied, strict=True))[len(alone) // 2]
    state = f"{REPLICATED_BYTES >> 20} MiB a rank, 2 ranks"
    for case, times, note, value in (
        ("ours: local save, async, blocked", alone, "no copies", None),
        ("ours: local save, async, blocked, clique", copied, "× is to the row above", ratio),
    ):
        ordered = sorted(times)
        yield Result(state, case, ordered[len(ordered) // 2], ordered[0], ordered[-1], value, len(times), note=note)


def _rank(folder: str, store: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    state = BasicTensorAwareStateDict({f"{i}": torch.rand(REPLICATED_BYTES // 64) for i in range(16)})
    base = Path(folder) / f"node-{rank}"
    # One manager at a time has saves under way, as in a job.
    managers = [
        LocalCheckpointManager(base, "alone"),
        LocalCheckpointManager(base, "copied", LazyCliqueReplicationStrategy(1, 2)),
    ]
    times: list[list[float]] = [[], []]
    for iteration in range(WARMUPS + 2 * RUNS):
        for manager, taken in zip(managers, times, strict=True):
            taken.append(_blocked(lambda m=manager, i=iteration: m.save(state, i, is_async=True)))  # type: ignore[misc]
            dist.barrier()
    if rank == 0:
        print(json.dumps([each[WARMUPS:] for each in times]))
    for manager in managers:
        manager.close()
    dist.destroy_process_group()


def _blocked(save: Callable[[], Any]) -> float:
    began = time.perf_counter()
    request = save()
    blocked = time.perf_counter() - began
    request.execute_sync()
    return blocked


def drop(_: object) -> None:
    """Free a result within the timing."""


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
