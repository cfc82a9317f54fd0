"""Fixtures of the tests of faults."""

from __future__ import annotations

import os
import random

import pytest


@pytest.fixture
def rng() -> random.Random:
    """Chance with a seed that is printed, and that FLASHPOINT_TEST_SEED sets."""
    seed = int(os.environ.get("FLASHPOINT_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"FLASHPOINT_TEST_SEED={seed}")
    return random.Random(seed)
