"""A group of all ranks that is built anew after it broke.

A time-out or a reset leaves a gloo group unusable for good, on the ranks that saw it at once, on the others at their
next collective. Owns the way back: ranks meet in the store of the default process group under a generation number, in
the background, for as long as it takes; who is late joins when it arrives. Nothing of it is a collective of the
default group. What the group is used for, and what becomes of the call that broke it, is the caller's business.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ml_flashpoint.format.errors import FlashpointError, RanksLostError
from ml_flashpoint.ranks.roll_call import Late, Wait, watched

_log = logging.getLogger(__name__)

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.002, 0.5
_MAX_NAMED = 8
# Ranks that failed together meet again within this; who has not come by then is what the others wait for.
_LATE_S = 5.0
# How often it is tried again to start a thread.
_RETRY_S = 1.0
# How long ranks that have all come wait for each other while they connect: one that cannot (no descriptor is left, say)
# reports it to nobody. Twice as long at every try in vain, since many ranks on a slow network may need more.
_CONNECT_S = 10.0


class LastingGroup:
    """See the module. Collective to construct; thread-safe.

    Args:
        name: the same on all ranks, and used once in the life of the default process group.
        deadline_s: seconds that a collective of the group, or the ranks' meeting, may take.
        calls: what every rank has to do, for messages.
        first: the group to begin with; by default one is built.

    Raises:
        RanksLostError: some ranks did not come to construct it; names them.
    """

    def __init__(
        self, name: str, *, deadline_s: float, calls: str = "", first: dist.ProcessGroup | None = None
    ) -> None:
        self._name = f"flashpoint/{name}"
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._deadline_s = deadline_s
        self._calls = calls
        self._store = c10d._get_default_store()
        self._world = dist.group.WORLD
        self._changed = threading.Condition()
        self._meeting: threading.Thread | None = None
        self._generation = 0
        self._connect_s = _CONNECT_S
        self._runs = 0  # collectives of this generation
        self._group = first
        self._gave_up = False
        self._closed = False
        if first is None:
            self._start_meeting()
            try:
                self.await_group()
            except FlashpointError:
                self.close()
                raise

    # ---- using it -----------------------------------------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, None while it is being built."""
        return self._group

    def await_group(self, deadline_s: float | None = None) -> dist.ProcessGroup:
        """The group; while it is being built, waits for it. Once a wait was in vain, later ones give up at once.

        Raises:
            RanksLostError: not within the deadline; names the ranks that are missing.
        """
        with self._changed:
            timeout_s = 0.0 if self._gave_up else self._deadline_s if deadline_s is None else deadline_s
            self._await_meeting(timeout_s)
            if self._group is not None:
                return self._group
            self._gave_up = True
        raise RanksLostError(f"ranks have lost each other{self._missing_text()}", rank=self._rank, hint=self._hint())

    def run(self, what: str, collective: Callable[[dist.ProcessGroup], object], *, late: Late | None = None) -> None:
        """Call a collective with the group; while that is being built, waits for it.

        Args:
            late: for collectives that no rank comes to much later than others. It is told of the ranks that have not
                come after ``FLASHPOINT_LATE_S``, on another thread; the log names them, too.

        Raises:
            FlashpointError: see :meth:`await_group`, or the collective failed: the group is built anew then.
        """
        groups = [self.await_group()]
        self._runs += 1
        try:
            with contextlib.nullcontext() if late is None else watched(self._wait(what, late)):
                collective(groups[0])
        except BaseException as error:  # of whatever kind: the others may wait in it
            self.broke(groups.pop(), error)  # and not kept here
            if not isinstance(error, Exception):
                raise
            raise self.failure(what, error) from error

    def _wait(self, what: str, late: Late) -> Wait:
        def report(ranks: tuple[int, ...], seconds: float) -> None:
            text = f"{what} has waited for {seconds:.0f} s{self._named(ranks)}"
            _log.warning("%s; %s", text, self._hint())
            late(ranks, seconds)

        key = f"{self._key(self._generation)}/run-{self._runs}"
        return Wait(self._store, key, self._rank, self._size, report)

    def broke(self, group: dist.ProcessGroup | None, error: BaseException | None = None) -> None:
        """Report that a collective of this group ended on this rank alone. Builds another one in the background.

        The caller must keep no reference to the group: its connections are closed with the last one, and only by that
        do ranks that wait in it notice.

        Args:
            error: what ended it; the variables of its traceback are cleared, since the group is among them.
        """
        if error is not None:
            traceback.clear_frames(error.__traceback__)
        with self._changed:
            if group is None or self._group is not group or self._closed:
                return
            self._group, self._gave_up = None, False
            self._generation += 1
        _destroy(group)  # the others notice at their next collective, if they have not yet
        self._start_meeting()

    def close(self) -> None:
        """Destroy the group. Idempotent."""
        with self._changed:
            group, self._group, self._closed = self._group, None, True
            self._changed.notify_all()
        if group is not None and dist.is_initialized() and dist.group.WORLD is self._world:
            _destroy(group)

    # ---- meeting ------------------------------------------------------------------------------------------

    def _start_meeting(self) -> None:
        """Go to meet the others, unless that is under way. Without a thread for it, whoever waits tries again."""
        with self._changed:
            if self._closed or (self._meeting is not None and self._meeting.is_alive()):
                return
            thread = threading.Thread(target=self._meet, name=f"flashpoint-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("ranks cannot be brought together again now: %s", error)
            else:
                self._meeting = thread

    def _await_meeting(self, timeout_s: float) -> None:
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while self._group is None and not self._closed:
                self._start_meeting()
                if (left := give_up - time.monotonic()) <= 0:
                    return
                self._changed.wait_for(lambda: self._group is not None or self._closed, min(left, _RETRY_S))

    def _meet(self) -> None:
        poll_s, began, reported = _SHORTEST_POLL_S, time.monotonic(), False
        arrived = -1
        while not self._closed and dist.is_initialized() and dist.group.WORLD is self._world:
            try:
                if arrived < self._generation:
                    self._arrive()
                    arrived = self._generation
                if self._count(arrived + 1):
                    self._generation += 1  # others have been here and have lost each other again
                    continue
                if self._count(arrived) >= self._size:
                    self._take(self._built())
                    if reported:
                        _log.warning("ranks have found each other again")
                    return
            except (RuntimeError, ValueError) as error:
                _log.debug("building the group of %s failed: %s", self._name, error)
                self._generation += arrived == self._generation
                self._connect_s *= 2
            if not reported and arrived > 0 and time.monotonic() > began + min(_LATE_S, self._deadline_s):
                reported = True
                _log.error("ranks have lost each other%s; %s", self._missing_text(), self._hint())
            time.sleep(poll_s)
            poll_s = min(poll_s * 1.3, _LONGEST_POLL_S)

    def _arrive(self) -> None:
        self._store.set(self._key(self._generation, self._rank), "here")
        self._store.add(self._key(self._generation), 1)

    def _count(self, generation: int) -> int:
        return int(self._store.add(self._key(generation), 0))

    def _key(self, generation: int, rank: int | None = None) -> str:
        return f"{self._name}/{generation}" + ("" if rank is None else f"/{rank}")

    def _built(self) -> dist.ProcessGroup:
        ranks = list(range(self._size))
        group: Any
        name: Any = self._key(self._generation, self._size)
        # Not `new_group`: that counts the groups of this process, which other threads make, too, to name the new one.
        group, _ = c10d._new_process_group_helper(
            self._size,
            self._rank,
            ranks,
            "gloo",
            self._store,
            name,
            timeout=timedelta(seconds=min(self._connect_s, self._deadline_s)),
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in ranks}
        c10d._set_pg_timeout(timedelta(seconds=self._deadline_s), group)
        return group  # type: ignore[no-any-return]

    def _take(self, group: dist.ProcessGroup) -> None:
        with self._changed:
            if not self._closed:
                self._group, group = group, None  # type: ignore[assignment]
                self._runs = 0
            self._meeting, self._gave_up, self._connect_s = None, False, _CONNECT_S
            self._changed.notify_all()
        if group is not None:
            _destroy(group)

    def missing(self) -> list[int]:
        """Ranks that have not come to build the group, as far as can be known; none while there is one."""
        if self._group is not None:
            return []
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(self._size) if not self._store.check([self._key(self._generation, rank)])]
        return []

    def _missing_text(self) -> str:
        missing = self.missing()
        return self._named(missing) if missing else ""

    def _named(self, missing: Sequence[int]) -> str:
        named = ", ".join(map(str, missing[:_MAX_NAMED])) + (", ..." if len(missing) > _MAX_NAMED else "")
        return f": {'rank' if len(missing) == 1 else 'ranks'} {named} of {self._size} did not come"

    def _hint(self) -> str:
        calls = f"every rank has {self._calls}; " if self._calls else ""
        return f"{calls}one that is missing died, hangs, or did not make this call: its own log says why"

    def failure(self, what: str, error: Exception) -> FlashpointError:
        """The error of a collective that ``error`` has ended, after :meth:`broke`."""
        self._await_meeting(min(_LATE_S, self._deadline_s))  # those that failed with this rank are about to come
        return RanksLostError(f"{what} failed{self._missing_text()}: {error}", rank=self._rank, hint=self._hint())


def _destroy(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # of a default process group that is gone
        dist.destroy_process_group(group)
