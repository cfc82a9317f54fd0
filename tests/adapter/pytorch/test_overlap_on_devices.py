"""``dcp.async_save`` from a device that is played, and lags behind: what is saved is what it was at the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ml_flashpoint.adapter.pytorch.memory_stager import HAS_FUTURES, MemoryStager
from tests.support.dcp import RESULT_TIMEOUT_S, Door
from tests.support.played_device import PlayedDevice, lock_arenas
from tests.support.tensors import assert_same, blank, clones


class Job:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(192, 192), nn.Linear(192, 192))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 192)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.mark.parametrize(
    "waits",
    ["step", pytest.param("future", marks=pytest.mark.skipif(not HAS_FUTURES, reason="this torch knows none"))],
)
def test_each_version_is_the_state_at_the_call(door: Door, monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    job = Job()
    device = PlayedDevice(monkeypatch, [job.model], [job.optimizer])
    options: dict[str, Any] = {}
    if waits == "step":
        door.writer.watch(job.optimizer)
    else:
        options["async_stager"] = MemoryStager(door.writer)
    for step in range(1, 16):
        job.step()
        expected = clones(job.state())
        saving: Any = dcp.async_save(
            job.state(), checkpoint_id=door.version(step), storage_writer=door.writer, **options
        )
        if waits == "future":
            saving.staging_completion.result(RESULT_TIMEOUT_S)
        job.step()
        getattr(saving, "upload_completion", saving).result(RESULT_TIMEOUT_S)
        lock_arenas(door.objects.store)
        assert_same(door.load(blank(expected), step), expected)
    assert len(device.late) >= 4, "the first saves go through slots, those that follow need not"
    assert all(each.over and each.error is None for each in device.late)
