"""The door of Accelerate: an object that is registered with an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from ml_flashpoint.adapter.accelerate import AcceleratorFlashpoint
from tests.conformance.suite import Conformance, Door, State
from tests.conformance.test_flashpoint import Holder
from tests.support import forked

pytestmark = pytest.mark.slow
forked.preload("ml_flashpoint.adapter.accelerate")


class AccelerateDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Identity())
        self._holder = Holder()
        accelerator.register_for_checkpointing(self._holder)
        self._fp = AcceleratorFlashpoint(accelerator, base, strict=True)
        self._asked = False

    def save(self, step: int, state: State) -> None:
        if not self._asked:
            self.load_latest()  # as one must, where there may be something
        self._holder.state = state
        self._fp.save(step)
        assert self._fp.wait(60)

    def load_latest(self) -> tuple[int, State] | None:
        self._holder.state = {}
        step = self._fp.resume()
        self._asked = True
        return (step, self._holder.state) if self._holder.state else None

    def close(self) -> None:
        self._fp.close()


class TestAccelerate(Conformance):
    door = AccelerateDoor
