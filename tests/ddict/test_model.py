"""Whatever several handles do with a dictionary, and whichever manager is killed, it is what a plain model says."""

from __future__ import annotations

import copy
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.errors import DDictKeyError, DDictWritesLostError
from ml_flashpoint.ddict.supervisor import MOST_DEATHS
from tests.support import tmpfs as tmpfs_folders
from tests.support.dictionaries import DEADLINE_S, await_copies, kill_manager, runtime_of

EXAMPLES = "FLASHPOINT_TEST_MODEL_EXAMPLES"
HANDLES = 3
WORKING_SET = 3
BIG = 70_000  # elements of a float32 tensor that is an object of its own

Content = dict[str, int]


@dataclasses.dataclass
class Write:
    """What a handle wrote: ``number`` None deletes the key."""

    key: str
    checkpoint_id: int
    writer: int
    number: int | None


class Model:
    """All writes in order, and what was committed of them.

    Attributes:
        floor: the oldest checkpoint that this still knows everything of.
        snapshots: what the dictionary held at a checkpoint when that was committed.
        uncommitted: for each handle, the managers that have writes of it that no commit covers.
        took_back: handles may be told of the loss of what another's rollback made uncommitted, whether they had any.
        late: keys that were written at a checkpoint that was committed already: a loss may or may not cost that write.
    """

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.floor = 0
        self.newest = 0
        self.committed = -1
        self.oldest = 0
        self.positions = [0] * HANDLES
        self.since = [0] * HANDLES
        self.snapshots: dict[int, Content] = {}
        self.persisted: dict[int, Content] = {}
        self.uncommitted: list[dict[int, set[int]]] = [{} for _ in range(HANDLES)]
        self.late: set[str] = set()
        self.took_back = False

    def content(self, checkpoint_id: int) -> Content:
        seen: dict[str, int | None] = {}
        for write in sorted(
            (write for write in self.writes if write.checkpoint_id <= checkpoint_id),
            key=lambda each: each.checkpoint_id,
        ):
            seen[write.key] = write.number
        return {key: number for key, number in seen.items() if number is not None}

    def write(self, handle: int, manager: int, key: str, number: int | None) -> None:
        at = self.positions[handle]
        self.writes = [w for w in self.writes if (w.key, w.checkpoint_id, w.writer) != (key, at, handle)]
        self.writes.append(Write(key, at, handle, number))
        self.uncommitted[handle].setdefault(manager, set()).add(at)
        if at <= self.committed:
            self.late.add(key)

    def move(self, handle: int, to: int) -> None:
        self.positions[handle] = to
        self.newest = max(self.newest, to)
        self.since[handle] = self.newest

    def target(self) -> int:
        """The newest checkpoint that every handle has moved past, or has fallen out of the working set of."""
        window = self.newest - WORKING_SET + 1
        self.oldest = max(self.oldest, min(window, self.committed))
        slowest = min(
            max(position, self.oldest, window if self.newest - since >= WORKING_SET else 0)
            for position, since in zip(self.positions, self.since, strict=True)
        )
        return max(self.committed, slowest - 1)

    def commit(self, checkpoint_id: int) -> None:
        if checkpoint_id > self.committed:
            self.committed = checkpoint_id
            self.snapshots[checkpoint_id] = self.content(checkpoint_id)
            self.late.clear()
            self.took_back = False
            for managers in self.uncommitted:
                for ids in managers.values():
                    ids -= set(range(checkpoint_id + 1))

    def rollback(self, handle: int, to: int) -> None:
        self.writes = [w for w in self.writes if w.writer != handle or w.checkpoint_id <= to]
        for ids in self.uncommitted[handle].values():
            ids -= {each for each in ids if each > to}
        self.move(handle, to)
        if self.committed > to:
            self.committed = to
            self.snapshots = {each: content for each, content in self.snapshots.items() if each <= to}
            self.snapshots.setdefault(to, self.content(to))
            self.persisted = {each: content for each, content in self.persisted.items() if each <= to}
            self.took_back = True
            # What others wrote above is not committed any more.
            for write in self.writes:
                if write.checkpoint_id > to and write.writer >= 0:
                    self.uncommitted[write.writer].setdefault(_manager_of(write.key), set()).add(write.checkpoint_id)

    def flatten(self, checkpoint_id: int, content: Content) -> None:
        """All handles are at this checkpoint, and what was before is nobody's."""
        self.writes = [Write(key, checkpoint_id, -1, number) for key, number in content.items()]
        self.floor = checkpoint_id
        self.positions = [checkpoint_id] * HANDLES
        self.since = [self.newest] * HANDLES
        self.uncommitted = [{} for _ in range(HANDLES)]
        self.late = set()


_places: dict[str, int] = {}


def _manager_of(key: str) -> int:
    return _places[key]


KEYS = st.integers(0, 7).map(lambda number: f"key {number}")
HANDLE = st.integers(0, HANDLES - 1)


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
        self.catch_up(handle)
        self.handles[handle][key] = torch.full((BIG,), float(self.count)) if big else self.count
        self.model.write(handle, _manager_of(key), key, self.count)

    @rule(handle=HANDLE, key=KEYS, big=st.booleans())
    def write(self, handle: int, key: str, big: bool) -> None:
        self.put(handle, key, big=big)

    @rule(handle=HANDLE, keys=st.sets(KEYS, min_size=1))
    def write_many(self, handle: int, keys: set[str]) -> None:
        self.count += 1
        self.catch_up(handle)
        self.handles[handle].update(dict.fromkeys(keys, self.count))
        for key in keys:
            self.model.write(handle, _manager_of(key), key, self.count)

    @rule(handle=HANDLE, key=KEYS)
    def delete(self, handle: int, key: str) -> None:
        self.catch_up(handle)
        if key in self.model.content(self.model.positions[handle]):
            del self.handles[handle][key]
            self.model.write(handle, _manager_of(key), key, None)
        else:
            with pytest.raises(DDictKeyError):
                del self.handles[handle][key]
            # The attempt may have made the manager known as one that this handle wrote to; nothing was written.

    @rule(handle=HANDLE)
    def checkpoint(self, handle: int) -> None:
        self.catch_up(handle)
        self.model.move(handle, self.model.positions[handle] + 1)
        assert self.handles[handle].checkpoint() == self.model.positions[handle]
        self.let_commit()

    @rule()
    def checkpoint_all(self) -> None:
        for handle in range(HANDLES):
            self.checkpoint(handle)

    @rule(handle=HANDLE, back=st.integers(0, WORKING_SET))
    def rollback(self, handle: int, back: int) -> None:
        self.catch_up(handle)
        to = max(self.model.positions[handle] - back, self.model.floor, self.model.newest - WORKING_SET + 1)
        assert self.handles[handle].rollback(to=to) == to
        self.model.rollback(handle, to)
        self.let_commit()

    @rule(handle=HANDLE)
    def sync(self, handle: int) -> None:
        expected = max(self.model.committed, 0)
        if expected < self.model.floor:
            return
        assert self.handles[handle].sync_to_newest_checkpoint() == expected
        self.model.move(handle, expected)
        self.let_commit()

    def catch_up(self, handle: int) -> None:
        """A handle that has fallen out of the working set goes on."""
        oldest = self.model.newest - WORKING_SET + 1
        if self.model.positions[handle] < oldest:
            self.handles[handle].checkpoint_id = oldest
            self.model.move(handle, oldest)
            self.let_commit()

    def let_commit(self) -> None:
        """Nothing is under way when a step is done: so the model knows what is committed."""
        expected = self.model.target()
        assert self.state("newest")["committed"] == expected
        self.model.commit(expected)

    def state(self, operation: str = "state") -> dict[str, Any]:
        assert self.dictionary is not None
        try:
            return self.dictionary._access.ask_main(operation)
        except DDictWritesLostError:
            # A main manager that took over does not know whether there were other handles, and says it once.
            assert self.model.took_back, "told of a loss that was none"
            return self.dictionary._access.ask_main(operation)

    # ---- persistence --------------------------------------------------------------------------------------

    @rule()
    def persist(self) -> None:
        committed = self.model.committed
        assert self.handles[0].persist() == committed
        if committed >= 0:
            self.model.persisted.setdefault(committed, self.model.snapshots[committed])
        assert self.handles[0].persisted_ids() == sorted(self.model.persisted)

    @precondition(lambda self: self.model.persisted)
    @rule(data=st.data(), handle=HANDLE)
    def restore(self, data: st.DataObject, handle: int) -> None:
        to = data.draw(st.sampled_from(sorted(self.model.persisted)))
        self.handles[handle].restore(to)
        self.model.persisted = {each: content for each, content in self.model.persisted.items() if each <= to}
        self.model.committed = self.model.newest = self.model.oldest = to
        self.model.flatten(to, self.model.persisted[to])
        self.model.snapshots = {to: self.model.persisted[to]}
        for each in self.handles:
            assert each.sync_to_newest_checkpoint() == to

    # ---- losses -------------------------------------------------------------------------------------------

    @rule(data=st.data(), lost_node=st.booleans(), wait=st.booleans(), by_moving=st.booleans())
    def kill(self, data: st.DataObject, lost_node: bool, wait: bool, by_moving: bool) -> None:
        assert self.dictionary is not None
        manager = data.draw(st.integers(0, self.managers - 1))
        if self.deaths[manager] == MOST_DEATHS:
            return  # it would stay down
        self.deaths[manager] += 1
        for handle in range(HANDLES):
            self.catch_up(handle)
        # One loss at a time: the next one is only survived with what the last one cost made up for.
        await_copies(self.dictionary, self.model.committed)
        before = kill_manager(self.dictionary, manager, lose_node=lost_node)
        if wait:
            runtime_of(self.dictionary).wait_until_ready(manager, other_than=before, timeout_s=DEADLINE_S)
        committed = self.model.committed
        to = max(committed, 0)
        losers = [number for number in range(HANDLES) if self.model.uncommitted[number].get(manager)]
        note(f"handles that lose writes: {losers}")
        event(f"manager {'0' if manager == 0 else '1 or 2'} killed, node {'lost' if lost_node else 'kept'}")
        before_that = [handle.checkpoint_id for handle in self.handles]
        told = self.learn_by_moving() if losers and by_moving else self.learn_by_writing(manager)
        # What others wrote just to find out stays, and can be lost, if they are not above what all go back to.
        found_out = {n for n in range(HANDLES) if n not in told and before_that[n] <= to and not (losers and by_moving)}
        assert set(losers) <= told.keys(), "not told of a loss"
        assert told.keys() <= set(losers) or self.model.took_back, "told of a loss that was none"
        assert {(error.manager, error.checkpoint_id) for error in told.values()} <= {(manager, to)}
        event(f"{len(told)} handles told, by {'moving' if losers and by_moving else 'writing'}")
        for number, handle in enumerate(self.handles):
            if handle.checkpoint_id < to:
                handle.checkpoint_id = to
            handle.rollback(to=to)
            self.model.rollback(number, to)
        self.model.committed = committed
        expected = {key: value for key, value in self.model.content(to).items() if _manager_of(key) != manager}
        if committed >= 0:
            was = self.model.snapshots[committed]
            expected |= {key: value for key, value in was.items() if _manager_of(key) == manager}
        self.adopt_uncertain(manager, to, expected)
        self.model.flatten(to, expected)
        for number in found_out if manager in _places.values() else ():
            self.model.uncommitted[number][manager] = {to}
        self.check(0)
        # So that there are copies again before the next loss.
        for handle in range(HANDLES):
            self.count += 1
            self.handles[handle][f"first {handle}"] = self.count
            self.model.write(handle, _manager_of(f"first {handle}"), f"first {handle}", self.count)
        onwards = self.model.newest + 1
        for number, handle in enumerate(self.handles):
            handle.checkpoint_id = onwards
            self.model.move(number, onwards)
        self.let_commit()

    def learn_by_writing(self, manager: int) -> dict[int, DDictWritesLostError]:
        """Which handles are told when they write at this manager next. What they write is rolled back later."""
        told = {}
        key = next((key for key in _places if _manager_of(key) == manager), None)
        for number, handle in enumerate(self.handles if key is not None else ()):
            try:
                handle[key] = -1
            except DDictWritesLostError as error:
                told[number] = error
        return told

    def learn_by_moving(self) -> dict[int, DDictWritesLostError]:
        """Which handles are told when all move on, the next commit having failed."""
        told = {}
        for _ in range(3):  # past the next checkpoint, past its commit, and to hear of that
            self.model.newest += 1
            for number, handle in enumerate(self.handles):
                try:
                    handle.checkpoint_id = self.model.newest
                except DDictWritesLostError as error:
                    told[number] = error
            assert self.state("newest")["committed"] == self.model.committed
        return told

    def adopt_uncertain(self, manager: int, to: int, expected: Content) -> None:
        """What the test's own write attempts, and late ones, have left at the checkpoint that all are at now."""
        late = {key for key in self.model.late if _manager_of(key) == manager}
        probed = next((key for key in _places if _manager_of(key) == manager), None)
        now = self.model.content(to)
        found = self.read(0)
        for key in late | ({probed} if probed is not None else set()):
            allowed = {expected.get(key), now.get(key)} | ({-1} if key == probed else set())
            assert found.get(key) in allowed
            expected.pop(key, None)
            if key in found:
                expected[key] = found[key]

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
        self.catch_up(handle)
        self.check(handle)

    @rule(handle=HANDLE, key=KEYS)
    def read_one(self, handle: int, key: str) -> None:
        self.catch_up(handle)
        found = self.handles[handle].get(key)
        number = int(found[0]) if isinstance(found, torch.Tensor) else found
        assert number == self.model.content(self.model.positions[handle]).get(key)


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


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(EXAMPLES not in os.environ, reason=f"takes long; set {EXAMPLES} to the number of examples")
def test_a_dictionary_is_what_a_model_says_for_long() -> None:
    _run(int(os.environ[EXAMPLES]), 40)
