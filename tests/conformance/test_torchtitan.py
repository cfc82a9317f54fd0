"""The torchtitan door: the state of a trainer that its checkpoint manager is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from ml_flashpoint.adapter.torchtitan import FlashpointManager
from tests.conformance.suite import Conformance, Door, Holder, State
from tests.support import forked

pytestmark = pytest.mark.slow
forked.preload("ml_flashpoint.adapter.torchtitan")


class TorchtitanDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._holder = Holder()
        config = FlashpointManager.Config(
            enable=True, base=str(base), keep_latest_k=0, interval=1 << 40, options={"strict": True}
        )
        parts: dict[str, Any] = {"model_parts": [torch.nn.Module()], "optimizers": [], "lr_schedulers": Holder()}
        self._manager = FlashpointManager(
            config,
            dataloader=None,
            states={"train_state": self._holder},
            sd_adapter=None,
            base_folder=f"{base}-own",
            **parts,
        )
        self._asked = False

    def save(self, step: int, state: State) -> None:
        if not self._asked:
            self.load_latest()  # as one must, where there may be something
        self._holder.state = state
        self._manager.save(step)
        assert self._manager.flashpoint.wait(60)

    def load_latest(self) -> tuple[int, State] | None:
        self._asked, self._holder.state = True, {}
        if not self._manager.load():
            return None
        return self._manager.flashpoint.steps_done, self._holder.state

    def close(self) -> None:
        self._manager.close()


class TestTorchtitan(Conformance):
    door = TorchtitanDoor
