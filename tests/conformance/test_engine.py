"""The bare engine: saver and loader, as an adapter calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from tests.conformance.suite import Conformance, Door, State


class EngineDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._objects = CheckpointObjectManager()
        self._saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=self._objects)
        self._loader = DefaultMLFlashpointCheckpointLoader(self._objects)
        self._loader.get_latest_complete_checkpoint(base)  # as one must, where there may be something

    def save(self, step: int, state: State) -> None:
        version = CheckpointContainerId.create_child(self.base, CheckpointContainerId.format_version_container(step))
        tensors = [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        others = [(key, json.dumps(value).encode()) for key, value in state.items() if not torch.is_tensor(value)]
        self._saver.save(version, tensors, others)

    def load_latest(self) -> tuple[int, State] | None:
        found = self._loader.get_latest_complete_checkpoint(self.base)
        if found is None:
            return None
        manifest = self._loader.read_manifest(found, 0)
        reader = self._loader.open_object(found, manifest, manifest.objects[0])
        state: State = {e.key: reader.tensor(e.key).clone() for e in reader.layout.tensors}
        state |= {e.key: json.loads(bytes(reader.bytes_of(e.key))) for e in reader.layout.byte_items}
        self._loader.release()
        assert found.step is not None
        return found.step, state

    def close(self) -> None:
        self._saver.close()
        self._objects.close()


@pytest.mark.slow
class TestEngine(Conformance):
    door = EngineDoor
