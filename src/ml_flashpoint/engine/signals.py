"""SIGTERM, where versions are persisted: time for what is in flight. SIGINT: not in the midst of a save.

The handler of SIGTERM only takes note: it may have interrupted the main thread with any lock held. A thread that
watches for signals hurries persisting. At its next step, save or close, the main thread waits for what is in flight,
then goes on to the earlier handler, or to the default action.

Python runs handlers in the main thread, between two instructions, so a main thread that hangs in native code (a
collective that waits for a dead peer) never gets to it. Where the default action is what comes next, the watching
thread therefore takes that action: if the main thread has not run the handler after a second and nothing is in flight
any more, and always at the end of the grace.
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
from dataclasses import dataclass
from types import FrameType

_log = logging.getLogger(__name__)

_ANSWER_S = 1.0
_POLL_S = 0.02


@dataclass(frozen=True, eq=False)
class InFlight:
    """The work of one engine that is in flight when SIGTERM comes.

    Attributes:
        hurry: has the newest version persisted as fast as that goes; does not wait.
        finish: waits until no save is under way and the newest version is persisted, for so many seconds at most.
        grace_s: seconds that SIGTERM is held up at most.
    """

    hurry: Callable[[], object]
    finish: Callable[[float], object]
    grace_s: float


def hold_up_sigterm(engine: InFlight) -> None:
    """Hold SIGTERM up for an engine, if this is the main thread and the present handler can be chained to."""
    global _handler
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) is not None:  # None: not installed from Python
        if _handler is None or not _handler.is_installed():
            _handler = _Handler(_handler)
        _handler.engines.append(engine)


def let_go_of_sigterm(engine: InFlight) -> None:
    """Undo `hold_up_sigterm`. Idempotent."""
    global _handler
    handler = _handler
    if handler is not None and engine in handler.engines:
        handler.engines.remove(engine)
        if not handler.engines and _in_main_thread():
            _handler = None
            handler.remove()
            handler.answer()  # one that has just come


def answer_sigterm() -> None:
    """Act on a SIGTERM that has come. To be called where a save would begin, and where an engine is closed."""
    if _handler is not None and _in_main_thread():
        _handler.answer()


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Have the first Ctrl-C interrupt what comes after this. Python raises KeyboardInterrupt between any two
    instructions, also where a lock was taken and nobody knows of it yet, who would give it back."""
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever insists is not held up

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
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


class _Handler:
    """A handler of SIGTERM. With no engines, it passes on: another handler may have been installed on top."""

    def __init__(self, below: _Handler | None = None) -> None:
        self.engines: list[InFlight] = [] if below is None else below.engines
        self._came: float | None = None  # when the SIGTERM did that is to be answered
        self._earlier = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._on_signal)
        if below is not None:  # another handler was installed on top of it; until now a SIGTERM was for that one
            below.engines, self._came = [], self._came if below._came is None else below._came
            below.remove()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._wakeup = writer if taken == -1 else -1
        if taken == -1:
            threading.Thread(target=self._watch, args=(reader,), name="flashpoint-sigterm", daemon=True).start()
        else:  # an event loop's: nobody watches
            signal.set_wakeup_fd(taken)
            os.close(reader)
            os.close(writer)

    def remove(self) -> None:
        """Leave SIGTERM to the earlier handler, unless somebody has installed one on top."""
        if self._wakeup != -1:
            taken = signal.set_wakeup_fd(-1)
            if taken not in (-1, self._wakeup):  # somebody's who came later
                signal.set_wakeup_fd(taken)
            os.close(self._wakeup)
        if self.is_installed():
            signal.signal(signal.SIGTERM, self._earlier)

    def answer(self) -> None:
        """Wait for what is in flight, and go on to the earlier handler, if a SIGTERM has come."""
        if self._came is not None:
            self._finish(self._came)
            self._came = None
            self._go_on(signal.SIGTERM, None)

    def is_installed(self) -> bool:
        """Return True unless somebody has installed another handler since."""
        return signal.getsignal(signal.SIGTERM) == self._on_signal

    def _finish(self, came: float) -> None:
        self._each(lambda engine: engine.finish(max(came + engine.grace_s - time.monotonic(), 0.0)))

    def _each(self, call: Callable[[InFlight], object]) -> None:
        for engine in list(self.engines):
            try:
                call(engine)
            except Exception:
                _log.exception("SIGTERM: the newest version may not be persisted")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None or not self.engines:
            self._go_on(number, frame)
        else:
            self._came = time.monotonic()

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._earlier):
            self._earlier(number, frame)
        elif self._earlier == signal.SIG_DFL:
            _take_default_action()

    def _watch(self, reader: int) -> None:
        """Hurry when a SIGTERM comes, and take the default action where the main thread does not."""
        with open(reader, "rb", buffering=0) as signals:
            while numbers := signals.read(64):
                if signal.SIGTERM not in numbers:
                    continue
                came = time.monotonic()
                self._each(lambda engine: engine.hurry())
                if self._earlier == signal.SIG_DFL:
                    self._await_answer(came)

    def _await_answer(self, came: float) -> None:
        while self._came is None and time.monotonic() < came + _ANSWER_S:
            time.sleep(_POLL_S)
        if self._came is None:
            self._finish(came)
        else:
            end = came + max((engine.grace_s for engine in self.engines), default=0.0)
            while self.engines and time.monotonic() < end:
                time.sleep(_POLL_S)
        if self.engines and self.is_installed():
            _log.warning("SIGTERM: the main thread has come to no step, save or close, ending the process")
            _take_default_action()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _take_default_action() -> None:
    # Not `signal.signal`, which is for the main thread only.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


_handler: _Handler | None = None
_held = threading.local()
"""The signal masks, by thread, from before the forks that it is about to make."""


def _hold_sigterm() -> None:
    """Have SIGTERM wait in the thread that forks, and so in the child until `_let_go_in_child`. Python forgets a signal
    that a child has caught before that, and the parent's watching thread would read it. Other threads take SIGTERM."""
    if _handler is not None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _held.masks = [*getattr(_held, "masks", ()), before]


def _release_sigterm() -> None:
    if masks := getattr(_held, "masks", None):
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())


def _let_go_in_child() -> None:
    """Leave a forked child the handler from before: one of Python's does not end a child that waits in native code."""
    global _handler
    if _handler is not None:
        _handler.engines.clear()
        _handler.remove()
        _handler = None
    _release_sigterm()


os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_let_go_in_child)
