"""Loading a version on all ranks or on none, for every adapter.

All ranks vote after each step of a load. Ranks that lost each other try the same version again. A version that is to
blame, or is refused, makes all go on to an older one. Where no other version would help, all stop.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ml_flashpoint import events
from ml_flashpoint.format.errors import Blame, RanksLostError, blame_of, text_of
from ml_flashpoint.format.names import CheckpointContainerId

if TYPE_CHECKING:
    from ml_flashpoint.engine.checkpointer import Checkpointer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_TRIES_IF_LOST = 2
"""Most times that loading begins anew, of whatever versions, because ranks lost each other."""


@dataclass(eq=False)
class LoadFailure(Exception):
    """The reason why a version could not be loaded, raised on all ranks; its cause is what was raised here, if anything
    was. Where ranks differ, the reason is the one that leaves least to try, and ``rank`` the lowest that has it.
    ``touched``: some rank may have written to tensors."""

    version: str
    rank: int
    text: str
    blame: Blame
    touched: bool

    @property
    def is_misfit(self) -> bool:
        """True if the program could not take what was there."""
        return self.blame in (Blame.OBJECT, Blame.PROGRAM)


class JointLoad:
    """One load. All methods are collective. ``failures`` are of the versions that could not be loaded, newest first;
    ``cause`` is the last failure on this rank, if it had any part in it."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer, self._ranks = checkpointer, checkpointer.ranks
        self.failures: list[LoadFailure] = []
        self.cause: BaseException | None = None

    def newest(
        self, find: Callable[[], CheckpointContainerId | None], load: Callable[[CheckpointContainerId], _T]
    ) -> tuple[CheckpointContainerId, _T] | None:
        """Load the newest version that all ranks can load. What could not be loaded in an earlier call is tried again.

        Args:
            find: returns the newest version that is not discarded, None if there is none: `Checkpointer.newest`.
            load: loads a version, in steps that are voted on by `step`.

        Returns:
            The version, and what ``load`` returned; None if none could be loaded. Raises a `RanksLostError`, on all
            ranks, if they lost each other again and again, which says nothing about the version.
        """
        self._checkpointer.reconsider()
        lost = 0
        while (version := find()) is not None:
            try:
                return version, load(version)
            except LoadFailure as failed:
                failure, self.cause = failed, failed.__cause__
                failed.__cause__ = failed.__traceback__ = None  # which hold what was loaded
            if failure.blame is Blame.RANKS:
                lost += 1
                if lost > _TRIES_IF_LOST:
                    raise RanksLostError(
                        f"version {version.name} cannot be loaded, as ranks lose each other: {failure.text}",
                        rank=self._ranks.rank,
                        hint="try again; older versions would fare no better",
                    ) from self.cause
                _log.warning("loading version %s is tried again: %s", version.name, failure.text)
                continue
            self.failures.append(failure)
            if failure.blame not in (Blame.VERSION, Blame.OBJECT):
                break
            text = "version %s cannot be loaded by rank %d, trying an older one: %s"
            _log.error(text, version.name, failure.rank, failure.text)
            events.emit(events.SteppedBack, self._ranks, version.parent, version.step, error=failure.text)
            self._checkpointer.discard(version)
        return None

    def step(
        self, version: CheckpointContainerId, action: Callable[[], _T], *, touched: Callable[[], bool] = lambda: False
    ) -> _T:
        """Return what ``action`` returns, once it has succeeded on every rank. Raise a `LoadFailure` if it failed on
        one. ``touched`` then returns True if tensors may have been written to."""
        result: list[_T] = []
        error, report = None, b""
        try:
            result.append(action())
        except Exception as caught:
            error = caught
            report = json.dumps([blame_of(caught), self._ranks.rank, text_of(caught), touched()]).encode()
        reports = [json.loads(blob) for blob in self._ranks.gather(report) if blob]
        if not reports:
            return result[0]
        blame, rank, text, _ = max(reports, key=lambda each: (each[0], -each[1]))
        anywhere = any(each[3] for each in reports)
        raise LoadFailure(version.name, rank, str(text), Blame(blame), anywhere) from error
