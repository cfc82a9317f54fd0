"""Copies of ours between the device and a slot, beside the floors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.cuda import floors
from benchmarks.cuda.report import Row, Run
from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import copy_all
from ml_flashpoint.copy.dtypes import described, torch_dtype
from ml_flashpoint.format.object_format import plan_layout
from ml_flashpoint.memory.slot import Slot

State = dict[str, torch.Tensor]


def state_of(run: Run, kind: tuple[int, int]) -> State:
    """So many tensors of so many bytes, on the device."""
    count, nbytes = kind
    return {f"blocks.{n}.weight": torch.rand(nbytes // 4, device=run.device) for n in range(count)}


def both_ways(run: Run, folder: Path) -> Iterator[Row]:
    """Few large tensors, then many small ones: into memory that is not locked, that is, and back."""
    for what, kind in (("large", run.size.large), ("small", run.size.small)):
        yield from _one(run, folder / f"slot-{what}", f"{kind[0]:,} x {kind[1] >> 10:,} KiB", kind)
        run.release()


def _one(run: Run, path: Path, name: str, kind: tuple[int, int]) -> Iterator[Row]:
    state = state_of(run, kind)
    layout = plan_layout(described(state.items()))
    nbytes = sum(tensor.nbytes for tensor in state.values())
    slot = Slot.make(path, layout.size)
    views = [slot.view(e.begin, e.end, torch_dtype(e.dtype), e.shape) for e in layout.tensors]
    sources = [state[e.key] for e in layout.tensors]

    def down() -> None:
        copy_all(views, sources)

    case = f"{name}: down, not locked"
    yield run.measure("copies", case, down, nbytes, floor=floors.DOWN, runs=3)
    yield run.measure(
        "copies", f"{name}: up, not locked", lambda: copy_all(sources, views), nbytes, floor=floors.UP, runs=3
    )
    if run.on_gpu:
        cuda.note_device(torch.cuda.current_device())
        began = time.perf_counter()
        slot.prepare()
        note = "" if slot.is_pinned else "refused"
        yield run.row("copies", f"{name}: locked", [time.perf_counter() - began], nbytes, note=note)
        case = f"{name}: down, locked"
        yield run.measure("copies", case, down, nbytes, floor=floors.DOWN)
        yield run.measure("copies", f"{name}: up, locked", lambda: copy_all(sources, views), nbytes, floor=floors.UP)
    assert all(torch.equal(view, source.cpu()) for view, source in zip(views[:3], sources[:3], strict=True))
    slot.remove()
