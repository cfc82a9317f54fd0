"""Snapshots of managers: what is sealed is at the holders, costs what changed, and comes back bit by bit."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ml_flashpoint.ddict.entries import StoredValue
from ml_flashpoint.ddict.snapshots import Snapshots
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    DigestMismatchError,
    InvalidArgumentError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, encode, object_name, read_manifest
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, RingReplicationStrategy
from ml_flashpoint.replication.transfer_client import PeerConnection
from tests.support.managers import SECRET, Cluster, Content, Member, content_of

PAGE = 4096
SMALL_PART = 4 * PAGE
"""More than a snapshot takes in which hardly anything is new."""


@pytest.fixture
def pair(tmpfs: Path) -> Iterator[Cluster]:
    with Cluster(tmpfs) as cluster:
        yield cluster


def some(count: int, size: int = 100, salt: int = 0) -> dict[bytes, bytes | None]:
    return {b"key-%d" % i: bytes([i % 256, salt]) * (size // 2) for i in range(count)}


def part_of(member: Member, of: int, attempt: str) -> Path:
    (path,) = member.folder.glob(f"step-*_ckpt/{object_name(of, attempt)}")
    return path


def flip_a_byte(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def value_ids(member: Member) -> list[str]:
    return [e.value.value_id for e in member.entries.values() if isinstance(e.value, StoredValue)]


# ---- sealing and recovering -------------------------------------------------------------------------------


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
    sealed = [replace(entry, key=b"%d" % i, writer=f"w-{i}", persistent=i % 2 == 0, broadcast=i > 1) for i in range(4)]
    ref = owner.snapshots.seal(5, sealed, 10)
    owner.down(lose_node=True)
    owner.up()
    found, _ = owner.snapshots.recover([ref])
    told = {e.key: (e.checkpoint_id, e.writer, e.persistent, e.broadcast) for e in found.pop(5)}
    assert found == {}
    assert told == {b"%d" % i: (3, f"w-{i}", i % 2 == 0, i > 1) for i in range(4)}


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
    assert owner.snapshots.pushed_bytes < SMALL_PART
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


# ---- what a snapshot costs --------------------------------------------------------------------------------


def test_unchanged_data_is_neither_copied_nor_sent(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, some(2000, size=1000))
    owner.put(0, {b"big-%d" % i: os.urandom(1_000_000) for i in range(3)}, stored=True)
    content = owner.seal(0)
    before, files = owner.snapshots.pushed_bytes, owner.files(0)
    assert before > 5_000_000
    owner.seal(1)
    assert owner.snapshots.pushed_bytes - before < SMALL_PART
    (new,) = {f for f in owner.files(0) - files if f.endswith(".safetensors")}
    assert read_manifest((owner.folder / new).with_suffix(".manifest")).total_size < SMALL_PART
    assert holder.files(0) == owner.files(0)
    assert owner.restart(lose_node=True) == {0: content, 1: content}


def test_a_small_change_costs_little(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(2000, size=1000))
    owner.seal(0)
    before = owner.snapshots.pushed_bytes
    owner.put(1, {b"key-7": b"x" * 1000})
    owner.take_out(b"key-8")
    sealed = owner.seal(1)
    assert owner.snapshots.pushed_bytes - before < SMALL_PART
    assert b"key-8" not in sealed
    assert owner.restart(lose_node=True)[1] == sealed


def test_sealing_again_does_nothing(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, some(10))
    owner.seal(0)
    files, before = owner.files(0), owner.snapshots.pushed_bytes
    owner.seal(0)
    assert (owner.files(0), owner.snapshots.pushed_bytes) == (files, before)


def test_sealing_again_with_other_entries_replaces_the_snapshot(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, some(10, size=20_000))
    owner.seal(0)
    old = owner.snapshots.sealed()[0].attempt
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
    assert owner.snapshots.pushed_bytes < 6 * (live + 39 * live / 4)
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


# ---- retention --------------------------------------------------------------------------------------------


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
    (value_id,) = value_ids(owner)
    assert owner.store.find(value_id, 0) is not None
    before = owner.snapshots.pushed_bytes
    owner.seal(2)
    assert owner.snapshots.pushed_bytes - before < SMALL_PART
    owner.take_out(b"big")
    owner.snapshots.seal(3, [], 10)
    owner.snapshots.retain([3])
    assert owner.store.find(value_id, 0) is None


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
    said: list[tuple[list[str], str]] = []
    owner.snapshots._tell_holder = lambda _, keep, before: said.append((keep, before))
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


@pytest.mark.parametrize(
    ("of", "keep", "before"),
    [(1, [], "0" * 20), (2, [], "0" * 20), (-1, [], "0" * 20), (0, [3], "0" * 20), (0, [], "9")],
)
def test_drop_copies_refuses_what_is_no_message(pair: Cluster, of: int, keep: list[str], before: str) -> None:
    with pytest.raises(InvalidArgumentError):
        pair[1].snapshots.drop_copies(of, keep, before)


# ---- damage and loss --------------------------------------------------------------------------------------


def damage(member: Member, of: int, what: str, value_id: str) -> None:
    attempt = (
        value_id
        if what == "value"
        else max(part.save_id for part in member.store.held() if part.rank == of and part.save_id.startswith("s-"))
    )
    path = part_of(member, of, attempt)
    if what == "manifest":
        flip_a_byte(path.with_suffix(".manifest"), 80)
    elif what == "header":
        flip_a_byte(path, 9)
    else:
        flip_a_byte(path, read_manifest(path.with_suffix(".manifest")).total_size - 1)


@pytest.mark.parametrize("what", ["value", "segment", "header", "manifest"])
def test_what_is_damaged_here_comes_from_the_holder(pair: Cluster, what: str) -> None:
    owner = pair[0]
    owner.put(0, {**some(50), b"big": None})
    owner.put(0, {b"big": os.urandom(300_000)}, stored=True)
    sealed = owner.seal(0)
    (value_id,) = value_ids(owner)
    damage(owner, 0, what, value_id)
    assert owner.restart() == {0: sealed}
    # It is whole again here.
    pair[1].down(lose_node=True)
    assert owner.restart() == {0: sealed}


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("what", ["value", "segment"])
def test_a_damaged_copy_is_refused_and_an_older_snapshot_is_there(pair: Cluster, what: str) -> None:
    owner, holder = pair.members
    owner.put(0, some(50))
    first = owner.seal(0)
    owner.put(1, some(50, salt=1))
    owner.put(1, {b"big": os.urandom(300_000)}, stored=True)
    owner.seal(1)
    (value_id,) = value_ids(owner)
    damage(holder, 0, what, value_id)
    assert owner.restart(lose_node=True) == {0: first}
    error = owner.failures.pop(1)
    assert isinstance(error, DigestMismatchError)
    assert error.rank == 0


@pytest.mark.damages_on_purpose
def test_damage_on_both_sides_is_lost_and_told(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, {b"big": os.urandom(300_000)}, stored=True)
    owner.seal(0)
    (value_id,) = value_ids(owner)
    damage(owner, 0, "value", value_id)
    damage(holder, 0, "value", value_id)
    assert owner.restart() == {}
    assert isinstance(owner.failures.pop(0), DamagedError)


def test_a_part_that_was_sealed_and_changed_is_not_pushed_to_a_new_holder(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, {b"big": os.urandom(300_000)}, stored=True)
    owner.seal(0)
    (value_id,) = value_ids(owner)
    owner.take_out(b"big")
    damage(owner, 0, "value", value_id)
    owner.put(1, some(5))
    holder.restart(lose_node=True)
    # The older snapshot is lost; that must not keep the newer one from being copied.
    sealed = owner.seal(1)
    assert owner.restart(lose_node=True) == {1: sealed}
    holder.restart(lose_node=True)


def test_a_holder_that_is_away_fails_the_seal_and_nothing_is_sent_twice(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, some(10))
    owner.put(0, {b"big-%d" % i: os.urandom(300_000) for i in range(3)}, stored=True)
    holder.down()
    began = time.monotonic()
    with pytest.raises(ReplicationError, match="not there"):
        owner.seal(0, deadline_s=30)
    assert time.monotonic() - began < 15
    files = owner.files(0)
    holder.up()
    sealed = owner.seal(0)
    assert owner.files(0) == files  # nothing was digested or written again
    total = sum(read_manifest(owner.folder / name).total_size for name in files if name.endswith(".manifest"))
    assert owner.snapshots.pushed_bytes == total
    # The holder's process dies, but not its node.
    holder.restart()
    owner.seal(0)
    assert owner.snapshots.pushed_bytes == total
    assert owner.restart(lose_node=True) == {0: sealed}


def test_a_holder_that_came_back_empty_gets_every_snapshot_again(pair: Cluster) -> None:
    owner, holder = pair.members
    contents = {}
    for checkpoint_id in range(3):
        owner.put(checkpoint_id, some(10, salt=checkpoint_id))
        owner.put(checkpoint_id, {b"big": os.urandom(300_000)}, stored=True)
        contents[checkpoint_id] = owner.seal(checkpoint_id)
    holder.restart(lose_node=True)
    assert holder.files(0) == set()
    owner.snapshots.replicate(10)
    assert holder.files(0) == owner.files(0)
    assert owner.restart(lose_node=True) == contents


# ---- values that come and go ------------------------------------------------------------------------------


def test_a_pinned_value_that_is_let_go_is_released_at_the_end(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, {b"big": os.urandom(300_000)}, stored=True)
    entries = list(owner.entries.values())
    (value_id,) = value_ids(owner)
    with owner.snapshots.pin(entries), owner.snapshots.pin(entries) as second:
        owner.take_out(b"big")
        second.release()
        second.release()
        assert owner.released == []
    assert owner.released == [value_id]


def test_a_value_let_go_while_it_is_sealed_belongs_to_the_snapshot(pair: Cluster) -> None:
    owner = pair[0]
    data = os.urandom(300_000)
    owner.put(0, {b"big": data}, stored=True)
    entries = list(owner.entries.values())
    with owner.snapshots.pin(entries):
        owner.take_out(b"big")
        owner.seal(0, entries=entries)
    assert owner.released == []
    assert owner.restart() == {0: {b"big": data}}


def test_a_part_that_is_pinned_does_not_retire(pair: Cluster) -> None:
    owner = pair[0]
    data = os.urandom(300_000)
    owner.put(0, {b"big": data}, stored=True)
    owner.seal(0)
    entries = list(owner.entries.values())
    with owner.snapshots.pin(entries):
        owner.take_out(b"big")
        owner.snapshots.forget_after(-1)
        owner.seal(1, entries=entries)
    owner.snapshots.retain([1])
    assert owner.restart(lose_node=True) == {1: {b"big": data}}


def test_a_value_that_no_snapshot_has_is_the_callers(pair: Cluster) -> None:
    owner = pair[0]
    owner.put(0, {b"big": os.urandom(300_000)}, stored=True)
    value = owner.entries[b"big"].value
    assert isinstance(value, StoredValue)
    assert not owner.snapshots.let_go(value)


@pytest.mark.slow
def test_puts_seals_and_retirement_at_once(pair: Cluster) -> None:
    """The shard goes on, under its lock, while checkpoints are sealed and others retire."""
    owner = pair[0]
    lock = threading.RLock()
    done = threading.Event()
    errors: list[BaseException] = []
    sealed: dict[int, Content] = {}

    def guarded(work: Callable[[random.Random], None], seed: int) -> None:
        dice = random.Random(seed)
        try:
            while not done.is_set():
                work(dice)
        except BaseException as error:
            errors.append(error)
            done.set()

    def put(dice: random.Random) -> None:
        with lock:
            owner.put(0, {b"key-%d" % dice.randrange(20): dice.randbytes(2000)})
            owner.put(0, {b"big-%d" % dice.randrange(5): dice.randbytes(300_000)}, stored=True)
        done.wait(0.001)

    def seal(_: random.Random) -> None:
        checkpoint_id = max(sealed, default=-1) + 1
        with lock:
            entries = list(owner.entries.values())
            content = content_of(entries)
            pin = owner.snapshots.pin(entries)
        with pin:
            owner.seal(checkpoint_id, entries=entries)
        sealed[checkpoint_id] = content
        if checkpoint_id == 25:
            done.set()

    def retire(_: random.Random) -> None:
        owner.snapshots.retain(sorted(sealed)[-2:])
        done.wait(0.002)

    in_use = owner.snapshots._in_use

    def in_use_under_the_lock(value_id: str) -> bool:
        with lock:
            return in_use(value_id)

    owner.snapshots._in_use = in_use_under_the_lock
    threads = [threading.Thread(target=guarded, args=(work, at)) for at, work in enumerate((put, put, seal, retire))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    found = owner.restart(lose_node=True)
    for checkpoint_id in sorted(sealed)[-2:]:
        assert found[checkpoint_id] == sealed[checkpoint_id]


@pytest.mark.slow
def test_no_room_at_the_holder_is_a_capacity_error(tmpfs: Path, small_tmpfs: Path) -> None:
    with Cluster(tmpfs) as cluster:
        owner, holder = cluster.members
        holder.down(lose_node=True)
        holder.folder = small_tmpfs
        holder.up()
        owner.put(0, some(3))
        sealed = owner.seal(0)
        owner.put(1, {b"big-%d" % number: os.urandom(1_500_000) for number in range(4)}, stored=True)
        with pytest.raises(CapacityError):
            owner.seal(1)
        for number in range(3):
            owner.take_out(b"big-%d" % number)
        # Copies that no snapshot needs make room.
        owner.snapshots.forget_after(0)
        sealed_then = owner.seal(1)
        assert owner.restart(lose_node=True) == {0: sealed, 1: sealed_then}


# ---- strangers and limits ---------------------------------------------------------------------------------


def push(member: Member, manifest: Manifest, data: bytes) -> None:
    address = member.snapshots.address
    assert address is not None
    with PeerConnection(address, SECRET) as peer:
        peer.push(manifest, encode(manifest), [memoryview(data)])


@pytest.mark.parametrize(
    ("rank", "world_size", "labels"),
    [
        (1, 2, {"ddict": "value", "checkpoint": "0", "stamp": "0" * 20}),  # its own
        (0, 3, {"ddict": "value", "checkpoint": "0", "stamp": "0" * 20}),  # of another dictionary
        (0, 2, {}),
        (0, 2, {"ddict": "snapshot", "checkpoint": "0", "stamp": "0" * 20}),  # not called like one
        (0, 2, {"ddict": "value", "checkpoint": "1", "stamp": "0" * 20}),
        (0, 2, {"ddict": "value", "checkpoint": "0", "stamp": "now"}),
    ],
)
def test_only_copies_to_be_held_are_taken_in(pair: Cluster, rank: int, world_size: int, labels: dict[str, str]) -> None:
    record = ObjectRecord(object_name(rank, "v-1"), 0, PAGE, ())
    manifest = Manifest("step-0_ckpt", rank, world_size, "v-1", "node-0", (record,), labels)
    with pytest.raises(ProtocolError):
        push(pair[1], manifest, b"")
    assert pair[1].files(rank) == set()


def test_bad_arguments_are_refused(pair: Cluster) -> None:
    def make(**changed: object) -> Snapshots:
        arguments = {
            "nodes": ("a", "b"),
            "strategy": NoReplicationStrategy(),
            "secret": SECRET,
            "peer_address": lambda _: None,
            "tell_holder": lambda *_: None,
            "in_use": lambda _: False,
            "incarnation": "1",
            **changed,
        }
        return Snapshots(pair[0].store, **arguments)  # type: ignore[arg-type]

    make()
    for changed in ({"nodes": ()}, {"secret": b"short"}, {"incarnation": "../x"}):
        with pytest.raises(InvalidArgumentError):
            make(**changed)


def test_a_closed_manager_seals_no_more(pair: Cluster) -> None:
    pair[0].snapshots.close()
    with pytest.raises(ReplicationError, match="closed"):
        pair[0].seal(0)
    with pytest.raises((ReplicationError, ObjectNotFoundError)):
        pair[1].seal(0, deadline_s=2)
