"""Page-locking with CUDA's own runtime: what it takes, what it refuses, and that nothing of it is left behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from ml_flashpoint.copy import cuda
from ml_flashpoint.memory.slot import Slot

pytestmark = pytest.mark.cuda
SIZE = 4 << 20


@pytest.fixture(autouse=True)
def _device() -> None:
    torch.cuda.init()
    assert cuda._runtime() is not None, "torch's own copy of the runtime was not found"
    cuda.note_device(torch.cuda.current_device())


def a_kernel_runs() -> bool:
    return bool((torch.ones(8, device="cuda") * 2).sum().item() == 16)


def locked_slot(path: Path, size: int = SIZE) -> Slot:
    slot = Slot.make(path, size)
    slot.prepare()
    return slot


def test_a_slot_is_locked_by_slices_until_it_is_closed(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SLICE", 1 << 20)
    slot = locked_slot(tmpfs / "slot")
    assert slot.is_pinned
    assert slot.tensor.is_pinned()
    for begin, end in cuda.slices(slot.address, slot.address + SIZE):
        at = begin - slot.address
        slot.tensor[at : at + end - begin].copy_(torch.ones(end - begin, dtype=torch.uint8, device="cuda"))
    assert bool(slot.tensor.all())
    view = slot.view(0, 64, torch.uint8, (64,))
    slot.close()
    assert not view.is_pinned()
    assert a_kernel_runs()


def test_what_nobody_closes_is_unlocked_before_it_is_unmapped(tmpfs: Path) -> None:
    """Else one of the next mappings at the same address would be refused, and copied to in the wrong place."""
    for turn in range(20):
        slot = locked_slot(tmpfs / f"slot-{turn}")
        assert slot.is_pinned
        del slot
        gc.collect()
    assert a_kernel_runs()


def test_a_refusal_is_no_error_of_the_next_kernel(tmpfs: Path) -> None:
    slot = Slot.make(tmpfs / "slot", SIZE)
    lock = cuda.PageLock(slot.address + (1 << 45), SIZE)  # where nothing is mapped
    assert not lock.extend()
    assert not lock.is_due
    assert a_kernel_runs()
    slot.close()


def test_memory_is_locked_while_another_thread_captures_a_graph(tmpfs: Path) -> None:
    static = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static += 1
    torch.cuda.current_stream().wait_stream(side)
    slot = Slot.make(tmpfs / "slot", SIZE)
    with torch.cuda.graph(graph):
        static += 1
        slot.lock_in_background()
        static += 1
    assert slot.is_pinned
    graph.replay()
    assert bool((static == 3).all())
    slot.close()


def test_forked_children_leave_cuda_alone(tmpfs: Path) -> None:
    slot = locked_slot(tmpfs / "slot")
    child = os.fork()
    if not child:
        status = 1
        try:
            slot.close()
            status = int(cuda.is_locked(slot.address, 1) or cuda.in_use())
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert slot.is_pinned
    assert slot.tensor.is_pinned()
    slot.close()
