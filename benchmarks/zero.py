"""An engine of DeepSpeed under ZeRO: how long a save keeps the training loop, beside the engine's own."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from benchmarks.timing import Memcpy, Result, measure, of_peer
from ml_flashpoint.adapter.deepspeed import DeepSpeedFlashpoint

STATE = "DeepSpeed, ZeRO 1, Adam"


class _Model(torch.nn.Module):
    """160 MiB of parameters in 40 tensors; with master weights and Adam's state, 640 MiB."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        rows = max(1, int(1024 * scale))
        self.weights = torch.nn.ParameterList(torch.rand(rows, 1024) for _ in range(40))

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum() * 1e-9


def results(folder: Path, scale: float) -> Iterator[Result]:
    """Rows of the same engine's saves, one after the other."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_PORT="0")
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=_Model(scale), config=config)
    nbytes = 4 * sum(parameter.nbytes for parameter in engine.module.parameters())
    memcpy = Memcpy({"all": torch.empty(nbytes, dtype=torch.uint8)})

    def train() -> None:
        engine.backward(engine())
        engine.step()

    with DeepSpeedFlashpoint(engine, folder / "job", strict=True) as fp:

        def ours(_: int) -> float:
            train()
            fp.step()
            return fp.health.blocked_s

        yield measure(STATE, "ours: step, blocked", ours, memcpy, after=lambda: fp.wait(60))
    peer = "engine.save_checkpoint, blocked"
    yield from of_peer(STATE, peer, _own_saves(peer, engine, train, memcpy, folder / "own"))


def _own_saves(case: str, engine: Any, train: Any, memcpy: Memcpy, folder: Path) -> Iterator[Result]:
    def own(_: int) -> float:
        train()
        began = time.perf_counter()
        engine.save_checkpoint(folder)
        return time.perf_counter() - began

    yield measure(STATE, case, own, memcpy, after=lambda: shutil.rmtree(folder))
