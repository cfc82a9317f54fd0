"""What a dictionary is made with, short of making it."""

from __future__ import annotations

import pytest

from ml_flashpoint import ddict
from ml_flashpoint.ddict.errors import REQUESTS, DDictManagerLostError
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ranks.strategies import Topology


@pytest.mark.parametrize("name", ["ring", "pairwise", "clique"])
@pytest.mark.parametrize("managers_per_node", [1, 3])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_each_strategy_that_has_a_name_survives_a_node(name: str, managers_per_node: int, nodes: int) -> None:
    strategy = Options(managers_per_node, nodes, replication=name).make_strategy()
    topology = Topology(tuple(f"node-{node}" for node in range(nodes) for _ in range(managers_per_node)))
    assert strategy.survivable_losses(topology) >= 1


@pytest.mark.parametrize("retryable", [True, False])
def test_whether_to_try_again_is_what_the_manager_says(retryable: bool) -> None:
    error = DDictManagerLostError("gone", manager=3)
    error.retryable = retryable
    rebuilt = REQUESTS.rebuild(REQUESTS.describe(error))
    assert isinstance(rebuilt, DDictManagerLostError)
    assert rebuilt.retryable is retryable


def test_all_that_is_exported_is_there() -> None:
    other_names = {"NULLCheckpointPersister": "NullCheckpointPersister"}
    assert all(getattr(ddict, name).__name__ == other_names.get(name, name) for name in ddict.__all__)
