"""The strategy and the adapter that docs/how-it-works.md adds, as they stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.forked import call_team
from tests.workers import documented_door


def test_the_strategy_and_the_adapter_of_the_page_work(tmpfs: Path) -> None:
    results = call_team(documented_door.save_and_load, tmpfs, 3)
    assert [held for held, _ in results] == [1, 2, 0]  # each rank's copy is two nodes further on
    for rank, (_, loaded) in enumerate(results):
        expected = np.arange(5.0) + rank
        assert set(loaded) == {"weight", "bias", "tied", "too"}
        for name, array in {"weight": expected + 1, "tied": expected, "too": expected}.items():
            np.testing.assert_array_equal(loaded[name], array)
        np.testing.assert_array_equal(loaded["bias"], np.ones((2, 3), np.int16))
