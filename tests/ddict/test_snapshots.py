"""Snapshots of managers: what is sealed is at the holders, costs what changed, and comes back bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.format.errors import (
    InvalidArgumentError,
)
from ml_flashpoint.format.manifest import read_manifest
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, RingReplicationStrategy
from tests.ddict.snapshot_support import SMALL_PART, some, value_parts
from tests.support.managers import Cluster


@pytest.fixture
def pair(tmpfs: Path) -> Iterator[Cluster]:
    with Cluster(tmpfs) as cluster:
        yield cluster


@pytest.mark.parametrize("lose_node", [False, True], ids=["process", "node"])
def test_what_was_sealed_comes_back(pair: Cluster, lose_node: bool) -> None:
    owner = pair[0]
    owner.put(0, some(20))
    owner.put(0, {b"big-%d" % i: os.urandom(300_000 + i) for i in range(3)}, stored=True)
    owner.put(0, {b"gone": None})
    first = owner.seal(0)
    owner.put(1, some(5, salt=1))
    owner.put(1, {b"big-0": os.urandom(400_000)}, stored=True)
    second = owner.seal(1)
    assert first != second
    assert owner.restart(lose_node=lose_node) == {1: second, 0: first}
    assert owner.failures == {}


def test_all_that_is_known_of_an_entry_comes_back(pair: Cluster) -> None:
    from dataclasses import replace

    owner = pair[0]
    owner.put(3, some(1))
    (entry,) = owner.entries.values()
    sealed = [replace(entry, key=b"%d" % i, writer=f"w-{i}", flags=i) for i in range(4)]
    ref = owner.snapshots.seal(5, sealed, 10)
    owner.down(lose_node=True)
    owner.up()
    found, _ = owner.snapshots.recover([ref])
    told = {e.key: (e.checkpoint_id, e.writer, e.flags) for e in found.pop(5)}
    assert found == {}
    assert told == {b"%d" % i: (3, f"w-{i}", i) for i in range(4)}


def test_an_empty_manager_has_snapshots_too(pair: Cluster) -> None:
    pair[1].seal(0)
    assert pair[1].restart(lose_node=True) == {0: {}}


def test_shared_entries_are_the_same_objects_in_all_snapshots(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(3))
    owner.put(0, {b"big": os.urandom(300_000)}, stored=True)
    owner.seal(0)
    owner.put(1, {b"key-0": b"other"})
    owner.seal(1)
    owner.down()
    owner.up()
    found, _ = owner.snapshots.recover(owner.saves.values())
    assert len(set(map(id, found[0])) & set(map(id, found[1]))) == 3


def test_sealing_goes_on_after_a_recovery_without_copying_what_was_recovered(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(500, size=1000))
    owner.put(0, {b"big": os.urandom(3_000_000)}, stored=True)
    owner.seal(0)
    owner.restart()
    owner.put(1, {b"new": b"value"})
    sealed = owner.seal(1)
    assert owner.snapshots.copies.pushed_bytes < SMALL_PART
    assert owner.restart(lose_node=True)[1] == sealed


def test_without_holders_snapshots_survive_the_process(tmpfs: Path) -> None:
    with Cluster(tmpfs, ["node-0"] * 2, NoReplicationStrategy()) as cluster:
        cluster[0].put(0, some(5))
        sealed = cluster[0].seal(0)
        assert cluster[0].snapshots.address is None
        assert cluster[0].restart() == {0: sealed}
        assert cluster[0].restart(lose_node=True) == {}


def test_several_managers_of_a_node_and_two_copies(tmpfs: Path) -> None:
    nodes = ["node-0", "node-0", "node-1", "node-1", "node-2", "node-2"]
    with Cluster(tmpfs, nodes, RingReplicationStrategy(copies=2)) as cluster:
        sealed = []
        for member in cluster.members:
            member.put(0, some(5, salt=member.number))
            member.put(0, {b"big": os.urandom(300_000)}, stored=True)
            sealed.append(member.seal(0))
        # Two nodes at once, with all that was on them.
        for number in (0, 1, 2, 3):
            cluster[number].down()
        for number in (0, 2):
            cluster[number].down(lose_node=True)
        for number in (0, 1, 2, 3):
            cluster[number].up()
        for number in (0, 1, 2, 3):
            assert cluster[number].recover() == {0: sealed[number]}
        # Those two hold copies for each other and for the third, too.
        for member in cluster.members:
            member.snapshots.replicate(10)
        assert cluster[4].restart(lose_node=True) == {0: sealed[4]}


def test_a_holder_that_is_away_is_not_waited_for_with_each_part(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [f"node-{number}" for number in range(3)]
    with Cluster(tmpfs, nodes, RingReplicationStrategy(copies=2)) as cluster:
        owner = cluster[0]
        for number in range(8):
            owner.put(0, {b"big-%d" % number: os.urandom(100_000)}, stored=True)
        sealed = owner.seal(0)
        owner.down(lose_node=True)
        away = owner.snapshots.holders[0]
        cluster[away].down()
        owner.up()
        asked: list[int] = []
        ask = owner.snapshots.copies.ask
        monkeypatch.setattr(
            owner.snapshots.copies, "ask", lambda number, *more: (asked.append(number), ask(number, *more))[1]
        )
        assert owner.recover() == {0: sealed}
        assert asked.count(away) == 1


def test_unchanged_data_is_neither_copied_nor_sent(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, some(2000, size=1000))
    owner.put(0, {b"big-%d" % i: os.urandom(1_000_000) for i in range(3)}, stored=True)
    content = owner.seal(0)
    before, files = owner.snapshots.copies.pushed_bytes, owner.files(0)
    assert before > 5_000_000
    owner.seal(1)
    assert owner.snapshots.copies.pushed_bytes - before < SMALL_PART
    (new,) = {f for f in owner.files(0) - files if f.endswith(".safetensors")}
    assert read_manifest((owner.folder / new).with_suffix(".manifest")).total_size < SMALL_PART
    assert holder.files(0) == owner.files(0)
    assert owner.restart(lose_node=True) == {0: content, 1: content}


def test_a_small_change_costs_little(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(2000, size=1000))
    owner.seal(0)
    before = owner.snapshots.copies.pushed_bytes
    owner.put(1, {b"key-7": b"x" * 1000})
    owner.take_out(b"key-8")
    sealed = owner.seal(1)
    assert owner.snapshots.copies.pushed_bytes - before < SMALL_PART
    assert b"key-8" not in sealed
    assert owner.restart(lose_node=True)[1] == sealed


def test_sealing_again_does_nothing(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(10))
    owner.seal(0)
    files, before = owner.files(0), owner.snapshots.copies.pushed_bytes
    owner.seal(0)
    assert (owner.files(0), owner.snapshots.copies.pushed_bytes) == (files, before)


def test_sealing_again_with_other_entries_replaces_the_snapshot(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, some(10, size=20_000))
    owner.seal(0)
    old = owner.snapshots.sealed()[0].name
    owner.put(0, some(10, size=20_000, salt=1))
    sealed = owner.seal(0)
    owner.snapshots.retain([0])
    assert not any(old in name for name in owner.files(0) | holder.files(0))
    assert owner.restart(lose_node=True) == {0: sealed}


def test_dead_values_do_not_pile_up(pair: Cluster) -> None:
    owner, holder = pair.members
    live = 200 * 1000
    for checkpoint_id in range(40):
        # A quarter of the keys change each time.
        changed = some(200, size=1000, salt=checkpoint_id)
        owner.put(checkpoint_id, {k: v for i, (k, v) in enumerate(changed.items()) if (i + checkpoint_id) % 4 == 0})
        if checkpoint_id == 0:
            owner.put(0, changed)
        sealed = owner.seal(checkpoint_id)
        owner.snapshots.retain([checkpoint_id])
    sizes = [read_manifest(path).total_size for path in owner.folder.glob("step-*_ckpt/*.manifest")]
    assert sum(sizes) < 3 * live
    assert len(sizes) < 12
    # Every value was sent once, and taken along a few times.
    assert owner.snapshots.copies.pushed_bytes < 6 * (live + 39 * live / 4)
    assert holder.files(0) == owner.files(0)
    assert owner.restart(lose_node=True)[39] == sealed


def test_deleted_values_do_not_stay_for_the_sake_of_the_others(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(100, size=2000))
    owner.seal(0)
    for number in range(60):
        owner.take_out(b"key-%d" % number)
    sealed = owner.seal(1)
    owner.snapshots.retain([1])
    sizes = [read_manifest(path).total_size for path in owner.folder.glob("step-*_ckpt/*.manifest")]
    assert sum(sizes) < 2 * 40 * 2000
    assert owner.restart(lose_node=True)[1] == sealed


def test_an_index_that_others_build_on_stays(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(100))
    owner.seal(0)
    for checkpoint_id in (1, 2):
        owner.put(checkpoint_id, {b"key-%d" % checkpoint_id: b"other"})
        sealed = owner.seal(checkpoint_id)
        owner.snapshots.retain([checkpoint_id])
    assert len(owner.files(0)) == 3 * 2
    assert owner.restart(lose_node=True)[2] == sealed


def test_many_small_changes_do_not_make_many_segments(pair: Cluster) -> None:
    owner = pair[0]
    for checkpoint_id in range(60):
        owner.put(checkpoint_id, {b"key-%d" % checkpoint_id: b"x" * 500})
        sealed = owner.seal(checkpoint_id)
        owner.snapshots.retain([checkpoint_id])
    assert len([name for name in owner.files(0) if name.endswith(".manifest")]) <= 9
    assert owner.restart(lose_node=True)[59] == sealed


def test_what_retires_is_dropped_here_and_at_the_holder(pair: Cluster) -> None:
    owner, holder = pair.members
    for checkpoint_id in range(4):
        owner.put(checkpoint_id, {b"big": os.urandom(300_000)}, stored=True)
        owner.put(checkpoint_id, some(3, size=20_000, salt=checkpoint_id))
        sealed = owner.seal(checkpoint_id)
    old = [name for name in owner.files(0) if "step-3_ckpt" not in name]
    assert len(old) == 3 * 2 * 2
    owner.snapshots.retain([1, 3])
    kept = {name.split("/")[0] for name in owner.files(0)}
    assert kept == {"step-1_ckpt", "step-3_ckpt"}
    assert holder.files(0) == owner.files(0)
    owner.snapshots.retain([3])
    assert {name.split("/")[0] for name in owner.files(0)} == {"step-3_ckpt"}
    assert holder.files(0) == owner.files(0)
    assert set(owner.snapshots.sealed()) == {3}
    assert owner.restart(lose_node=True) == {3: sealed}


def test_what_is_above_the_retained_stays(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(3))
    for checkpoint_id in range(3):
        owner.seal(checkpoint_id)
    owner.snapshots.retain([1])
    assert set(owner.snapshots.sealed()) == {1, 2}
    owner.snapshots.retain([])
    assert set(owner.snapshots.sealed()) == {1, 2}


def test_values_in_use_stay_though_no_snapshot_needs_them(pair: Cluster) -> None:
    owner, _ = pair.members
    data = os.urandom(300_000)
    owner.put(0, {b"big": data}, stored=True)
    owner.seal(0)
    owner.snapshots.seal(1, [], 10)
    owner.snapshots.retain([1])
    (part,) = value_parts(owner)
    assert owner.store.find(part.save, 0) is not None
    before = owner.snapshots.copies.pushed_bytes
    owner.seal(2)
    assert owner.snapshots.copies.pushed_bytes - before < SMALL_PART
    owner.take_out(b"big")
    owner.snapshots.seal(3, [], 10)
    owner.snapshots.retain([3])
    assert owner.store.find(part.save, 0) is None


def test_a_rollback_forgets_what_was_above(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, some(3))
    owner.put(0, {b"big": os.urandom(300_000)}, stored=True)
    first = owner.seal(0)
    at_first = dict(owner.entries)
    owner.put(1, {b"key-0": b"abandoned"})
    owner.put(1, {b"other": os.urandom(300_000)}, stored=True)
    owner.seal(1)
    owner.seal(2)
    owner.take_out(b"other")
    owner.entries = at_first
    owner.snapshots.forget_after(0)
    assert set(owner.snapshots.sealed()) == {0}
    assert {name.split("/")[0] for name in owner.files(0) | holder.files(0)} == {"step-0_ckpt"}
    owner.put(1, {b"key-1": b"after the rollback"})
    again = owner.seal(1)
    assert owner.restart(lose_node=True) == {0: first, 1: again}


def test_what_was_sealed_above_a_rollback_and_stays_is_sealed_again(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(3))
    first = owner.seal(0)
    owner.put(1, {b"kept": b"by another writer"})
    owner.put(1, {b"big": os.urandom(300_000)}, stored=True)
    owner.seal(1)
    owner.snapshots.forget_after(0)
    again = owner.seal(1)
    assert owner.restart(lose_node=True) == {0: first, 1: again}


def test_abandoned_snapshots_do_not_come_back_from_a_holder_that_was_not_told(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, some(3))
    first = owner.seal(0)
    owner.put(1, {b"key-0": b"abandoned"})
    owner.seal(1)
    owner.seal(2)
    holder.unreachable = True
    owner.snapshots.forget_after(0)
    owner.put(1, {b"key-0": b"after the rollback"})
    again = owner.seal(1)
    holder.unreachable = False
    assert owner.restart(lose_node=True) == {0: first, 1: again}


def test_checkpoints_are_sealed_in_ascending_order(pair: Cluster) -> None:
    pair[0].seal(5)
    with pytest.raises(InvalidArgumentError, match="checkpoint 5 is sealed already"):
        pair[0].seal(4)
    with pytest.raises(InvalidArgumentError, match="checkpoint_id"):
        pair[0].seal(-1)


def test_a_holder_that_could_not_be_told_is_told_the_next_time(pair: Cluster) -> None:
    owner, holder = pair.members
    for checkpoint_id in range(2):
        owner.put(checkpoint_id, some(3, size=20_000, salt=checkpoint_id))
        owner.seal(checkpoint_id)
    holder.unreachable = True
    owner.snapshots.retain([1])
    assert holder.files(0) > owner.files(0)
    holder.unreachable = False
    owner.snapshots.retain([1])
    assert holder.files(0) == owner.files(0)


def test_a_late_message_drops_nothing_that_is_newer(pair: Cluster) -> None:
    owner, holder = pair.members
    said: list[tuple[list[str], int]] = []
    ask = owner.snapshots.copies.ask

    def hold_back(number: int, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        if operation != "drop_copies":
            return ask(number, operation, fields)
        said.append((fields["keep"], fields["before"]))
        return {}

    owner.snapshots.copies.ask = hold_back
    owner.put(0, some(3))
    owner.seal(0)
    owner.snapshots.retain([0])
    owner.put(1, {b"big": os.urandom(300_000)}, stored=True)
    owner.put(1, some(3, salt=1))
    sealed = owner.seal(1)
    ((keep, before),) = said
    files = holder.files(0)
    holder.snapshots.drop_copies(0, keep, before)
    assert holder.files(0) == files
    assert owner.restart(lose_node=True)[1] == sealed


@pytest.mark.parametrize("of", [1, 2, -1])
def test_drop_copies_refuses_one_whose_copies_are_elsewhere(pair: Cluster, of: int) -> None:
    with pytest.raises(InvalidArgumentError):
        pair[1].snapshots.drop_copies(of, [], 0)
