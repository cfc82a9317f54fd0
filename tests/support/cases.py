"""Cases that ranks go through in one job, one after the other: starting them is what takes the time.

Owns both ends: `go_through` in a worker, `CaseRuns` in the test, where each case is a test of its own. What the cases
are is the worker's. A case that fails on one rank while others go on shows there as a timeout of the process group, and
what comes after it may fail, too.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Hashable, Iterable
from datetime import timedelta
from pathlib import Path

from tests.support import tmpfs as tmpfs_folders
from tests.support.cluster import Cluster, ClusterError
from tests.support.worker import report

RUN_TIMEOUT_S = 300.0


def go_through(names: Iterable[str], run: Callable[[str], None]) -> None:
    """Run each case on this rank, and report how it ended. Collective: ranks meet after each."""
    import torch.distributed as dist

    meeting = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    for name in names:
        began, error = time.monotonic(), None
        try:
            run(name)
        except BaseException:
            error = traceback.format_exc()
        report(case=name, error=error, seconds=round(time.monotonic() - began, 2))
        dist.barrier(meeting)


class CaseRuns:
    """Runs that several tests look at, each made when it is first asked for."""

    def __init__(self) -> None:
        self._folder = tmpfs_folders.make_folder()
        self._done: dict[Hashable, tuple[list[dict[str, str | None]], str]] = {}

    def check(self, key: Hashable, make: Callable[[Path], Cluster], case: str) -> None:
        """Raises `AssertionError`, with what every rank said, unless a case of the run of that key ended well on all.

        ``make`` is given a folder for the run.
        """
        if key not in self._done:
            self._done[key] = self._run(make)
        by_rank, output = self._done[key]
        errors = [of_rank.get(case, "it was not run") for of_rank in by_rank]
        failed = "\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None)
        assert not failed, f"{failed}\n{output}"

    def _run(self, make: Callable[[Path], Cluster]) -> tuple[list[dict[str, str | None]], str]:
        """How each case ended on each rank, None if well, and what was printed if the run failed as a whole."""
        root, output = self._folder / str(len(self._done)), ""
        with make(root) as cluster:
            try:
                cluster.wait(RUN_TIMEOUT_S)
            except ClusterError as error:
                output = str(error)
            reports = [cluster.reports(rank) for rank in range(cluster.world_size)]
        tmpfs_folders.remove_folder(root)
        return [{said["case"]: said["error"] for said in of_rank} for of_rank in reports], output

    def close(self) -> None:
        """Remove their folders."""
        tmpfs_folders.remove_folder(self._folder)


def run_cases(cluster: Cluster) -> None:
    """Run the cases that a cluster is given to the end. All of them must end well."""
    with cluster:
        cluster.wait(RUN_TIMEOUT_S)
        errors = [said["error"] for rank in range(cluster.world_size) for said in cluster.reports(rank)]
        assert errors == [None] * cluster.world_size, errors
