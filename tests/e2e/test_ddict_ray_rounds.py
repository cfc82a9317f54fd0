"""A dictionary of 256 MiB on Ray: managers are killed and nodes removed while four writers write, for many rounds."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("ray")

import ray

from ml_flashpoint.ddict import DDict, DDictCheckpointRetiredError, DDictError, DDictWritesLostError
from ml_flashpoint.ddict.runtime.ray_runtime import NAMESPACE, actor_name
from tests.support import tmpfs as tmpfs_folders
from tests.support.forked import wait_until
from tests.support.ray_cluster import RayCluster, ray_cluster
from tests.workers import ddict_ray
from tests.workers.ddict_ray import PARTS, part_of

NODES = 3
WRITERS = 4
TIMEOUT_S = 60.0
DEADLINE_S = 150.0
ROUND_S = 240.0  # a strike, what was committed read again, two more commits, and a node for one that was lost
AROUND_S = 2 * DEADLINE_S  # the cluster's start, the first commits, and the end
NEEDED_BYTES = 6 << 30
REMOVES_A_NODE, KILLS_AN_ACTOR = 5, 3  # each so many rounds; else a manager is killed


def _rounds(number: int, *marks: Any) -> Any:
    """A case with time for each of its rounds; a round that takes more fails on its own."""
    return pytest.param(number, marks=[pytest.mark.timeout(AROUND_S + number * ROUND_S), *marks])


@pytest.mark.slow(150)
@pytest.mark.parametrize("rounds", [_rounds(5), _rounds(50, pytest.mark.soak)])
def test_nothing_committed_is_lost_round_after_round(tmpfs: Path, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    free = min(shutil.disk_usage(tmpfs).free, psutil.virtual_memory().available)
    if not tmpfs_folders.has_tmpfs() or free < NEEDED_BYTES:
        pytest.skip(f"takes {NEEDED_BYTES >> 30} GiB of /dev/shm, of which {free >> 20} MiB are free")
    monkeypatch.setenv("FLASHPOINT_DDICT_BASE", str(tmpfs))
    with ray_cluster(NODES + 1) as cluster:  # one to spare: Ray moves no bundle that runs
        # A checkpoint stays while eight newer ones are committed: `_check` reads 256 MiB of it, on a busy machine, too.
        with DDict(1, NODES, 5 << 30, working_set_size=8, timeout=TIMEOUT_S, replication="ring") as d:
            writers = [_start(cluster, d, rank) for rank in range(WRITERS)]
            committed = _await_committed(d, PARTS)
            for number in range(1, rounds + 1):
                began = time.monotonic()
                _strike(cluster, d, number)
                assert _check(d) >= committed, "what was committed is so no more"
                committed = _await_committed(d, committed + 2)
                cluster.fill()
                took = time.monotonic() - began
                print(f"round {number}: {took:.1f} s, {committed} committed")
                assert took < ROUND_S, f"round {number} took {took:.0f} s"
            _newest_until_done(d, lambda at: _retry(lambda: d.pput("stop", True)))
            reports = ray.get(writers, timeout=DEADLINE_S)
            for report in reports:
                assert set(report.errors) <= {"DDictManagerLostError", "DDictTimeoutError", "DDictWritesLostError"}
                assert report.longest_s < TIMEOUT_S + 5
            _check(d, [report.written - 1 for report in reports])
        wait_until(lambda: not list(tmpfs.iterdir()), "no folder is left", DEADLINE_S)


def _start(cluster: RayCluster, d: DDict, rank: int) -> Any:
    """On the head, which no round removes."""
    pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(cluster.head, soft=False)
    task = ray.remote(ddict_ray.write_parts).options(num_cpus=0.2, max_retries=0, scheduling_strategy=pinned)
    return task.remote(d, rank, WRITERS)


def _strike(cluster: RayCluster, d: DDict, number: int) -> None:
    places = {manager: _place_of(d, manager) for manager in range(NODES)}
    away = [manager for manager, place in places.items() if place["node"] != cluster.head]
    if number % REMOVES_A_NODE == 0:
        place = places[away[number // REMOVES_A_NODE % len(away)]]
        cluster.lose(place["node"])
        shutil.rmtree(place["folder"], ignore_errors=True)
    elif number % KILLS_AN_ACTOR == 0:
        ray.kill(_actor(d, number % NODES), no_restart=False)
    else:
        os.kill(places[number % NODES]["pids"][number % NODES], signal.SIGKILL)


def _actor(d: DDict, manager: int) -> Any:
    return ray.get_actor(actor_name(d._configuration.dictionary, manager), namespace=NAMESPACE)


def _place_of(d: DDict, manager: int) -> dict[str, Any]:
    give_up = time.monotonic() + DEADLINE_S
    while True:
        try:
            place = dict(ray.get(_actor(d, manager).place.remote(), timeout=DEADLINE_S))
        except ray.exceptions.RayActorError:  # it is being started again
            place = {"pids": {}}
        if manager in place["pids"]:
            return place
        assert time.monotonic() < give_up
        time.sleep(0.1)


def _check(d: DDict, ends: Sequence[int] | None = None) -> int:
    """All that is in the newest committed checkpoint is what was written there. Returns its id.

    Args:
        ends: the epoch after which each writer has ended, if they have: not all of them see at once that they shall.
    """

    def look(at: int) -> None:
        newest = [at if ends is None else min(at, ends[rank]) for rank in range(WRITERS)]
        assert [_retry(lambda rank=rank: d["last", rank]) for rank in range(WRITERS)] == newest
        for rank, last in enumerate(newest):
            assert {_retry(lambda key=(rank, "small", key): d[key]) for key in range(0, 100, 7)} == {last}
            for epoch in range(last - PARTS + 1, last + 1):
                found = _retry(lambda key=(rank, "part", epoch % PARTS): d[key])
                assert torch.equal(found, part_of(rank, epoch)), (rank, epoch)

    return _newest_until_done(d, look)


def _newest_until_done(d: DDict, action: Callable[[int], Any]) -> int:
    """Do something at the newest committed checkpoint, again if the writers were faster. Returns its id."""
    give_up = time.monotonic() + DEADLINE_S
    while True:
        try:
            at = int(_retry(d.sync_to_newest_checkpoint))
            action(at)
            return at
        except DDictCheckpointRetiredError:
            assert time.monotonic() < give_up


def _await_committed(d: DDict, least: int) -> int:
    wait_until(lambda: d.committed_checkpoint_id >= least, f"checkpoint {least} is committed", DEADLINE_S)
    return d.committed_checkpoint_id


def _retry(call: Any) -> Any:
    """As users are told: an error that says so may be answered by calling again."""
    for _ in range(5):
        try:
            return call()
        except DDictWritesLostError:
            continue  # said once: what a task had written that is gone
        except DDictError as error:
            if not error.retryable:
                raise
    return call()
