"""Ranks agree on who writes what of replicated state: each name once, whoever changes, and without waiting for those
who do not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined, unused-ignore]

from ml_flashpoint.engine.replicas import Replicas, Table
from ml_flashpoint.engine.store import JobStore, SignedStore
from ml_flashpoint.format.errors import DeadlineError, SaveError
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.state.replicas import Replica

_WAIT_S = 60.0


class _Ranks:
    """Some ranks of one process, each with a thread that answers."""

    def __init__(self, count: int) -> None:
        job = JobStore(None, HashStore(), b"secret")
        self.each = [Replicas(rank, count, job) for rank in range(count)]
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._answer, args=(each,), daemon=True) for each in self.each]
        for thread in self._threads:
            thread.start()

    def _answer(self, replicas: Replicas) -> None:
        while not self._ended.wait(0.001):
            replicas.answer()

    def agree(
        self, step: int, names: dict[int, str], deadline_s: float = _WAIT_S, share: Any = None
    ) -> dict[int, Table]:
        """Have some ranks save a step at once, which have items of these names, of one letter each."""

        def of(rank: int) -> Table:
            items = [Replica(name, 1) for name in names[rank]]
            return self.each[rank].agree(
                SaveId(1, step), names[rank], names[rank], lambda: items, deadline_s, share=share
            )

        with ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(of, names), strict=True))

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def ranks() -> Any:
    made: list[_Ranks] = []

    def make(count: int) -> _Ranks:
        made.append(_Ranks(count))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[[int], _Ranks]


def _share(table: Table) -> bytes:
    return "".join(sorted(table.written)).encode()


def _written(tables: dict[int, Table]) -> str:
    assert len({table.name for table in tables.values()}) == 1
    return "".join(sorted(name for table in tables.values() for name in table.written))


@pytest.mark.parametrize("names", [["abcd"] * 3, ["abcd", "abx", "abcd"], ["a", "b", "c"], ["ab"]])
def test_every_name_is_written_once(ranks: Make, names: list[str]) -> None:
    several = ranks(len(names))
    tables = several.agree(1, dict(enumerate(names)))
    assert _written(tables) == "".join(sorted(set("".join(names))))
    assert several.agree(2, dict(enumerate(names))) == tables


def test_a_rank_that_changes_alone_waits_until_the_others_have_come_as_far_and_they_follow(ranks: Make) -> None:
    several = ranks(3)
    several.agree(1, dict.fromkeys(range(3), "ab"))
    before = several.agree(2, {0: "ab", 2: "ab"})
    changed = several.agree(2, {1: "abc", 0: "ab"}, _WAIT_S)[1]
    assert changed.written >= {"c"}
    assert before[0].name != changed.name
    step, now = 3, several.agree(3, {0: "ab", 1: "abc", 2: "ab"})
    while len({table.name for table in now.values()}) > 1:  # saves of different tables are not verified
        step += 1
        now = several.agree(step, {0: "ab", 1: "abc", 2: "ab"})
    assert _written(now) == "abc"


def test_a_rank_that_does_not_come_is_named_and_not_waited_for_again(ranks: Make) -> None:
    several = ranks(2)
    with pytest.raises(DeadlineError, match="rank 1 has not saved"):
        several.agree(1, {0: "ab"}, 0.1)
    with pytest.raises(DeadlineError, match="rank 1 has not saved"):
        several.agree(2, {0: "ab"})
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(several.agree, 3, {1: "ab"})
        with contextlib.suppress(DeadlineError):  # it may come a moment later
            several.agree(3, {0: "ab"})
        came.result()
    for step in range(4, 1000):
        with contextlib.suppress(DeadlineError):
            assert _written(several.agree(step, {0: "ab", 1: "ab"})) == "ab"
            break


def test_a_rank_that_cannot_read_its_state_is_not_waited_for(ranks: Make) -> None:
    several = ranks(2)
    several.each[0].pass_over(SaveId(1, 1))
    with pytest.raises(SaveError, match="could not read its state"):
        several.agree(1, {1: "ab"}, 10 * _WAIT_S)
    assert _written(several.agree(2, {0: "ab", 1: "ab"})) == "ab"
    several.each[0].pass_over(SaveId(1, 3))
    assert "c" in several.agree(3, {1: "abc"}, 10 * _WAIT_S)[1].written  # the other one goes by what it had


def test_rank_0_collects_what_all_write_by_a_table(ranks: Make) -> None:
    several = ranks(2)
    name = several.agree(1, {0: "ab", 1: "ab"})[0].name
    large = bytes(range(256)) * 100_000
    several.each[0].publish(name, lambda: large)
    with pytest.raises(DeadlineError) as caught:
        several.each[0].collect(name, 0.05)
    assert caught.value.rank == 1
    several.each[1].publish(name, lambda: b"one")
    several.each[1].publish(name, lambda: pytest.fail("it is published"))
    assert several.each[0].collect(name, _WAIT_S) == [large, b"one"]


def test_a_save_does_not_wait_for_a_store_that_is_silent_but_to_the_deadline_if_its_structure_has_changed() -> None:
    asked, thawed = threading.Event(), threading.Event()

    class Plain:
        def __init__(self, store: PrefixStore) -> None:
            self.store = store

        def add(self, key: str, amount: int) -> int:
            if asked.is_set():
                thawed.wait(_WAIT_S)
            return self.store.add(key, amount)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

    class Job(JobStore):
        def connect(self, prefix: str) -> SignedStore:
            client: Any = SignedStore(store, prefix, b"secret")
            client.plain = Plain(client.plain)
            return client  # type: ignore[no-any-return]

    store = HashStore()
    both = [Replicas(rank, 2, Job(None, store, b"secret")) for rank in range(2)]
    with ThreadPoolExecutor(3) as pool:
        agree = [pool.submit(each.agree, SaveId(1, 1), "k", "k", lambda: [Replica("a", 1)], _WAIT_S) for each in both]
        table = agree[1].result().name
        both[1].publish(table, lambda: b"a")
        asked.set()
        answer = pool.submit(both[1].answer)  # as the board's thread does, until rank 0's process is thawed
        both[1].publish(table, lambda: b"a")
        assert both[1].agree(SaveId(1, 2), "k", "k", list, 0).name == table
        with pytest.raises(DeadlineError):
            both[0].agree(SaveId(1, 3), "other", "k", lambda: [Replica("b", 1)], 0.01)
        assert not answer.done()
        thawed.set()


def test_a_count_of_changes_that_another_process_has_made_no_number_is_got_over() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    replicas = Replicas(0, 2, JobStore(("127.0.0.1", server.port), server, b"secret"))
    server.set("table/changes", "garbage")
    items = [Replica("a", 1)]
    for step, error in ((1, "the job's store failed"), (2, "rank 1 has not saved")):
        with pytest.raises(DeadlineError, match=error):
            replicas.agree(SaveId(1, step), "k", "k", lambda: items, 0)


def test_a_list_that_is_needed_stays_however_often_another_rank_changes() -> None:
    job = JobStore(None, HashStore(), b"secret")
    several = [Replicas(rank, 2, job) for rank in range(2)]

    def agree(rank: int, step: int, plan: str) -> Table:
        items = [Replica(f"of rank {rank}", 1)]
        return several[rank].agree(SaveId(1, step), f"k{rank}", plan, lambda: items, 0, share=_share)

    for step in range(1, 30):
        with pytest.raises(DeadlineError, match="rank 0 has"):  # not come as far
            agree(1, step, f"changed at {step}")
        if step == 1:
            with pytest.raises(DeadlineError, match="rank 1 has not published its items"):
                agree(0, step, "the same")
            several[1].answer()
        several[0].answer()  # publishes what rank 0 writes by the new table
        table = agree(0, step, "the same")
        several[0].answer()
        assert agree(1, step, f"changed at {step}").name == table.name


def test_a_rank_that_has_not_changed_publishes_what_it_writes_by_a_new_table(ranks: Make) -> None:
    several = ranks(2)
    several.agree(1, {0: "ab", 1: "ab"}, share=_share)
    table = several.agree(2, {0: "abc", 1: "ab"}, share=_share)[0]  # rank 1 has copied by the table before
    shares = several.each[0].collect(table.name, _WAIT_S)
    assert sorted(b"".join(shares)) == sorted(b"abc")
