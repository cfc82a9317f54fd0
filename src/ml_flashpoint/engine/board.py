"""The board: where the ranks of a job answer rounds and read verdicts.

Owns a rank's one thread for that, and these keys in the job's store (see `engine.store`). What to answer and to decide
is for `rounds`::

    verdict          the newest verdict
    answer/<rank>    the newest answer of a rank
    count/<d>        at least the number of ranks once round d can be decided: a rank adds 1 to it if its part is
                     copied, and the number of ranks if not

The training thread never waits for the store. A store or a rank that is silent means that nothing new is verified, and
nothing else: the thread goes on trying until it is closed. It asks the store again and again, with pauses that grow to
a tenth of the time since there was something to do: where a ``wait`` of a ``TCPStore`` times out, torch logs two lines.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence

from ml_flashpoint import events
from ml_flashpoint.engine.rounds import Answer, Leader, Member, Outcome, Verdict
from ml_flashpoint.engine.store import SignedStore
from ml_flashpoint.format.errors import CapacityError, FlashpointError, SaveError
from ml_flashpoint.format.knobs import late_s
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.pool import SlotRequest

_log = logging.getLogger(__name__)

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.5
_SHORTEST_PAUSE_ALONE_S = 0.05
"""Without other ranks, nothing changes but by this one's own calls, which wake the thread."""


class Board:
    """One rank's place at the board. Thread-safe.

    Functions are called on the board's thread, without a lock.

    Args:
        member: this rank's side of the rounds, for the board alone from now on.
        connect: returns a client of the store, with keys of the run, for this board alone; again after a failure.
        push: has all holders of this rank adopt a verdict, and then copy the committed part of a save. Raises a
            `FlashpointError` if a holder has no copy: a `CapacityError` if it has no room for one.
        heard: takes note of the newest verdict. This rank answers no round before.
        also: called on each pass while the store can be used, twice a second at least.
        emit: `events.emit`, bound to a rank and base.
        persist_every, persister_is_busy: see `Leader`, for rank 0.
    """

    def __init__(
        self,
        member: Member,
        *,
        rank: int,
        ranks: int,
        connect: Callable[[], SignedStore],
        push: Callable[[SaveId, Verdict], None],
        heard: Callable[[Verdict], None],
        also: Callable[[], None] | None = None,
        emit: Callable[..., None] = lambda kind, **fields: None,
        persist_every: int = 0,
        persister_is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._member = member
        self._leader = Leader(member, ranks, persist_every) if rank == 0 else None
        self._rank, self._ranks = rank, ranks
        self._shortest_pause_s = _SHORTEST_PAUSE_S if ranks > 1 else _SHORTEST_PAUSE_ALONE_S
        self._connect, self._push, self._heard = connect, push, heard
        self._also, self._emit, self._persister_is_busy = also, emit, persister_is_busy
        self._lock = threading.Lock()  # of the member
        self._news = threading.Event()
        self._store: SignedStore | None = None
        self._published: Answer | None = None
        self._last_heard = member.verdict
        self._called = self._decided = self._answered = time.monotonic()
        self._late_s = self._first_late_s = late_s()
        self._closed = False
        self._last: Callable[[], None] = lambda: None
        self._has_failed = False  # the store, the last time
        self._thread = threading.Thread(target=self._run, name="flashpoint-board", daemon=True)

    def start(self) -> None:
        """Start the thread. Until then calls are recorded only. Raise a `SaveError` if none can be started."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise SaveError(f"cannot start the thread of the board: {error}", hint="look at ulimit -u") from error

    # ---- the training thread and the executors: none of these waits ------------------------------------------

    @property
    def verdict(self) -> Verdict:
        """The newest verdict that this rank knows."""
        return self._member.verdict

    def call(self, save: SaveId, *, explicit: bool = False, table: str = "") -> None:
        """See `Member.call`."""
        with self._lock:
            self._member.call(save, explicit=explicit, table=table)
            self._called = time.monotonic()
        self._news.set()

    def ask(self, save: SaveId) -> None:
        """See `Member.ask`."""
        with self._lock:
            self._member.ask(save)
        self._news.set()

    def request(self, save: SaveId | None, *, explicit: bool = False) -> SlotRequest:
        """See `Member.request`."""
        with self._lock:
            return self._member.request(save, explicit=explicit)

    @property
    def retained(self) -> frozenset[SaveId]:
        """See `Member.retained`. Also once the board is closed."""
        with self._lock:
            return self._member.retained

    def commit(self, save: SaveId) -> None:
        """Record that this rank's part of a save is committed."""
        with self._lock:
            self._member.parts[save] = True
        self._news.set()

    def fail(self, save: SaveId, *, late: int = 0) -> None:
        """See `Member.fail`."""
        with self._lock:
            self._member.fail(save, late=late)
        self._news.set()

    def hear(self, verdict: Verdict) -> None:
        """Take a verdict into use that came with a peer's push. This rank retains by it when this returns."""
        with self._lock:
            if self._member.adopt(verdict):
                self._news.set()

    def close(self, deadline_s: float, last: Callable[[], None] = lambda: None) -> bool:
        """End the thread, after a last call on it unless the store has failed. Return True if it has ended in time: it
        may be in a call of the store, and those have no deadlines."""
        self._last, self._closed = last, True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # ---- the board's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        began = time.monotonic()
        while not self._closed:
            pause_s = min(max((time.monotonic() - began) / 10, self._shortest_pause_s), _LONGEST_PAUSE_S)
            try:
                if self._go_on():
                    began = time.monotonic()
                    continue
                self._has_failed = False
            except Exception as error:  # of whatever kind: a thread that ended would be silent for ever
                self._report(error)
                self._store, self._has_failed, pause_s = None, True, _LONGEST_PAUSE_S
            if self._news.wait(pause_s):
                began = time.monotonic()
                self._news.clear()
        if not self._has_failed:
            try:
                self._last()
            except Exception:
                _log.exception("rank %d: the board ends", self._rank)

    def _go_on(self) -> bool:
        """Answer the round, decide it, or adopt a newer verdict. Return True if anything of that was to be done."""
        verdict = self._member.verdict
        if verdict.number > self._last_heard.number:
            self._last_heard = verdict
            try:
                self._heard(verdict)
            except Exception:  # it must not be mistaken for a failure of the store
                _log.exception("rank %d: the board goes on", self._rank)
        if self._store is None:
            self._store, self._published = self._connected(verdict), None
        if self._also is not None:
            self._also()
        answered = self._answer(self._store, verdict)
        if self._leader is not None:
            return self._lead(self._store, self._leader, verdict) or answered
        blob = self._store.get("verdict")  # rank 0 may not have come yet
        if not blob:
            return answered
        with self._lock:
            return self._member.adopt(Verdict.parsed(json.loads(blob))) or answered

    def _connected(self, verdict: Verdict) -> SignedStore:
        store = self._connect()
        if self._leader is not None:
            for rank in range(self._ranks):
                store.reserve(f"answer/{rank}")
            store.set("verdict", json.dumps(verdict))
            if self._has_failed:  # answers that were counted are found when late
                store.plain.delete_key(f"count/{verdict.number}")
        return store

    def _answer(self, store: SignedStore, verdict: Verdict) -> bool:
        """Push the round's part if it is committed, and publish the answer. Return False if there is nothing to do."""
        member = self._member
        with self._lock:
            if member.verdict is not verdict:
                return True
            save, answer = member.target, member.answer
            is_due = answer is None and save is not None and member.parts.get(save, False)
        if is_due:
            assert save is not None
            outcome = Outcome.COPIED
            try:
                self._push(save, verdict)
            except FlashpointError as error:
                _log.warning("step %d has no copies, and is not verified: %s", save.step, error)
                # For a smaller save there may be room: nobody waits for this one until its deadline.
                outcome = Outcome.LOST if isinstance(error, CapacityError) else Outcome.UNCOPIED
            with self._lock:
                if member.verdict is not verdict:
                    return True
                member.end(save, outcome)
                answer = member.answer
        if answer is None or answer == self._published:
            return False
        store.set(f"answer/{self._rank}", json.dumps(answer))
        store.plain.add(f"count/{answer.number}", 1 if answer.outcome is Outcome.COPIED else self._ranks)
        self._published, self._answered = answer, time.monotonic()
        return True

    def _lead(self, store: SignedStore, leader: Leader, old: Verdict) -> bool:
        """Decide a round on rank 0. Return False if that cannot be done yet."""
        now = time.monotonic()
        has_answered = self._published is not None and self._published.number == old.number
        is_late = has_answered and now - self._answered > self._late_s
        answers, count = list[Answer](), store.plain.add(f"count/{old.number}", 0)
        if count >= self._ranks or is_late or (count and leader.may_be_waited_for(now - self._called)):
            blobs = store.multi_get([f"answer/{rank}" for rank in range(self._ranks)])
            found = [Answer.parsed(json.loads(blob)) if blob else None for blob in blobs]
            answers = [answer for answer in found if answer is not None]
            if is_late:
                self._report_missing([rank for rank, each in enumerate(found) if not each or each.number != old.number])
        is_busy = self._persister_is_busy()
        with self._lock:
            verdict = leader.decide(
                answers, since_s=now - self._decided, idle_s=now - self._called, persister_is_busy=is_busy
            )
            if verdict is None:
                return False
            # Adopted before it is published, which `_connected` repeats if that fails. Else a failure in between would
            # have rank 0 decide once more, and two verdicts would have one number.
            self._member.adopt(verdict)
        self._decided, self._late_s = now, self._first_late_s
        store.set("verdict", json.dumps(verdict))
        store.plain.delete_key(f"count/{old.number - 1}")
        return True

    def _report_missing(self, missing: Sequence[int]) -> None:
        """Name the ranks that have not answered a round, less and less often."""
        seconds, save = self._late_s, self._member.target
        self._late_s *= 2
        if missing:
            step = None if save is None else save.step
            named = events.named(missing)
            text = "step %s is not verified: for %.0f s, nothing was heard of rank %s"
            _log.warning(text, step, seconds, named)
            self._emit(events.RanksMissing, step=step, ranks=tuple(missing), seconds=seconds)

    def _report(self, error: Exception) -> None:
        if not self._has_failed and not self._closed:
            text = f"{type(error).__name__}: {error}"
            _log.warning(
                "rank %d cannot reach the store on rank 0, and no new version is verified until it can: %s",
                self._rank,
                text,
            )
            self._emit(events.AgreementFailed, step=None, error=text)
