"""`flashpoint top`: all nodes of a job, seen from one of them, by a token that is good for looking only."""

from __future__ import annotations

import dataclasses
import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli.job_view import JobWatch
from ml_flashpoint.cli.losses import Loss, losses_of_job
from ml_flashpoint.cli.top import _loss_lines
from ml_flashpoint.core.watching import WATCHING, NodeConnection, Watch, read_watch
from ml_flashpoint.format.errors import AuthenticationError, FlashpointError
from ml_flashpoint.format.status import RankStatus
from ml_flashpoint.net.client import Connection
from ml_flashpoint.replication.transfer_client import PeerConnection
from tests.cli.test_losses import told
from tests.facade.test_overlap import Job
from tests.support.forked import Team, preload
from tests.support.processes import child_environment
from tests.workers import recovery_faults as faults

preload("tests.workers.recovery_faults")


def _bases(tmpfs: Path) -> list[Path]:
    return [tmpfs / f"node-{node}" / "job" for node in (0, 1)]


def _top(*args: object) -> subprocess.CompletedProcess[str]:
    return _run("top", *args)


def _run(*args: object) -> subprocess.CompletedProcess[str]:
    """In another process: who asks who holds a lock is not told of its own, and lets go of it."""
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", *map(str, args)]
    return subprocess.run(argv, capture_output=True, text=True, env=child_environment(), timeout=60)


@pytest.mark.slow
def test_all_nodes_are_seen_from_each_and_one_that_dies_is_missed(tmpfs: Path) -> None:
    bases = _bases(tmpfs)
    with Team(faults.facade_saves, tmpfs, 2, 3, True) as team:
        for child in team.ranks:
            child.next_report("saved")
        for here, base in enumerate(bases):
            with JobWatch(str(base)) as job:
                view = job.look()
            assert [(node.node, node.here, node.state) for node in view.nodes] == [
                (f"node-{here}", True, "ok"),
                (f"node-{1 - here}", False, "ok"),
            ]
            assert [[rank.rank for rank in node.ranks] for node in view.nodes] == [[here], [1 - here]]
            assert all(node.told[0].verified == 3 and node.arena_bytes > 0 for node in view.nodes)
            assert all(node.available_bytes > 0 for node in view.nodes)
            assert [loss.node for loss in view.losses] == [f"node-{here}", f"node-{1 - here}"]
            assert all(loss.step == 3 and loss.is_sure for loss in view.losses)
            assert view.losses[1].sources == (f"node-{here}",)
        done = _top(bases[0], "--json", "--count", 2, "--every", 0.1)
        looks = [json.loads(line) for line in done.stdout.splitlines()]
        assert (done.returncode, len(looks)) == (0, 2)
        assert [node["node"] for node in looks[1]["nodes"]] == ["node-0", "node-1"]
        with JobWatch(str(bases[0])) as job:
            assert not job.look().is_degraded
            team[1].kill()
            view = job.look()
            assert view.nodes[1].state == "no answer"
            assert view.is_degraded
            assert view.losses[0].silent == ("node-1",)
            assert "its copies are on node-1, which does not answer" in view.losses[0].text()
            assert view.losses[1].text().startswith("if node-1 died now: 0 steps lost, back at step 3"), "as ever"
        done = _top(bases[0], "--count", 1)
        assert done.returncode == 1
        assert "node=node-1 here=no state=no-answer error=" in done.stdout


@pytest.mark.slow
def test_the_token_is_good_for_looking_only(tmpfs: Path) -> None:
    bases = _bases(tmpfs)
    with Team(faults.facade_saves, tmpfs, 2, 1, True) as team:
        for child in team.ranks:
            child.next_report("saved")
        file = bases[0] / ".flashpoint" / "watch.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        watch = read_watch(bases[0])
        assert watch is not None
        assert watch == read_watch(bases[1])
        assert watch.token.hex() not in repr(watch)
        for address in watch.nodes:
            assert NodeConnection(address, watch.token, timeout_s=10).ask().node == address.node
            with pytest.raises(AuthenticationError):
                NodeConnection(address, bytes(32), timeout_s=10).ask()
            with pytest.raises(FlashpointError):
                PeerConnection((address.host, address.port), watch.token, deadline_s=10).ping()
            where = ("tcp", address.host, address.port)
            with Connection(where, watch.token, WATCHING, connect_timeout_s=10) as connection:
                for op in ("fetch", "push", "manifest", "ping"):
                    with pytest.raises(FlashpointError, match="no request"):
                        connection.request(op, {}, timeout_s=10)
                assert connection.request("status", {}, timeout_s=10).fields["node"] == address.node


@pytest.mark.parametrize(
    "content",
    [
        "",
        "torn",
        "[]",
        "{}",
        '{"schema": 2, "token": "00", "nodes": []}',
        '{"schema": 1, "token": "xy", "nodes": []}',
        '{"schema": 1, "token": 1, "nodes": []}',
        '{"schema": 1, "token": "00", "nodes": 5}',
        '{"schema": 1, "token": "00", "nodes": [1]}',
        '{"schema": 1, "token": "00", "nodes": [{"node": "a", "host": "h", "port": "1"}]}',
    ],
)
def test_what_is_no_file_of_that_kind(tmp_path: Path, content: str) -> None:
    (tmp_path / ".flashpoint").mkdir()
    assert read_watch(tmp_path) is None
    (tmp_path / ".flashpoint" / "watch.json").write_text(content)
    assert read_watch(tmp_path) is None
    (tmp_path / ".flashpoint" / "watch.json").write_text('{"schema": 1, "token": "00", "nodes": []}')
    assert read_watch(tmp_path) == Watch((), b"\0")


def test_one_node_needs_no_file_and_removes_that_of_an_earlier_run(tmpfs: Path) -> None:
    private = tmpfs / "job" / ".flashpoint"
    private.mkdir(parents=True, mode=0o700)
    (private / "watch.json").write_text("{}")
    with Flashpoint(tmpfs / "job") as fp:
        fp.track(**Job().tracked).resume()
        assert not (private / "watch.json").exists()


def _ranks(node: str, copies_on: tuple[str, ...], **changes: Any) -> list[RankStatus]:
    return [dataclasses.replace(told(copies_on=copies_on, **changes), node=node)]


def test_what_other_nodes_say_is_put_together() -> None:
    own = _ranks("a", ("b",))
    here = [Loss("a", here=True, step=40, steps_lost=1, seconds=4.0, sources=("b",)), Loss(None, step=40, steps_lost=1)]
    others = {"b": _ranks("b", ("a",)), "c": _ranks("c", ("d",), committed=43)}
    found = losses_of_job(here, own, others, ["d"])
    assert [(loss.node, loss.step, loss.steps_lost, loss.silent) for loss in found] == [
        ("a", 40, 1, ()),
        ("b", 40, 3, ()),
        ("c", 40, 3, ("d",)),
        (None, 40, 1, ()),
    ], "d does not answer, and this node holds nothing of it"
    others["d"] = _ranks("d", ("c",))
    assert [loss.node for loss in losses_of_job(here, own, others, [])] == ["a", "b", "c", "d"]
    assert losses_of_job(here, [], {}, ["b"]) == here
    bare = losses_of_job([], [], {"b": _ranks("b", (), survives=0, persisted=20)}, [])
    assert [(loss.step, loss.persisted) for loss in bare] == [(None, 20)]


def test_of_many_nodes_that_are_alike_one_line() -> None:
    losses = [
        Loss(f"n{number}", here=not number, step=40, seconds=float(number), sources=("x",)) for number in range(64)
    ]
    losses[7] = Loss("n7", step=None)
    lines = _loss_lines(losses)
    assert [sure for _, sure in lines] == [True, False, True]
    assert lines[0][0].startswith("if n0 (this node)")
    assert lines[1][0].startswith("if n7 died now: no version")
    assert lines[2][0].startswith("of the other 62 nodes, the slowest: if n63 died now")
    assert len(_loss_lines(losses[:9])) == 9


@pytest.mark.slow
def test_a_job_is_found_by_its_name(tmpfs: Path) -> None:
    name = f"{tmpfs.name}-job"
    with Flashpoint(tmpfs / name) as fp:
        fp.track(**Job().tracked).resume()
        done = _top(name, "--count", 1, "--json")
        assert json.loads(done.stdout)["base"] == str(tmpfs / name)
        assert _run("status", name, "--json").returncode == 0
        with Flashpoint(tmpfs / "other" / name):
            done = _top(name, "--count", 1)
            assert (done.returncode, "there are several of this name" in done.stderr) == (2, True)
    done = _top("no-such-job", "--count", 1)
    assert (done.returncode, "flashpoint ls --all lists them" in done.stderr) == (2, True)
