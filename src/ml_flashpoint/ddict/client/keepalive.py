"""Connections that the handles of a process share, and a session that keeps those that write attached.

Owns what the coordinator is told of each handle, also by others than the handle: when it is gone, or does nothing; and
the connection, the session, by whose end the coordinator knows that the process was killed.
"""

from __future__ import annotations

import logging
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
    StaleEpochError,
    StaleRequestError,
    writes_lost,
)
from ml_flashpoint.ddict.links import Exchange, Links, locator
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.ddict.wire.requests import Account, Back, CatchUp, Join, Leave, Watch, Whose, Written
from ml_flashpoint.format.errors import FlashpointError

_log = logging.getLogger(__name__)

_WATCH_S = 20
_PATIENCE_S = 900_000.0
_LONGEST_PAUSE_S = 1.0
_LEAVE_S = 5.0
_CATCH_UP_S = 60.0


class Standing:
    """The place of a handle, and what of its writes can be lost. Thread-safe.

    Attributes:
        joined: True if it counts as writing: only then does it matter where it is, and that it leaves.
        written: since it went back last.
        lost: what it has to go back for before it writes or moves, as `errors.writes_lost` has it.
        untold: what it has to be told before anything else.
        generation: of its requests; see `fence`.
        going_back: the rollback that is not done: whatever the handle does next finishes it.
        astray: True if the coordinator may take it to be elsewhere.
    """

    def __init__(self, handle: str, session: str, checkpoint_id: int, epoch: int) -> None:
        self.handle, self.checkpoint_id, self.epoch = handle, checkpoint_id, epoch
        self.joined = self.astray = False
        self.written = Written()
        self.lost: tuple[str, int, int | None] | None = None
        self.untold: DDictError | None = None
        self.generation = 0
        self.going_back: Back | None = None
        self.session = session
        self._base = (-1, 0)  # where the epoch began: a checkpoint and the number of its cut
        self._lock = threading.Lock()

    @property
    def is_known(self) -> bool:
        """True if the coordinator is to hear of its end."""
        return self.joined or self.astray or self.going_back is not None or self.written != Written()

    def whose(self, *, writes: bool = False) -> Whose:
        """Return whose a request is."""
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

    def wrote_above(self, checkpoint_id: int) -> bool:
        """Return True if it may have written something above a committed checkpoint."""
        with self._lock:
            return self.written.checkpoint > checkpoint_id

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
        """Hear what has begun; see `Coordinator.catch_up`."""
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
        to = min(max(base, 0), self.checkpoint_id)
        self.lost = why, to, manager
        self.untold = writes_lost(why, to, manager)

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
            lost = self.lost
            if lost is not None and isinstance(self.untold, DDictWritesLostError):
                self.untold = None
        if lost is not None:
            raise writes_lost(*lost)


class Keepalive:
    """See the module. Thread-safe. It begins with the first handle that writes.

    Attributes:
        id: of the session.
        standings: of handles that have joined; each change is one step.
    """

    def __init__(self, links: Links) -> None:
        self.id = secrets.token_hex(8)
        self.standings: dict[str, Standing] = {}
        self._links = links
        self._lock = threading.Lock()
        self._attached, self._closed = threading.Event(), threading.Event()
        self._failure = "it does not answer"
        self._gone: queue.SimpleQueue[Standing | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        _keepalives.add(self)

    def begin(self, deadline: float) -> None:
        """Have a session."""
        with self._lock:
            if not self._threads:
                self._threads = [
                    threading.Thread(target=run, name=name, daemon=True)
                    for run, name in ((self._run, "ddict-keepalive"), (self._run_leaving, "ddict-leave"))
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
                    self._closed.wait(_LONGEST_PAUSE_S)
                except Exception:  # without this thread, handles that are forgotten would hold up commits
                    _log.exception("a handle that is gone could not be detached")
                    break
            self.standings.pop(standing.handle, None)
        self.close()

    def close_later(self) -> None:
        """Close when those that were forgotten have left: like `forget`, for the last handle of all."""
        if self._threads:
            self._gone.put(None)
        else:
            self.close()

    def await_end(self, deadline: float) -> None:
        """Wait until those that were forgotten have left, if that is all that there is to be done."""
        if not self.standings or not self._gone.empty():
            self._gone.put(None)
            for thread in self._threads[1:]:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        pause = 0.01
        while not self._closed.is_set():
            try:
                link = self._links.connect(COORDINATOR, 5.0)
                try:
                    Exchange(link, time.monotonic() + 5.0).request(Watch(self.id, -1, 0))
                    for standing in list(self.standings.values()):
                        self._join_again(standing)
                    self._attached.set()
                    pause, epoch = 0.01, 0
                    while not self._closed.is_set():
                        # A coordinator that is stopped takes its time. The end of either side breaks the connection.
                        exchange = Exchange(link, time.monotonic() + _PATIENCE_S)
                        epoch = int(exchange.request(Watch(self.id, epoch, _WATCH_S)).fields["epoch"])
                        self._tell(epoch)
                finally:
                    if not self._closed.is_set():
                        self._attached.clear()
                    link.close()
            except DDictDestroyedError:
                self.close()
            except FlashpointError as error:
                self._failure = str(error)
                self._closed.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            except Exception:  # without this thread, commits would go on without the handles of this process
                _log.exception("the connection that keeps handles attached failed")
                self._closed.wait(_LONGEST_PAUSE_S)

    def _tell(self, epoch: int) -> None:
        """Have handles that do nothing at the moment hear of an epoch: others may wait for them to."""
        for standing in list(self.standings.values()):
            if standing.epoch < epoch:
                standing.catch_up(self._links, time.monotonic() + _CATCH_UP_S)

    def _join_again(self, standing: Standing) -> None:
        """Join after the connection broke, although this process lives: the coordinator took it for killed."""
        deadline = time.monotonic() + _LEAVE_S
        while True:
            try:
                self._links.call(COORDINATOR, Join(standing.account()), deadline=deadline)
                return
            except StaleEpochError:
                standing.catch_up(self._links, time.monotonic() + _CATCH_UP_S)
                return
            except StaleRequestError:  # it has asked for something else meanwhile, perhaps to leave
                if standing.handle not in self.standings:
                    return
                if time.monotonic() >= deadline:
                    raise

    def close(self) -> None:
        """Detach all, and close the connections. Does not wait."""
        self._closed.set()
        self._attached.set()  # for those who wait for what will not come
        self._gone.put(None)
        self._links.close()


_keepalives: weakref.WeakSet[Keepalive] = weakref.WeakSet()


def await_leaves(deadline: float) -> None:
    """Wait, at the end of a process, until the handles that it had, and forgot, have left."""
    for keepalive in list(_keepalives):
        keepalive.await_end(deadline)


class Client:
    """A process's side of a dictionary, which all of its handles share. Thread-safe."""

    def __init__(self, configuration: Configuration) -> None:
        found = locator(configuration)
        self.links = Links(found, configuration.secret)
        self.is_local = found.is_local
        self.keepalive = Keepalive(self.links)
        self.writer = ValueWriter()
        self._finalizer = weakref.finalize(self, _close, self.keepalive, self.writer)

    def close(self) -> None:
        """Let go of everything; also done when the last handle of the process is gone."""
        self.keepalive.close()
        self._finalizer()


def _close(keepalive: Keepalive, writer: ValueWriter) -> None:
    keepalive.close_later()
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
    _keepalives.clear()


os.register_at_fork(after_in_child=_after_fork)
