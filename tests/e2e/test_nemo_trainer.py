"""The NeMo door with NeMo's real classes, on two ranks of two nodes, in an environment of its own: `make test-nemo`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.cases import RUN_TIMEOUT_S, CaseRuns
from tests.support.cluster import Cluster

pytestmark = [
    pytest.mark.slow(60),
    pytest.mark.skipif(importlib.util.find_spec("nemo") is None, reason="NeMo is not installed"),
]

CASES = [
    "sync",
    "asynchronous",
    "both_asynchronous",
    "failing",
    "callback",
    "auto_resume",
    "ending",
    "forgetting_to_ask",
    "context",
    "wrapping_twice",
    "the_page",
    "disabled",
    "refusals",
]


@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("name", CASES)
def test_on_two_nodes(case_runs: CaseRuns, name: str) -> None:
    """One job for all of them: NeMo takes longest to import."""

    def make(root: Path) -> Cluster:
        return Cluster(root, "nemo_cases", nodes=2, args=CASES, torchrun=True, preload=warm.NEMO)

    case_runs.check("all", make, name)
