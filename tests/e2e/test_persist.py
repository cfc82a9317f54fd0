"""Jobs of several ranks that go on from what is persisted, on as many ranks or on others, through every door."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.format.names import object_name
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.tools.copy import persist_version
from tests.support.forked import Team, call_team, preload
from tests.support.persisting import lose_all_nodes, persisted_steps
from tests.workers import persisting_doors
from tests.workers.persisting_doors import Life

_MEGATRON = importlib.util.find_spec("megatron") is not None
_HAS_MEGATRON = pytest.mark.skipif(not _MEGATRON, reason="megatron-core is not installed")
pytestmark = pytest.mark.slow(90)
preload(persisting_doors.__name__)
if _MEGATRON:
    preload("tests.support.megatron")  # it takes seconds to import


@pytest.fixture(params=["facade", "dcp", "local", pytest.param("megatron", marks=_HAS_MEGATRON)])
def door(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def job(
    root: Path,
    door: str,
    world_size: int,
    until: int,
    *,
    leaves: bool = False,
    placement: Sequence[int] | None = None,
    **options: Any,
) -> Team:
    store = str(root / "store")
    return Team(persisting_doors.train, root, world_size, door, store, until, options, leaves, placement=placement)


def live(root: Path, door: str, world_size: int, until: int, **options: Any) -> list[Life]:
    with job(root, door, world_size, until, **options) as team:
        return team.results(120)


def began(lives: list[Life]) -> list[tuple[str, int]]:
    return [(each.source, each.began) for each in lives]


def undisturbed(root: Path, door: str, world_size: int, steps: int) -> list[str]:
    return call_team(persisting_doors.undisturbed, root / "undisturbed", world_size, door, steps)


def test_a_job_is_killed_and_loses_both_nodes_of_a_pair(tmpfs: Path, door: str) -> None:
    store, options = tmpfs / "store", {"persist_every": 2}
    with job(tmpfs, door, 2, 10**6, **options) as team:
        while True:
            _, step, persisted = team[0].next_report("step")
            if persisted is not None and persisted >= 4:
                break
        team[0].kill()
        team[1].kill()
    kept = persisted_steps(store)[0]
    lose_all_nodes(tmpfs)
    until = step + 3
    lives = live(tmpfs, door, 2, until, **options)
    assert began(lives) == [("persisted", kept)] * 2
    assert [each.now for each in lives] == undisturbed(tmpfs, door, 2, until)
    assert persisted_steps(store)[0] == until


@pytest.mark.parametrize(
    ("door", "leaves"),
    [
        ("dcp", False),
        ("local", True),
        pytest.param("megatron", False, marks=_HAS_MEGATRON),
        pytest.param("facade", True, marks=pytest.mark.soak),
        pytest.param("dcp", True, marks=pytest.mark.soak),
        pytest.param("local", False, marks=pytest.mark.soak),
        pytest.param("megatron", True, marks=[_HAS_MEGATRON, pytest.mark.soak]),
    ],
)
def test_the_last_version_is_persisted_at_the_end(tmpfs: Path, door: str, leaves: bool) -> None:
    first = live(tmpfs, door, 2, 4, leaves=leaves, persist_every=1000)
    assert began(first) == [("nothing", 0)] * 2
    assert persisted_steps(tmpfs / "store") == [4]
    again = live(tmpfs, door, 2, 5, leaves=leaves, persist_every=1000)
    assert began(again) == [("memory", 4)] * 2, "memory comes first where it is as new"
    lose_all_nodes(tmpfs)
    last = live(tmpfs, door, 2, 7, leaves=leaves, persist_every=1000)
    assert began(last) == [("persisted", 5)] * 2
    assert [each.then for each in last] == [each.now for each in again]
    assert [each.now for each in last] == undisturbed(tmpfs, door, 2, 7)


@pytest.mark.parametrize(
    "door",
    [
        "facade",
        "dcp",
        pytest.param("local", marks=pytest.mark.soak),
        pytest.param("megatron", marks=[_HAS_MEGATRON, pytest.mark.soak]),
    ],
)
def test_the_newest_version_is_persisted_on_sigterm(tmpfs: Path, door: str) -> None:
    """A rank that waits in a collective for one that has ended is ended with the grace."""
    with job(tmpfs, door, 2, 10**6, persist_every=1000, grace_s=10.0) as team:
        for child in team.ranks:
            child.next_report("step", 5)
        for child in team.ranks:
            os.kill(child.pid, signal.SIGTERM)
        assert [child.wait() for child in team.ranks] == [-signal.SIGTERM] * 2
        last = max([5, *(each[1] for each in team[0].reports if each[0] == "step")])
    kept = persisted_steps(tmpfs / "store")[0]
    assert max(5, last - 1) <= kept <= last + 1, "what was under way may be lost"
    lose_all_nodes(tmpfs)
    assert began(live(tmpfs, door, 2, kept + 1)) == [("persisted", kept)] * 2


@pytest.mark.parametrize(
    ("door", "world_size"), [("facade", 2), ("dcp", 3), pytest.param("megatron", 2, marks=_HAS_MEGATRON)]
)
def test_a_job_goes_on_as_another_number_of_ranks(tmpfs: Path, door: str, world_size: int) -> None:
    before = live(tmpfs, door, 4, 3)
    lose_all_nodes(tmpfs)
    after = live(tmpfs, door, world_size, 4)
    assert began(after) == [("persisted", 3)] * world_size
    assert [each.then for each in after] == [before[0].now] * world_size
    lose_all_nodes(tmpfs)
    assert began(live(tmpfs, door, 4, 4)) == [("persisted", 4)] * 4


def test_local_checkpoints_of_another_number_of_ranks_are_refused(tmpfs: Path) -> None:
    live(tmpfs, "local", 2, 3)
    lose_all_nodes(tmpfs)
    store = str(tmpfs / "store")
    for said in call_team(persisting_doors.refuse_another_number_of_ranks, tmpfs, 3, store):
        assert "was saved by 2 ranks, and there are 3 now" in said


def test_what_one_node_of_a_dead_job_holds_is_persisted_by_hand(tmpfs: Path) -> None:
    before = live(tmpfs, "facade", 4, 6, placement=(0, 0, 1, 1), persists=False)
    persist_version(tmpfs / "node-1" / "job", tmpfs / "store")
    lose_all_nodes(tmpfs)
    after = live(tmpfs, "facade", 3, 8)
    assert began(after) == [("persisted", 6)] * 3
    assert [each.then for each in after] == [before[0].now] * 3


@pytest.mark.damages_on_purpose
def test_a_part_that_is_damaged_makes_all_ranks_go_back(tmpfs: Path) -> None:
    before = live(tmpfs, "facade", 2, 3)
    live(tmpfs, "facade", 2, 6)
    lose_all_nodes(tmpfs)
    store = tmpfs / "store"
    newest = next(version for version in open_store(store).versions() if version.counts)
    assert newest.step == 6
    path = store / newest.folder / object_name(1, newest.save_id)
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)
    after = live(tmpfs, "facade", 2, 3)
    assert began(after) == [("persisted", 3)] * 2
    assert [each.then for each in after] == [each.now for each in before]
