"""The Lightning door: what a trainer saves, and what its strategy is given to load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from ml_flashpoint.adapter.lightning.engine import TrainerFlashpoint
from ml_flashpoint.config import Config
from tests.conformance.suite import Conformance, Door, State
from tests.support import forked

pytestmark = pytest.mark.slow
# Importing Lightning takes seconds: once for all children of this session, not once each.
forked.preload("ml_flashpoint.adapter.lightning")


class LightningDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._flashpoint = TrainerFlashpoint(str(base), sharded=False, config=Config(sigterm_grace_s=None), strict=True)
        self._state: State = {}
        # What is asked of a trainer while it saves.
        self._trainer: Any = SimpleNamespace(
            _checkpoint_connector=SimpleNamespace(dump_checkpoint=lambda weights_only: dict(self._state)),
            _logger_connector=SimpleNamespace(_callback_metrics={}),
            fit_loop=SimpleNamespace(_data_fetcher=None, _combined_loader=None),
            lightning_module=torch.nn.Module(),
            optimizers=[],
        )
        self._flashpoint.attach(self._trainer)

    def save(self, step: int, state: State) -> None:
        if self._flashpoint.last_saved is None:
            self._flashpoint.find(None, may_fall_back=False)  # as one must, where there may be something
        self._state = state
        self._flashpoint.save(step)
        assert self._flashpoint.wait(60)

    def load_latest(self) -> tuple[int, State] | None:
        path = self._flashpoint.find(None, may_fall_back=False)
        if path is None:
            return None
        assert path.step is not None
        return path.step, self._flashpoint.load(str(path))

    def close(self) -> None:
        self._flashpoint.close()


class TestLightning(Conformance):
    door = LightningDoor
