"""Time of a round of the board with many ranks, all but rank 0 played by one client, and its calls of the store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import TCPStore

from benchmarks.timing import Result, measure
from ml_flashpoint.engine.board import Board
from ml_flashpoint.engine.rounds import Answer, Member, Outcome, Verdict
from ml_flashpoint.engine.store import SignedStore
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.ranks.retention import Keep

RANKS = 16_384
_DEADLINE = timedelta(seconds=60)


def results() -> Iterator[Result]:
    """Rows of one round: from the last rank's answer to the verdict, and with all answers."""
    server = TCPStore("127.0.0.1", 0, None, True, _DEADLINE, wait_for_workers=False)

    def connect() -> SignedStore:
        return SignedStore(TCPStore("127.0.0.1", server.port, None, False, _DEADLINE), "run-1", b"secret")

    others = connect()
    heard = threading.Event()
    board = Board(
        Member(Verdict(0, (), SaveId(1, 0)), Keep()),
        rank=0,
        ranks=RANKS,
        connect=connect,
        push=lambda save, verdict: None,
        heard=lambda verdict: heard.set(),
    )

    def answer(ranks: range, save: SaveId, number: int) -> None:
        text = json.dumps(Answer(number, save, Outcome.COPIED))
        for rank in ranks:
            others.set(f"answer/{rank}", text)
            others.plain.add(f"count/{number}", 1)

    def one_round(run: int, *, last_only: bool) -> float:
        number, save = board.verdict.number, SaveId(1, board.verdict.newest.step + 1)
        heard.clear()
        board.call(save)
        board.commit(save)
        began = time.perf_counter()
        answer(range(1, RANKS - 1), save, number)
        began = time.perf_counter() if last_only else began
        answer(range(RANKS - 1, RANKS), save, number)
        if not heard.wait(_DEADLINE.total_seconds()):
            raise TimeoutError("no verdict")
        return time.perf_counter() - began

    board.start()
    try:
        state, calls = f"{RANKS:,} ranks", f"{2 * RANKS:,} calls of the store to answer, one by each rank to hear"
        yield measure(state, "round: last answer to verdict", lambda run: one_round(run, last_only=True), None)
        yield measure(state, "round: all answers", lambda run: one_round(run, last_only=False), None, note=calls)
    finally:
        board.close(10)
