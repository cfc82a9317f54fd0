"""The harness itself, with real processes: what other tests rely on when they kill things."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.support import own_network
from tests.support import tmpfs as tmpfs_folders
from tests.support.cluster import Cluster, ClusterError, contiguous, run_ranks

pytestmark = pytest.mark.slow


def test_contiguous_placement_fills_nodes_evenly() -> None:
    assert contiguous(4, 2) == (0, 0, 1, 1)
    assert contiguous(5, 2) == (0, 0, 0, 1, 1)
    assert contiguous(3, 3) == (0, 1, 2)


def test_two_nodes_talk_over_gloo(tmpfs: Path) -> None:
    reports = run_ranks(tmpfs, "harness_probe", 2, nodes=2, args=["end"])
    assert [report["total"] for (report,) in reports] == [3, 3]
    assert [report["node"] for (report,) in reports] == ["node-0", "node-1"]
    assert [report["threads"] for (report,) in reports] == [1, 1]
    for node in (0, 1):
        assert (tmpfs / f"node-{node}" / "job" / f"rank-{node}").read_text() == "here"


def test_failure_of_a_rank_is_raised_with_its_output(tmpfs: Path) -> None:
    with pytest.raises(ClusterError, match="the probe fails as it was told to") as caught:
        run_ranks(tmpfs, "harness_probe", 2, args=["fail"])
    # -6 if rank 0 noticed the loss of its peer, and failed, before the peer was gone.
    assert re.search(r"rank 1 failed with (1|-6)\b", str(caught.value))
    assert "--- rank 0 ---" in str(caught.value)


def test_a_hang_is_raised_with_the_stacks_of_the_ranks(tmpfs: Path) -> None:
    with Cluster(tmpfs, "harness_probe", args=["hang"]) as cluster:
        cluster.wait_for_output('"child"', rank=0)
        child = cluster.reports(0)[-1]["child"]
        with pytest.raises(ClusterError, match=r"no end of all processes within 0\.1 s") as caught:
            cluster.wait(timeout_s=0.1)
    assert 'harness_probe.py", line' in str(caught.value)
    assert not _runs(child)


@pytest.mark.netns
@pytest.mark.parametrize("loopback", [True, False])
def test_a_network_of_its_own_has_loopback_or_is_left_again(monkeypatch: pytest.MonkeyPatch, loopback: bool) -> None:
    def no_loopback() -> None:
        raise OSError("no such device")

    if not loopback:
        monkeypatch.setattr(own_network, "_start_loopback", no_loopback)
    seen: list[object] = []

    def enter() -> None:
        before = os.readlink("/proc/thread-self/ns/net")
        seen.append(own_network.enter())
        seen.append(os.readlink("/proc/thread-self/ns/net") != before)
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 10):
            seen.append("connected")

    # A network is a thread's, so this one's is not touched.
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(60)
    assert seen == [loopback, loopback, "connected"]


def test_killed_node_is_gone_with_everything_on_it(tmpfs: Path) -> None:
    with Cluster(tmpfs, "harness_probe", placement=(0, 1, 0, 1), args=["hang"]) as cluster:
        pids = {}
        for rank in range(4):
            cluster.wait_for_output('"child"', rank=rank)
            first, second = cluster.reports(rank)
            pids[rank] = {first["pid"], second["child"]}
        cluster.kill_node(1)
        assert not any(_runs(pid) for rank in (1, 3) for pid in pids[rank])
        # The survivors are about to fail, since their peers are gone; what they have started does not know of that.
        assert all(_runs(cluster.reports(rank)[1]["child"]) for rank in (0, 2))
        assert not cluster.node_folder(1).exists()
        assert (cluster.base_of(0) / "rank-2").exists()
        assert cluster.kill_rank(2) in pids[2]
    assert not any(_runs(pid) for rank in range(4) for pid in pids[rank])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_replaces_a_killed_rank_and_a_killed_node(tmpfs: Path) -> None:
    with Cluster(
        tmpfs, "harness_probe", nodes=2, ranks_per_node=2, args=["hang"], torchrun=True, max_restarts=3
    ) as cluster:
        for rank in range(4):
            cluster.wait_for_report(rank=rank, total=10, timeout_s=120)
        cluster.kill_rank(3)
        for rank in range(4):
            cluster.wait_for_report(rank=rank, total=10, nth=2, timeout_s=120)
        cluster.kill_node(0)
        cluster.start_node(0)
        for rank in range(4):
            cluster.wait_for_report(rank=rank, total=10, nth=3, timeout_s=120)
        assert cluster.base_of(0).exists()


def test_folders_of_dead_runs_are_swept_and_of_live_ones_kept(tmpfs: Path) -> None:
    if tmpfs.parent != tmpfs_folders.SHM:
        pytest.skip("no tmpfs here")
    script = "from tests.support.tmpfs import make_folder; print(make_folder())"
    left = Path(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout[:-1])
    assert left.exists()
    tmpfs_folders.sweep()  # unless another run's is faster
    assert not left.exists()
    assert tmpfs.exists()


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
