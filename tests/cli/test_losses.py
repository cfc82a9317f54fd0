"""What a node says that the loss of a node would cost: no more than it knows, and what then happens."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.cli.status import Loss, losses
from ml_flashpoint.cli.view import VersionView
from ml_flashpoint.format.manifest import MAX_BLOCK_SIZE, Manifest, ObjectRecord
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.status import Status
from ml_flashpoint.stores.version_store import Version
from ml_flashpoint.tools.check import CheckedPart
from tests.support.forked import Team, call_team, preload
from tests.support.processes import child_environment
from tests.workers import recovery_faults as faults

preload("tests.workers.recovery_faults")

PART = 1000


def told(rank: int = 0, **changes: Any) -> Status:
    """A rank of four nodes with copies on the next one: step 40 verified, 41 committed, 1000 bytes copied in 2 s."""
    usual: dict[str, Any] = {"nodes": 4, "survives": 1, "copies_on": ("b",), "committed": 41, "verified": 40}
    usual |= {"part_bytes": PART, "copied_bytes": PART, "copied_in_s": 2.0, "updated_s": 1.0}
    return Status(rank=rank, node="a", **(usual | changes))


def version(step: int = 40, own: tuple[int, ...] = (0,), problems: tuple[tuple[str, str], ...] = ()) -> VersionView:
    """With the parts of own ranks, and a copy of rank 3 on node d that is twice as large."""
    parts = []
    for rank, node, size in [*((rank, "a", PART) for rank in own), (3, "d", 2 * PART)]:
        record = ObjectRecord(size, size, ("0" * 16,), MAX_BLOCK_SIZE)
        manifest = Manifest(SaveId(1, step), rank, 4, node, record)
        parts.append(CheckedPart(rank, manifest, problems))
    listed = Version(SaveId(1, step), f"step-{step}_ckpt", (*own, 3), 4, True)
    return VersionView(listed, "replicated", tuple(parts), copied=(3,))


def test_this_node_those_that_it_holds_and_the_others() -> None:
    own, peer, others = losses([told()], [version(41), version()])
    assert own == Loss("a", here=True, step=40, steps_lost=1, seconds=4.0, sources=("b",))
    assert own.text() == "if a (this node) died now: 1 step lost, back at step 40 in about 4 s, from b"
    assert peer == Loss("d", step=40, steps_lost=1, seconds=8.0, sources=("a",))
    assert peer.text() == "if d died now: 1 step lost, back at step 40 in about 8 s, from a"
    assert others == Loss(None, step=40, steps_lost=1)
    assert (
        others.text() == "if another node died now: 1 step lost, back at step 40, from the nodes that hold its copies"
    )
    assert len(losses([told(nodes=2)], [version()])) == 2


def test_the_slowest_rank_counts_and_what_was_never_measured_is_not_made_up() -> None:
    two = version(own=(0, 1))
    assert losses([told(), told(1, copied_in_s=100.0)], [two])[0].seconds == 200.0
    own, peer, _ = losses([told(), told(1, copied_bytes=0, copied_in_s=0.0)], [two])
    assert own.seconds is peer.seconds is None
    assert "back at step 40 in an unknown time, from b" in own.text()


def test_without_copies_nothing_is_promised() -> None:
    bare = {"survives": 0, "copies_on": ()}
    own, others = losses([told(**bare)], [version()])
    assert own.text() == ("if a (this node) died now: no version would be left in memory, and nothing is persisted")
    assert others.step is None
    assert "cannot be told" in others.text()
    own, _ = losses([told(**bare, persisted=30), told(1, **bare, persisted=20)], [version(own=(0, 1))])
    assert (own.step, own.persisted) == (None, 20)
    assert "its ranks have persisted step 20" in own.text()
    assert len(losses([told(**bare, nodes=1)], [version()])) == 1


@pytest.mark.parametrize(
    ("ranks", "versions"),
    [
        ([], [version()]),
        ([told(verified=None)], [version()]),
        ([told()], []),
        ([told()], [version(39), version(41)]),
        ([told(), told(1)], [version()]),  # rank 1 has no part of it any more
        ([told()], [version(problems=(("x", "missing"),))]),
        ([told()], [dataclasses.replace(version(), abandoned=True)]),
        ([told(), dataclasses.replace(told(1), node="z")], [version(own=(0, 1))]),
    ],
)
def test_what_cannot_be_known_is_not_told(ranks: list[Status], versions: list[VersionView]) -> None:
    assert losses(ranks, versions) == []


def status_of(base: Path) -> dict[str, Any]:
    """In another process: who asks who holds a lock is not told of its own."""
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", "status", str(base), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, env=child_environment(), timeout=60, check=True)
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_what_is_said_is_what_happens(tmpfs: Path, lost: int) -> None:
    with Team(faults.facade_saves, tmpfs, 2, 3, True) as ranks:
        for child in ranks.ranks:
            child.next_report("saved")
        said = [status_of(tmpfs / f"node-{node}" / "job")["losses"] for node in (0, 1)]
    for node, (own, peer) in enumerate(said):
        assert (own["node"], own["here"], own["from"]) == (f"node-{node}", True, [f"node-{1 - node}"])
        assert (peer["node"], peer["here"], peer["from"]) == (f"node-{1 - node}", False, [f"node-{node}"])
        assert own["step"] == peer["step"] == 3
        assert own["steps_lost"] == peer["steps_lost"] == 0
        assert 0 < own["seconds"] < 60
    shutil.rmtree(tmpfs / f"node-{lost}")
    assert call_team(faults.facade_goes_on, tmpfs, 2) == [said[lost][0]["step"]] * 2
