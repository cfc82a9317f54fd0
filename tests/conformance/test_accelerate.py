"""The door of Accelerate: an object that is registered with an accelerator."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator

from ml_flashpoint import Flashpoint
from ml_flashpoint.adapter.accelerate import AcceleratorFlashpoint
from tests.conformance.suite import Conformance, FlashpointDoor
from tests.support import forked

pytestmark = pytest.mark.slow
forked.preload("ml_flashpoint.adapter.accelerate")


class AccelerateDoor(FlashpointDoor):
    def open(self) -> Flashpoint:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Identity())
        accelerator.register_for_checkpointing(self._holder)
        return AcceleratorFlashpoint(accelerator, self.base, strict=True)


class TestAccelerate(Conformance):
    door = AccelerateDoor
