"""The same groups and barriers as in test_native, on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError
from ml_flashpoint.ddict.native import (
    CollectiveGroup,
    Policy,
    ProcessFailedError,
    ProcessGroup,
    ProcessTemplate,
    System,
)
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.ddict.native_support import barrier_of, group_of, notes, puids_of
from tests.support.forked import wait_until
from tests.workers import ddict_members

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

DEADLINE_S = 100.0


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_the_nodes_are_those_of_the_cluster() -> None:
    system = System()
    assert system.nnodes == 2
    assert [node.num_cpus for node in system.nodes] == [2, 2]
    assert system.primary_node.num_gpus == 0


def test_members_pass_a_barrier_together(tmp_path: Path) -> None:
    with barrier_of(4) as barrier, group_of(4, ddict_members.pass_often, barrier, 5, str(tmp_path)) as group:
        puids = puids_of(group)
        group.join(timeout=DEADLINE_S)
        assert group.inactive_puids == [(puid, 0) for puid in puids]
        assert not barrier.broken
    for together in zip(*notes(tmp_path, puids), strict=True):
        assert sorted(together) == list(range(4))


def test_a_member_that_fails_is_named_with_its_error_and_ends_the_others(tmp_path: Path) -> None:
    with barrier_of(3) as barrier, group_of(3, ddict_members.fail_if, "me", barrier, str(tmp_path)) as group:
        puids = puids_of(group)
        with pytest.raises(ProcessFailedError, match="ValueError: no luck for me") as caught:
            group.join(timeout=DEADLINE_S)
        assert caught.value.puid in puids
        assert caught.value.exit_code == 1


@pytest.mark.parametrize("first", [True, False], ids=["before it ever waited", "after it waited once"])
def test_the_death_of_a_member_breaks_the_barrier_for_the_others(tmp_path: Path, first: bool) -> None:
    work = (ddict_members.wait_for_lost,)
    with (
        barrier_of(3) as barrier,
        group_of(3, *work, barrier, str(tmp_path), first, ignore_error_on_exit=True) as group,
    ):
        puids = puids_of(group)
        wait_until(lambda: (tmp_path / "lost").exists() and barrier.n_waiting == 2, "two waiting for the third")
        wait_until(lambda: any((tmp_path / str(puid)).exists() for puid in puids), "the name of the third")
        lost = next(puid for puid in puids if (tmp_path / str(puid)).exists())
        os.kill(group.pids[lost], signal.SIGKILL)
        group.join(timeout=DEADLINE_S)
        assert dict(group.inactive_puids)[lost] != 0
        told = notes(tmp_path, [puid for puid in puids if puid != lost])
        assert all("the barrier is broken" in text for text in told)


def test_close_ends_members_at_work(tmp_path: Path) -> None:
    with group_of(2, ddict_members.hang, str(tmp_path)) as group:
        puids, pids = puids_of(group), list(group.pids.values())
        wait_until(lambda: all((tmp_path / str(puid)).exists() for puid in puids), "the start of both")
        assert sorted(notes(tmp_path, puids)) == sorted(pids)
        with pytest.raises(DDictTimeoutError):
            group.join(timeout=0.05)
        group.close()
        wait_until(lambda: not [pid for pid in pids if psutil.pid_exists(pid)], "the end of both")
        assert [puid for puid, _ in group.inactive_puids] == puids


def test_ranks_on_both_nodes_reduce_together(tmp_path: Path) -> None:
    with CollectiveGroup(ddict_members.reduce_ranks, (str(tmp_path),), policies=[Policy()] * 4) as group:
        group.init()
        puids = puids_of(group)
        group.start()
        group.join(timeout=DEADLINE_S)
    seen = notes(tmp_path, puids)
    assert [one["total"] for one in seen] == [10] * 4
    # Rank, local rank, ranks on the node, node, all ranks.
    assert [one["place"] for one in seen] == [[0, 0, 2, 0, 4], [1, 1, 2, 0, 4], [2, 0, 2, 1, 4], [3, 1, 2, 1, 4]]


@pytest.mark.parametrize("node", [-1, 2])
def test_a_node_that_is_not_there_is_named(node: int, tmp_path: Path) -> None:
    group = ProcessGroup()
    group.add_process(1, ProcessTemplate(ddict_members.hang, (str(tmp_path),), policy=Policy(node=node)))
    ranks = CollectiveGroup(ddict_members.reduce_ranks, (str(tmp_path),), policies=[Policy(node=node)])
    for start in (group.start, ranks.init):
        with pytest.raises(InvalidArgumentError, match="no such node: the cluster has 2") as caught:
            start()
        assert (caught.value.argument, caught.value.value) == ("node", str(node))


def test_a_client_of_a_cluster_is_told_that_nobody_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(DDictError, match="in a task or an actor"):
        barrier_of(2).__enter__()


def test_a_killed_task_that_waits_breaks_the_barrier() -> None:
    """It is no member of a group: only the end of its connection tells."""
    with barrier_of(3) as barrier:
        killed = ray.remote(ddict_members.Waiter).options(num_cpus=0).remote()
        left = ray.remote(ddict_members.Waiter).options(num_cpus=0).remote()
        gone, told = killed.wait.remote(barrier), left.wait.remote(barrier)
        wait_until(lambda: barrier.n_waiting == 2, "both waiting", DEADLINE_S)
        os.kill(ray.get(killed.pid.remote()), signal.SIGKILL)
        assert "died, or gave up" in ray.get(told, timeout=DEADLINE_S)
        with pytest.raises(ray.exceptions.RayError):
            ray.get(gone, timeout=DEADLINE_S)
        assert barrier.broken
