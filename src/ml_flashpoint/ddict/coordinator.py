"""Which checkpoints are committed and which retire. Owned by the main manager, which runs one of these.

Owns the order in which managers are asked to take a snapshot, to seal it, and to let older ones go. Who writes, and
what may be committed for that, is `attendance`'s; what is persisted, `persisting`'s. What a manager does is its own
matter; how it is reached, the caller's.

A checkpoint is committed when every handle that writes has moved past it and, with replication, every manager has
sealed it with verified copies. A handle whose process has died still counts, until the others have left its checkpoint
behind in the working set, or until nobody writes and `sync_to_newest_checkpoint` begins anew from what is committed.

One is committed at a time, always the newest that can be, except that those due to be persisted are not skipped. It
lasts: what a handle writes at or below a committed id later is covered by the next commit, not by that one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ml_flashpoint.ddict.accounts import Needs, Rules, Write, Writer, listed, merge
from ml_flashpoint.ddict.attendance import RETRY_S, Attendance
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictManagerLostError,
    DDictPersistError,
    DDictTimeoutError,
)
from ml_flashpoint.ddict.persisting import Persisting
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.knobs import seal_deadline_s

_log = logging.getLogger(__name__)

_CALL_S = 30.0

Call = Callable[[int, str, dict[str, Any], float], dict[str, Any]]
"""``(manager, operation, fields, timeout in seconds) -> fields of the answer``."""


class Coordinator(Attendance):
    """See the module. Thread-safe.

    Args:
        rules: of the dictionary.
        call: reaches a manager.
        persist: makes a checkpoint exist whose parts all managers have written; called with their receipts.
        unpersist: removes persisted checkpoints above one, which were rolled back.
        committed: checkpoint that was committed last, for one that takes over; -1: none.
        sealed: checkpoints, that one included, of which every manager has a snapshot.
        to_persist: of these, those that are due to be persisted and are not.
        expected: handles that wrote before, for one that takes over, with their leases: it commits nothing before they
            have come back, or for as long as `EXPECT_S`.
        pids: processes of these, as far as they are on this machine.
        died: handles that wrote before, and whose processes are gone.
        taken: see `Attendance`.
        takes_over: managers may have snapshots of later checkpoints, which not all of them have.
        restored: checkpoint that was restored, of which there are no snapshots yet; None: there are, or it was not.
        incarnations: of the managers.
        settle_s: seconds to wait before committing anything, for others to come back.
    """

    def __init__(
        self,
        rules: Rules,
        call: Call,
        persist: Callable[[int, list[str]], None] = lambda checkpoint_id, receipts: None,
        *,
        unpersist: Callable[[int], None] = lambda above: None,
        committed: int = -1,
        sealed: Sequence[int] = (),
        to_persist: Sequence[int] = (),
        expected: Mapping[str, str] | None = None,
        pids: Mapping[str, int] | None = None,
        died: Collection[str] = (),
        taken: Needs | None = None,
        takes_over: bool = False,
        restored: int | None = None,
        incarnations: Mapping[int, str] | None = None,
        settle_s: float = 0.0,
    ) -> None:
        super().__init__(
            rules,
            committed=committed,
            sealed=sealed,
            expected=expected or {},
            pids=pids or {},
            died=died,
            taken=taken or {},
            settle_s=settle_s,
        )
        self._call = call
        self._incarnations = dict(incarnations or {})  # of the managers, at the last commit
        self._tried = committed  # newest checkpoint that a manager may have a snapshot of
        self._to_forget: int | None = committed if takes_over else None
        self._snapshot = committed if sealed else -1  # of which managers hold a snapshot to be persisted
        self._busy = False
        self._called_off = False  # the commit under way: somebody went back, and what it has is not what was written
        self._held_up = 0
        self._closing = False
        self._persisting = Persisting(
            self._changed, write=self._write_parts, complete=persist, remove_above=unpersist, due=to_persist
        )
        if restored is not None:
            self._restored(restored)
        self._pool = ThreadPoolExecutor(max_workers=min(32, rules.managers), thread_name_prefix="ddict-commit")
        self._thread = threading.Thread(target=self._run, name="ddict-coordinator", daemon=True)
        self._thread.start()

    # ---- rollback -----------------------------------------------------------------------------------------

    def rollback(
        self,
        handle: str,
        lease: str | None,
        to: int,
        wrote: Sequence[Write],
        timeout_s: float,
        lost: Collection[int] = (),
    ) -> dict[str, Any]:
        """A handle goes back to checkpoint ``to``. It discards what it wrote above from the managers after this.

        Args:
            lease: None: the handle is not attached.
            wrote: what is left of its writes.
            lost: managers that lost what it wrote, to which this is the answer.

        Raises:
            DDictCheckpointRetiredError: that has left the working set.
            DDictTimeoutError: a commit that is under way did not end.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            if lease is not None:
                # Unknown, it is one that comes back; or its process died with this on the way.
                self._changed.wait_for(
                    lambda: handle in self._writers or lease in self._leases or handle in self._left, timeout_s
                )
                if handle not in self._writers and lease not in self._leases:
                    raise DDictTimeoutError("the process of this handle is not attached")
            oldest = self._oldest()  # managers may be about to hear of it
            if to < oldest:
                raise DDictCheckpointRetiredError(f"checkpoint {to} has left the working set", checkpoint_id=oldest)
            assumed = self._arrived(handle)
            if lease is not None and handle not in self._left:
                self._writers.setdefault(handle, Writer(to, lease, assumed=assumed))
            writer = self._writers.get(handle)
            if writer is not None:
                assumed = {} if to <= self._committed else writer.assumed
                assumed = {place: need for place, need in assumed.items() if place[0] not in lost}
                writer.position, writer.wrote, writer.assumed, writer.lost = to, self._needs(wrote), assumed, None
                writer.told = None
                writer.since = self._newest
            highest = max(self._fixed(), self._tried)  # before what is torn is forgotten
            self._called_off = self._called_off or self._committing > to
            if lost and to > self._committed:
                self._note_torn(to)
            self._changed.notify_all()
            if highest <= to and self._to_forget is None:
                return self._state()
        with self._no_commits(until):
            with self._changed:
                before = self._snapshot
                if max(self._committed, self._tried, highest) > to:
                    self._take_back(handle, to)
                if lost:
                    self._floor = min(self._floor, self._safe())
            # At once: a manager that dies later must not come back with what was rolled back.
            self._forget(max(0.1, until - time.monotonic()))
            with self._changed:
                is_lower, back_at = self._snapshot < before, self._snapshot
            if is_lower and back_at >= 0:
                # It may be persisted yet, and managers have let go of it. Those that are away do this as they recover.
                with contextlib.suppress(FlashpointError):
                    self._prepare(back_at, max(0.1, until - time.monotonic()))
        return self.state()

    def _note_torn(self, checkpoint_id: int) -> None:
        """A checkpoint that is not committed lacks what was lost, of which nobody gives account any more. So it is not
        what it was when all had moved past it, and who takes over must not find it. With the lock held."""
        self._floor = min(self._floor, self._safe())
        self._called_off = self._called_off or self._committing >= checkpoint_id
        if max(self._committing, self._tried) >= checkpoint_id:
            self._have_forgotten(checkpoint_id - 1)

    def _have_forgotten(self, above: int) -> None:
        self._to_forget = above if self._to_forget is None else min(above, self._to_forget)
        self._persisting.remove_later(above)
        self._tried = min(self._tried, above)

    def _forget(self, timeout_s: float) -> None:
        """Have managers forget the snapshots that were taken back. Until they have, nothing can be committed."""
        with self._changed:
            above = self._to_forget
            taken = listed(self._taken)
        if above is not None:
            self._all("forget", {"above": above, "taken": taken}, timeout_s=timeout_s)
        with self._changed:
            if self._to_forget == above:
                self._to_forget = None
        try:
            self._persisting.remove_rolled_back()
        except Exception as error:  # whoever persists next tries again: commits must not wait for a store that is away
            _log.error("what was persisted and rolled back is still there: %s", error)

    @contextlib.contextmanager
    def _no_commits(self, until: float) -> Iterator[None]:
        """Wait until no commit is under way, and let none begin. The lock is free meanwhile: managers that recover
        ask where the dictionary is."""
        with self._changed:
            self._held_up += 1
        try:
            with self._changed:
                while self._busy:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise DDictTimeoutError("a commit is under way", checkpoint_id=self._committing)
                    self._changed.wait(left)
            yield
        finally:
            with self._changed:
                self._held_up -= 1
                self._changed.notify_all()

    def _take_back(self, handle: str, to: int) -> None:
        # What others wrote above is uncommitted again, so they must hear of it if a manager dies now.
        taken = self._incarnations if self._committed > to else {}
        again: Needs = dict.fromkeys(taken.items(), self._committed)
        for name, writer in self._writers.items():
            if name != handle:
                merge(writer.assumed, again)
            elif self._rules.snapshots and to not in self._sealed:
                # Commits skipped it, so what this one has there is uncommitted, too.
                merge(writer.assumed, dict.fromkeys(taken.items(), to))
        if self._any_departed:
            merge(self._departed_wrote, again)
        merge(self._taken, again)
        self._have_forgotten(to)
        # All had moved past what was committed, so past this one too.
        self._floor = to if self._committed > to else min(self._floor, to)
        self._sealed = [each for each in self._sealed if each <= to]
        self._committed = min(self._committed, max(self._sealed, default=-1) if self._rules.snapshots else to)
        self._snapshot = min(self._snapshot, self._committed)
        self._departed = min(self._departed, to)
        self._died = {name: min(position, to) for name, position in self._died.items()}
        self._persisting.take_back(to)

    # ---- commits ------------------------------------------------------------------------------------------

    def _next(self) -> int | None:
        if self._held_up or self._torn is not None or time.monotonic() < self._not_before:
            return None
        target = self._target()
        if target <= self._committed:
            return None
        due = self._rules.next_due(max(self._committed, self._floor - 1))
        return target if due is None else min(target, due)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closing:
                    self._give_up_expected()
                    if self._rules.snapshots and self._next() is not None:
                        break
                    # Not while one goes back or restores: managers must not hear of what was before after that.
                    if not self._held_up and self._oldest() != self._oldest_told:
                        break
                    self._changed.wait(RETRY_S if time.monotonic() < self._not_before else None)
                if self._closing:
                    return
                checkpoint_id = self._next() if self._rules.snapshots else None
                self._committing = -1 if checkpoint_id is None else checkpoint_id
                self._busy, self._called_off = True, False
            try:
                if checkpoint_id is None:
                    self._settle()
                else:
                    self._commit(checkpoint_id)
            except FlashpointError as error:
                _log.warning("checkpoint %s is not committed yet: %s", checkpoint_id, error)
                with self._changed:
                    self._trouble = str(error)
                    self._changed.wait(RETRY_S)
            except Exception:  # the thread must go on: what stops it would stop all commits, without a word
                _log.exception("committing checkpoint %s failed", checkpoint_id)
                with self._changed:
                    self._changed.wait(RETRY_S)
            finally:
                with self._changed:
                    self._busy, self._committing = False, -1
                    self._changed.notify_all()

    def _commit(self, checkpoint_id: int) -> None:
        with self._changed:
            if checkpoint_id < self._tried:
                self._have_forgotten(self._committed)  # a later one was tried, and somebody went back meanwhile
            self._tried = max(self._tried, checkpoint_id)
        self._forget(_CALL_S)
        answers = self._prepare(checkpoint_id, _CALL_S)
        incarnations = {manager: str(answer["incarnation"]) for manager, answer in enumerate(answers)}
        # Whoever has gone back meanwhile does not count what it wrote any more, whether that was lost or not.
        if self._note_losses(incarnations) or self._called_off:
            self._all("abort", {"checkpoint_id": checkpoint_id})
            return
        if self._rules.replicated:
            sealed = self._all("seal", {"checkpoint_id": checkpoint_id}, timeout_s=seal_deadline_s())
            if any(str(answer["incarnation"]) != incarnations[m] for m, answer in enumerate(sealed)):
                return  # one died in between: prepare tells whose writes it took with it
        with self._changed:
            if checkpoint_id <= self._committed or self._called_off:
                return
            if any(incarnations[manager] != incarnation for manager, (incarnation, _) in self._came_back.items()):
                return  # it had sealed, and has agreed on an earlier checkpoint since
            self._committed = self._snapshot = checkpoint_id
            self._trouble = ""
            self._sealed.append(checkpoint_id)
            self._incarnations = incarnations
            for needs in self._all_needs():
                # Not what a handle that came back meanwhile wrote to a process that is gone: it is told next.
                for place in [p for p, need in needs.items() if need <= checkpoint_id and incarnations[p[0]] == p[1]]:
                    del needs[place]
            # Whoever had lost some of it was told before this could be committed.
            self._taken = {place: need for place, need in self._taken.items() if need > checkpoint_id}
            if self._rules.is_due(checkpoint_id):
                self._persisting.add(checkpoint_id)
            self._changed.notify_all()
        self._settle()

    def _prepare(self, checkpoint_id: int, timeout_s: float) -> list[dict[str, Any]]:
        """Have managers note what belongs to a checkpoint, and who writes, for one that takes over."""
        return self._all("prepare", {"checkpoint_id": checkpoint_id, "writers": self.writers()}, timeout_s=timeout_s)

    def _settle(self) -> None:
        """Let managers forget what is not needed any more."""
        with self._changed:
            oldest = self._oldest()
            keep = [each for each in self._sealed if each >= oldest or each == self._committed]
            pinned = [*self._persisting.waiting, self._snapshot]
            fields = {"oldest": oldest, "keep": keep, "pinned": pinned, "committed": self._committed}
            fields["taken"] = listed(self._taken)
        self._all("settle", fields)
        with self._changed:
            self._sealed = [each for each in self._sealed if each in keep]
            self._oldest_told = max(self._oldest_told, oldest)

    def _await_keys(self, checkpoint_id: int, timeout_s: float) -> None:
        self._all_at_length("complete", {"checkpoint_id": checkpoint_id}, timeout_s)

    def _all(self, operation: str, fields: dict[str, Any], *, timeout_s: float = _CALL_S) -> list[dict[str, Any]]:
        """Ask all managers at the same time; returns their answers, or raises the first error once all answered."""
        return self._ask(self._pool, operation, fields, timeout_s)

    def _all_at_length(self, operation: str, fields: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """The same for what takes long, with threads of its own: commits must not wait for one."""
        with ThreadPoolExecutor(min(32, self._rules.managers), thread_name_prefix=f"ddict-{operation}") as pool:
            return self._ask(pool, operation, fields, timeout_s)

    def _ask(
        self, pool: ThreadPoolExecutor, operation: str, fields: dict[str, Any], timeout_s: float
    ) -> list[dict[str, Any]]:
        asked = [
            pool.submit(self._call, manager, operation, fields, timeout_s) for manager in range(self._rules.managers)
        ]
        answers, errors = [], []
        for each in asked:
            try:
                answers.append(each.result())
            except FlashpointError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    # ---- persistence --------------------------------------------------------------------------------------

    def persist_newest(self, timeout_s: float, is_gone: Callable[[], bool] = lambda: False) -> int:
        """Commit what can be, persist the newest committed checkpoint if it is not, and return it; -1: there is none.

        Raises:
            FlashpointError: it could not be persisted.
        """
        until = time.monotonic() + timeout_s
        self.newest(timeout_s, is_gone)
        with self._changed:
            checkpoint_id = self._snapshot
            if checkpoint_id >= 0:
                self._persisting.add(checkpoint_id)
        if checkpoint_id >= 0:
            self._persisting.await_persisted(checkpoint_id, until)
        return checkpoint_id

    def _write_parts(self, checkpoint_id: int) -> list[str]:
        written = self._all_at_length("persist", {"checkpoint_id": checkpoint_id}, seal_deadline_s())
        return [str(answer["receipt"]) for answer in written]

    def restore(self, checkpoint_id: int, fields: dict[str, Any], timeout_s: float) -> None:
        """Have all managers hold a persisted checkpoint, and nothing else.

        Raises:
            FlashpointError: a manager cannot read it; all is as before.
            DDictPersistError: a manager died when others had taken it up; nothing is committed until a restore works.
            DDictTimeoutError: it was not done in time; or it was, but for the copies.
        """
        until = time.monotonic() + timeout_s
        with self._no_commits(until):
            self._persisting.await_idle(until)
            try:
                self._all("restore_prepare", fields, timeout_s=max(0.1, until - time.monotonic()))
            except FlashpointError:
                with contextlib.suppress(FlashpointError):
                    self._all("restore_abort", {})
                raise
            with self._changed:
                self._restoring = fields.get("checkpoint")
            try:
                self._commit_restored(fields, until)
            except FlashpointError as error:
                torn = DDictPersistError(
                    f"only some managers hold what was restored: {error}",
                    checkpoint_id=checkpoint_id,
                    hint="restore() again",
                )
                with self._changed:
                    self._torn = torn
                raise torn from error
            with self._changed:
                self._torn = None
                self._restored(checkpoint_id)
        # It was committed before it was persisted, so it is again: at once, which makes the copies there are none of.
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._committed >= checkpoint_id or self._closing, max(0.0, until - time.monotonic())
            ):
                raise DDictTimeoutError(
                    f"checkpoint {checkpoint_id} is restored, but managers do not hold copies of it yet",
                    checkpoint_id=checkpoint_id,
                    hint="sync_to_newest_checkpoint() waits for them",
                )

    def _commit_restored(self, fields: dict[str, Any], until: float) -> None:
        """Have managers take up what they have read, those too that died since, with what they read again."""
        while True:
            try:
                self._all("restore_commit", fields, timeout_s=max(0.1, min(_CALL_S, until - time.monotonic())))
                return
            except FlashpointError as error:
                # A manager that came back without its values says so for good.
                is_final = isinstance(error, DDictManagerLostError) and not error.retryable
                if is_final or until - time.monotonic() < RETRY_S:
                    raise
                _log.warning("not all managers have taken up what is restored yet: %s", error)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, RETRY_S)
            with contextlib.suppress(FlashpointError):
                self._all("restore_prepare", fields, timeout_s=max(0.1, until - time.monotonic()))

    def _restored(self, checkpoint_id: int) -> None:
        for writer in self._writers.values():
            writer.position, writer.wrote, writer.assumed, writer.lost = checkpoint_id, {}, {}, None
            writer.since = checkpoint_id
        self._committed = -1 if self._rules.snapshots else checkpoint_id
        self._floor = self._restored_at = checkpoint_id
        self._departed, self._departed_wrote, self._died = checkpoint_id + 1, {}, {}
        self._newest = self._oldest_told = checkpoint_id
        self._persisting.restored(checkpoint_id)
        self._tried, self._to_forget = -1, None
        self._sealed, self._snapshot = [], -1
        self._taken, self._inherited = {}, {}
        self._orphaned = None
        self._restoring = None

    def close(self) -> None:
        """Stop committing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._persisting.close()
        self._thread.join(1.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
