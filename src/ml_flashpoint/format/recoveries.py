"""Recoveries, put together from the events that one rank tells while it recovers: from when to when, in which phases.

Owns which events belong together. `cli.report` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ml_flashpoint.format.events import (
    Event,
    LoopHeld,
    PartCommitted,
    PartFetched,
    Resumed,
    SaveFailed,
    SteppedBack,
    VersionRecovered,
)

_SLACK_S = 1.0  # by which an event may be told late


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that a recovery did, in seconds since the epoch by the clock of its node.

    Attributes:
        name: ``detect``, ``plan``, ``fetch`` or ``load``.
        began_s, ended_s: from when to when.
    """

    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery of one rank.

    Attributes:
        rank, node, base: see `Event`.
        step: from which training goes on; None if that is not known.
        source: where the state came from, as in `Resumed`; empty where nobody told.
        began_s, ended_s: from when to when, as in `Phase`.
        phases: in their order. Where versions were tried in vain, what that took is in the phases of the one that
            was recovered.
        stepped_back: versions that could not be recovered or loaded.
        fetched: parts that came from peers.
    """

    rank: int
    node: str
    base: str
    step: int | None
    source: str
    began_s: float
    ended_s: float
    phases: tuple[Phase, ...]
    stepped_back: tuple[SteppedBack, ...]
    fetched: tuple[PartFetched, ...]


@dataclass(slots=True)
class Recoveries:
    """Puts events together, as they come. Ranks may be mixed; those of one rank come in their order."""

    _open: dict[tuple[str, int, str], list[Event]] = field(default_factory=dict)

    def add(self, event: Event) -> list[Recovery]:
        """The recoveries that are over by an event: none, mostly."""
        key = (event.base, event.rank, event.node)
        match event:
            case PartFetched() | SteppedBack() | VersionRecovered():
                self._open.setdefault(key, []).append(event)
                return []
            case Resumed():
                earlier = self._open.pop(key, [])
                began_s = event.time_s - event.seconds - _SLACK_S
                before = [each for each in earlier if each.time_s < began_s]  # of a process that did not live to tell
                mine = [each for each in earlier if each.time_s >= began_s]
                return [*_told(before), *_told([*mine, event])]
            case LoopHeld() | PartCommitted() | SaveFailed():  # training goes on
                return _told(self._open.pop(key, []))
        return []

    def rest(self) -> list[Recovery]:
        """Those that nobody has said are over."""
        rest = [recovery for told in self._open.values() for recovery in _told(told)]
        self._open.clear()
        return rest


def _told(events: list[Event]) -> list[Recovery]:
    if not any(isinstance(each, (SteppedBack, VersionRecovered, Resumed)) for each in events):
        return []  # nothing to recover: what was fetched is a copy that was made again
    last = events[-1]
    phases: list[Phase] = []
    for each in events:
        if isinstance(each, VersionRecovered):
            at = each.time_s - each.detect_s - each.plan_s - each.fetch_s
            for name, seconds in (("detect", each.detect_s), ("plan", each.plan_s), ("fetch", each.fetch_s)):
                phases.append(Phase(name, at, at + seconds))
                at += seconds
        elif isinstance(each, Resumed):
            began_s = each.time_s - each.seconds
            phases.append(Phase("load", max([began_s, *(phase.ended_s for phase in phases)]), each.time_s))
    resumed = last if isinstance(last, Resumed) else None
    began = [phase.began_s for phase in phases] + [each.time_s for each in events]
    if resumed is not None:
        began.append(resumed.time_s - resumed.seconds)
    recovered = [each for each in events if isinstance(each, VersionRecovered)]
    return [
        Recovery(
            rank=last.rank,
            node=last.node,
            base=last.base,
            step=resumed.step if resumed is not None else recovered[-1].step if recovered else None,
            source=resumed.source if resumed is not None else "",
            began_s=min(began),
            ended_s=max(each.time_s for each in events),
            phases=tuple(phases),
            stepped_back=tuple(each for each in events if isinstance(each, SteppedBack)),
            fetched=tuple(each for each in events if isinstance(each, PartFetched)),
        )
    ]
