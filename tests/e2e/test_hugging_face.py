"""Jobs of Accelerate and of the Trainer that are killed and go on from memory, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.support import warm
from tests.support.cluster import Cluster

# Steps after which rank 0 is killed: in the midst of an epoch, before its last step, and after it.
KILLS = {
    "accelerate": (1, 9, 22, 23),
    "accelerate-ddp": (4, 12),
    "accelerate-accumulates": (5, 12),
    "accelerate-workers": (3, 23),
    "trainer": (1, 9, 22, 23),
    "trainer-ddp": (4, 12),
    "trainer-accumulates": (5, 12),
    "trainer-workers": (3, 23),
    "trainer-lora": (3, 29),
    "trainer-stops": (14,),
    "trainer-fsdp2": (4, 12),
}


def last(reports: list[dict[str, Any]], name: str) -> Any:
    return [each[name] for each in reports if name in each][-1]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", list(KILLS))
def test_killed_run_is_the_undisturbed_run(tmpfs: Path, kind: str) -> None:
    ranks = 2 if kind.endswith(("-ddp", "-fsdp2")) else 1
    with Cluster(
        tmpfs,
        "hugging_face",
        ranks_per_node=ranks,
        args=[kind, *KILLS[kind]],
        torchrun=True,
        max_restarts=len(KILLS[kind]),
        preload=warm.HUGGING_FACE,
    ) as cluster:
        cluster.wait(timeout_s=200)
        for rank in range(ranks):
            reports = cluster.reports(rank)
            assert sum("resumes" in each for each in reports) == len(KILLS[kind]) + 2
            resumed, undisturbed = last(reports, "resumed"), last(reports, "undisturbed")
            # What was told in whichever life, the last one's where two did.
            own = reports[: next(i for i, each in enumerate(reports) if "resumed" in each)]
            losses = {each["step"]: each["value"] for each in own if "step" in each}
            assert losses == undisturbed["losses"]
            for name in undisturbed.keys() - {"losses"}:
                assert resumed[name] == undisturbed[name], name
            assert resumed["failures"] == 0
