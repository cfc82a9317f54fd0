"""`every_n_steps="auto"` in a loop of one process. What is chosen, and when, is in tests/core/test_save_interval.py."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.status import read_status

HOUR_S = 3600.0


def test_a_real_loop(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ml_flashpoint")
    saved: list[int | None] = []

    def train(steps: int) -> Flashpoint:
        model = torch.nn.Linear(500, 500)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with Flashpoint(base, every_n_steps="auto", mtbf_s=300 * HOUR_S) as fp:
            fp.track(model=model, optimizer=optimizer).resume()
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(32, 500)).sum().backward()
                optimizer.step()
                fp.step()
                assert fp.wait()
                saved.append(fp.last_saved)
        return fp

    health = train(60).health
    assert saved[:9] == list(range(1, 10))
    assert health.every_n_steps > 1
    assert "300 h is to be expected" in str(health.interval_reason)
    assert "step is saved: a step takes" in caplog.text
    last = saved[-1]
    assert train(1).last_recovery.step == last  # type: ignore[union-attr]
    status = read_status(base / ".flashpoint" / "rank-00000")
    assert status is not None
    assert status.starts == 2
    assert 0 < status.since_s < status.updated_s
