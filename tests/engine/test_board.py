"""The board, with real stores: in this process, and in others that are stopped, killed and started again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.distributed_c10d import Store

from ml_flashpoint.engine.board import Board
from ml_flashpoint.engine.rounds import Member, Verdict
from ml_flashpoint.engine.store import SignedStore
from ml_flashpoint.format.errors import ReplicationError
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.ranks.retention import Keep
from tests.support.forked import Child, preload, wait_until
from tests.workers import board_store

preload("tests.workers.board_store")

_FIRST = Verdict(0, (), SaveId(1, 0))


class _Job:
    """Ranks of a job, as threads: each commits what it saves at once, and its copies are made as the test says."""

    def __init__(self, ranks: int, connect: Callable[[], SignedStore], first: Verdict = _FIRST) -> None:
        self.copies_fail = threading.Event()
        self.heard: list[list[Verdict]] = [[] for _ in range(ranks)]
        self.boards = [
            Board(
                Member(first, Keep(1)),
                rank=rank,
                ranks=ranks,
                connect=connect,
                push=self._push,
                heard=self.heard[rank].append,
            )
            for rank in range(ranks)
        ]

    def _push(self, save: SaveId, verdict: Verdict) -> None:
        if self.copies_fail.is_set():
            raise ReplicationError("no holder can be reached")

    def save(self, step: int, *, explicit: bool = False, ranks: range | None = None) -> None:
        """Save a step on some ranks, all by default, and commit it."""
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

    def make(ranks: int, connect: Callable[[], SignedStore], first: Verdict = _FIRST) -> _Job:
        jobs.append(_Job(ranks, connect, first))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def _signed(store: Store, secret: bytes = b"secret") -> SignedStore:
    return SignedStore(store, "run-1", secret)


def _client(port: int, secret: bytes = b"secret") -> SignedStore:
    return _signed(TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5)), secret)


@pytest.fixture
def in_process() -> Callable[[], SignedStore]:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return lambda: (server, _client(server.port))[1]


def test_a_process_that_is_alone_verifies_what_it_commits(begin: Callable[..., _Job]) -> None:
    store = HashStore()
    job = begin(1, lambda: _signed(store))
    for step in (10, 20, 30):
        job.save(step, explicit=True)
        job.await_verified(step)


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


def test_a_save_that_one_rank_has_not_called_is_not_verified_and_the_next_one_is(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    job = begin(3, in_process)
    job.save(10)
    job.await_verified(10)
    job.save(20, ranks=range(2))
    job.save(30, explicit=True)
    job.await_verified(30)
    assert all(SaveId(1, 20) not in verdict.verified for heard in job.heard for verdict in heard)


def test_a_save_without_copies_is_not_verified(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    job = begin(2, in_process)
    job.copies_fail.set()
    job.save(10)
    wait_until(lambda: all(board.verdict.number for board in job.boards), "a round without result")
    assert all(board.verdict.verified == () for board in job.boards)
    job.copies_fail.clear()
    job.save(20, explicit=True)
    job.await_verified(20)


def test_the_recovered_version_is_verified_before_anything_else(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    recovered = SaveId(1, 70)
    job = begin(2, in_process, Verdict(0, (), recovered, recovered=recovered))
    job.await_verified(70)
    assert job.heard[1][0].verified == (recovered,)


def test_a_verdict_that_comes_with_a_push_is_not_adopted_twice(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    job = begin(2, in_process)
    job.save(10, explicit=True)
    job.await_verified(10)
    newest = job.boards[0].verdict
    job.boards[1].hear(newest)
    job.boards[1].hear(_FIRST)
    assert job.boards[1].verdict == newest
    assert [each.number for each in job.heard[1]].count(newest.number) == 1


def test_a_store_that_cannot_be_reached_verifies_nothing_until_it_can(begin: Callable[..., _Job]) -> None:
    reachable, store = threading.Event(), HashStore()

    def connect() -> SignedStore:
        if not reachable.is_set():
            raise ConnectionRefusedError("nobody listens")
        return _signed(store)

    job = begin(2, connect)
    job.save(10)
    wait_until(lambda: all(board.error for board in job.boards), "ranks that say so")
    assert all("nobody listens" in str(board.error) for board in job.boards)
    assert all(board.verdict == _FIRST for board in job.boards)
    reachable.set()
    job.save(20, explicit=True)
    job.await_verified(20)
    wait_until(lambda: not any(board.error for board in job.boards), "ranks that work again")


def test_a_store_that_was_killed_and_comes_back_empty_goes_on(begin: Callable[..., _Job]) -> None:
    with Child(board_store.serve, 0) as first:
        port = first.next_report("port")[1]
        job = begin(3, lambda: _client(port))
        job.save(10, explicit=True)
        job.await_verified(10)
        first.kill()
        job.save(20)
        wait_until(lambda: all(board.error for board in job.boards), "ranks that miss the store")
        assert all(board.verdict.newest == SaveId(1, 10) for board in job.boards)
        with Child(board_store.serve, port) as second:
            second.next_report("port")
            job.save(30, explicit=True)
            job.await_verified(30)
            job.close()


def test_saves_go_on_while_the_store_is_stopped_and_are_verified_when_it_goes_on(begin: Callable[..., _Job]) -> None:
    with Child(board_store.serve, 0) as server:
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


def test_values_of_the_board_that_make_no_sense_are_an_error_and_are_got_over(
    begin: Callable[..., _Job], in_process: Callable[[], SignedStore]
) -> None:
    job = begin(2, in_process)
    job.save(10, explicit=True)
    job.await_verified(10)
    in_process().set("verdict", '{"number": -1}')
    wait_until(lambda: job.boards[1].error is not None, "a rank that cannot read the verdict")
    assert "ProtocolError" in str(job.boards[1].error)
    job.save(20, explicit=True)
    job.await_verified(20)


def test_a_board_whose_store_hangs_closes_at_the_deadline(begin: Callable[..., _Job]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        entered = threading.Event()

        def connect() -> SignedStore:
            entered.set()
            return _signed(TCPStore("127.0.0.1", silent.getsockname()[1], None, False, timedelta(seconds=3)))

        job = begin(1, connect)
        assert entered.wait(30)
        assert job.boards[0].close(0.01) is False
    job.close()
