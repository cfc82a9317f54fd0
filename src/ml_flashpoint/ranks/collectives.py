"""Collectives of all ranks of a job, on a gloo group that is connected anew after it broke.

A time-out or a reset leaves a gloo group unusable on the ranks that saw it, and on the others at their next collective.
Each rank then drops the group, and in its next collective the ranks meet in the store of the default process group,
under the number of the next group. Nothing here is a collective of the default process group, but the construction.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined, unused-ignore]

from ml_flashpoint.format.errors import RanksLostError

_log = logging.getLogger(__name__)

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.002, 0.5
_MAX_NAMED = 8
# Ranks that failed together report it within this time. The others are named.
_REPORT_S = 5.0
# Ranks that have all come wait this long for each other while they connect, and twice as long at each further try.
_CONNECT_S = 10.0
_HINT = "one that is missing died, hangs, or did not make this call: its own log says why"


class Collectives:
    """See the module. Collective to construct. Used by one thread. ``deadline_s`` is for a collective, and for the
    ranks' meeting before it."""

    def __init__(self, deadline_s: float) -> None:
        self._rank, self._size, self._deadline_s = dist.get_rank(), dist.get_world_size(), deadline_s
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        self._number = self._arrived = 0
        self._connect_s, self._gave_up = _CONNECT_S, False
        self._last: dict[str, torch.Tensor] = {}
        self._store: Any = c10d._get_default_store()
        # The store may be that of an earlier process group, too.
        name = torch.tensor([secrets.randbits(62) if self._rank == 0 else 0], dtype=torch.int64, device="cpu")
        self.reduce("numbering", name, dist.ReduceOp.SUM)
        self._store = PrefixStore(f"flashpoint/{name.item()}", self._store)

    def reduce(self, what: str, data: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce ``data`` over all ranks, in place. ``what`` names the collective in errors. Raise a `RanksLostError`,
        which names the ranks that are missing, if a rank did not come, or left.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        # Gloo's threads let go of a tensor some time after the collective has ended. Were that the last reference,
        # they would need the interpreter to free it, and abort the process if that happens to be exiting.
        self._last[what] = data
        if self._group is None:
            self._group = self._connected()
        try:
            self._group.allreduce([data], options).wait()
        except BaseException as error:  # of whatever kind: the others may wait in it
            self._drop(error)
            if not isinstance(error, Exception):
                raise
            missing = self._named(self._lost())
            raise RanksLostError(
                f"the {what} of the job's ranks failed{missing}: {error}", rank=self._rank, hint=_HINT
            ) from error

    def _drop(self, error: BaseException) -> None:
        """Drop the group, with all references to it: by that the ranks that wait in it notice."""
        traceback.clear_frames(error.__traceback__)
        if self._number == 0:
            with contextlib.suppress(Exception):  # of a default process group that is gone
                dist.destroy_process_group(self._group)
        self._group, self._gave_up = None, False
        with contextlib.suppress(RuntimeError):  # of a store that is gone
            self._store.set(f"lost/{self._number}/{self._rank}", "lost")
            self._store.add(f"lost/{self._number}", 1)
            self._go_beyond(self._number)

    def _lost(self) -> list[int]:
        """Return the ranks that do not report within a few seconds that the group broke."""
        with contextlib.suppress(RuntimeError):
            until = time.monotonic() + min(_REPORT_S, self._deadline_s)
            while self._store.add(f"lost/{self._number}", 0) < self._size and time.monotonic() < until:
                time.sleep(_SHORTEST_POLL_S * 10)
            return self._absent(f"lost/{self._number}")
        return []

    def _connected(self) -> Any:
        """Return a group of all ranks, once all have come. After a wait in vain, the next one gives up at once."""
        until = time.monotonic() + (0.0 if self._gave_up else self._deadline_s)
        poll_s = _SHORTEST_POLL_S
        while True:
            try:
                newest = self._store.add("newest", 0)
                if newest > self._arrived:
                    self._store.set(f"{newest}/{self._rank}", "here")
                    self._store.add(str(newest), 1)
                    self._arrived = newest
                if self._store.add(str(newest), 0) >= self._size:
                    return self._made(newest)
            except (RuntimeError, ValueError) as error:
                _log.debug("rank %d cannot connect to the others: %s", self._rank, error)
                self._connect_s *= 2
                self._go_beyond(self._arrived)
            if time.monotonic() >= until:
                break
            time.sleep(poll_s)
            poll_s = min(poll_s * 1.3, _LONGEST_POLL_S)
        self._gave_up = True
        missing = self._named(self._absent(str(self._arrived)))
        raise RanksLostError(f"ranks have lost each other{missing}", rank=self._rank, hint=_HINT)

    def _made(self, number: int) -> Any:
        connect_s = min(self._connect_s, self._deadline_s)
        store = PrefixStore(f"{number}/gloo", self._store)
        group = ProcessGroupGloo(store, self._rank, self._size, timedelta(seconds=connect_s))
        group._set_default_timeout(timedelta(seconds=self._deadline_s))
        self._number, self._connect_s, self._gave_up = number, _CONNECT_S, False
        return group

    def _go_beyond(self, number: int) -> None:
        """Have all ranks meet under a higher number, unless that is so."""
        if self._store.add("newest", 0) <= number:
            self._store.add("newest", 1)

    def _absent(self, key: str) -> list[int]:
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(self._size) if not self._store.check([f"{key}/{rank}"])]
        return []

    def _named(self, missing: list[int]) -> str:
        if not missing:
            return ""
        named = ", ".join(map(str, missing[:_MAX_NAMED])) + (", ..." if len(missing) > _MAX_NAMED else "")
        return f": {'rank' if len(missing) == 1 else 'ranks'} {named} of {self._size} did not come"
