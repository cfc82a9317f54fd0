"""Fixtures of the façade's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def base(tmpfs: Path) -> Path:
    """A base container of the test's own."""
    return tmpfs / "job"
