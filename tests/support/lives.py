"""What the lives of a job reported that is killed, goes on, and is trained once more undisturbed by the last life."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster

Reports = list[dict[str, Any]]


def last(reports: Reports, name: str) -> Any:
    """The value that was reported last under a name."""
    return [each[name] for each in reports if name in each][-1]


def assert_undisturbed(reports: Reports, but: Set[str] = frozenset()) -> Reports:
    """The job came to what the undisturbed run came to. Return what its lives have reported until then."""
    resumed, undisturbed = last(reports, "resumed"), last(reports, "undisturbed")
    for name in undisturbed.keys() - but:
        assert resumed[name] == undisturbed[name], name
    return reports[: next(number for number, each in enumerate(reports) if "resumed" in each)]


def assert_example_goes_on(
    root: Path, example: Path, *args: object, says: Sequence[str], preload: Sequence[str], **env: str
) -> None:
    """An example whose rank 0 kills itself is started again by torchrun, on two ranks, and says all this then."""
    with Cluster(
        root, example, ranks_per_node=2, args=args, env=env, torchrun=True, max_restarts=2, preload=preload
    ) as cluster:
        cluster.wait(timeout_s=200)
        output = cluster.outputs()[0]
    for pattern in ("rank 0 kills itself", *says):
        assert re.search(pattern, output), (pattern, output)
