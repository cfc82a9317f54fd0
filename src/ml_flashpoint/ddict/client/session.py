"""The account of a handle, and the session that a process has with the coordinator for all of its handles."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
import weakref
from typing import Any

from ml_flashpoint.ddict.client.values import ValueWriter
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictDestroyedError,
    DDictError,
    DDictManagerLostError,
    DDictWritesLostError,
    StaleRequestError,
    writes_lost,
)
from ml_flashpoint.ddict.links import Exchange, Links, locator
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.ddict.wire.requests import Account, Back, CatchUp, Leave, Watch, Whose, Written
from ml_flashpoint.format.errors import FlashpointError

_WATCH_S = 20
_ANSWER_S, _PATIENCE_S = 5.0, 900_000.0
_RETRY_S = 0.2
_LEAVE_S = 5.0
_CATCH_UP_S = 60.0


class Standing:
    """The place of a handle, and what of its writes can be lost. Thread-safe."""

    def __init__(self, handle: str, session: str, checkpoint_id: int, epoch: int) -> None:
        self.handle, self.session, self.checkpoint_id, self.epoch = handle, session, checkpoint_id, epoch
        self.joined = False  # counts as writing: only then does it matter where it is, and that it leaves
        self.astray = False  # the coordinator may take it to be elsewhere
        self.written = Written()  # since it went back last
        self.lost: tuple[str, int, int | None] | None = None  # to go back for before it writes, for `writes_lost`
        self.untold: DDictError | None = None  # to be told before anything else
        self.generation = 0  # of its requests; see `fence`
        self.going_back: Back | None = None  # a rollback that is not done: whatever it does next finishes that
        self._base = (-1, 0)  # where the epoch began: a checkpoint and the number of its cut
        self._lock = threading.Lock()

    @property
    def is_known(self) -> bool:
        """True if the coordinator is to hear of its end."""
        return self.joined or self.astray or self.going_back is not None or self.written != Written()

    def whose(self, *, writes: bool = False) -> Whose:
        """Return whose a request is. Raise `StaleRequestError` if the handle has something else to do first."""
        with self._lock:
            if self.untold is not None or (writes and (self.lost is not None or self.going_back is not None)):
                raise StaleRequestError("this handle has something else to do first")
            return self._whose()

    def _whose(self) -> Whose:
        return Whose(self.handle, self.checkpoint_id, self.epoch, self.generation)

    def account(self) -> Account:
        """Return all that the coordinator is told of it."""
        with self._lock:
            back = self.going_back
            written = self.written if back is None else self.written.back_to(back.to)
            return Account(self._whose(), self.session, written, back or Back())

    def give_up(self, generation: int) -> None:
        """Note that a request of a generation was not answered: what comes from now on is of a later one."""
        with self._lock:
            self.generation = max(self.generation, generation + 1)

    def go_back(self, back: Back) -> None:
        """Begin a rollback."""
        with self._lock:
            self.going_back = back
            self.generation += 1

    def wrote(self, written: Written, epoch: int) -> None:
        """Note what it has written, in an epoch that may be over by now."""
        with self._lock:
            if epoch == self.epoch or not written.is_above(*self._base):
                self.written = self.written.and_also(written)
            elif self.lost is None:
                self._lose("another epoch has begun", self._base[0], None)

    def went_back(self, to: int, state: dict[str, Any]) -> None:
        """Note that it is at ``to`` now, and nothing of it is left above."""
        with self._lock:
            is_same, self.checkpoint_id, self.epoch = self.epoch == int(state["epoch"]), to, int(state["epoch"])
            # Where an epoch began with it, what is left of it is in the cut at its base.
            self.written = self.written.back_to(to) if is_same else Written(min(self.written.checkpoint, to))
            self.lost = self.untold = self.going_back = None
            self.astray = False

    def catch_up(self, links: Links, deadline: float) -> None:
        """Hear what has begun; see `Rules.catch_up`."""
        asked = self.account()
        answer = links.call(COORDINATOR, CatchUp(asked), deadline=deadline).fields
        with self._lock:
            if asked.whose.epoch != self.epoch or (int(answer["epoch"]) == self.epoch and answer["lost"] is None):
                return
            self.epoch, base = int(answer["epoch"]), int(answer["base"])
            self._base = base, int(answer["cut"])
            if answer["lost"] is not None:
                if self.lost is None or self.lost[0] != answer["lost"]:
                    self._lose(str(answer["lost"]), base, answer["manager"])
                    self.written = Written()
                return
            self.written = Written(min(self.written.checkpoint, base))  # all of it is in that cut
            if answer["taken"] and self.untold is None:
                self.untold = DDictCheckpointRetiredError(
                    f"what was committed at or below checkpoint {self.checkpoint_id} was taken back to {base}",
                    checkpoint_id=max(base, 0),
                    hint="sync_to_newest_checkpoint() goes to the newest committed one",
                )

    def _lose(self, why: str, base: int, manager: int | None) -> None:
        self.lost = why, min(max(base, 0), self.checkpoint_id), manager
        self.untold = writes_lost(*self.lost)

    def tell(self) -> None:
        """Raise what it has to be told, once."""
        if self.untold is None:
            return
        with self._lock:
            untold, self.untold = self.untold, None
        if untold is not None:
            raise untold

    def check_whole(self) -> None:
        """Raise `DDictWritesLostError` if something is lost that it has to go back for."""
        with self._lock:
            if self.lost is None:
                return
            if isinstance(self.untold, DDictWritesLostError):
                self.untold = None
            raise writes_lost(*self.lost)


class Session:
    """A connection by whose end the coordinator knows that this process is gone; it begins with the first write.

    One thread hears of epochs by it, for handles that do nothing: others may wait for what they say. Another one
    detaches handles that were garbage collected. Thread-safe.
    """

    def __init__(self, links: Links) -> None:
        self.id = secrets.token_hex(8)
        self.standings: dict[str, Standing] = {}  # of handles that have joined; each change is one step
        self._links = links
        self._lock = threading.Lock()
        self._attached, self._closed = threading.Event(), threading.Event()
        self._failure = "it does not answer"
        self._gone: queue.SimpleQueue[Standing | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        _sessions.add(self)

    def begin(self, deadline: float) -> None:
        """Have the connection."""
        with self._lock:
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._hear, name="ddict-session", daemon=True),
                    threading.Thread(target=self._run_leaving, name="ddict-leave", daemon=True),
                ]
                for thread in self._threads:
                    thread.start()
        if not self._attached.wait(max(0.0, deadline - time.monotonic())):
            raise DDictManagerLostError(
                f"the coordinator does not take this process as one that writes: {self._failure}",
                manager=COORDINATOR,
                hint="about 512 processes can write at a time; detach() handles that do not",
            )
        if self._closed.is_set():
            raise DDictDestroyedError("the dictionary was destroyed")

    def _hear(self) -> None:
        while not self._closed.is_set():
            try:
                with contextlib.closing(self._links.connect(COORDINATOR, _ANSWER_S)) as link:
                    self._hear_by(link)
            except DDictDestroyedError:
                self.close()
            except Exception as error:  # without this thread, commits would go on without the handles of this process
                if not self._closed.is_set():
                    self._failure = str(error)
                    self._attached.clear()
                self._closed.wait(_RETRY_S)

    def _hear_by(self, link: Any) -> None:
        epoch, seconds, patience = 0, 0, _ANSWER_S
        while not self._closed.is_set():
            told = Exchange(link, time.monotonic() + patience).request(Watch(self.id, epoch, seconds)).fields["epoch"]
            for standing in list(self.standings.values()):
                # All after a new connection: the end of the one before was taken for the end of this process.
                if standing.epoch < told or not seconds:
                    standing.catch_up(self._links, time.monotonic() + _CATCH_UP_S)
            self._attached.set()
            # A coordinator that is stopped takes its time. The end of either side breaks the connection.
            epoch, seconds, patience = int(told), _WATCH_S, _PATIENCE_S

    def forget(self, standing: Standing) -> None:
        """Detach a handle that was garbage collected: from any thread at any moment, so it takes no lock."""
        self._gone.put(standing)

    def _run_leaving(self) -> None:
        while (standing := self._gone.get()) is not None:
            while not self._closed.is_set():
                try:
                    self._links.call(COORDINATOR, Leave(standing.account()), deadline=time.monotonic() + _LEAVE_S)
                    break
                except FlashpointError:
                    self._closed.wait(_RETRY_S)
            self.standings.pop(standing.handle, None)
        self.close()

    def end(self) -> list[threading.Thread]:
        """Close once the handles that were forgotten have left. Return the threads that this takes. For the garbage
        collector, too, so it waits for nothing."""
        self._gone.put(None)
        if not self._threads:
            self.close()
        return self._threads[1:]

    def close(self) -> None:
        """Detach all, and close the connections. Does not wait."""
        self._closed.set()
        self._attached.set()  # for those who wait for what will not come
        self._gone.put(None)
        self._links.close()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def end_sessions(deadline: float) -> None:
    """Have the handles that this process had, and forgot, leave before it ends."""
    for thread in [each for session in list(_sessions) for each in session.end()]:
        thread.join(max(0.0, deadline - time.monotonic()))


class Client:
    """A process's side of a dictionary, which all of its handles share. Thread-safe."""

    def __init__(self, configuration: Configuration) -> None:
        found = locator(configuration)
        self.links = Links(found, configuration.secret)
        self.is_local = found.is_local
        self.session = Session(self.links)
        self.writer = ValueWriter()
        self._finalizer = weakref.finalize(self, _close, self.session, self.writer)

    def close(self) -> None:
        """Let go of everything; also done when the last handle of the process is gone."""
        self.session.close()
        self._finalizer()


def _close(session: Session, writer: ValueWriter) -> None:
    session.end()
    writer.close()


_clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
_clients_lock = threading.Lock()


def client_of(configuration: Configuration) -> Client:
    """Return this process's client for a dictionary, made if there is none."""
    with _clients_lock:
        client = _clients.get(configuration.dictionary)
        if client is None:
            client = _clients[configuration.dictionary] = Client(configuration)
        return client


def _after_fork() -> None:
    global _clients_lock
    _clients_lock = threading.Lock()
    for client in list(_clients.values()):
        client._finalizer.detach()  # nothing of it is this process's: handles have another one here
    _clients.clear()
    _sessions.clear()


os.register_at_fork(after_in_child=_after_fork)
