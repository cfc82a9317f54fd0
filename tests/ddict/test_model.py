"""Whatever several handles do with a dictionary, and whichever manager is killed, it is what a plain model says."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.errors import DDictCheckpointRetiredError, DDictKeyError, DDictWritesLostError
from ml_flashpoint.ddict.runtime.embedded import MOST_DEATHS
from ml_flashpoint.format.errors import FlashpointError
from tests.support import tmpfs as tmpfs_folders
from tests.support.dictionaries import DEADLINE_S, await_copies, await_that, kill_manager

EXAMPLES = "FLASHPOINT_TEST_MODEL_EXAMPLES"
HANDLES = 3
WORKING_SET = 3
_FORK = multiprocessing.get_context("fork")
BIG = 70_000  # elements of a float32 tensor that is an object of its own

Content = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Write:
    """What a handle wrote: ``number`` None deletes the key."""

    key: str
    checkpoint_id: int
    writer: int
    number: int | None


class Model:
    """All writes in order, and what was committed of them.

    Attributes:
        snapshots: for each checkpoint that was committed by itself, the writes that were seen there then.
        cuts: the number of the cut that each of those is.
        written: the highest checkpoint that each handle wrote at.
        late: the newest cut that a write of each handle came late for; -1: none.
        told: the newest cut that a write came late for of a handle that has moved since.
        open: where processes were killed: not whole, until that has left the working set.
    """

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.newest = 0
        self.committed = -1
        self.oldest = 0
        self.positions = [0] * HANDLES
        self.snapshots: dict[int, dict[str, Write]] = {}
        self.persisted: dict[int, Content] = {}
        self.cuts: dict[int, int] = {}
        self.cut = 0
        self.written = [-1] * HANDLES
        self.late = [-1] * HANDLES
        self.told = -1
        self.open: list[int] = []

    def seen(self, checkpoint_id: int) -> dict[str, Write]:
        """The write of each key that is seen at a checkpoint."""
        seen: dict[str, Write] = {}
        for write in sorted(
            (w for w in self.writes if w.checkpoint_id <= checkpoint_id), key=lambda w: w.checkpoint_id
        ):
            seen[write.key] = write
        return {key: write for key, write in seen.items() if write.number is not None}

    def content(self, checkpoint_id: int) -> Content:
        return _content(self.seen(checkpoint_id))

    def write(self, handle: int, key: str, number: int | None) -> None:
        at = self.positions[handle]
        self.writes = [w for w in self.writes if (w.key, w.checkpoint_id, w.writer) != (key, at, handle)]
        self.writes.append(Write(key, at, handle, number))
        self.written[handle] = max(self.written[handle], at)
        if at <= self.committed:
            self.late[handle] = self.cuts[self.committed]

    def may_move(self, handle: int, to: int) -> bool:
        """Whether nobody would be left behind, out of the working set."""
        others = [at for each, at in enumerate(self.positions) if each != handle]
        return to <= self.newest or min(others) > to - WORKING_SET

    def may_go_back(self, to: int) -> bool:
        """Whether a checkpoint is in the working set and, if one above it is committed, was so itself."""
        return to >= self.oldest and (to >= self.committed or to in self.snapshots)

    def move(self, handle: int, to: int) -> None:
        self.positions[handle] = to
        self.newest = max(self.newest, to)
        self.told = max(self.told, self.late[handle])

    def whole(self) -> int:
        """The newest checkpoint that every handle has moved past."""
        self.open = [at for at in self.open if at > self.newest - WORKING_SET]
        return min(self.positions + self.open) - 1

    def target(self) -> int:
        """The newest checkpoint that can be committed."""
        return max(self.committed, self.whole())

    def commit(self, checkpoint_id: int) -> None:
        """Commit a checkpoint, again if something was written there late."""
        is_late = checkpoint_id == self.whole() >= 0 and self.told >= self.cuts.get(checkpoint_id, 0)
        if checkpoint_id > self.committed or is_late:
            self.committed = checkpoint_id
            self.snapshots[checkpoint_id] = self.seen(checkpoint_id)
            self.cut += 1
            self.cuts[checkpoint_id] = self.cut
        window = self.newest - WORKING_SET + 1
        self.oldest = max(self.oldest, min(window, max(self.committed, 0), min(self.positions)))

    def rollback(self, handle: int, to: int) -> None:
        self.writes = [w for w in self.writes if w.writer != handle or w.checkpoint_id <= to]
        self.written[handle] = min(self.written[handle], to)
        self.positions[handle] = to

    def losers(self, base: int, *, taken: bool) -> dict[int, int]:
        """Handles that are told when an epoch begins, and the checkpoint that each goes on from."""
        return {
            handle: min(max(base, 0), self.positions[handle])
            for handle, at in enumerate(self.positions)
            if self.written[handle] > base or self.late[handle] >= self.cuts.get(base, 0) or (taken and at > base)
        }

    def begin(self, base: int) -> None:
        """An epoch begins: all is as it was when checkpoints up to this one were committed."""
        self.committed = base
        self.snapshots = {each: seen for each, seen in self.snapshots.items() if each <= base}
        self.persisted = {each: content for each, content in self.persisted.items() if each <= base}
        self.written = [min(at, base) for at in self.written]
        self.late, self.told = [-1] * HANDLES, -1
        self.open = [at for at in self.open if at <= base]
        self.writes = []
        present: dict[str, Write] = {}
        for checkpoint_id, seen in sorted(self.snapshots.items()):
            if checkpoint_id >= self.oldest or checkpoint_id == base:
                self.writes += [Write(key, checkpoint_id, -1, None) for key in present.keys() - seen.keys()]
                self.writes += [write for key, write in seen.items() if present.get(key) != write]
                present = seen


def write_and_be_killed(handle: DDict, keys: list[str], big: bool, pipe: Connection) -> None:
    for key in keys:
        handle[key] = torch.full((BIG,), -1.0) if big else -1
    pipe.send("written")
    os.kill(os.getpid(), signal.SIGKILL)


def _content(seen: dict[str, Write]) -> Content:
    return {key: write.number for key, write in seen.items() if write.number is not None}


_places: dict[str, int] = {}


KEYS = st.integers(0, 7).map(lambda number: f"key {number}")
HANDLE = st.integers(0, HANDLES - 1)
HOW = st.sampled_from(["read", "write", "move"])


class DictionaryModel(RuleBasedStateMachine):
    """A dictionary with copies on other nodes, and its handles, against a `Model`."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tmpfs_folders.make_folder()
        self.model = Model()
        self.count = 0
        self.dictionary: DDict | None = None

    @initialize(nodes=st.sampled_from([2, 3]))
    def make(self, nodes: int) -> None:
        self.managers = nodes
        self.deaths = [0] * nodes
        self.dictionary = DDict(
            1,
            nodes,
            256 << 20,
            working_set_size=WORKING_SET,
            replication="ring",
            persister_class=PosixCheckpointPersister,
            persist_path=str(self.folder),
            persist_count=-1,
            timeout=DEADLINE_S,
        )
        self.handles = [copy.copy(self.dictionary) for _ in range(HANDLES)]
        _places.clear()
        _places.update({f"key {number}": self.handles[0].which_manager(f"key {number}") for number in range(8)})
        _places.update(
            {f"first {handle}": self.handles[0].which_manager(f"first {handle}") for handle in range(HANDLES)}
        )
        for handle in range(HANDLES):
            self.put(handle, f"first {handle}")

    def teardown(self) -> None:
        try:
            if self.dictionary is not None:
                self.dictionary.destroy()
                assert not Path(self.dictionary._configuration.base).exists()
        finally:
            tmpfs_folders.remove_folder(self.folder)

    # ---- what handles do ----------------------------------------------------------------------------------

    def put(self, handle: int, key: str, *, big: bool = False) -> None:
        self.count += 1
        self.handles[handle][key] = torch.full((BIG,), float(self.count)) if big else self.count
        self.model.write(handle, key, self.count)

    @rule(handle=HANDLE, key=KEYS, big=st.booleans())
    def write(self, handle: int, key: str, big: bool) -> None:
        self.put(handle, key, big=big)

    @rule(handle=HANDLE, keys=st.sets(KEYS, min_size=1))
    def write_many(self, handle: int, keys: set[str]) -> None:
        self.count += 1
        self.handles[handle].update(dict.fromkeys(keys, self.count))
        for key in keys:
            self.model.write(handle, key, self.count)

    @rule(handle=HANDLE, key=KEYS)
    def delete(self, handle: int, key: str) -> None:
        if key in self.model.content(self.model.positions[handle]):
            del self.handles[handle][key]
            self.model.write(handle, key, None)
        else:
            with pytest.raises(DDictKeyError):
                del self.handles[handle][key]
            # For all that the handle knows, it may have been deleted.
            self.model.written[handle] = max(self.model.written[handle], self.model.positions[handle])

    @rule(handle=HANDLE)
    def checkpoint(self, handle: int) -> None:
        to = self.model.positions[handle] + 1
        if self.model.may_move(handle, to):
            self.model.move(handle, to)
            assert self.handles[handle].checkpoint() == to
            self.let_commit()

    @rule()
    def checkpoint_all(self) -> None:
        for handle in sorted(range(HANDLES), key=lambda each: self.model.positions[each]):
            self.checkpoint(handle)

    @rule(handle=HANDLE, back=st.integers(0, WORKING_SET))
    def rollback(self, handle: int, back: int) -> None:
        model = self.model
        to = max(model.positions[handle] - back, 0)
        if not model.may_go_back(to):
            with pytest.raises(DDictCheckpointRetiredError):
                self.handles[handle].rollback(to=to)
            return
        taken = model.committed > to
        assert self.handles[handle].rollback(to=to) == to
        model.rollback(handle, to)
        event("rollback below what is committed" if taken else "rollback")
        if taken:
            losers = model.losers(to, taken=True)
            losers.pop(handle, None)
            model.begin(to)
            for each in sorted(range(HANDLES), key=lambda each: each not in losers):
                if each != handle:
                    self.hear(each, losers.get(each), manager=None, how="read")
        self.let_commit()

    @rule(handle=HANDLE)
    def sync(self, handle: int) -> None:
        expected = max(self.model.committed, 0)
        assert self.handles[handle].sync_to_newest_checkpoint() == expected
        self.model.rollback(handle, expected)
        self.let_commit()

    def let_commit(self) -> None:
        """Nothing is under way when a step is done: so the model knows what is committed."""
        assert self.dictionary is not None
        assert self.dictionary._coordinator is not None
        expected = self.model.target()
        coordinator, rules = self.dictionary._coordinator, self.dictionary._coordinator.rules

        def is_idle() -> bool:
            with coordinator._changed:
                return not coordinator._busy and rules.next() is None

        found = coordinator.newest(rules.epoch, time.monotonic() + DEADLINE_S, lambda: False)
        assert found["committed"] == expected
        await_that(is_idle)
        self.model.commit(expected)

    # ---- persistence --------------------------------------------------------------------------------------

    @rule()
    def persist(self) -> None:
        committed = self.model.committed
        assert self.handles[0].persist() == committed
        if committed >= 0:
            self.model.persisted.setdefault(committed, _content(self.model.snapshots[committed]))
        assert self.handles[0].persisted_ids() == sorted(self.model.persisted)

    @precondition(lambda self: self.model.persisted)
    @rule(data=st.data(), handle=HANDLE)
    def restore(self, data: st.DataObject, handle: int) -> None:
        model = self.model
        to = data.draw(st.sampled_from(sorted(model.persisted)))
        losers = model.losers(model.committed, taken=False)
        self.handles[handle].restore(to)
        model.oldest = model.newest = to
        content = model.persisted[to]
        model.snapshots = {to: {key: Write(key, to, -1, number) for key, number in content.items()}}
        model.cut += 1
        model.cuts = {to: model.cut}
        model.begin(to)
        for number, each in enumerate(self.handles):
            if number in losers and number != handle:
                with pytest.raises(DDictWritesLostError):
                    each.sync_to_newest_checkpoint()
            assert each.sync_to_newest_checkpoint() == to
            model.move(number, to)
        self.let_commit()

    # ---- losses -------------------------------------------------------------------------------------------

    @rule(data=st.data(), lost_node=st.booleans(), how=st.lists(HOW, min_size=HANDLES, max_size=HANDLES))
    def kill(self, data: st.DataObject, lost_node: bool, how: list[str]) -> None:
        assert self.dictionary is not None
        model = self.model
        manager = data.draw(st.integers(0, self.managers - 1))
        if self.deaths[manager] == MOST_DEATHS:
            return  # it would stay down
        self.deaths[manager] += 1
        # One loss at a time: the next one is only survived with what the last one cost made up for.
        await_copies(self.dictionary, model.committed)
        rules = self.dictionary._coordinator.rules  # type: ignore[union-attr]
        await_that(lambda: not rules._behind)  # else its loss may be part of the epoch that it has yet to begin
        epoch = self.dictionary._access.state()["epoch"]
        kill_manager(self.dictionary, manager, lose_node=lost_node)
        key = next((key for key in _places if _places[key] == manager), None)
        if key is None or "move" in how:  # else it is waited for by who asks the manager
            await_that(lambda: self.dictionary._access.state()["epoch"] > epoch)  # type: ignore[union-attr]
        losers = model.losers(model.committed, taken=False)
        note(f"handles that lose writes: {losers}")
        event(f"{len(losers)} handles lose writes, node {'lost' if lost_node else 'kept'}")
        model.begin(model.committed)
        for handle in sorted(range(HANDLES), key=lambda each: each not in losers):  # others may have to wait for them
            self.hear(handle, losers.get(handle), manager, how[handle], key)
        self.let_commit()

    def hear(self, handle: int, back_to: int | None, manager: int | None, how: str, key: str | None = None) -> None:
        """A handle hears of the new epoch, whatever it does next: only if it lost something."""
        model, its = self.model, self.handles[handle]
        key = key or next(iter(_places))
        if back_to is not None:
            with pytest.raises(DDictWritesLostError) as raised:
                its.checkpoint() if how == "move" else its.put(key, -1) if how == "write" else its.get(key)
            assert (raised.value.manager, raised.value.checkpoint_id) == (manager, back_to)
            with pytest.raises(DDictWritesLostError):
                its.put(key, -1)  # until it goes back
            assert its.rollback(to=back_to) == back_to
            model.rollback(handle, back_to)
        elif how == "write":
            self.put(handle, key)
        elif how == "move":
            self.checkpoint(handle)
        self.check(handle)

    @rule(back=st.integers(0, WORKING_SET - 1), keys=st.sets(KEYS, min_size=1), big=st.booleans())
    def kill_a_writer(self, back: int, keys: set[str], big: bool) -> None:
        """A process is killed in the midst of a step: what it wrote at it is gone."""
        assert self.dictionary is not None
        model = self.model
        at = model.newest - back
        if at <= model.committed or at < model.oldest:
            return
        handle = copy.copy(self.handles[0])
        handle.checkpoint_id = at
        ours, theirs = _FORK.Pipe(duplex=False)
        child = _FORK.Process(target=write_and_be_killed, args=(handle, sorted(keys), big, theirs))
        child.start()
        theirs.close()
        child.join(DEADLINE_S)
        assert child.exitcode == -signal.SIGKILL
        assert ours.poll()
        assert ours.recv() == "written"
        handle.detach()
        await_that(lambda: self.dictionary._access.state()["writers"] == HANDLES)  # type: ignore[union-attr]
        model.newest = max(model.newest, at)
        model.open.append(at)
        event("a writer is killed")
        self.let_commit()
        rules = self.dictionary._coordinator.rules  # type: ignore[union-attr]
        await_that(lambda: not rules._discards)
        for each in range(HANDLES):
            self.check(each)

    @rule()
    def persist_where_storage_is_away(self) -> None:
        """What cannot be persisted now can be later; what was before is still there."""
        if self.model.committed < 0 or self.model.committed in self.model.persisted:
            return
        away = self.folder.with_name(f"{self.folder.name}-away")
        self.folder.rename(away)
        self.folder.write_text("no folder")
        try:
            with pytest.raises(FlashpointError):
                self.handles[0].persist()
        finally:
            self.folder.unlink()
            away.rename(self.folder)
        event("storage fails")
        assert self.handles[0].persisted_ids() == sorted(self.model.persisted)

    # ---- what must hold -----------------------------------------------------------------------------------

    def read(self, handle: int) -> Content:
        return {
            key: int(value[BIG // 2]) if isinstance(value, torch.Tensor) else value
            for key, value in self.handles[handle].items()
        }

    def check(self, handle: int) -> None:
        assert self.read(handle) == self.model.content(self.model.positions[handle])

    @rule(handle=HANDLE)
    def read_all(self, handle: int) -> None:
        self.check(handle)

    @rule(handle=HANDLE, key=KEYS)
    def read_one(self, handle: int, key: str) -> None:
        found = self.handles[handle].get(key)
        number = int(found[0]) if isinstance(found, torch.Tensor) else found
        assert number == self.model.content(self.model.positions[handle]).get(key)

    @rule(checkpoint_id=st.integers(0, 12))
    def read_elsewhere(self, checkpoint_id: int) -> None:
        """Wherever a reader stands, it sees what is seen there, or is told that nothing is."""
        reader = copy.copy(self.handles[0])  # which has heard of all epochs: it would be told of what was taken back
        reader.checkpoint_id = checkpoint_id
        if self.model.may_go_back(checkpoint_id):
            assert set(reader) == self.model.content(checkpoint_id).keys()
        else:
            with pytest.raises(DDictCheckpointRetiredError):
                len(reader)


def _run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        DictionaryModel,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dictionary_is_what_a_model_says() -> None:
    _run(15, 20)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_dictionary_is_what_a_model_says_for_10_000_steps() -> None:
    _run(int(os.environ.get(EXAMPLES, "200")), 50)
