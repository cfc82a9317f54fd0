"""The machine by itself: what copies, page faults and page-locking cost without us."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.cuda.report import Row, Run
from ml_flashpoint.copy import cuda
from ml_flashpoint.memory.slot import Slot

DOWN, UP = "pinned, device to host", "pinned, host to device"


def copies(run: Run) -> Iterator[Row]:
    """Between device and host, and within each."""
    size = run.size.floor
    there = torch.ones(size, dtype=torch.uint8, device=run.device)
    pageable = torch.ones(size, dtype=torch.uint8)
    if run.on_gpu:
        pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        yield run.measure("floors", DOWN, lambda: pinned.copy_(there, non_blocking=True), size)
        yield run.measure("floors", UP, lambda: there.copy_(pinned, non_blocking=True), size)
        del pinned
    yield run.measure("floors", "pageable, device to host", lambda: pageable.copy_(there), size, floor=DOWN)
    yield run.measure("floors", "pageable, host to device", lambda: there.copy_(pageable), size, floor=UP)
    other = torch.empty_like(there)
    yield run.measure("floors", "within the device", lambda: other.copy_(there), size)
    host = torch.empty_like(pageable)
    yield run.measure("floors", "memcpy, one thread", lambda: _copy(host, pageable, 1), size)
    yield run.measure("floors", "memcpy, 8 threads", lambda: _copy(host, pageable, 8), size)


def _copy(to: torch.Tensor, of: torch.Tensor, workers: int) -> None:
    pairs = list(zip(to.chunk(workers), of.chunk(workers), strict=True))
    threads = [threading.Thread(target=a.copy_, args=(b,)) for a, b in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def faults_and_locks(run: Run, folder: Path) -> Iterator[Row]:
    """New memory: faulted in, then page-locked by slices of several sizes, and unlocked."""
    size = max(1 << 20, run.size.floor)
    began = time.perf_counter()
    slot = Slot.make(folder / "faulted", size)
    yield run.row("memory", "reserved and faulted in, one thread", [time.perf_counter() - began], size)
    runtime = cuda.Runtime() if run.on_gpu else None
    for unit in (64 << 20, 256 << 20, 1 << 30):
        if runtime is None:
            yield Row("memory", f"locked by {unit >> 20} MiB", note="left out: there is no device")
            continue
        begins = range(slot.address, slot.address + size, unit)
        with runtime.guard(run.device.index or 0):
            began = time.perf_counter()
            statuses = {runtime.register(b, min(unit, slot.address + size - b)) for b in begins}
            locked = time.perf_counter()
            for begin in begins:
                runtime.unregister(begin)
            unlocked = time.perf_counter()
            runtime.last_error()
        note = "" if statuses == {0} else f"refused: {statuses}"
        yield run.row("memory", f"locked by {unit >> 20} MiB", [locked - began], size, note=note)
        yield run.row("memory", f"unlocked by {unit >> 20} MiB", [unlocked - locked], size)
    slot.remove()
