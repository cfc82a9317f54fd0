"""What another door has saved into a façade's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ml_flashpoint import Flashpoint
from ml_flashpoint.config import Config
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import LoadError


def test_an_older_version_is_not_gone_back_to(tmpfs: Path) -> None:
    """Nobody would see it, and what is newer would be overwritten."""
    model = torch.nn.Linear(4, 4)
    with Flashpoint(tmpfs / "job", every_n_steps=1) as fp:
        fp.track(model=model)
        assert fp.resume() == 0
        fp.step()
    with Checkpointer(tmpfs / "job", Config(keep=2)) as engine:
        assert engine.latest() == engine.id(1)
        save = engine.begin(2, explicit=True)
        save.fill([("a", torch.ones(10))])
        save.commit()
        save.verified.result(20)
    assert (tmpfs / "job" / "step-1_ckpt").exists()
    with Flashpoint(tmpfs / "job", every_n_steps=1) as fp:
        fp.track(model=model)
        with pytest.raises(LoadError, match="not saved through DCP"):
            fp.resume()
