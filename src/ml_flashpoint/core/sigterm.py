"""SIGTERM: time for the save in flight to be committed, then whatever would have happened anyway. SIGINT: not in the
midst of a save.

Owns the handler, its chaining and its removal. What there is to wait for is the door's to say.

Python runs handlers in the main thread, between two instructions, so a main thread that hangs in native code (a
collective that waits for a dead peer) would never get to it, and a launcher would have to wait for its own deadline to
kill a process that dies at once without us. Where the default action is what comes next, a thread therefore
watches for signals, and takes that action if the main thread does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_log = logging.getLogger(__name__)

# A main thread that has not run its handler after so many seconds is in native code.
_RESPONSE_S = 1.0
_BUSY_POLL_S = 0.05
_LONGEST_S = 3600.0


class ReentrantEvent:
    """As `threading.Event`, for what a signal handler of the main thread sets or waits for too.

    A handler may run anywhere in the main thread, also where that holds the lock of an event, and a
    `threading.Event` has one that nobody gets twice.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake up whoever waits."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Unset it."""
        with self._changed:
            self._is_set = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set; returns whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout_s)


class OffThread:
    """Has a function called by a thread of its own, and waits for it: for a signal handler, which may have interrupted
    its thread with any lock held, and must wait for none of them without a limit. The thread is started beforehand,
    since starting one takes locks, too.

    Args:
        function: called with the seconds that it may take.
        name: of the thread.
    """

    def __init__(self, function: Callable[[float], object], name: str) -> None:
        self._function = function
        self._asked, self._done = ReentrantEvent(), ReentrantEvent()
        self._deadline_s: float | None = 0.0
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def __call__(self, deadline_s: float) -> None:
        """Have it called, and wait for as long at most."""
        self._deadline_s = deadline_s
        self._done.clear()
        self._asked.set()
        self._done.wait(deadline_s)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._deadline_s = None
        self._asked.set()

    def _work(self) -> None:
        while True:
            while not self._asked.wait(_LONGEST_S):
                pass
            self._asked.clear()
            if (deadline_s := self._deadline_s) is None:
                return
            try:
                self._function(deadline_s)
            except Exception:
                _log.exception("committing on SIGTERM failed")
            self._done.set()


_responded = ReentrantEvent()
"""Set by any guard's handler: the main thread lives. Of the process, since guards may be chained."""

_writers: set[int] = set()
"""What signals are written to for the watching threads."""


class TerminationGuard:
    """Calls ``commit`` when SIGTERM comes, then the handler that was there before, or the default action.

    Install it in the main thread; elsewhere it does nothing, as only the main thread may set handlers. A second SIGTERM
    while ``commit`` runs is not held up. A forked child has the handler from before, or the default action.

    Args:
        commit: waits, at most for the seconds that it is given, until nothing is under way.
        grace_s: seconds that SIGTERM is held up at most.
    """

    def __init__(self, commit: Callable[[float], object], grace_s: float) -> None:
        self._commit = commit
        self._grace_s = grace_s
        self._earlier: Callable[[int, FrameType | None], object] | int | None = None
        self._pid = 0
        self._closed = False
        self._committing = False
        self._busy = False
        self._pending: tuple[int, FrameType | None] | None = None
        self._wakeup: int | None = None

    def install(self) -> None:
        """Take SIGTERM over, if this is the main thread and the present handler can be chained to."""
        if threading.current_thread() is not threading.main_thread():
            _log.info("not in the main thread: SIGTERM is not handled")
            return
        earlier = signal.getsignal(signal.SIGTERM)
        if earlier is None:
            _log.info("SIGTERM has a handler that was not installed from Python: it is left alone")
            return
        self._earlier = earlier
        self._pid = os.getpid()
        signal.signal(signal.SIGTERM, self._on_signal)
        if earlier == signal.SIG_DFL:
            self._start_watching()

    def remove(self) -> None:
        """Restore the earlier handler. If another one was installed on top since, it stays, and ours passes on, until
        that one is removed, too: a handler that only passes on would keep others from seeing the default action."""
        self._closed = True
        if not self._is_mine() or threading.current_thread() is not threading.main_thread():
            return
        self._stop_watching()
        if self._is_installed():
            signal.signal(signal.SIGTERM, self._earlier_open())

    def _earlier_open(self) -> Callable[[int, FrameType | None], object] | int | None:
        """The newest earlier handler that is not one of a guard that was removed."""
        guard = getattr(self._earlier, "__self__", None)
        return guard._earlier_open() if isinstance(guard, TerminationGuard) and guard._closed else self._earlier

    def _is_mine(self) -> bool:
        return self._pid == os.getpid()

    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._on_signal

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """While a save is being begun: a signal that comes now is acted on when it has begun, the first SIGINT, too."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._busy = True
        try:
            with _interrupt_held():
                yield
        finally:
            self._busy = False
            if self._pending is not None:
                pending, self._pending = self._pending, None
                self._on_signal(*pending)

    # ---- in the main thread -------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        _responded.set()
        if self._is_mine():
            if self._busy:
                self._pending = number, frame
                return
            if not self._closed and not self._committing:
                self._committing = True
                self._commit_within(self._grace_s)
                self._committing = False
        earlier = self._earlier
        if callable(earlier):
            earlier(number, frame)
        elif earlier == signal.SIG_DFL:
            _take_default_action()

    def _commit_within(self, deadline_s: float) -> None:
        try:
            self._commit(deadline_s)
        except Exception:
            _log.exception("committing on SIGTERM failed")

    # ---- beside a main thread that hangs ------------------------------------------------------------------

    def _start_watching(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if taken != -1:  # an event loop's
            signal.set_wakeup_fd(taken)
            os.close(reader)
            os.close(writer)
            return
        self._wakeup = writer
        _writers.add(writer)
        threading.Thread(target=self._watch, args=(reader,), name="flashpoint-sigterm", daemon=True).start()

    def _stop_watching(self) -> None:
        if self._wakeup is None:
            return
        taken = signal.set_wakeup_fd(-1)
        if taken not in (-1, self._wakeup):  # somebody's who came later
            signal.set_wakeup_fd(taken)
        os.close(self._wakeup)
        _writers.discard(self._wakeup)
        self._wakeup = None

    def _watch(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as signals:
            while numbers := signals.read(64):
                if signal.SIGTERM in numbers:
                    self._act_unless_main_thread_does()

    def _act_unless_main_thread_does(self) -> None:
        give_up = time.monotonic() + self._grace_s
        responded = _responded.wait(_RESPONSE_S)
        while self._busy and not responded and time.monotonic() < give_up:
            responded = _responded.wait(_BUSY_POLL_S)
        if not responded and not self._closed and self._is_installed():
            self._commit_within(max(give_up - time.monotonic(), _BUSY_POLL_S))
            if not _responded.is_set():
                _log.warning("SIGTERM: the main thread hangs in native code, ending the process")
                _take_default_action()
        _responded.clear()


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """Have the first Ctrl-C interrupt what comes after this. Python raises KeyboardInterrupt between any two
    instructions, also where a lock was taken and nobody knows of it yet, who would give it back."""
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever insists is not held up

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hold:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if held:
            raise KeyboardInterrupt


def _take_default_action() -> None:
    # Not `signal.signal`, which is for the main thread only.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


# A forked child shares the pipe: what is sent to the child must not reach the parent's watcher, not even before the
# child runs any Python. So whoever forks does not take SIGTERM meanwhile, and neither does the child, until it has let
# go of the pipe, and has the handler from before: one of Python's does not end a child that waits in native code.
# Other threads of the parent take it as ever.


def _guard() -> TerminationGuard | None:
    """The guard whose handler is installed."""
    guard = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return guard if isinstance(guard, TerminationGuard) else None


def _hold_sigterm() -> None:
    if _writers or _guard() is not None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _held.masks = [*getattr(_held, "masks", ()), before]


def _release_sigterm() -> None:
    if masks := getattr(_held, "masks", None):
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())


def _let_go_in_child() -> None:
    if _writers:
        taken = signal.set_wakeup_fd(-1)
        if taken not in (-1, *_writers):
            signal.set_wakeup_fd(taken)
        _writers.clear()
    while (guard := _guard()) is not None:
        signal.signal(signal.SIGTERM, guard._earlier)
    _release_sigterm()


_held = threading.local()
"""Of each thread, the signal masks from before the forks that it is about to make."""

os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_let_go_in_child)
