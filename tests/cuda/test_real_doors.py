"""`dcp.async_save` from a real device returns before the copy: what is saved is what it was at the call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from ml_flashpoint.adapter.pytorch.memory_stager import HAS_FUTURES, MemoryStager
from tests.cuda.test_real_overlap import late
from tests.support.dcp import RESULT_TIMEOUT_S, Door
from tests.support.played_device import lock_slots
from tests.support.tensors import assert_same, blank, clones

__all__ = ["late"]

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]
WIDTH = 1024


class Job:
    def __init__(self) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def step(self) -> None:
        self.model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.fixture
def door(tmpfs: Path) -> Iterator[Door]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = Door(tmpfs / "job")
    yield made
    made.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "waits",
    ["step", pytest.param("future", marks=pytest.mark.skipif(not HAS_FUTURES, reason="this torch knows none"))],
)
def test_each_version_is_the_state_at_the_call(door: Door, late: list[Any], waits: str) -> None:
    job = Job()
    options: dict[str, Any] = {}
    if waits == "step":
        door.writer.watch(job.optimizer)
    else:
        options["async_stager"] = MemoryStager(door.writer)
    for step in range(1, 11):
        job.step()
        expected = clones(job.state())
        saving: Any = dcp.async_save(
            job.state(), checkpoint_id=door.version(step), storage_writer=door.writer, **options
        )
        if waits == "future":
            saving.staging_completion.result(RESULT_TIMEOUT_S)
        job.step()
        getattr(saving, "upload_completion", saving).result(RESULT_TIMEOUT_S)
        lock_slots(door.checkpointer._pool)
        assert_same(door.load(blank(expected), step), expected)
    assert len(late) >= 4
    assert all(each.over for each in late)
