"""Copies between real processes: what a holder has is what was pushed, and what is lost comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.container import BaseContainer
from tests.memory.support import fill_up, value_of
from tests.support.forked import Child, Team, preload
from tests.workers import copying
from tests.workers.copying import RUN

preload("tests.workers.copying")

_ENV = {"FLASHPOINT_TEST_BLOCK_BYTES": "4096", "FLASHPOINT_HOST": "127.0.0.1"}


class _Job:
    """Ranks on a node each, whose parts are copied to the next ranks."""

    def __init__(self, root: Path, ranks: int, *args: Any) -> None:
        self.team = Team(copying.obey, root, ranks, *args, env=_ENV)
        for child in self.team.ranks:
            child.next_report("address")

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.team.__exit__(*exc_info)

    def __getitem__(self, rank: int) -> Child:
        return self.team[rank]

    def __call__(self, rank: int, name: str, /, *args: Any, **options: Any) -> Any:
        """What a rank answers to what it is told to do."""
        self[rank].say(name, args, options)
        return self[rank].next_report(name)[1]

    def copied(self, step: int, rank: int = 0) -> None:
        """Save and push a step, which its verdict lists from then on."""
        assert self(rank, "save", step) is None
        assert self(rank, "push", step) is None
        self(rank, "hear", step, [step])

    def steps_at(self, rank: int, of: int = 0) -> list[int]:
        return [step for step, owner, _ in self(rank, "parts") if owner == of]


@pytest.fixture
def trio(tmpfs: Path) -> Iterator[_Job]:
    with _Job(tmpfs, 3, 2) as job:
        yield job


@pytest.fixture
def pair(tmpfs: Path) -> Iterator[_Job]:
    with _Job(tmpfs, 2, 1) as job:
        yield job


def _value(step: int, rank: int = 0) -> float:
    return value_of(SaveId(RUN, step), rank)


# ---- pushing ---------------------------------------------------------------------------------------------------


def test_all_holders_have_the_part_and_its_manifest_byte_for_byte(trio: _Job) -> None:
    trio.copied(1)
    for holder in (1, 2):
        assert trio(holder, "value", 1, 0) == _value(1)
        assert trio(holder, "same", 1, 0) == trio(0, "same", 1, 0)
    before = trio(1, "parts")
    assert trio(0, "push", 1) is None  # they have it already
    assert trio(1, "parts") == before


def test_a_verdict_that_rides_along_frees_the_slot_that_the_copy_takes(pair: _Job) -> None:
    for step in range(1, 6):  # more than there are slots
        pair.copied(step)
        assert pair(1, "number") == step - 1
    assert pair.steps_at(1) == [4, 5]


@pytest.mark.stores_any_bytes
def test_a_copy_waits_for_the_verdict_that_frees_a_slot(pair: _Job) -> None:
    pair.copied(1)
    pair.copied(2)
    for rank in (0, 1):
        pair(rank, "hear", 3, [1], 2)  # retains both
    pair(0, "lose", 1, 0)
    pair[0].say("push_crafted", (1, RUN), {"step": 3})
    pair(1, "hear", 4, [2])
    assert pair[0].next_report("push_crafted")[1] is None
    assert pair.steps_at(1) == [2, 3]


def test_without_a_free_slot_a_copy_is_refused_in_time(tmpfs: Path) -> None:
    with _Job(tmpfs, 2, 1, None, 0.2) as job:
        job.copied(1)
        job.copied(2)
        job(0, "hear", 3, [1], 2)
        refused = job(0, "push_crafted", 1, RUN, step=3)
        assert "ReplicationError" in refused  # later there may be one, and the save is not lost
        assert job.steps_at(1) == [1, 2]


def test_a_copy_that_a_reader_keeps_out_is_refused_with_a_word_about_readers(tmpfs: Path) -> None:
    with _Job(tmpfs, 2, 1, None, 0.2) as job:
        job.copied(1)
        job.copied(2)
        assert job(0, "save", 3) is None
        with BaseContainer(tmpfs / "node-1" / "job").open_part(SaveId(RUN, 1), 0):
            assert "a stopped reader" in job(0, "push", 3)
        assert job(0, "push", 3) is None


@pytest.mark.damages_on_purpose
def test_a_damaged_block_is_refused_and_a_damaged_copy_is_no_copy(pair: _Job) -> None:
    pair.copied(1)
    pair(0, "save", 2)
    pair(0, "damage", 2, 0)
    assert "DigestMismatchError" in pair(0, "push", 2)
    assert pair.steps_at(1) == [1]
    pair(0, "save", 3)
    assert pair(0, "push", 3) is None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"run": RUN - 1}, "is of run 6"),
        ({"run": RUN + 1}, "is of run 8"),
        ({"rank": 1}, "holds no copies of rank 1 of 2"),
        ({"world_size": 3}, "holds no copies of rank 0 of 3"),
        ({"file_size": 5000}, "no slot has 5000 bytes"),
        ({"file_size": 1 << 60}, "larger than the filesystem"),
    ],
)
def test_what_cannot_be_right_is_refused_before_room_is_made(tmpfs: Path, changes: dict[str, Any], error: str) -> None:
    with _Job(tmpfs, 2, 1, None, 0.2) as job:
        job.copied(1)
        job.copied(2)
        job(0, "hear", 9, [2])
        before = job(1, "parts"), job(1, "number")
        assert error in job(0, "push_crafted", 1, **{"run": RUN, **changes})
        heard = 9 if changes.keys() - {"run"} else before[1]
        assert (job(1, "parts"), job(1, "number")) == (before[0], heard), "a verdict of another run is not heard"


def test_what_is_left_of_the_push_of_an_earlier_round_takes_no_slot_of_a_newer_one(pair: _Job) -> None:
    pair.copied(1)
    pair(0, "hear", 5, [1])
    assert pair(0, "save", 2) is None
    assert pair(0, "push", 2) is None
    before = pair(1, "parts")
    error = pair(0, "push_crafted", 1, run=RUN, number=4, step=9)
    assert "is of round 4, after one of round 5" in error
    assert pair(1, "parts") == before


@pytest.mark.stores_any_bytes
def test_a_part_that_differs_from_the_copy_of_the_same_save_replaces_it(pair: _Job) -> None:
    pair.copied(1)
    before = pair(1, "same", 1, 0)
    assert pair(0, "push_crafted", 1, RUN, step=1) is None
    assert pair(1, "same", 1, 0) != before
    assert pair(0, "save", 2) is None
    assert pair(0, "push", 2) is None, "the slot of the first copy is free"


@pytest.mark.stores_any_bytes
@pytest.mark.parametrize("in_time", [True, False])
def test_copies_of_one_rank_are_received_one_at_a_time(tmpfs: Path, in_time: bool) -> None:
    with _Job(tmpfs, 2, 1, None, 30.0 if in_time else 0.2) as job:
        said = job(1, "receive_twice", 0, 0.5 if in_time else None)
    if in_time:
        assert said == ["begins 1", "ends 1", "begins 2", "ends 2"]
    else:
        assert (said[0], said[2:]) == ("begins 1", ["ends 1"])
        assert "another copy of this rank is still being received" in said[1]


def test_a_run_that_has_ended_takes_no_copies_in(pair: _Job) -> None:
    pair.copied(1)
    assert pair(1, "end_run") is None
    assert pair(0, "save", 2) is None
    assert "which has ended on this rank" in pair(0, "push", 2)
    assert pair.steps_at(1) == [1]


def test_a_full_tmpfs_refuses_a_copy_and_takes_it_once_there_is_room(small_tmpfs: Path) -> None:
    with _Job(small_tmpfs, 2, 1, None, 0.2) as job:
        job(0, "save", 1)
        others = fill_up(small_tmpfs)
        assert "CapacityError" in job(0, "push", 1)
        others.unlink()
        assert job(0, "push", 1) is None
        assert job(1, "value", 1, 0) == _value(1)


def test_a_holder_that_is_killed_midway_has_a_copy_once_the_job_is_back(tmpfs: Path) -> None:
    with _Job(tmpfs, 2, 1) as job:
        job.copied(1)
        job(0, "save", 2)
        job[1].say("die_amid", ("receive_payload",), {})
        job[1].next_report("die_amid")
        assert "Error" in job(0, "push", 2)
    with _Job(tmpfs, 2, 1) as job:
        assert job.steps_at(1) == [1]
        assert job(0, "push", 2) is None
        assert job(1, "value", 2, 0) == _value(2)


# ---- fetching --------------------------------------------------------------------------------------------------


def test_a_lost_part_comes_back_from_a_holder(trio: _Job) -> None:
    trio.copied(1)
    manifest = trio(0, "same", 1, 0)
    trio(0, "lose", 1, 0)
    assert trio(0, "fetch", 1, 0, ["node-0", "node-9", "node-2"], 30.0) == []
    assert trio(0, "value", 1, 0) == _value(1)
    assert trio(0, "same", 1, 0) == manifest


def test_a_fetch_goes_on_at_the_second_holder_where_the_first_one_dies(trio: _Job) -> None:
    trio.copied(1)
    trio(0, "lose", 1, 0)
    trio(1, "die_amid", "send_payload")
    assert trio(0, "fetch", 1, 0, ["node-1", "node-2"], 30.0) == [("node-1", "ConnectionLostError")]
    assert trio(0, "value", 1, 0) == _value(1)


def test_damage_is_final_and_what_cannot_be_reached_is_not(trio: _Job) -> None:
    trio.copied(1)
    trio(0, "lose", 1, 0)
    trio(1, "damage", 1, 0)
    assert trio(0, "fetch", 1, 0, ["node-1", "node-2"], 30.0) == [("node-1", "DigestMismatchError")]
    trio(0, "damage", 1, 0)
    assert "DigestMismatchError" in trio(0, "fetch", 1, 0, ["node-1"], 30.0)  # at once
    assert trio(0, "fetch", 1, 0, ["node-2"], 30.0) == []  # in place of the damaged one
    assert trio(0, "value", 1, 0) == _value(1)
    assert "ObjectNotFoundError" in trio(0, "fetch", 2, 0, ["node-1", "node-2"], 30.0)
    trio[2].kill()
    # The one that cannot be reached may have it: that is the last word.
    assert "ConnectionLostError" in trio(0, "fetch", 2, 0, ["node-1", "node-2"], 0.2)
    trio(1, "lose", 1, 0)


def test_blocks_are_read_checked_from_whoever_has_them(trio: _Job) -> None:
    trio.copied(1)
    trio(0, "save", 2)
    nodes = ["node-0", "node-1"]
    whole = trio(2, "read", 1, 0, 0, 4 * 4096, nodes)
    assert trio(2, "read", 1, 0, 2, 2 * 4096, nodes) == whole[2 * 4096 :]
    trio(0, "damage", 1, 0)
    assert trio(2, "read", 1, 0, 0, 4 * 4096, nodes) == whole
    assert "DigestMismatchError" in trio(2, "read", 1, 0, 0, 4 * 4096, ["node-0"])
    trio(0, "lose", 1, 0)


# ---- together --------------------------------------------------------------------------------------------------


def _constructed(root: Path, *args: Any, placement: list[int] | None = None) -> list[Any]:
    with Team(copying.obey, root, 2, *args, placement=placement, env=_ENV) as team:
        return team.results()


def test_a_rank_that_cannot_listen_is_an_error_everywhere(tmpfs: Path) -> None:
    results = _constructed(tmpfs, 1, "192.0.2.1")  # no address of this host
    assert "ReplicationError: serving peers failed on rank 1, node-1: cannot listen" in results[0]
    assert "ReplicationError: cannot listen on 192.0.2.1" in results[1]


def test_a_job_on_one_node_serves_nothing_and_pushes_to_nobody(tmpfs: Path) -> None:
    with Team(copying.obey, tmpfs, 2, 0, placement=[0, 0], env=_ENV) as team:
        for child in team.ranks:
            assert child.next_report("address")[1] == (None, None)
            for name in ("save", "push"):
                child.say(name, (1,), {})
                assert child.next_report(name)[1] is None
