"""What is known of CUDA without any: which device is whose, on a machine that is played."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ml_flashpoint.staging.cuda import device_today

SOURCES = Path(__file__).parents[2] / "src" / "ml_flashpoint"


def on(index: int) -> torch.device:
    return torch.device("cuda", index)


@pytest.mark.parametrize(
    ("saved", "ours", "expected"),
    [
        ("cpu", [on(1)], torch.device("cpu")),
        ("cuda:3", [torch.device("cpu"), on(1), on(1)], on(1)),  # the rank has moved
        ("cuda:0", [], on(2)),  # nothing says where it is now
        ("cuda:1", [on(0), on(1)], on(1)),  # a model that lies on several
        ("cuda:7", [on(0), on(1)], on(2)),
    ],
)
def test_what_was_on_a_device_goes_to_todays(
    saved: str, ours: list[torch.device], expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert device_today(saved, ours) == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_today(saved, ours) == torch.device("cpu")


def test_nothing_asks_torch_whether_cuda_is_available() -> None:
    """That initialises the driver, and children that a job forks later cannot use CUDA."""
    asking = [str(path) for path in SOURCES.rglob("*.py") if "cuda.is_available()" in path.read_text().replace("`", "")]
    assert asking == [] or asking == [str(SOURCES / "staging" / "cuda.py")]
