"""The coordinator of a dictionary: in the process that made it, reached by clients and managers.

Owns its server, where managers are, and threads that carry out what `rules` decides: one that asks managers to begin an
epoch, to prepare and seal a cut, and to let older ones go, and one that has them persist. Its end is the dictionary's
end: nothing takes its place."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from ml_flashpoint.ddict.errors import (
    REQUESTS,
    DDictDestroyedError,
    DDictPersistError,
    DDictTimeoutError,
    StaleEpochError,
)
from ml_flashpoint.ddict.links import Links, Locator, Place, allow_many_files, locator, own_node
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.ddict.persistence import History
from ml_flashpoint.ddict.rules import Ask, Rules, Step, Wanted
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.requests import Account, Back, Request, Result, Whose
from ml_flashpoint.format.errors import FlashpointError, ProtocolError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.net.client import Address
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.server import Peer, RequestServer
from ml_flashpoint.stores.durable import save_of

_log = logging.getLogger(__name__)

_CALL_S, _BEGIN_S = 30.0, 10.0
_RETRY_S = 0.2
_LOOK_S = 0.5
_HEAR_S = 2.0

IsGone: TypeAlias = Callable[[], bool]
"""Returns True if whoever asked does not wait for the answer any more, so that nobody is told anything by it."""


@dataclass(eq=False, slots=True)
class Session:
    """A connection of a client or a manager."""

    peer: Peer
    id: str = ""  # of the handles' session that it keeps attached, if any


class Coordinator:
    """See the module. Thread-safe. Serves from construction until :meth:`close`; in a forked child it is closed.

    Args:
        configuration: of the dictionary.
        host: address to serve all nodes on; None: a Unix socket in the dictionary's folder.

    Raises:
        JobInUseError: another live dictionary persists under this name and path.
    """

    def __init__(self, configuration: Configuration, host: str | None = None) -> None:
        allow_many_files()  # each connection is one
        options = configuration.options
        self.rules = Rules(options)
        self.places: dict[int, Place] = {}
        here = locator(configuration) if host is None else Locator(own_node(), None, lambda timeout_s: self.places)
        self._links = Links(here, configuration.secret)
        self._history = History(configuration) if options.persists else None
        if self._history is not None:
            self._history.begin()
        lock = threading.RLock()  # around all that the rules are told, and asked
        self._changed = threading.Condition(lock)
        self._opened = threading.Condition(lock)  # notified when an epoch may be told of
        self._restoring = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._unanswered: dict[int, str] = {}  # managers that commits wait for, and what they were asked
        self._trouble: FlashpointError | None = None  # why managers have not done what they were asked last
        self._busy = self._closing = self._held_up = False
        self._pool = ThreadPoolExecutor(min(32, options.managers), thread_name_prefix="ddict-commit")
        self._threads = [threading.Thread(target=self._run, name="ddict-coordinator", daemon=True)]
        if self._history is not None:
            its = (self._history,)
            self._threads.append(threading.Thread(target=self._persist, args=its, name="ddict-persist", daemon=True))
        for thread in self._threads:
            thread.start()
        unix_path = str(Path(configuration.base, "c.sock")) if host is None else None
        try:
            self._server = RequestServer(configuration.secret, self, REQUESTS, unix_path=unix_path, tcp_host=host)
        except BaseException:
            self._stop()
            self._let_go()
            raise

    @property
    def address(self) -> Address:
        """The address that it listens at."""
        return self._server.addresses[0]

    def close(self) -> None:
        """Commit and answer nothing more. Idempotent."""
        self._stop()
        self._server.close()
        self._let_go()

    def _stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._opened.notify_all()
        for thread in self._threads:
            thread.join(1.0)

    def _let_go(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._links.close()
        if self._history is not None:
            self._history.close()  # last: whoever takes the name over finds none of this at work

    # ---- managers -----------------------------------------------------------------------------------------

    def _ask_all(self, request: Request, deadline: float) -> None:
        self._ask(dict.fromkeys(range(self.rules.options.managers), request), deadline)

    def _ask(
        self, requests: Mapping[int, Request], deadline: float, heard: Callable[[int], None] | None = None
    ) -> list[Fields]:
        """Ask managers, all at once. Return their answers, or raise the first error once all have answered. ``heard``:
        called with each manager that has answered a step of a commit; anything else has threads of its own, as it takes
        long, and commits must not wait for it."""
        until = max(deadline, time.monotonic() + 0.05)

        def ask(manager: int, request: Request) -> Fields:
            if heard is not None:
                self._unanswered[manager] = asked.name_of(request)
            try:
                fields = self._links.call(manager, request, deadline=until).fields
                if heard is not None:
                    heard(manager)
                return fields
            finally:
                if heard is not None:
                    self._unanswered.pop(manager, None)

        own = ThreadPoolExecutor(min(32, len(requests))) if heard is None else contextlib.nullcontext(self._pool)
        with own as pool:
            try:
                under_way = [pool.submit(ask, *each) for each in requests.items()]
            except RuntimeError as error:  # no thread can be had; or the program ends, without `destroy`
                raise FlashpointError(f"managers cannot be asked: {error}") from error
            wait(under_way)
            return [each.result() for each in under_way]

    def _run(self) -> None:
        while True:
            with self._changed:
                step = None
                while not self._closing and (step := self.rules.next(is_held_up=self._held_up)) is None:
                    self._changed.wait()
                if self._closing or step is None:
                    return
                self._busy, ask = True, self.rules.ask(step)
            is_done = False
            try:
                self._carry_out(ask)
                is_done = True
                if step is not Step.PREPARE:  # what comes next may be what has failed
                    self._trouble = None
            except Exception as error:  # the thread must go on: what stops it would stop all commits, without a word
                with self._changed:
                    if not isinstance(error, FlashpointError):
                        _log.exception("a commit failed")
                    else:
                        if str(error) != str(self._trouble):
                            _log.warning("nothing more is committed yet: %s", error)
                        self._trouble = error
                    self._changed.wait(_RETRY_S)
            finally:
                with self._changed:
                    self._busy = False
                    self.rules.ended(ask, is_done=is_done)
                    if step is Step.BEGIN:
                        self._opened.notify_all()
                    self._changed.notify_all()

    def _carry_out(self, ask: Ask) -> None:
        def heard(manager: int) -> None:
            with self._changed:
                ask.heard(manager)

        within_s = {Step.BEGIN: _BEGIN_S, Step.SEAL: seal_deadline_s()}.get(ask.step, _CALL_S)
        answers = self._ask(ask.requests, time.monotonic() + within_s, heard)
        with self._changed:
            ask.done(answers)

    def _persist(self, history: History) -> None:
        while True:
            with self._changed:
                wanted = None
                while not self._closing and (wanted := self.rules.next_to_persist(time.monotonic())) is None:
                    self._changed.wait(_LOOK_S)  # what has failed is tried again
                if self._closing or wanted is None:
                    return
            failure = self._try_to_persist(history, wanted)
            with self._changed:
                if not self._closing:  # or the attempt may have been removed without an error
                    self.rules.tried_to_persist(wanted, failure, time.monotonic())
                    self._changed.notify_all()

    def _try_to_persist(self, history: History, wanted: Wanted) -> FlashpointError | None:
        version = None
        try:
            history.record()
            version = history.new_attempt(wanted.checkpoint_id)
            told = asked.Persist(wanted.cut, save_of(version))
            self._ask_all(told, time.monotonic() + seal_deadline_s())
            keep = self.rules.options.persist_count
            history.complete(version, keep, lambda: self._closing or not self.rules.counts(wanted))
            return None
        except Exception as error:  # the thread must go on
            if version is not None:
                history.remove_failed(version)
            if isinstance(error, FlashpointError):
                return error
            _log.exception("persisting checkpoint %d failed", wanted.checkpoint_id)
            return DDictPersistError(f"{type(error).__name__}: {error}", checkpoint_id=wanted.checkpoint_id)

    # ---- waiting ------------------------------------------------------------------------------------------

    def _await(
        self, reason: Callable[[], tuple[int, str] | None], deadline: float, is_gone: IsGone = lambda: False
    ) -> bool:
        """Wait until there is no ``reason`` to, which is a checkpoint and a text. With the lock held. Return False if
        nobody waits for the answer any more. Raises `DDictTimeoutError`: with the last reason; `DDictDestroyedError`:
        the dictionary has ended."""
        while (found := reason()) is not None:
            if self._closing:
                raise DDictDestroyedError("the dictionary was destroyed")
            if is_gone():
                return False
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._too_late(found[1], found[0])
            self._changed.wait(min(left, _RETRY_S))
        return True

    def _too_late(self, why: str, checkpoint_id: int | None = None) -> DDictTimeoutError:
        """The error for who has waited in vain. If it is for a manager, that may be one that does not come back."""
        unanswered = sorted(self._unanswered.items())
        reasons = [f"manager {manager} has not answered {operation!r} yet" for manager, operation in unanswered]
        why = "; ".join([why, *reasons, *([self._trouble.message] if self._trouble else [])])
        away = unanswered[0][0] if unanswered else getattr(self._trouble, "manager", None)
        hint = f"if manager {away} stays away, make the dictionary anew, and restore() what was persisted"
        return DDictTimeoutError(why, checkpoint_id=checkpoint_id, manager=away, hint=None if away is None else hint)

    def _await_open(self, deadline: float) -> None:
        rules = self.rules
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: rules.is_open or self._closing, left):
                raise self._too_late(f"not all managers have begun epoch {rules.epoch} yet")
            if not rules.is_open:
                raise DDictDestroyedError("the dictionary was destroyed")

    def await_epoch(self, epoch: int, until: float, is_gone: IsGone) -> int:
        """Wait for another epoch than this one; returns the one that it is."""
        rules = self.rules
        with self._opened:  # not with those who wait for commits: there is one here for each process that writes
            while (rules.epoch == epoch or not rules.is_open) and not self._closing and not is_gone():
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._opened.wait(min(left, _LOOK_S))
            return rules.epoch if rules.is_open else epoch

    @contextlib.contextmanager
    def _no_commits(self, deadline: float) -> Iterator[None]:
        """Wait until no commit is under way, and let none begin; one at a time: who has given a restore up, and begins
        another, gets that one."""
        if not self._restoring.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DDictTimeoutError("another checkpoint is being restored")
        try:
            with self._changed:
                self._held_up = True
                if not self._changed.wait_for(lambda: not self._busy, max(0.0, deadline - time.monotonic())):
                    raise DDictTimeoutError("a commit is under way", checkpoint_id=self.rules.committing)
            yield
        finally:
            with self._changed:
                self._held_up = False
                self._changed.notify_all()
            self._restoring.release()

    # ---- what handles ask ---------------------------------------------------------------------------------

    def state(self) -> Fields:
        """See `Rules.state`."""
        with self._changed:
            return self.rules.state()

    def _tell(self, event: Callable[..., Any], *told: Any) -> Any:
        """Tell the rules of an event. Return what they say."""
        with self._changed:
            try:
                return event(*told)
            finally:
                self._changed.notify_all()

    def watch(self, session: Session, its: asked.Watch, is_gone: IsGone) -> Fields:
        """See `Watch`. Meanwhile the end of either process is noticed by the other."""
        with self._changed:
            if not session.id:
                session.id, self._sessions[its.session] = its.session, session
                self.rules.processes[session.id] = session.peer.text
        return {"epoch": self.await_epoch(its.epoch, time.monotonic() + its.seconds, is_gone)}

    def move(self, account: Account, to: int, onwards: bool, deadline: float) -> Fields:
        """Let a handle move on to another checkpoint; see `Rules.begin_move`. Raises `DDictTimeoutError`: others did
        not do their part in time."""
        handle, _, epoch, _ = account.whose
        rules, options = self.rules, self.rules.options
        position = self._tell(lambda: rules.begin_move(account, to, onwards=onwards))

        def reason() -> tuple[int, str] | None:
            rules.check_epoch(epoch, handle)
            return rules.keeps_from_moving(handle, position)

        try:
            with self._changed:
                self._await(reason, deadline)
                retires = position - options.working_set_size if position > rules.newest else -1
            if options.wait_for_keys and retires >= 0:
                self._ask_all(asked.AwaitKeys(retires), deadline)
        except BaseException:
            self._tell(rules.stay, handle)
            raise
        moved: Fields = self._tell(lambda: rules.move(account, position, onwards=onwards))
        return moved

    def go_back(self, whose: Whose, session: str, back: Back, deadline: float) -> Fields:
        """Take a handle back to a checkpoint; see `Rules.go_back`. Return the state, where it is now, ``position``, and
        why what was persisted above ``stays`` on offer, or null. Raises `DDictTimeoutError`: not all managers could be
        reached; the same call again finishes it."""
        with self._changed:
            to, told = self.rules.go_back(whose, session, back)
            if told is None and self._history is not None:
                self._history.take_back(to)
            epoch = self.rules.epoch  # what begins after this one, the handle has yet to hear of
            self._changed.notify_all()
        if told is not None:
            self._ask_all(told, deadline)
        self._await_open(deadline)
        return {**self.state(), "epoch": epoch, "position": to, "stays": self._record_rollback(deadline)}

    def leave(self, account: Account) -> None:
        """Count a handle no more; see `Rules.leave`."""
        with self._changed:
            taken_to = self.rules.leave(account)
            if taken_to is not None and self._history is not None:
                self._history.take_back(taken_to)
            self._changed.notify_all()
        if taken_to is not None:
            self._record_rollback()

    def _record_rollback(self, deadline: float | None = None) -> str | None:
        """Have the store know that what was persisted above a checkpoint counts no more. Return why it does not:
        whoever persists next tries again."""
        try:
            if self._history is not None:
                self._history.record(deadline)
        except Exception as error:  # of a persister of the user's own, perhaps
            _log.warning("a persisted checkpoint that was rolled back is still on offer: %s", error)
            return str(error) if isinstance(error, FlashpointError) else repr(error)
        return None

    def catch_up(self, account: Account, deadline: float) -> Fields:
        """See `Rules.catch_up`. Raises `DDictTimeoutError`: managers have not begun the epoch in time."""
        self._await_open(deadline)
        told: Fields = self._tell(self.rules.catch_up, account)
        return told

    def newest(self, epoch: int, deadline: float, is_gone: IsGone, *, tells: bool = True) -> Fields:
        """Return the state, once what can be committed now is. Where nobody writes, all go on from that, whatever was
        begun by those now gone. ``tells``: see `Rules.go_on`. Raises `DDictWritesLostError`: see `Rules.begin_move`;
        `DDictTimeoutError`: commits did not end in time."""
        rules = self.rules
        with self._changed:
            rules.check_epoch(epoch)
            # Whoever asks may know already of processes that died, and must not find them writing.
            for session in [each for each in self._sessions.values() if each.peer.is_gone()]:
                self.closed(session)
            # Processes that live hear of an epoch by themselves, and say where they are then.
            unheard = min(deadline, time.monotonic() + _HEAR_S)
            while rules.unheard() and (left := unheard - time.monotonic()) > 0:
                self._changed.wait(left)
                rules.check_epoch(epoch)
            wanted = rules.target()

            def reason() -> tuple[int, str] | None:
                nonlocal wanted
                rules.check_epoch(epoch)
                if tells:
                    rules.raise_orphaned()
                wanted = min(wanted, rules.target())  # a rollback can mean that less is to be committed than it was
                return None if rules.committed >= wanted else (wanted, rules.why_not(wanted))

            if not self._await(reason, deadline, is_gone):
                return rules.state()
            self._tell(lambda: rules.go_on(tells=tells))
        self._await_open(deadline)
        return self.state()

    def await_commit(self, its: asked.AwaitCommit, deadline: float, is_gone: IsGone) -> Fields:
        """Wait until a checkpoint is committed; see `Rules.keeps_from_commit`. Raises `DDictTimeoutError`: it was not
        in time."""
        account, at, rules = its.account, its.checkpoint_id, self.rules
        with self._changed:
            self._changed.notify_all()  # what it wrote late may have to be committed
            self._await(lambda: rules.keeps_from_commit(account, at, if_written=its.if_written), deadline, is_gone)
            return rules.state()

    def freeze(self, whose: Whose, frozen: bool, deadline: float) -> None:
        """Have all managers refuse writes, or take them again."""
        self._ask_all(self._tell(self.rules.freeze, whose, frozen), deadline)

    # ---- persistence --------------------------------------------------------------------------------------

    def persisted_ids(self) -> list[int]:
        """Return the checkpoints that can be restored."""
        return [] if self._history is None else self._history.ids()

    def _persisted(self) -> History:
        if self._history is None:
            raise DDictPersistError("this dictionary was made without a persister", hint="pass persister_class")
        return self._history

    def persist_newest(self, deadline: float, is_gone: IsGone) -> int:
        """Commit what can be, persist the newest committed checkpoint if it is not, and return it; -1: there is none.
        Raises `FlashpointError`: it could not be persisted."""
        self._persisted()
        rules = self.rules
        while True:
            self._await_open(deadline)
            try:
                self.newest(rules.epoch, deadline, is_gone, tells=False)
                break
            except StaleEpochError:
                continue  # an epoch has begun meanwhile: what is committed in that one is as good
        with self._changed:
            checkpoint_id = rules.committed
            if checkpoint_id >= 0:
                self._tell(rules.persist, checkpoint_id)
                why = checkpoint_id, "checkpoints are still being persisted"
                self._await(lambda: why if rules.is_to_be_persisted(checkpoint_id) else None, deadline)
        return checkpoint_id

    def restore(self, whose: Whose, checkpoint_id: int, deadline: float) -> Fields:
        """Have all managers hold a persisted checkpoint, and nothing else: an epoch begins with it.

        Raises:
            DDictTimeoutError: it was not done in time; or it was, and copies are missing.
            FlashpointError: a manager cannot read it, or it is not there; all is as before.
        """
        rules, history, handle = self.rules, self._persisted(), whose.handle
        self._tell(rules.fence.hear, handle, whose.generation)
        version = save_of(history.locate(checkpoint_id))
        with self._no_commits(deadline):
            with self._changed:
                why = checkpoint_id, "checkpoints are still being persisted"
                self._await(lambda: why if rules.is_persisting() else None, deadline)
            try:
                self._ask_all(asked.PrepareRestore(version), deadline)
                self._tell(rules.fence.hear, handle, whose.generation)
                history.restored(checkpoint_id)
            except FlashpointError:
                with contextlib.suppress(FlashpointError):
                    self._ask_all(asked.PrepareRestore(None), time.monotonic() + _CALL_S)
                raise
            self._tell(rules.restore, handle, checkpoint_id, version)
        self._await_open(deadline)

        def reason() -> tuple[int, str] | None:  # an epoch may begin: all go on from what is restored then
            text = f"it is restored, but has no copies yet: {rules.why_not(checkpoint_id)}"
            return None if rules.committed >= checkpoint_id or self._closing else (checkpoint_id, text)

        with self._changed:
            self._await(reason, deadline)
            return rules.state()

    # ---- requests -----------------------------------------------------------------------------------------

    def open(self, peer: Peer) -> Session:
        """See `RequestHandler`."""
        return Session(peer)

    def handle(self, session: Session, operation: str, fields: Fields, blobs: list[bytes]) -> Result:
        """See `RequestHandler`."""
        request, deadline = asked.decode(operation, fields)
        found = _OPERATIONS.get(type(request))
        if found is None:
            raise ProtocolError(f"the coordinator has no operation {operation!a}")
        return found(_Call(self, session, deadline), request) or {}, ()

    def closed(self, session: Session) -> None:
        """See `RequestHandler`. The process of a session is gone, unless it has another connection by now."""
        with self._changed:
            if self._sessions.get(session.id) is session:
                del self._sessions[session.id]
                self._tell(self.rules.killed, session.id)

    def note_place(self, told: asked.Here) -> None:
        """Note where a manager is."""
        self.rules.check_manager(told.manager)
        self.places[told.manager] = Place(told.node, told.unix, told.host, told.port)


class _Call(NamedTuple):
    """A request's receiver, its connection, and when its time is up."""

    to: Coordinator
    session: Session
    deadline: float

    @property
    def is_gone(self) -> IsGone:
        """See `IsGone`."""
        return self.session.peer.is_gone


_Operation: TypeAlias = Callable[[_Call, Any], "Fields | None"]
_OPERATIONS: Final[dict[type[Request], _Operation]] = {
    asked.Hello: lambda call, its: {"manager": COORDINATOR},
    asked.State: lambda call, its: call.to.state(),
    asked.Watch: lambda call, its: call.to.watch(call.session, its, call.is_gone),
    asked.Join: lambda call, its: call.to._tell(call.to.rules.join, its.account),
    asked.Move: lambda call, its: call.to.move(its.account, its.to, its.onwards, call.deadline),
    asked.GoBack: lambda call, its: call.to.go_back(its.whose, its.session, its.back, call.deadline),
    asked.CatchUp: lambda call, its: call.to.catch_up(its.account, call.deadline),
    asked.Leave: lambda call, its: call.to.leave(its.account),
    asked.Newest: lambda call, its: call.to.newest(its.epoch, call.deadline, call.is_gone),
    asked.AwaitCommit: lambda call, its: call.to.await_commit(its, call.deadline, call.is_gone),
    asked.SetFrozen: lambda call, its: call.to.freeze(its.whose, its.frozen, call.deadline),
    asked.PersistNewest: lambda call, its: {"checkpoint_id": call.to.persist_newest(call.deadline, call.is_gone)},
    asked.PersistedIds: lambda call, its: {"ids": call.to.persisted_ids()},
    asked.Restore: lambda call, its: call.to.restore(its.whose, its.checkpoint_id, call.deadline),
    asked.Here: lambda call, its: call.to.note_place(its),
    asked.Places: lambda call, its: {"places": list(call.to.places.items())},
    asked.Returned: lambda call, its: call.to._tell(call.to.rules.returned, its.manager, its.incarnation),
    asked.SealedBy: lambda call, its: {"sealed": call.to._tell(call.to.rules.sealed_by, its.manager)},
}
