"""Managers and writers that are lost: nobody reads an older value silently, and what is committed is whole steps."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict, DDictManagerLostError, PosixCheckpointPersister
from ml_flashpoint.ddict.client.session import Session, Standing
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictError,
    DDictFullError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from ml_flashpoint.ddict.links import Links, locator
from ml_flashpoint.ddict.options import COORDINATOR
from ml_flashpoint.ddict.runtime import embedded
from ml_flashpoint.ddict.wire.requests import Join, Move, Request
from ml_flashpoint.net.server import MAX_CONNECTIONS
from tests.ddict.support import BIG, Make, key_of, keys_of_all
from tests.support.dictionaries import DEADLINE_S, await_copies, await_that, kill_manager, pid_of, runtime_of, stopped


@pytest.fixture
def make(make: Make) -> Make:
    """Make dictionaries with copies on other nodes."""
    options = {"working_set_size": 8, "replication": "ring"}
    return lambda nodes=2, **named: make(1, nodes, 64 << 20, **{**options, **named})


@pytest.mark.slow
def test_no_handle_reads_an_older_value_silently(make: Make) -> None:
    d = make()
    key = key_of(d, 0)
    d[key] = 0
    d.checkpoint()
    assert d.wait_for_commit() == 0
    with stopped(pid_of(d, 1)):  # so that commits fall behind: at most that of 1 has begun, and 2 is skipped
        for number in range(1, 4):
            d[key] = number
            d.checkpoint()
    assert d.wait_for_commit() == 3
    readers = {at: copy.copy(d) for at in range(5)}
    for at, reader in readers.items():
        reader.checkpoint_id = at
    kill_manager(d, 0)

    assert {at: readers[at][key] for at in (0, 3, 4)} == {0: 0, 3: 3, 4: 3}
    with contextlib.suppress(DDictCheckpointRetiredError):
        assert readers[1][key] == 1
    for call in (lambda: readers[2][key], lambda: d.rollback(to=2)):
        with pytest.raises(DDictCheckpointRetiredError) as raised:
            call()
        assert raised.value.checkpoint_id == 3
    assert d.checkpoint_id == 4


def lose_a_manager_after(reader: DDict, d: DDict, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the last manager be lost when the first has answered with values that are not committed."""
    keys = keys_of_all(d)
    d.update(dict.fromkeys(keys, "whole"))
    d.checkpoint()
    d.wait_for_commit()
    d.update(dict.fromkeys(keys, "half a step"))
    reader.checkpoint_id = d.checkpoint_id
    access = reader._access
    get_many, epoch = access._get_many, d._access.state()["epoch"]

    def get_and_lose(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        found = get_many(*args, **named)
        kill_manager(d, len(keys) - 1)
        await_that(lambda: d._access.state()["epoch"] > epoch)
        return found

    monkeypatch.setattr(access, "_get_many", get_and_lose)
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("look", [lambda d: dict(d.items()), lambda d: dict(zip(d, d.values(), strict=True))])
def test_all_items_are_of_one_epoch(
    make: Make, monkeypatch: pytest.MonkeyPatch, look: Callable[[DDict], dict[str, str]]
) -> None:
    d = make()
    reader = copy.copy(d)
    keys = lose_a_manager_after(reader, d, monkeypatch)
    assert look(reader) == dict.fromkeys(keys, "whole")


@pytest.mark.slow
def test_a_filter_does_not_go_on_in_another_epoch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    d = make()
    reader = copy.copy(d)
    keys = lose_a_manager_after(reader, d, monkeypatch)
    found = reader.filter(lambda key, value: True)
    assert next(found) == (keys[0], "half a step")
    with pytest.raises(DDictError, match="one cut") as raised:
        next(found)
    assert raised.value.retryable
    assert dict(reader.filter(lambda key, value: True)) == dict.fromkeys(keys, "whole")


@pytest.mark.slow
def test_what_is_put_for_all_checkpoints_late_is_lost_with_a_word(make: Make) -> None:
    d = make()
    keys = keys_of_all(d)
    d[keys[0]] = 0
    d.checkpoint()
    assert d.wait_for_commit() == 0
    other = DDict.attach(d.serialize())
    other.sync_to_newest_checkpoint()
    other.pput(keys[1], "late")
    kill_manager(d, 1)

    with pytest.raises(DDictWritesLostError):
        other[keys[1]]
    other.rollback(to=0)
    assert keys[1] not in other


@pytest.mark.slow
def test_a_writer_that_does_nothing_holds_up_nobody_after_a_loss(make: Make) -> None:
    d = make()
    idle, keys = copy.copy(d), keys_of_all(d)
    for handle in (d, idle):
        handle[keys[0]] = 0
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(DDict.checkpoint, (d, idle)))
    assert d.wait_for_commit() == 0
    idle.checkpoint_id = 5  # where it has written nothing
    kill_manager(d, 1)
    assert d.get(keys[1]) is None

    for number in range(3):
        d[keys[1]] = number
        d.checkpoint()

    assert d.wait_for_commit() == 3


@pytest.mark.slow
def test_a_stuck_writer_holds_up_others_until_the_timeout_and_is_named(make: Make) -> None:
    d = make(working_set_size=2, timeout=2.0)
    stuck = copy.copy(d)
    d["a"] = stuck["b"] = 0
    d.checkpoint()

    with pytest.raises(DDictTimeoutError, match=f"{stuck._access.standing.handle} of process {os.getpid()} is at 0"):
        d.checkpoint()

    assert d.checkpoint_id == 1
    with pytest.raises(DDictTimeoutError, match=f"{stuck._access.standing.handle} of process {os.getpid()} is at 0"):
        d.wait_for_commit()
    stuck.detach()
    assert d.checkpoint() == 2
    assert d.wait_for_commit() == 1


@pytest.mark.slow
def test_a_manager_that_does_not_answer_is_named_in_time(make: Make) -> None:
    d = make(timeout=2.0)
    d["a"] = 0
    with stopped(pid_of(d, 1)):
        d.checkpoint()
        for call in (d.wait_for_commit, d.sync_to_newest_checkpoint):
            with pytest.raises(DDictTimeoutError, match="manager 1 has not answered 'prepare' yet"):
                call()
    assert d.wait_for_commit(timeout=DEADLINE_S) == 0


@pytest.mark.slow
def test_a_manager_that_stays_down_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "MOST_DEATHS", 0)
    stored = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "persist_count": -1}
    options = {"working_set_size": 8, "replication": "ring", **stored}
    d = DDict(1, 2, 64 << 20, timeout=DEADLINE_S, **options)
    try:
        d[key_of(d, 0)] = 1
        d.checkpoint()
        assert d.persist() == 0
        kill_manager(d, 1)
        await_that(lambda: 1 in runtime_of(d).down)
        d[key_of(d, 0)] = 2
        d.checkpoint()
        d._access.timeout_s = 2.0

        for call in (d.wait_for_commit, d.sync_to_newest_checkpoint):
            began = time.monotonic()
            with pytest.raises(
                DDictTimeoutError, match=r"manager 1.*make the dictionary anew, and restore\(\)"
            ) as told:
                call()
            assert told.value.manager == 1
            assert time.monotonic() - began < 2.0 + DEADLINE_S / 4
    finally:
        with pytest.raises(DDictTimeoutError):  # what is newest could not be persisted
            d.destroy()
    with DDict(1, 2, 64 << 20, **options) as anew:
        anew.restore(anew.persisted_ids()[-1])
        assert anew.values() == [1]


@pytest.mark.slow
def test_checkpoints_are_made_of_whole_steps_with_a_persister_too(tmp_path: Any) -> None:
    stored = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "timeout": 2.0}
    with DDict(1, 1, 64 << 20, **stored) as d:
        stuck = copy.copy(d)
        d["a"] = stuck["b"] = 0
        with pytest.raises(DDictTimeoutError, match="cannot retire"):
            d.checkpoint()
        stuck.detach()


def _write(dictionary: DDict, pipe: Pipe, how: str) -> None:
    dictionary["done"] = 1
    dictionary.checkpoint()
    dictionary["open"] = 1
    pipe.send("written")
    if how == "killed":
        signal.pause()
    elif how == "failed":
        raise SystemError("in the middle of a step")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["orderly", "killed", "failed"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_who_is_killed_loses_what_it_had_open_and_who_ends_does_not(make: Make, how: str, method: str) -> None:
    d = make(working_set_size=2)
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_write, args=(d, theirs, how))
    child.start()
    theirs.close()
    assert ours.poll(DEADLINE_S)
    ours.recv()
    if how == "killed":
        child.kill()
    child.join(DEADLINE_S)
    assert child.exitcode is not None
    await_that(lambda: d._access.state()["writers"] == 0)
    d.checkpoint_id = 1

    for number in range(1, 4):  # others leave it behind
        d["mine"] = number
        d.checkpoint()
        d.checkpoint_id = number + 1
    assert d.wait_for_commit() == 3

    assert d["done"] == 1
    assert ("open" in d) == (how == "orderly")


def _write_once(dictionary: DDict) -> None:
    dictionary["key"] = 1
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_who_goes_on_after_all_were_killed_sees_nothing_of_what_they_had_begun(make: Make) -> None:
    d = make()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_write, args=(d, theirs, "killed"))
    child.start()
    assert ours.poll(DEADLINE_S)
    child.kill()
    child.join(DEADLINE_S)

    assert d.sync_to_newest_checkpoint() == 0

    assert d["done"] == 1
    d.checkpoint()
    assert "open" not in d


@pytest.mark.slow
def test_what_was_left_and_is_not_committed_for_one_who_was_killed_is_told(make: Make) -> None:
    d = make()
    leaves, context = copy.copy(d), multiprocessing.get_context("fork")
    leaves["left"] = 1
    child = context.Process(target=_write_once, args=(d,))  # at 0, which is never whole now
    child.start()
    child.join(DEADLINE_S)
    leaves.checkpoint()
    leaves.detach()

    with pytest.raises(DDictWritesLostError, match="killed"):
        d.sync_to_newest_checkpoint()

    assert (d.sync_to_newest_checkpoint(), d.items()) == (0, [])


# ---- damage ----------------------------------------------------------------------------------------------------------


def fill(dictionary: DDict) -> dict[int, object]:
    """Commit small and large values at every manager."""
    values: dict[int, object] = {key: f"value {key}" for key in range(20)}
    values |= {key: torch.full((BIG,), float(key)) for key in range(20, 28)}
    dictionary.update(values)
    dictionary.checkpoint()
    assert dictionary.wait_for_commit() == 0
    await_copies(dictionary, 0)
    return values


def damage(dictionary: DDict, node: int, of: int, *, large: bool | None = None) -> int:
    """Alter a byte of each part of a manager on a node; of its values, or of its snapshots only. Returns how many."""
    found = 0
    for part in Path(dictionary._configuration.base, f"node-{node}").glob(f"step-*_ckpt/rank-{of:05d}-*.safetensors"):
        content = bytearray(part.read_bytes()[:8192])
        if large is None or large == (b'{"format"' not in content):
            with part.open("r+b") as file:
                file.seek(100)
                byte = file.read(1)
                file.seek(100)
                file.write(bytes([byte[0] ^ 1]))
            found += 1
    return found


def check(dictionary: DDict, values: dict[int, object]) -> None:
    for key, value in values.items():
        found = dictionary[key]
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


@pytest.mark.slow
@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("large", [True, False])
def test_what_is_damaged_in_memory_comes_from_a_copy(large: bool) -> None:
    with DDict(1, 3, 256 << 20, replication="ring", timeout=DEADLINE_S) as dictionary:
        values = fill(dictionary)
        with stopped(pid_of(dictionary, 0)):
            assert damage(dictionary, node=0, of=0, large=large)
            kill_manager(dictionary, 0)
        check(dictionary, values)


@pytest.mark.slow
def test_a_checkpoint_without_changes_sends_nothing_and_is_recovered_all_the_same(make: Make) -> None:
    d = make()

    def parts() -> list[Path]:
        return sorted(Path(d._configuration.base).glob("node-*/step-*_ckpt/*.manifest"))

    keys = keys_of_all(d)
    d.update({keys[0]: 1, keys[1]: torch.ones(BIG)})
    d.checkpoint()
    assert d.wait_for_commit() == 0
    before = parts()
    for number in range(1, 4):
        d.checkpoint()
        assert d.wait_for_commit() == number

    assert parts() == before
    kill_manager(d, 1, lose_node=True)
    assert (d[keys[0]], d[keys[1]].sum()) == (1, BIG)
    assert d.sync_to_newest_checkpoint() == 3


@pytest.mark.slow
@pytest.mark.damages_on_purpose
def test_what_was_taken_back_does_not_stay_in_memory(make: Make) -> None:
    d = make(working_set_size=4)
    d["key"] = 0
    d.checkpoint()
    d.wait_for_commit()

    parts = []
    for _ in range(3):
        d["key"] = torch.zeros(BIG)
        d.checkpoint()
        d.wait_for_commit()
        parts.append(len(list(Path(d._configuration.base).glob("*/step-*/*.manifest"))))
        d.rollback(to=0)
        d.checkpoint()
    assert parts[0] == parts[1] == parts[2]


def test_what_is_damaged_everywhere_is_lost_and_told() -> None:
    with DDict(1, 2, 256 << 20, replication="ring", timeout=DEADLINE_S) as dictionary:
        values = fill(dictionary)
        key = next(key for key in values if dictionary.which_manager(key) == 0)
        with stopped(pid_of(dictionary, 0)):
            assert damage(dictionary, node=0, of=0)
            assert damage(dictionary, node=1, of=0)
            kill_manager(dictionary, 0)
        with pytest.raises(DDictManagerLostError, match="no whole copy") as raised:
            dictionary[key]
        assert not raised.value.retryable


# ---- a full tmpfs ----------------------------------------------------------------------------------------------------


def value(number: int) -> torch.Tensor:
    return torch.full((70_000,), float(number))


@pytest.mark.slow
def test_a_full_tmpfs(small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_DDICT_BASE", str(small_tmpfs))
    with DDict(1, 2, 400 << 20, working_set_size=2, replication="ring", timeout=DEADLINE_S) as d:
        d.update({number: value(number) for number in range(4)})
        d.checkpoint()
        assert d.wait_for_commit() == 0
        ballast = small_tmpfs / "ballast"
        _fill(ballast)

        with pytest.raises(DDictFullError, match="enlarge the tmpfs"):
            d.update({("more", number): value(number) for number in range(20)})  # some may find room that is kept free
        for manager in range(2):
            epoch = d._access.state()["epoch"]
            kill_manager(d, manager)
            await_that(lambda epoch=epoch: d._access.state()["epoch"] > epoch)  # type: ignore[misc]
            for number in range(4):
                assert torch.equal(_read(d, number), value(number))
        ballast.unlink()
        d.sync_to_newest_checkpoint()
        d.checkpoint()
        d["more"] = value(5)
        d.checkpoint()
        d.wait_for_commit()
        assert torch.equal(d["more"], value(5))


def _fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(1 << 12))


def _read(d: DDict, key: int) -> torch.Tensor:
    try:
        return d[key]
    except DDictWritesLostError:
        d.sync_to_newest_checkpoint()
        return d[key]


# ---- as many processes as may write ----------------------------------------------------------------------------------


MOST = MAX_CONNECTIONS // 2


class Process:
    """All that the coordinator sees of a process that writes: its two connections, and a handle."""

    def __init__(self, dictionary: DDict, number: int, timeout_s: float) -> None:
        configuration = dictionary._configuration
        self.links = Links(locator(configuration), configuration.secret)
        self._session = Session(self.links)
        try:
            self._session.begin(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise
        self.standing = Standing(f"{number:016x}", self._session.id, 0, 0)
        self.ask(Join(self.standing.account()))

    def ask(self, request: Request) -> None:
        self.links.call(COORDINATOR, request, deadline=time.monotonic() + DEADLINE_S)

    def close(self) -> None:
        self._session.close()


@pytest.mark.slow
def test_as_many_processes_as_may_write() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 5 * MAX_CONNECTIONS:
        pytest.skip("a process here may not have both ends of so many connections open")
    with (
        DDict(1, 2, 64 << 20, replication="ring", working_set_size=2, timeout=DEADLINE_S) as d,
        contextlib.ExitStack() as ends,
    ):
        d["a"] = 0
        others = []
        for number in range(1, MOST):
            others.append(Process(d, number, DEADLINE_S))
            ends.callback(others[-1].close)
        assert d._access.state()["writers"] == MOST

        for _ in range(2):
            with pytest.raises(
                DDictManagerLostError, match=f"as many connections as it may, {MAX_CONNECTIONS}"
            ) as told:
                Process(d, MOST, timeout_s=0.5)
            assert told.value.retryable
            assert "detach()" in str(told.value)

        for each in others:
            each.ask(Move(each.standing.account(), 1, onwards=False))
        d.checkpoint()
        assert d.wait_for_commit() == 0, "those that are attached go on"
        others[0].close()
        await_that(lambda: d._access.state()["writers"] == MOST - 1)
        ends.callback(Process(d, MOST, DEADLINE_S).close)
