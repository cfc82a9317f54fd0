"""Copies by several threads at once, since torchrun leaves one to torch, and the other cores wait for it.

Owns how many threads copy, which it measures, and the handing out of pieces to them. The threads are those that digest
(`format.digest`); what one piece is, and copying it, is `copy`'s.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import torch

from ml_flashpoint.format import knobs
from ml_flashpoint.format.digest import run_on_pool

MIN_BYTES = 16 << 20
"""Below this, a copy is over before a second thread has begun."""

_MAX_THREADS = 8  # memory bandwidth is used up before, and other ranks of the node copy at the same time
_TRIAL_BYTES = 64 << 20  # a copy that tells how fast threads are
_TRIALS = 3  # of each number of threads; the best counts, as memory is cold at first
_WORTH_IT = 1.05
_AGAIN = 500  # copies after which it is found out again: the machine may have been busy with something else

Job = Callable[[], None]


class Handout:
    """Jobs that several threads take from one iterator, the caller of :meth:`run` among them."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._in_inference = torch.is_inference_mode_enabled()  # of a thread each, and says what may be written to
        self._at_work: set[int] = set()  # threads
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, threads: int) -> None:
        """Have all jobs done. Returns, or raises, once no thread is at work any more: whatever it works on may go then.

        Args:
            threads: how many at most, with this one.

        Raises:
            BaseException: what the first job that failed raised, or what interrupted this thread. The rest is not done.
        """
        interrupt: BaseException | None = None
        try:
            for _ in range(threads - 1):
                if not run_on_pool(self._work_as_caller):
                    break
            self._work()
        except BaseException as error:
            interrupt = error
        while True:
            try:
                with self._changed:
                    self._jobs = iter(())
                    self._at_work.discard(threading.get_ident())
                    # For one job of each: as long as it would take here. If one hung, its memory could not be let go.
                    self._changed.wait_for(lambda: not self._at_work)
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None or self._error is not None:
            raise interrupt or self._error  # type: ignore[misc]

    def _work_as_caller(self) -> None:
        with torch.inference_mode(self._in_inference):
            self._work()

    def _work(self) -> None:
        """Work until there is no job left. A thread that comes when all is over finds none."""
        thread = threading.get_ident()
        while (job := self._next(thread)) is not None:
            try:
                job()
            except BaseException as error:
                self._fail(error)

    def _next(self, thread: int) -> Job | None:
        with self._changed:
            try:
                job = next(self._jobs, None)
            except BaseException as error:
                self._fail(error)
                job = None
            if job is not None:
                self._at_work.add(thread)
            else:
                self._at_work.discard(thread)
                self._changed.notify_all()
            return job

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._jobs = iter(())


class Trials:
    """Finds out how many threads copy fastest, by what copies take that are made anyway. Thread-safe.

    Args:
        most: threads at most.
    """

    def __init__(self, most: int) -> None:
        self._counts = sorted({most, *(1 << power for power in range(most.bit_length()))}, reverse=True)
        self._best = dict.fromkeys(self._counts, 0.0)
        self._left = self._counts * _TRIALS
        self._since = 0
        self._lock = threading.Lock()
        self.chosen: int | None = most if most == 1 else None

    def threads(self, nbytes: int) -> int:
        """How many should copy so many bytes now."""
        with self._lock:
            if self.chosen is not None:
                return self.chosen
            return self._left[0] if nbytes >= _TRIAL_BYTES else self._counts[0]

    def took(self, threads: int, nbytes: int, seconds: float) -> None:
        """Take note of a copy that was made."""
        with self._lock:
            if len(self._counts) == 1 or nbytes < _TRIAL_BYTES:
                return
            if self.chosen is not None:
                self._since += 1
                if self._since >= _AGAIN:
                    self._best = dict.fromkeys(self._counts, 0.0)
                    self._left, self._since, self.chosen = self._counts * _TRIALS, 0, None
                return
            if threads != self._left[0]:
                return
            del self._left[0]
            self._best[threads] = max(self._best[threads], nbytes / max(seconds, 1e-9))
            if not self._left:
                enough = max(self._best.values()) / _WORTH_IT
                self.chosen = min(each for each, rate in self._best.items() if rate >= enough)


_trials: dict[int, Trials] = {}


def run(jobs: Iterator[Job], nbytes: int) -> None:
    """Have jobs done that copy so many bytes together, by as many threads as help; see `Handout.run`."""
    trials = _trials_now()
    threads = trials.threads(nbytes)
    began = time.perf_counter()
    Handout(jobs).run(threads)
    trials.took(threads, nbytes, time.perf_counter() - began)


def several(nbytes: int) -> bool:
    """Whether more than one thread would copy so many bytes."""
    return nbytes >= MIN_BYTES and _trials_now().threads(nbytes) > 1


def _trials_now() -> Trials:
    """Of the limit that holds now."""
    most = knobs.copy_threads() or max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // _ranks_here()))
    if torch.get_num_threads() > 1:  # then torch itself copies by several
        most = 1
    trials = _trials.get(most)
    if trials is None:
        trials = _trials.setdefault(most, Trials(most))
    return trials


def _ranks_here() -> int:
    """Ranks of this host that copy at the same time, as torchrun tells."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isascii() and text.isdecimal() and len(text) < 6 else 1


def _forget_trials() -> None:
    # In a forked child a lock of the parent may be held for good.
    _trials.clear()


os.register_at_fork(after_in_child=_forget_trials)
