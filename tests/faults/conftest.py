"""Fixtures of the tests of faults."""

from __future__ import annotations

import os
import random

import pytest

from tests.faults.common import SCALE


@pytest.fixture
def rng() -> random.Random:
    """Chance with a seed that is printed, and that FLASHPOINT_TEST_SEED sets."""
    seed = int(os.environ.get("FLASHPOINT_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"FLASHPOINT_TEST_SEED={seed}")
    return random.Random(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More iterations may take longer."""
    if SCALE > 1:
        for item in items:
            if item.path.parent.name == "faults":
                item.add_marker(pytest.mark.timeout(300 * SCALE))
