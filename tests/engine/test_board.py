"""The board, with real stores: in this process, and in others that are stopped, killed and started again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.distributed_c10d import Store

from ml_flashpoint import events
from ml_flashpoint.engine.board import Board
from ml_flashpoint.engine.rounds import Member, Verdict
from ml_flashpoint.engine.store import SignedStore
from ml_flashpoint.format.errors import CapacityError, FlashpointError, ReplicationError
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.ranks.retention import Keep
from tests.support.forked import Child, preload, wait_until
from tests.workers import checkpointer_jobs as jobs

preload("tests.workers.checkpointer_jobs")

_FIRST = Verdict(0, (), SaveId(1, 0))


class _Job:
    """Ranks of a job, as threads: each commits what it saves at once, and its copies are made as the test says."""

    def __init__(self, ranks: int, connect: Callable[[], SignedStore], first: Verdict = _FIRST, **options: Any) -> None:
        self.copy_error: FlashpointError | None = None
        self.hearing_fails = False
        self.heard: list[list[Verdict]] = [[] for _ in range(ranks)]
        self.emitted: list[tuple[type[events.Event], dict[str, Any]]] = []
        self.boards = [
            Board(
                Member(first, Keep(1)),
                rank=rank,
                ranks=ranks,
                connect=connect,
                push=self._push,
                heard=partial(self._hear, rank),
                emit=lambda kind, **fields: self.emitted.append((kind, fields)),
                **options,
            )
            for rank in range(ranks)
        ]
        for board in self.boards:
            board.start()

    def _push(self, save: SaveId, verdict: Verdict) -> None:
        if self.copy_error is not None:
            raise self.copy_error

    def _hear(self, rank: int, verdict: Verdict) -> None:
        self.heard[rank].append(verdict)
        if self.hearing_fails:
            raise ValueError("a subscriber fails")

    def save(self, step: int, *, explicit: bool = False, ranks: Iterable[int] = ()) -> None:
        """Save a step on some ranks, all by default, and commit it there."""
        for rank in ranks or range(len(self.boards)):
            self.boards[rank].call(SaveId(1, step), explicit=explicit)
            self.boards[rank].commit(SaveId(1, step))

    def await_verified(self, step: int) -> None:
        """Wait until all ranks know that a step is verified."""
        for board in self.boards:
            wait_until(lambda board=board: board.verdict.newest == SaveId(1, step), f"step {step} verified")  # type: ignore[misc]

    def close(self) -> None:
        """Close all boards."""
        for board in self.boards:
            board.close(0)
        assert all(board.close(30) for board in self.boards)


@pytest.fixture
def begin() -> Iterator[Callable[..., _Job]]:
    jobs: list[_Job] = []

    def make(ranks: int, connect: Callable[[], SignedStore], first: Verdict = _FIRST, **options: Any) -> _Job:
        jobs.append(_Job(ranks, connect, first, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def _signed(store: Store, secret: bytes = b"secret") -> SignedStore:
    return SignedStore(store, "run-1", secret)


def _client(port: int, secret: bytes = b"secret") -> SignedStore:
    return _signed(TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5)), secret)


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def in_process(server: TCPStore) -> Callable[[], SignedStore]:
    return lambda: _client(server.port)


def test_a_process_that_is_alone_verifies_what_it_commits(begin: Callable[..., _Job]) -> None:
    store = HashStore()
    job = begin(1, lambda: _signed(store))
    for step in range(10, 100, 10):
        job.save(step, explicit=True)
        job.await_verified(step)
    assert store.num_keys() <= 5, "counts of earlier rounds stay in the store"


def test_ranks_that_save_alike_verify_their_saves(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    job = begin(4, in_process)
    for step in range(10, 200, 10):
        job.save(step)
    job.save(200, explicit=True)
    job.await_verified(200)
    for heard in job.heard:
        assert [verdict.number for verdict in heard] == sorted({verdict.number for verdict in heard})


def test_a_save_whose_copies_fail_is_verified_once_they_can_be_made(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    job = begin(2, in_process)
    job.copy_error = ReplicationError("no holder can be reached")
    job.save(10, explicit=True)
    wait_until(lambda: job.boards[0].verdict.number >= 3, "several rounds about step 10")
    assert all(board.verdict.newest < SaveId(1, 10) for board in job.boards)
    job.copy_error = None
    job.await_verified(10)


def test_a_save_for_whose_copies_there_is_no_room_is_not_tried_again(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    job = begin(2, in_process)
    job.copy_error = CapacityError("no room")
    job.save(10, explicit=True)
    wait_until(lambda: all(board.verdict.lost == (SaveId(1, 10),) for board in job.boards), "step 10 is lost")
    job.copy_error = None
    job.save(20, explicit=True)
    job.await_verified(20)


def test_a_failure_to_take_note_of_a_verdict_is_none_of_the_store(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    job = begin(2, in_process)
    job.hearing_fails = True
    for step in (10, 20):
        job.save(step, explicit=True)
        job.await_verified(step)
    wait_until(lambda: all(heard and heard[-1].newest == SaveId(1, 20) for heard in job.heard), "all have heard")
    job.close()
    assert job.emitted == []


def test_an_explicit_save_before_the_save_of_the_round_is_verified_at_once(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    job = begin(2, in_process, Verdict(0, (), SaveId(1, 500)))
    job.save(10, explicit=True)
    job.await_verified(10)


def test_the_ranks_that_nothing_is_heard_of_are_named(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHPOINT_LATE_S", "0.05")
    job = begin(3, in_process)
    job.save(10, ranks=[0, 2])
    wait_until(lambda: len(job.emitted) >= 2, "two reports")
    (kind, first), (_, second) = job.emitted[:2]
    assert kind is events.RanksMissing
    assert (first["step"], first["ranks"]) == (10, (1,))
    assert second["seconds"] > first["seconds"]
    job.save(10, ranks=[1])
    job.await_verified(10)
    assert in_process().plain.add("count/0", 0) == 3, "each rank has answered once"


def test_a_store_that_cannot_be_reached_verifies_nothing_until_it_can(begin: Callable[..., _Job]) -> None:
    reachable, store = threading.Event(), HashStore()

    def connect() -> SignedStore:
        if not reachable.is_set():
            raise ConnectionRefusedError("nobody listens")
        return _signed(store)

    job = begin(2, connect)
    job.save(10)
    wait_until(lambda: len(job.emitted) == 2, "ranks that say so")
    assert all("nobody listens" in fields["error"] for _, fields in job.emitted)
    assert all(board.verdict == _FIRST for board in job.boards)
    reachable.set()
    job.save(20, explicit=True)
    job.await_verified(20)
    assert [kind for kind, _ in job.emitted] == [events.AgreementFailed] * 2, "once a rank"


def test_a_store_that_was_killed_and_comes_back_empty_goes_on(
    begin: Callable[..., _Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHPOINT_LATE_S", "0.2")  # the count of answers is lost with the store
    with Child(jobs.serve, 0) as first:
        port = first.next_report("port")[1]
        job = begin(3, lambda: _client(port))
        job.save(10, explicit=True)
        job.await_verified(10)
        first.kill()
        job.save(20)
        failed = lambda: [kind for kind, _ in job.emitted].count(events.AgreementFailed)  # noqa: E731
        wait_until(lambda: failed() == 3, "ranks that miss the store")
        assert all(board.verdict.newest == SaveId(1, 10) for board in job.boards)
        with Child(jobs.serve, port) as second:
            second.next_report("port")
            job.save(30, explicit=True)
            job.await_verified(30)
            job.close()


def test_saves_go_on_while_the_store_is_stopped_and_are_verified_when_it_goes_on(begin: Callable[..., _Job]) -> None:
    with Child(jobs.serve, 0) as server:
        port = server.next_report("port")[1]
        job = begin(2, lambda: _client(port))
        job.save(10, explicit=True)
        job.await_verified(10)
        server.stop()
        for step in range(20, 100, 10):
            job.save(step)
        assert all(board.verdict.newest == SaveId(1, 10) for board in job.boards)
        server.go_on()
        job.save(100, explicit=True)
        job.await_verified(100)
        job.close()


@pytest.mark.parametrize("key", ["verdict", "count"])
def test_a_value_that_makes_no_sense_is_an_error_and_is_got_over(
    begin: Callable[..., _Job], server: TCPStore, in_process: Callable[[], SignedStore], key: str
) -> None:
    job = begin(2, in_process)
    job.save(10, explicit=True)
    job.await_verified(10)
    if key == "verdict":
        in_process().set("verdict", "[-1]")
    else:  # as another process can: it is no number, and the server ends the connection of whoever adds to it
        stranger = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=5))
        stranger.set(f"run-1/count/{job.boards[0].verdict.number}", "garbage")
    wait_until(lambda: job.emitted != [], "a rank to notice")
    job.save(20, explicit=True)
    job.await_verified(20)


def test_a_verdict_is_the_only_one_of_its_number_where_the_store_fails_as_it_is_published(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHPOINT_LATE_S", "0.2")
    busy, heard = threading.Event(), threading.Event()

    class FailsOnce:
        """Counts of a store that breaks once a verdict is there, while the next decision would be another one."""

        def __init__(self, plain: Store) -> None:
            self.plain = plain

        def __getattr__(self, name: str) -> Any:
            return getattr(self.plain, name)

        def delete_key(self, key: str) -> bool:
            if not busy.is_set():
                assert heard.wait(30)
                busy.set()
                raise RuntimeError("the connection broke")
            return bool(self.plain.delete_key(key))

    def connect() -> SignedStore:
        client = in_process()
        client.plain = FailsOnce(client.plain)  # type: ignore[assignment]
        return client

    job = begin(2, connect, persist_every=10, persister_is_busy=busy.is_set)
    job.save(10, explicit=True)
    wait_until(lambda: job.heard[1] != [], "rank 1 hears of the verdict")
    heard.set()
    job.save(20, explicit=True)
    job.await_verified(20)
    wait_until(lambda: job.heard[0][-1:] == job.heard[1][-1:], "both have heard the newest verdict")
    numbered = {verdict.number: verdict for verdict in job.heard[0]}
    assert all(numbered[verdict.number] == verdict for verdict in job.heard[1] if verdict.number in numbered)
    assert job.heard[1][0].persist == SaveId(1, 10)
    assert numbered[job.heard[1][0].number].persist == SaveId(1, 10)


def test_a_board_whose_store_hangs_closes_at_the_deadline(begin: Callable[..., _Job]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        entered = threading.Event()

        def connect() -> SignedStore:
            entered.set()
            return _signed(TCPStore("127.0.0.1", silent.getsockname()[1], None, False, timedelta(seconds=3)))

        job = begin(1, connect)
        assert entered.wait(30)
        left: list[int] = []
        assert job.boards[0].close(0.01, lambda: left.append(0)) is False
        assert left == []
    job.close()


def test_a_last_call_is_made_on_the_thread_unless_the_store_has_failed(begin: Callable[..., _Job]) -> None:
    store, left = HashStore(), []
    job = begin(1, lambda: _signed(store))
    assert job.boards[0].close(30, lambda: left.append(threading.current_thread()))
    assert [thread.name for thread in left] == ["flashpoint-board"]

    def unreachable() -> SignedStore:
        raise RuntimeError("connection refused")

    job = begin(1, unreachable)
    wait_until(lambda: job.emitted != [], "the store to fail")
    assert job.boards[0].close(30, lambda: left.append(threading.current_thread()))
    assert len(left) == 1
