"""Notes what is staged by any door that plans before it copies, and tells whether that is what was committed.

Owns the copies that it compares with, made when a save begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ml_flashpoint.engine.committing import TensorItem
from ml_flashpoint.engine.save import Save


class Witness:
    """From now on, until the patches of ``monkeypatch`` are undone.

    Attributes:
        late: of each save, whether it returned before all was copied.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.late: list[bool] = []
        self._staged: list[tuple[Save, dict[str, torch.Tensor]]] = []
        stage = Save.stage

        def noted(save: Save, tensors: Sequence[TensorItem], *given: Any, **how: Any) -> Any:
            copies = {name: tensor.detach().clone() for name, tensor in tensors}
            views = stage(save, tensors, *given, **how)
            self.late.append(not save.staged.done())
            self._staged.append((save, copies))
            return views

        monkeypatch.setattr(Save, "stage", noted)

    def latest_is_in(self, base: Path) -> bool:
        """Whether the save that was staged last was committed, as it was staged, by this rank alone on this node."""
        save, copies = self._staged[-1]
        if save.id is None:
            return False
        objects = [each for each in (base / save.id.version).glob("rank-*.safetensors") if save.id.text in each.name]
        if len(objects) != 1 or not copies:
            return False
        found = safetensors.torch.load_file(objects[0])
        return all(_is_same(found[name], copy) for name, copy in copies.items())


def _is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    octets = [each.contiguous().view(-1).view(torch.uint8) for each in (found, expected)]
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(*octets)
