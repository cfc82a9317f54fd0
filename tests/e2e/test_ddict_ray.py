"""A dictionary on a real Ray cluster of three nodes: values near and far, writers everywhere, a node that is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("ray")

import ray
from ray.exceptions import RayError

from ml_flashpoint.ddict import (
    DDict,
    DDictCheckpointRetiredError,
    DDictDestroyedError,
    DDictError,
    DDictWritesLostError,
)
from ml_flashpoint.ddict.runtime.folder import sweep
from ml_flashpoint.ddict.runtime.ray_runtime import NAMESPACE, actor_name
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support import tmpfs as tmpfs_folders
from tests.support.forked import wait_until
from tests.support.ray_cluster import RayCluster, ray_cluster, run_on
from tests.workers import ddict_ray
from tests.workers.ddict_ray import PARTS, part_of, value_of

pytestmark = [pytest.mark.slow(100), pytest.mark.timeout(400)]

NODES = 3
WRITERS = 4
ERRORS_OF_WRITERS = {"DDictManagerLostError", "DDictTimeoutError", "DDictWritesLostError"}
TIMEOUT_S = 60.0
DEADLINE_S = 150.0
TOTAL = 3 << 30


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """Where the nodes keep the folders of dictionaries."""
    folder = tmpfs_folders.make_folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHPOINT_DDICT_BASE", str(folder))
        yield folder
    tmpfs_folders.remove_folder(folder)


@pytest.fixture(scope="module")
def one_cluster(base: Path) -> Iterator[RayCluster]:
    with ray_cluster(NODES) as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: RayCluster, base: Path) -> Iterator[RayCluster]:
    one_cluster.fill()
    yield one_cluster
    wait_until(lambda: not list(base.iterdir()), f"no folder is left: {list(base.iterdir())}", DEADLINE_S)


def actor_of(d: DDict, node: int) -> Any:
    """Of one manager, where each has a node of its own."""
    return ray.get_actor(actor_name(d._configuration.dictionary, node), namespace=NAMESPACE)


def is_named(d: DDict, node: int) -> bool:
    """Whether Ray still finds the actor by its name."""
    try:
        actor_of(d, node)
    except ValueError:
        return False
    return True


def group_states() -> set[str]:
    """Of all placement groups that the cluster has had."""
    return {str(group["state"]) for group in ray.util.placement_group_table().values()}


def pids_of(d: DDict, nodes: int) -> list[int]:
    """Of the actors' processes."""
    asked = [actor_of(d, node).__ray_call__.remote(lambda _: os.getpid()) for node in range(nodes)]
    return list(ray.get(asked, timeout=DEADLINE_S))


def await_ended(pids: list[int]) -> None:
    """Wait until there are no such processes, or only what nobody has waited for."""

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    wait_until(lambda: not any(map(runs, pids)), f"all actors' processes have ended: {pids}", DEADLINE_S)


def place_of(d: DDict, manager: int) -> dict[str, Any]:
    """Asked again while its actor is starting."""
    found = dict[str, Any]()

    def is_told() -> bool:
        with contextlib.suppress(ray.exceptions.ActorUnavailableError):
            found.update(ray.get(actor_of(d, manager).place.remote(), timeout=DEADLINE_S))
        return bool(found)

    wait_until(is_told, f"manager {manager} says where it is", DEADLINE_S)
    return found


def ray_node_of(d: DDict, manager: int) -> str:
    return str(place_of(d, manager)["node"])


def manager_elsewhere(cluster: RayCluster, d: DDict) -> int:
    """One that is not on the head of the cluster. Where managers are, Ray decides."""
    return next(manager for manager in range(NODES) if ray_node_of(d, manager) != cluster.head)


def lose(cluster: RayCluster, d: DDict, manager: int) -> None:
    """A machine goes with its memory, and with all processes: managers and what starts them again are none of Ray's."""
    place = place_of(d, manager)
    managers = [psutil.Process(pid) for pid in place["pids"].values()]
    doomed = [*filter(None, (each.parent() for each in managers)), *managers]
    cluster.lose(place["node"])
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    await_ended([each.pid for each in doomed])
    shutil.rmtree(place["folder"], ignore_errors=True)


def test_values_of_all_nodes(cluster: RayCluster) -> None:
    keys = [f"{rank}-{number}" for rank in range(NODES) for number in range(6)]
    with DDict(1, NODES, TOTAL, timeout=TIMEOUT_S) as d:
        assert d._configuration.coordinator is not None
        ray.get([run_on(node, ddict_ray.put_from, d, rank) for rank, node in enumerate(cluster.nodes)])
        assert sorted(d) == keys
        looks = ray.get([run_on(node, ddict_ray.look, d, keys) for node in cluster.nodes])

        owners = {key: d.which_manager(key) for key in keys}
        assert set(owners.values()) == set(range(NODES))
        assert sorted(manager for local, _, _ in looks for manager in local) == list(range(NODES))
        for local, mapped, sums in looks:
            assert len(local) == 1
            assert mapped == [key for key in keys if owners[key] in local]
            assert sums == {key: float(value_of(int(key[0]), int(key[2])).double().sum()) for key in keys}
        d.update(small=1, text="far and near")
        assert (d["small"], d["text"], len(d)) == (1, "far and near", len(keys) + 2)


def test_a_node_is_lost_while_writers_run(cluster: RayCluster) -> None:
    with DDict(1, NODES, TOTAL, working_set_size=2, wait_for_writers=True, timeout=TIMEOUT_S, replication="ring") as d:
        lost = manager_elsewhere(cluster, d)
        running = {node: run_on(node, ddict_ray.write_epochs, d, r, NODES) for r, node in enumerate(cluster.nodes)}
        wait_until(lambda: d.sync_to_newest_checkpoint() >= 3, "three checkpoints", DEADLINE_S)
        lost_node = ray_node_of(d, lost)
        lost_rank = list(running).index(lost_node)
        left = [rank for rank in range(NODES) if rank != lost_rank]
        committed = d.sync_to_newest_checkpoint()

        lose(cluster, d, lost)

        # The handle of this process, which knew the manager where it was, finds it where it is.
        for rank in range(NODES):
            for epoch in range(committed + 1):
                _at_newest(d, lambda at, rank=rank, epoch=epoch: _expect(d, rank, epoch))
        assert ray_node_of(d, lost) != lost_node
        together = [
            n for n in range(NODES) if any(ray_node_of(d, n) == ray_node_of(d, o) for o in range(NODES) if o != n)
        ]
        shared = {each.manager: each.copies_on_same_node for each in d.stats()}
        assert {n: its for n, its in shared.items() if its} == {
            n: (o,) for n in together for o in together if o == (n + 1) % NODES
        }
        wait_until(lambda: _newest(d) >= committed + 3, "commits go on", DEADLINE_S)
        _retry(lambda: d.pput("stop", True))

        with pytest.raises(RayError):
            ray.get(running.pop(lost_node), timeout=DEADLINE_S)
        reports = dict(zip(left, ray.get(list(running.values()), timeout=DEADLINE_S), strict=True))
        for report in reports.values():
            assert set(report.errors) <= ERRORS_OF_WRITERS
            assert report.longest_s < TIMEOUT_S + 5

        newest = _newest(d)
        assert newest == max(report.written for report in reports.values()) - 1
        for rank in range(NODES):
            for epoch in range(reports[rank].written if rank in reports else committed + 1):
                _expect(d, rank, epoch)

        before = cluster.nodes
        cluster.fill()
        (new_node,) = set(cluster.nodes) - set(before)
        looked = ray.get(run_on(new_node, ddict_ray.look, d, [(0, 0)]), timeout=DEADLINE_S)
        assert looked == ([], [], {(0, 0): float(value_of(0, 0).double().sum())})


@pytest.mark.timeout(900)
def test_nothing_committed_is_lost_strike_after_strike(cluster: RayCluster, base: Path) -> None:
    """At real size: four writers write 256 MiB, while a manager, an actor, and a node with all on it are killed."""
    free = min(shutil.disk_usage(base).free, psutil.virtual_memory().available)
    if not tmpfs_folders.has_tmpfs() or free < (6 << 30):
        pytest.skip(f"takes 6 GiB of /dev/shm, of which {free >> 20} MiB are free")
    # A checkpoint stays while eight newer ones are committed: `_check` reads 256 MiB of it, on a busy machine, too.
    with DDict(1, NODES, 5 << 30, working_set_size=8, timeout=TIMEOUT_S, replication="ring") as d:
        # On the head, which is not lost.
        pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(cluster.head, soft=False)
        task = ray.remote(ddict_ray.write_epochs).options(num_cpus=0.2, max_retries=0, scheduling_strategy=pinned)
        writers = [task.remote(d, rank, WRITERS, True) for rank in range(WRITERS)]
        committed = _await_committed(d, PARTS)
        away = manager_elsewhere(cluster, d)
        for strike in (
            lambda: os.kill(place_of(d, 0)["pids"][0], signal.SIGKILL),
            lambda: ray.kill(actor_of(d, 1), no_restart=False),
            lambda: lose(cluster, d, away),
        ):
            strike()
            assert _check(d) >= committed, "what was committed is so no more"
            committed = _await_committed(d, committed + 2)
            wait_until(lambda: all(_place(actor_of(d, n)) for n in range(NODES)), "all are back", DEADLINE_S)
        _at_newest(d, lambda at: _retry(lambda: d.pput("stop", True)))
        reports = ray.get(writers, timeout=DEADLINE_S)
        for report in reports:
            assert set(report.errors) <= ERRORS_OF_WRITERS
            assert report.longest_s < TIMEOUT_S + 5
        _check(d, [report.written - 1 for report in reports])


def test_a_killed_manager_comes_back_to_its_folder(cluster: RayCluster, base: Path) -> None:
    # With a single node there are no copies elsewhere: what is in the folder is all that there is.
    with DDict(1, 1, TOTAL, working_set_size=2, timeout=TIMEOUT_S, replication="ring") as d:
        d.update({number: value_of(0, number) for number in range(4)})
        d.checkpoint()
        assert d.sync_to_newest_checkpoint() == 0
        place, folders = place_of(d, 0), set(base.iterdir())

        os.kill(place["pids"][0], signal.SIGKILL)
        # As other dictionaries of this machine do meanwhile.
        wait_until(lambda: sweep(base) == [] and place_of(d, 0) != place, "it is back", DEADLINE_S)

        assert set(base.iterdir()) == folders
        for number in range(4):
            assert torch.equal(_retry(lambda key=number: d[key]), value_of(0, number))


def test_destroy_leaves_no_actor_and_no_folder(cluster: RayCluster, base: Path) -> None:
    d = DDict(2, NODES, TOTAL, timeout=TIMEOUT_S)
    d["x"] = value_of(0, 0)
    other = DDict.attach(d.serialize())
    assert len(list(base.iterdir())) == NODES
    pids = pids_of(d, NODES)
    managers = {pid for node in range(NODES) for pid in place_of(d, node)["pids"].values()}
    assert len(managers) == 2 * NODES

    d.destroy()

    # Ray kills actors and removes placement groups after the calls that ask for it have returned.
    wait_until(lambda: not list(base.iterdir()), "no folder is left", DEADLINE_S)
    await_ended([*pids, *managers])
    for node in range(NODES):
        wait_until(lambda node=node: not is_named(d, node), "no actor is left", DEADLINE_S)
    wait_until(lambda: group_states() <= {"REMOVED"}, "no placement group is left", DEADLINE_S)
    with pytest.raises(DDictDestroyedError):
        other["x"]


def test_all_ends_with_the_creator(cluster: RayCluster, base: Path) -> None:
    creator = subprocess.Popen(
        [sys.executable, "-m", ddict_ray.__name__, cluster.address],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert creator.stdout is not None
        said, serialized = creator.stdout.readline().split()
        assert said == "serialized"
        d = DDict.attach(serialized, timeout=30)  # another job of the cluster
        assert float(d["x"].sum()) == ddict_ray.LARGE
        assert len(list(base.iterdir())) == 2
        pids = pids_of(d, 2)
    finally:
        creator.send_signal(signal.SIGKILL)
        creator.wait(DEADLINE_S)
    await_ended(pids)
    wait_until(lambda: not list(base.iterdir()), "the folders are gone", DEADLINE_S)
    with pytest.raises(DDictError):
        d["x"]


def test_more_nodes_than_there_are(cluster: RayCluster) -> None:
    with pytest.raises(InvalidArgumentError, match="n_nodes"):
        DDict(1, NODES + 1, TOTAL)


def test_managers_may_be_children_all_the_same(cluster: RayCluster) -> None:
    with DDict(1, 1, 64 << 20, runtime="embedded") as d:
        d["x"] = 1
        assert d._configuration.coordinator is None
        assert d["x"] == 1


def _place(actor: Any) -> dict[str, Any] | None:
    try:
        return dict(ray.get(actor.place.remote(), timeout=1))
    except RayError:
        return None  # it is being started again


def _newest(d: DDict) -> int:
    try:
        return int(_retry(d.sync_to_newest_checkpoint))
    except DDictWritesLostError:  # said once: those of the writer that was lost with its node
        return int(_retry(d.sync_to_newest_checkpoint))


def _at_newest(d: DDict, action: Callable[[int], Any]) -> int:
    """Do something at the newest committed checkpoint, and again if writers were faster. Return its id."""
    give_up = time.monotonic() + DEADLINE_S
    while True:
        at = _newest(d)
        try:
            action(at)
            return at
        except DDictCheckpointRetiredError:
            assert time.monotonic() < give_up


def _expect(d: DDict, rank: int, epoch: int) -> None:
    assert torch.equal(_retry(lambda: d[rank, epoch]), value_of(rank, epoch)), (rank, epoch)


def _check(d: DDict, ends: Sequence[int] | None = None) -> int:
    """All that is in the newest committed checkpoint is what was written there. Return its id.

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

    return _at_newest(d, look)


def _await_committed(d: DDict, least: int) -> int:
    wait_until(lambda: d.committed_checkpoint_id >= least, f"checkpoint {least} is committed", DEADLINE_S)
    return d.committed_checkpoint_id


def _retry(call: Any) -> Any:
    """As users are told: an error that says so may be answered by calling again."""
    for _ in range(5):
        try:
            return call()
        except DDictError as error:
            if not error.retryable:
                raise
    return call()
