"""The bare engine: a `Checkpointer`, as an adapter calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ml_flashpoint.engine.checkpointer import Checkpointer
from tests.conformance.suite import Conformance, Door, State


class EngineDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._checkpointer = Checkpointer(base)
        self._checkpointer.latest()  # as one must, where there may be something
        self._highest = -1

    def save(self, step: int, state: State) -> None:
        if step <= self._highest:
            self._checkpointer.latest()  # a new run, in which the step may be saved again
        self._highest = step
        tensors = [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        others = [(key, json.dumps(value).encode()) for key, value in state.items() if not torch.is_tensor(value)]
        save = self._checkpointer.begin(step, explicit=True)
        save.fill(tensors, others)
        save.commit()
        save.committed.result()

    def load_latest(self) -> tuple[int, State] | None:
        found = self._checkpointer.latest()
        if found is None:
            return None
        with self._checkpointer.open_version(found) as version:
            reader = version.open(0)
            state: State = {e.key: reader.tensor(e.key).clone() for e in reader.layout.tensors}
            state |= {e.key: json.loads(bytes(reader.bytes_of(e.key))) for e in reader.layout.byte_items}
        assert found.step is not None
        return found.step, state

    def close(self) -> None:
        self._checkpointer.close()


@pytest.mark.slow
class TestEngine(Conformance):
    door = EngineDoor
