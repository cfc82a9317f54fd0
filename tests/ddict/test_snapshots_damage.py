"""Snapshots of managers that are damaged, values that come and go meanwhile, and strangers."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ml_flashpoint.ddict.manager.snapshots import Snapshots
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    DigestMismatchError,
    InvalidArgumentError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name, read_manifest
from ml_flashpoint.net.peer import PeerConnection
from tests.ddict.snapshot_support import PAGE, flip_a_byte, path_of, some, value_parts
from tests.support.managers import SECRET, Cluster, Content, Member, content_of


@pytest.fixture
def pair(tmpfs: Path) -> Iterator[Cluster]:
    with Cluster(tmpfs) as cluster:
        yield cluster


def damage(member: Member, of: int, what: str, owner: Member) -> None:
    part = value_parts(owner)[0] if what == "value" else owner.snapshots.sealed()[max(owner.snapshots.sealed())]
    path = path_of(member, of, part)
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
    damage(owner, 0, what, owner)
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
    damage(holder, 0, what, owner)
    assert owner.restart(lose_node=True) == {0: first}
    error = owner.failures.pop(1)
    assert isinstance(error, DigestMismatchError)
    assert error.rank == 0


@pytest.mark.damages_on_purpose
def test_damage_on_both_sides_is_lost_and_told(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, {b"big": os.urandom(300_000)}, stored=True)
    owner.seal(0)
    damage(owner, 0, "value", owner)
    damage(holder, 0, "value", owner)
    assert owner.restart() == {}
    assert isinstance(owner.failures.pop(0), DamagedError)


def test_a_part_that_was_sealed_and_changed_is_not_pushed_to_a_new_holder(pair: Cluster) -> None:
    owner, holder = pair.members
    owner.put(0, {b"big": os.urandom(300_000)}, stored=True)
    owner.seal(0)
    damage(owner, 0, "value", owner)
    owner.take_out(b"big")
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
    with pytest.raises(ReplicationError, match="takes no copies"):
        owner.seal(0, deadline_s=30)
    assert time.monotonic() - began < 15
    files = owner.files(0)
    holder.up()
    sealed = owner.seal(0)
    assert owner.files(0) == files  # nothing was digested or written again
    total = sum(read_manifest(owner.folder / name).total_size for name in files if name.endswith(".manifest"))
    assert owner.snapshots.copies.pushed_bytes == total
    # The holder's process dies, but not its node.
    holder.restart()
    owner.seal(0)
    assert owner.snapshots.copies.pushed_bytes == total
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


def test_a_value_let_go_while_it_is_sealed_belongs_to_the_snapshot(pair: Cluster) -> None:
    owner = pair[0]
    data = os.urandom(300_000)
    owner.put(0, {b"big": data}, stored=True)
    entries = list(owner.entries.values())
    owner.take_out(b"big")
    owner.seal(0, entries=entries)
    del entries
    owner.slots.collect()
    assert owner.store.resident_bytes()[1] < 300_000
    assert owner.restart() == {0: {b"big": data}}


def test_a_part_that_is_needed_does_not_retire(pair: Cluster) -> None:
    owner = pair[0]
    data = os.urandom(300_000)
    owner.put(0, {b"big": data}, stored=True)
    owner.seal(0)
    entries = list(owner.entries.values())
    owner.take_out(b"big")
    owner.snapshots.forget_after(-1)
    owner.seal(1, entries=entries)
    del entries
    owner.snapshots.retain([1])
    assert owner.restart(lose_node=True) == {1: {b"big": data}}


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
        owner.seal(checkpoint_id, entries=entries)
        sealed[checkpoint_id] = content
        if checkpoint_id == 25:
            done.set()

    def retire(_: random.Random) -> None:
        owner.snapshots.retain(sorted(sealed)[-2:])
        done.wait(0.002)

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
        gc.collect()  # the frames of the error
        # Copies that no snapshot needs make room.
        owner.snapshots.forget_after(0)
        sealed_then = owner.seal(1)
        assert owner.restart(lose_node=True) == {0: sealed, 1: sealed_then}


def push(member: Member, manifest: Manifest, data: bytes) -> None:
    address = member.snapshots.address
    assert address is not None
    with PeerConnection(address, SECRET) as peer:
        peer.push(manifest, memoryview(data))


@pytest.mark.parametrize(
    ("rank", "world_size", "name", "size"),
    [
        (1, 2, "00000001", PAGE),  # its own
        (0, 3, "00000001", PAGE),  # of another dictionary
        (0, 2, "00000001", PAGE - 1),
    ],
)
def test_only_copies_to_be_held_are_taken_in(pair: Cluster, rank: int, world_size: int, name: str, size: int) -> None:
    record = ObjectRecord(object_name(rank, name), 0, size, ())
    manifest = Manifest("step-0_ckpt", rank, world_size, name, "node-0", (record,))
    with pytest.raises(ProtocolError):
        push(pair[1], manifest, b"")
    assert pair[1].files(rank) == set()


def test_bad_arguments_are_refused(pair: Cluster) -> None:
    def make(**changed: object) -> Snapshots:
        arguments = {
            "nodes": ("a", "b"),
            "holders": ((), ()),
            "secret": SECRET,
            "ask": lambda *_: {},
            "values": pair[0].slots,
            **changed,
        }
        return Snapshots(pair[0].store, **arguments)  # type: ignore[arg-type]

    make()
    with pytest.raises(InvalidArgumentError):
        make(secret=b"short")


def test_a_closed_manager_seals_no_more(pair: Cluster) -> None:
    pair[0].snapshots.close()
    with pytest.raises(ReplicationError, match="closed"):
        pair[0].seal(0)
    with pytest.raises((ReplicationError, ObjectNotFoundError)):
        pair[1].seal(0, deadline_s=2)
