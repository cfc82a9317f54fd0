"""The board: where the ranks of a job answer rounds and read verdicts.

Owns a rank's one thread for that, and the keys in the store that all ranks share: rank 0 hosts a ``TCPStore`` of torch
(https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore); a job of one process has a
``HashStore``. What to answer and to decide is for `rounds`::

    verdict          the newest verdict
    answer/<rank>    the newest answer of a rank
    count/<d>        at least the number of ranks once round d can be decided: a rank adds 1 to it if its part is
                     copied, and the number of ranks if not

The training thread never waits for the store. A store or a rank that is silent means that nothing new is verified, and
nothing else: the thread goes on trying until it is closed. It asks the store again and again, with pauses that grow to
a tenth of the time of a round: where a ``wait`` of a ``TCPStore`` times out, torch logs two lines.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from ml_flashpoint.engine.rounds import Answer, Leader, Member, Verdict
from ml_flashpoint.format.errors import FlashpointError, ProtocolError
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.pool import SlotRequest

_log = logging.getLogger(__name__)

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.5
_MOST_BYTES = 1 << 16


class Board:
    """One rank's place at the board. Thread-safe.

    Args:
        member: this rank's side of the rounds, for the board alone from now on.
        rank, ranks: this rank, and how many there are.
        connect: returns the store; called again after the store has failed. Each rank needs a client of its own.
        push: has all holders of this rank adopt a verdict, and then copy the committed part of a save. Raises a
            `FlashpointError` if a holder has no copy.
        heard: takes note of a newer verdict, which this rank retains by from now on. Called without a lock.

    All three are called on the board's thread, and `heard` also on that of `hear`.
    """

    def __init__(
        self,
        member: Member,
        *,
        rank: int,
        ranks: int,
        connect: Callable[[], Store],
        push: Callable[[SaveId, Verdict], None],
        heard: Callable[[Verdict], None],
    ) -> None:
        self._member = member
        self._leader = Leader(member, ranks) if rank == 0 else None
        self._rank, self._ranks = rank, ranks
        self._connect, self._push_to_holders, self._heard = connect, push, heard
        self._changed = threading.Condition()
        self._store: Store | None = None
        self._published: Answer | None = None
        self._seen = b""
        self._has_news = False
        self._closed = False
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="flashpoint-board", daemon=True)
        self._thread.start()

    # ---- the training thread and the executors: none of these waits ------------------------------------------

    @property
    def verdict(self) -> Verdict:
        """The newest verdict that this rank knows."""
        return self._member.verdict

    @property
    def error(self) -> str | None:
        """The reason why nothing new can be verified now; None while the board works."""
        return self._error

    def call(self, save: SaveId, *, explicit: bool = False) -> SlotRequest:
        """Record that the program saves, and return the terms on which the save may take a slot.

        Args:
            save: newer than all that were called before in this run.
            explicit: True if somebody waits until it is verified.

        Raises:
            InvalidArgumentError: a newer save was called before.
        """
        with self._changed:
            self._member.call(save, explicit=explicit)
            self._tell()
            return self._member.request(save)

    def request(self, save: SaveId) -> SlotRequest:
        """Return the terms on which a save that was called may take a slot now."""
        with self._changed:
            return self._member.request(save)

    def commit(self, save: SaveId) -> None:
        """Record that this rank's part of a save is committed."""
        with self._changed:
            self._member.commit(save)
            self._tell()

    def fail(self, save: SaveId, *, late: int = 0) -> None:
        """Record that a save has no part on this rank; see `Member.fail`."""
        with self._changed:
            self._member.fail(save, late=late)
            self._tell()

    def hear(self, verdict: Verdict) -> None:
        """Take a verdict into use that came with a peer's push."""
        self._adopt(verdict)

    def close(self, deadline_s: float) -> bool:
        """End the thread.

        Args:
            deadline_s: seconds to wait for the thread, which may be in a call of the store.

        Returns:
            True if the thread has ended.
        """
        with self._changed:
            self._closed = True
            self._tell()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # ---- the board's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        began = time.monotonic()
        while not self._closed:
            pause_s = min(max((time.monotonic() - began) / 10, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            try:
                if self._go_on():
                    began = time.monotonic()
                    continue
                self._error = None
            except Exception as error:  # of whatever kind: a thread that ended would be silent for ever
                self._report(error)
                self._store, pause_s = None, _LONGEST_PAUSE_S
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_news, pause_s)
                self._has_news = False

    def _go_on(self) -> bool:
        """Answer the round, decide it, or adopt a newer verdict. Return True if anything of that was to be done."""
        if self._store is None:
            store = self._connect()
            if self._leader is not None:
                for rank in range(self._ranks):
                    store.compare_set(f"answer/{rank}", "", "")
                store.set("verdict", json.dumps(self._member.verdict.to_fields()))
            self._store, self._published = store, None
        answered = self._answer(self._store)
        newer = self._look(self._store) if self._leader is None else self._lead(self._store, self._leader)
        return answered or newer

    def _answer(self, store: Store) -> bool:
        """Push the round's part if it is committed, and publish the answer if there is one."""
        with self._changed:
            save, verdict, answer = self._member.target, self._member.verdict, self._member.answer
            committed = save is not None and self._member.parts.get(save, False)
        if answer is None and save is not None and committed:
            copied = self._push(save, verdict)
            with self._changed:
                if self._member.verdict == verdict:
                    self._member.end_push(save, copied=copied)
                answer = self._member.answer
        if answer is None or answer == self._published:
            return False
        store.set(f"answer/{self._rank}", json.dumps(answer.to_fields()))
        store.add(f"count/{answer.number}", 1 if answer.copied else self._ranks)
        self._published = answer
        return True

    def _push(self, save: SaveId, verdict: Verdict) -> bool:
        try:
            self._push_to_holders(save, verdict)
        except FlashpointError as error:
            _log.warning("step %d has no copies, and is not verified: %s", save.step, error)
            return False
        return True

    def _look(self, store: Store) -> bool:
        """Adopt the newest verdict."""
        if not store.check(["verdict"]):  # rank 0 has not come yet
            return False
        blob = store.get("verdict")
        if blob == self._seen:
            return False
        self._adopt(Verdict.from_fields(_parsed(blob)))
        self._seen = blob
        return True

    def _lead(self, store: Store, leader: Leader) -> bool:
        """Decide the round, if that can be done."""
        number = self._member.verdict.number
        answers: list[Answer] = []
        if store.add(f"count/{number}", 0) >= self._ranks:
            blobs = store.multi_get([f"answer/{rank}" for rank in range(self._ranks)])
            answers = [Answer.from_fields(_parsed(blob)) for blob in blobs if blob]
        with self._changed:
            verdict = leader.decide(answers)
        if verdict is None:
            return False
        store.set("verdict", json.dumps(verdict.to_fields()))
        store.delete_key(f"count/{number - 1}")
        self._adopt(verdict)
        return True

    def _adopt(self, verdict: Verdict) -> None:
        with self._changed:
            newer = self._member.adopt(verdict)
            self._tell()
        if newer:
            self._heard(verdict)

    def _tell(self) -> None:
        self._has_news = True
        self._changed.notify()

    def _report(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if self._error is None and not self._closed:
            _log.warning("rank %d cannot use the board, and nothing new is verified until it can: %s", self._rank, text)
        self._error = text


def _parsed(blob: bytes) -> Any:
    if len(blob) > _MOST_BYTES:
        raise ProtocolError(f"a value of {len(blob):,} bytes on the board, over the {_MOST_BYTES:,} allowed")
    try:
        return json.loads(blob)
    except ValueError as error:
        raise ProtocolError(f"a value on the board is no JSON: {error}") from error
