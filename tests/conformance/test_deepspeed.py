"""The door of DeepSpeed: an object that is tracked beside an engine, whose steps count."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

import torch.distributed as dist

from ml_flashpoint import Flashpoint
from ml_flashpoint.state.archive import plain_modes
from tests.conformance.suite import Conformance, FlashpointDoor, State
from tests.support import forked
from tests.workers.deepspeed_training import DeepSpeedFlashpoint, deepspeed, make_engine

pytestmark = pytest.mark.slow
forked.preload("tests.workers.deepspeed_training")


class DeepSpeedDoor(FlashpointDoor):
    def open(self) -> Flashpoint:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with plain_modes():  # under which DeepSpeed makes no engine
            self._engine = make_engine("stage 1", 0, 0)
        return DeepSpeedFlashpoint(self._engine, self.base, strict=True).track(holder=self._holder)

    def save(self, step: int, state: State) -> None:
        if not self._asked:
            self.load_latest()
        self._engine.global_steps = step
        super().save(step, state)

    def close(self) -> None:
        super().close()
        deepspeed.comm.destroy_process_group()


class TestDeepSpeed(Conformance):
    door = DeepSpeedDoor


def test_the_door_leaves_no_process_group(tmp_path: Path) -> None:
    DeepSpeedDoor(tmp_path / "job").close()
    assert not dist.is_initialized()
