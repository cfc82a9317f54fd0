"""Whatever a manager and its holder go through, snapshots are what a plain model says."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ml_flashpoint.format.errors import FlashpointError
from tests.support import tmpfs as tmpfs_folders
from tests.support.managers import Cluster, Content, content_of

KEYS = st.integers(0, 11).map(lambda number: b"key-%d" % number)


class SnapshotsModel(RuleBasedStateMachine):
    """An owner and its holder against dicts.

    Attributes:
        snapshots: what each checkpoint holds that is retained.
        uncertain: a checkpoint that may have been sealed here, although not everywhere.
        history: whatever was sealed under an id.
        copied: whether the holder has all of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tmpfs_folders.make_folder()
        self.cluster = Cluster(self.folder)
        self.snapshots: dict[int, Content] = {}
        self.uncertain: dict[int, Content] = {}
        self.history: dict[int, list[Content]] = {}
        self.copied = True
        self.next_id = 0
        self.count = 0

    @initialize()
    def first(self) -> None:
        self.seal()

    @property
    def owner(self):  # type: ignore[no-untyped-def]
        return self.cluster[0]

    def teardown(self) -> None:
        self.cluster.__exit__()
        tmpfs_folders.remove_folder(self.folder)

    @rule(keys=st.sets(KEYS, min_size=1), size=st.sampled_from([1, 500, 30_000]))
    def put(self, keys: set[bytes], size: int) -> None:
        self.count += 1
        self.owner.put(self.next_id, {key: b"%08d" % self.count + key * (size // 6) for key in keys})

    @rule(key=KEYS)
    def put_large(self, key: bytes) -> None:
        self.count += 1
        self.owner.put(self.next_id, {key: b"%08d" % self.count * 40_000}, stored=True)

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        self.owner.take_out(key)

    @rule()
    def seal(self) -> None:
        content = content_of(self.owner.entries.values())
        self.history.setdefault(self.next_id, []).append(content)
        try:
            self.owner.seal(self.next_id)
        except FlashpointError:
            assert not self.cluster[1].is_up
            self.uncertain[self.next_id] = content
        else:
            assert self.cluster[1].is_up
            self.snapshots.update(self.uncertain)  # earlier ones are copied, too
            self.uncertain = {}
            self.snapshots[self.next_id] = content
            self.copied = True
        self.next_id += 1

    @rule(count=st.integers(1, 3))
    def retain(self, count: int) -> None:
        kept = sorted(self.snapshots)[-count:]
        self.owner.snapshots.retain(kept)
        for checkpoint_id in sorted(self.snapshots):
            if checkpoint_id not in kept:
                del self.snapshots[checkpoint_id]

    @precondition(lambda self: len(self.snapshots) > 1)
    @rule()
    def roll_back(self) -> None:
        self.copied = self.copied and not self.uncertain
        dropped = max(self.snapshots)
        del self.snapshots[dropped]
        self.uncertain = {}
        self.owner.snapshots.forget_after(max(self.snapshots))
        self.next_id = max(self.snapshots) + 1

    @rule(lose_node=st.booleans())
    def owner_dies(self, lose_node: bool) -> None:
        if not self.cluster[1].is_up:
            return
        lose_node = lose_node and self.copied
        found = self.owner.restart(lose_node=lose_node)
        for checkpoint_id, content in self.snapshots.items():
            assert found.pop(checkpoint_id) == content
        for checkpoint_id, content in found.items():
            # Not sealed everywhere, or retired and needed by others, or rolled back when the holder was not there.
            assert content in self.history[checkpoint_id]
        # As the coordinator does, which knows what was committed.
        self.owner.snapshots.forget_after(max(self.snapshots))
        self.uncertain = {}
        self.next_id = max(self.snapshots) + 1

    @rule(lose_node=st.booleans())
    def holder_dies(self, lose_node: bool) -> None:
        if self.cluster[1].is_up:
            self.cluster[1].down(lose_node=lose_node)
            self.copied = self.copied and not lose_node

    @precondition(lambda self: not self.cluster[1].is_up)
    @rule(replicate=st.booleans())
    def holder_comes_back(self, replicate: bool) -> None:
        self.cluster[1].up()
        if replicate:
            self.owner.snapshots.replicate(20)
            self.copied = True

    @invariant()
    def files_are_those_of_parts(self) -> None:
        """No part is left without its snapshot, once nothing is under way."""
        for member in self.cluster.members:
            if member.is_up:
                held = [part for rank in range(2) for part in member.store.parts_of(rank)]
                manifests = {name for rank in range(2) for name in member.files(rank) if name.endswith(".manifest")}
                assert len(manifests) == len(held)


@pytest.mark.slow
def test_snapshots_are_what_a_model_says() -> None:
    if not tmpfs_folders.has_tmpfs():
        pytest.skip("needs /dev/shm")
    run_state_machine_as_test(SnapshotsModel, settings=settings(max_examples=40, stateful_step_count=30))


@pytest.mark.slow
def test_snapshots_are_what_a_model_says_at_length() -> None:
    if not tmpfs_folders.has_tmpfs():
        pytest.skip("needs /dev/shm")
    run_state_machine_as_test(SnapshotsModel, settings=settings(max_examples=80, stateful_step_count=50))
