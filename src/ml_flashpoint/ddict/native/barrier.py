"""A barrier of processes.

Owns the barrier itself (who waits, who is released, and what they are told: a handler of requests, whose sessions end
with the processes that they are of), its handles, which are picklable, and their connections to it. It lives in the
process that made it, so that nothing is left locked by a process that was killed; where that is no process of the Ray
cluster, but a client of it, in an actor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing.util
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final

from ml_flashpoint.ddict.errors import REQUESTS, BarrierBrokenError, DDictDestroyedError, DDictTimeoutError
from ml_flashpoint.ddict.native import ray as native_ray
from ml_flashpoint.format.errors import AuthenticationError, FlashpointError, InvalidArgumentError, ProtocolError
from ml_flashpoint.net.channel import Channel, ConnectionLostError
from ml_flashpoint.net.client import Address, Connection
from ml_flashpoint.net.messages import Fields, text
from ml_flashpoint.net.server import Peer, RequestServer

_log = logging.getLogger(__name__)

BARRIERS: Final = dataclasses.replace(REQUESTS, purpose=b"ml_flashpoint.ddict barrier", json_bytes=64 << 10, blobs=0)
"""A client says ``wait``, which is answered when all are there; ``state``, ``abort``, ``reset``; and ``bye`` before it
leaves in order."""


_REPLY_S = 30.0
_NO_END_S = 1e6
_MOST_REASON = 1000
_travelling: ContextVar[list[Barrier] | None] = ContextVar("_travelling", default=None)
_farewell_of: int | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Session:
    channel: Channel
    counts: bool = False
    """Whether it has waited, and not said farewell: its end is that of a process that others count on."""


class BarrierServer:
    """The barrier itself.

    Args:
        action: called before each release, on a thread of its own.
        host: address of this machine that processes on others reach it at; None: there are none.
    """

    def __init__(self, parties: int, action: Callable[[], object] | None, host: str | None = None) -> None:
        self._parties, self._action = parties, action
        self._broken = ""
        self._waiting: list[_Session] = []
        self._passing: list[_Session] = []
        """Those who wait for the action, and for nobody else."""
        self._acting = self._is_closed = False
        self._lock = threading.Lock()
        self.secret = secrets.token_bytes(32)
        self._server = RequestServer(
            self.secret,
            self,
            BARRIERS,
            # An abstract name: there is no file that could outlive a process.
            unix_path=f"\0mlf-barrier-{secrets.token_hex(16)}" if host is None else None,
            tcp_host=host,
            max_connections=4 * parties + 100,
        )

    @property
    def address(self) -> Address:
        """Where it is."""
        return self._server.addresses[0]

    def close(self) -> None:
        """End it: all connections close."""
        with self._lock:
            self._is_closed = True
        self._server.close()

    def abort(self, reason: str) -> None:
        """Break it, from any thread."""
        with self._lock:
            self._break(reason)

    # ---- requests: see `RequestHandler` -------------------------------------------------------------------

    def open(self, peer: Peer) -> _Session:
        """A thread of some process has connected."""
        assert peer.channel is not None
        return _Session(peer.channel)

    def handle(
        self, session: _Session, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Any]] | None:
        """Do what it says."""
        with self._lock:
            if op == "wait":
                self._join(session)
                return None  # told by whoever releases it
            if op == "state":
                return {"waiting": len(self._waiting) + len(self._passing), "broken": self._broken}, ()
            if op == "bye":
                session.counts = False
            elif op in ("abort", "reset"):
                self._break(text(fields, "reason"))
                self._broken = self._broken if op == "abort" else ""
            else:
                raise ProtocolError(f"there is no operation {op!a}")
            return {}, ()

    def closed(self, session: _Session) -> None:
        """It has gone, one way or another."""
        with self._lock:
            for waiting in (self._waiting, self._passing):
                if session in waiting:
                    waiting.remove(session)
            if session.counts and not self._is_closed:
                self._break("a process that uses it died, or gave up")

    # ---- the barrier --------------------------------------------------------------------------------------

    def _join(self, session: _Session) -> None:
        if self._broken:
            self._tell(session)
            return
        session.counts = True
        self._waiting.append(session)
        self._pass_if_all_are_here()

    def _pass_if_all_are_here(self) -> None:
        if self._acting or len(self._waiting) < self._parties:
            return
        self._passing, self._waiting = self._waiting[: self._parties], self._waiting[self._parties :]
        if self._action is None:
            self._release()
            return
        # Not on this thread, and not under the lock: the action may use the barrier.
        try:
            threading.Thread(target=self._act, args=(self._passing,), name="ddict-barrier-action", daemon=True).start()
            self._acting = True
        except RuntimeError as error:
            self._break(f"its action cannot be called: {error}")

    def _act(self, passing: list[_Session]) -> None:
        assert self._action is not None
        failure = ""
        try:
            self._action()
        except BaseException as error:
            _log.exception("the action of a barrier failed")
            failure = f"its action failed: {type(error).__name__}: {error}"
        with self._lock:
            self._acting = False
            # Else it was broken meanwhile, and they know. It may be whole again, for others than these.
            if self._passing is passing:
                if failure:
                    self._break(failure)
                else:
                    self._release()
            # Others may have come meanwhile.
            self._pass_if_all_are_here()

    def _release(self) -> None:
        released, self._passing = self._passing, []
        for index, one in enumerate(released):
            self._tell(one, index)

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        waiting, self._passing, self._waiting = [*self._passing, *self._waiting], [], []
        for session in waiting:
            self._tell(session)

    def _tell(self, session: _Session, index: int | None = None) -> None:
        # A few bytes to one who waits for nothing else always fit into the socket; who is gone is heard of later.
        broken = BarrierBrokenError(f"the barrier is broken: {self._broken}")
        try:
            if index is None:
                session.channel.send(BARRIERS.describe(broken), {})
            else:
                session.channel.send(None, {"index": index})
        except FlashpointError as error:
            _log.debug("a process could not be told of a barrier: %s", error)


class Barrier:
    """Lets processes, or threads, wait for each other; reusable.

    It is broken when a waiting one gives up or dies, when a process that has waited before ends without a farewell
    (SIGKILL), when a member of a `ProcessGroup` that it was given to fails, or by `abort`: then all who wait, and all
    who come later, get `BarrierBrokenError` until `reset`. A handle is thread-safe and picklable; the process that
    made it has to live as long as it is used.

    Args:
        parties: how many have to wait for all to pass.
        action: called by the process that made the barrier, on a thread of its own, before each release. It may use
            the barrier, except to wait at it; what it raises breaks the barrier. Not in a client of a Ray cluster.
        timeout: seconds, for every `wait` that does not give its own.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def __init__(self, parties: int, action: Callable[[], object] | None = None, timeout: float | None = None) -> None:
        if isinstance(parties, bool) or not isinstance(parties, int) or parties < 1:
            raise InvalidArgumentError("must be a positive number of processes", argument="parties", value=parties)
        _check_timeout(timeout)
        self._parties = parties
        self._timeout = timeout
        self._server: BarrierServer | None = None
        self._actor: Any = None
        if native_ray.is_client():
            if action is not None:
                raise InvalidArgumentError("cannot be called in a client of Ray", argument="action", value=action)
            self._actor, found = native_ray.make_barrier(parties)
            self._address, self._secret = found
        else:
            host = native_ray.own_host() if native_ray.is_on_ray() else None
            self._server = server = BarrierServer(parties, action, host)
            self._address, self._secret = server.address, server.secret
            weakref.finalize(self, server.close)
        self._lines = _Lines(self._address, self._secret)

    def __reduce__(self) -> tuple[Any, ...]:
        travelling = _travelling.get()
        if travelling is not None:
            travelling.append(self)
        return _handle, (self._address, self._secret, self._parties, self._timeout)

    @property
    def parties(self) -> int:
        """How many have to wait for all to pass."""
        return self._parties

    @property
    def n_waiting(self) -> int:
        """How many wait at the moment."""
        return int(self._lines.ask("state")["waiting"])

    @property
    def broken(self) -> bool:
        """Whether it is broken."""
        return bool(self._lines.ask("state")["broken"])

    def wait(self, timeout: float | None = None) -> int:
        """Wait until as many as there are parties do; a number from 0, another one for each of them.

        Args:
            timeout: seconds; by default those of the barrier, or without end.

        Raises:
            BarrierBrokenError: not all came: one died, or gave up.
            DDictTimeoutError: this one gave up, which breaks the barrier.
            DDictDestroyedError: the process that made the barrier is gone, or has closed it.
        """
        timeout = self._timeout if timeout is None else timeout
        _check_timeout(timeout)
        return self._lines.wait(timeout)

    def abort(self, reason: str = "it was aborted") -> None:
        """Break it: all who wait and who come get `BarrierBrokenError`."""
        if self._server is not None:
            self._server.abort(reason)
        else:
            self._lines.ask("abort", reason=reason[:_MOST_REASON])

    def reset(self) -> None:
        """Make a broken one usable again. Those who wait get `BarrierBrokenError`."""
        self._lines.ask("reset", reason="it was reset")

    def close(self) -> None:
        """In the process that made it: end it for all. Elsewhere: let go of it."""
        if self._server is not None:
            self._server.close()
        if self._actor is not None:
            native_ray.end_barrier(self._actor)
        self._lines.leave()


def _handle(address: Address, secret: bytes, parties: int, timeout: float | None) -> Barrier:
    barrier = object.__new__(Barrier)
    barrier._actor = barrier._server = None
    barrier._parties, barrier._timeout = parties, timeout
    barrier._address, barrier._secret = address, secret
    barrier._lines = _Lines(address, secret)
    return barrier


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not 0 <= timeout < float("inf"):
        raise InvalidArgumentError("must be a number of seconds", argument="timeout", value=timeout)


@contextlib.contextmanager
def barriers_in_pickles() -> Iterator[list[Barrier]]:
    """Collects the barriers that are pickled meanwhile by this thread."""
    found: list[Barrier] = []
    reset = _travelling.set(found)
    try:
        yield found
    finally:
        _travelling.reset(reset)


class _Line(Connection):
    """A connection of a thread that waits. When nothing refers to it any more, as after the thread's end, it says
    farewell."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never made
            self.leave("bye")


class _Lines:
    """This process's connections to a barrier, made when they are first used: one for each thread that waits, since
    each waits for itself, and one for all questions, whose end breaks nothing. In a forked child they are made anew."""

    def __init__(self, address: Address, secret: bytes) -> None:
        self._to = address, secret, BARRIERS
        self._of_thread = threading.local()
        self._waiting: weakref.WeakSet[_Line] = weakref.WeakSet()
        self._asking: Connection | None = None
        _all.add(self)
        _ensure_farewell()

    def wait(self, timeout_s: float | None) -> int:
        """Wait until all are there. Who gives up hangs up without a farewell: that breaks the barrier for all."""
        within_s = _NO_END_S if timeout_s is None else timeout_s
        try:
            with _gone():
                line: _Line | None = getattr(self._of_thread, "line", None)
                if line is None or line.closed:
                    line = self._of_thread.line = _Line(*self._to, connect_timeout_s=_REPLY_S)
                    self._waiting.add(line)
                try:
                    return int(line.request("wait", {}, timeout_s=within_s).fields["index"])
                except BaseException as error:
                    if not isinstance(error, FlashpointError):
                        line.close()  # it would hear the answer to this in place of that to the next question
                    raise
        except DDictTimeoutError as error:
            raise DDictTimeoutError(f"not all came to the barrier within {timeout_s} s") from error

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask something that is answered at once."""
        try:
            with _gone():
                if self._asking is None or self._asking.closed:
                    self._asking = Connection(*self._to, connect_timeout_s=_REPLY_S)
                return self._asking.request(op, fields, timeout_s=_REPLY_S).fields
        except DDictTimeoutError as error:
            raise DDictTimeoutError(f"the barrier did not answer within {_REPLY_S} s") from error

    def leave(self) -> None:
        """Let go of the barrier in order: what becomes of this thread is nothing to it any more."""
        line: _Line | None = getattr(self._of_thread, "line", None)
        if line is not None:
            line.leave("bye")

    def close(self) -> None:
        """Let go of the barrier in order: what becomes of this process is nothing to it any more."""
        for line in list(self._waiting):
            line.leave("bye")
        if self._asking is not None:
            self._asking.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a half-made one; the end of the interpreter
            self.close()


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except (ConnectionLostError, AuthenticationError) as error:
        raise DDictDestroyedError(f"the barrier is gone: {error.message}") from error


_all: weakref.WeakSet[_Lines] = weakref.WeakSet()


def _ensure_farewell() -> None:
    # By multiprocessing's means, since its children end without `atexit`, and forget what was theirs before the fork.
    global _farewell_of
    if _farewell_of != os.getpid():
        _farewell_of = os.getpid()
        multiprocessing.util.Finalize(None, say_farewell, exitpriority=10)


def say_farewell() -> None:
    """Let go of all barriers of this process, which ends in order."""
    for lines in list(_all):
        lines.close()
