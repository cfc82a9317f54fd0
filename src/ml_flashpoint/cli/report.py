"""`flashpoint report`: the events of a job, drawn on one page.

Of events, which may be many, sums by step and by rank are kept, and the newest failures and recoveries. Nothing in a
file is trusted: a line that is no event, or has a number that cannot be, is left out and counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final

from ml_flashpoint import events
from ml_flashpoint.cli import output
from ml_flashpoint.cli.output import ranks_text
from ml_flashpoint.events import Event, decode_event, name_of
from ml_flashpoint.extras import require
from ml_flashpoint.format.errors import InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.format.files import replace_file

_MOST_OF_A_LINE, _REPORT_EVERY = 1 << 17, 4096
_LATEST_S, _MOST_SECONDS, _MOST = 2.0**33, 1e9, 2**53
_MOST_FAILURES, _MOST_RECOVERIES, _MOST_POINTS, _MOST_ROWS = 500, 500, 2000, 100
_PHASES: Final = ("detect", "plan", "fetch", "load")


@dataclass(slots=True)
class Sum:
    """Count, sum and greatest of some numbers."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        self.count, self.total, self.most = self.count + 1, self.total + value, max(self.most, value)

    @property
    def mean(self) -> float:
        """The mean; 0.0 of no numbers."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class RankFacts:
    """Facts of one rank, over all of its lives.

    Attributes:
        node: its newest node.
        saves, failures: parts committed, and events of failures.
        part_bytes: size of its newest part.
        verified: greatest verified step.
        held: seconds that saves held the loop.
    """

    node: str = ""
    saves: int = 0
    failures: int = 0
    part_bytes: int = 0
    verified: int | None = None
    held: Sum = field(default_factory=Sum)


@dataclass(slots=True)
class Facts:
    """Facts of a job.

    Attributes:
        count, left_out: lines that are events, and lines that are not.
        first_s, last_s: time of the first and of the last event, since the epoch.
        seconds: by step: for which a save held the loop; until it was committed, and verified; that copies took.
        reached: times and steps: committed, verified and persisted, by the first rank that reports one.
        copies: parts of which copies were made on other nodes.
        failures, recoveries: the newest ones.
    """

    count: int = 0
    left_out: int = 0
    bases: set[str] = field(default_factory=set)
    first_s: float = _LATEST_S
    last_s: float = 0.0
    seconds: dict[str, dict[int, Sum]] = field(
        default_factory=lambda: {kind: {} for kind in ("held", "committed", "copied", "verified")}
    )
    reached: dict[str, list[tuple[float, int]]] = field(
        default_factory=lambda: {kind: [] for kind in ("committed", "verified", "persisted")}
    )
    copies: int = 0
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    failures: deque[Event] = field(default_factory=lambda: deque(maxlen=_MOST_FAILURES))
    recoveries: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_RECOVERIES))
    _reporters: dict[str, int] = field(default_factory=dict)
    _recovered: dict[tuple[str, int], events.VersionRecovered] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take one more event into account."""
        self.count += 1
        self.bases.add(event.base)
        self.first_s, self.last_s = min(self.first_s, event.time_s), max(self.last_s, event.time_s)
        rank = self.ranks.setdefault(event.rank, RankFacts())
        rank.node = event.node
        match event:
            case events.LoopHeld():
                self._measure("held", event, event.seconds)
                rank.held.add(event.seconds)
            case events.PartCommitted():
                self._measure("committed", event, event.seconds)
                self._reach("committed", event)
                rank.saves, rank.part_bytes = rank.saves + 1, event.bytes
            case events.PartReplicated():
                self._measure("copied", event, event.seconds)
                self.copies += len(event.holders)
            case events.VersionVerified():
                if event.seconds:
                    self._measure("verified", event, event.seconds)
                self._reach("verified", event)
                rank.verified = max(rank.verified or 0, event.step or 0)
            case events.VersionPersisted():
                self._reach("persisted", event)
            case events.VersionRecovered():
                self._recovered[event.base, event.rank] = event
            case events.Resumed(source=source) if source != "nothing":
                self._resume(event, self._recovered.pop((event.base, event.rank), None))
        if hasattr(event, "error"):
            rank.failures += 1
            self.failures.append(event)

    def _measure(self, kind: str, event: Event, seconds: float) -> None:
        if event.step is not None:
            self.seconds[kind].setdefault(event.step, Sum()).add(seconds)

    def _reach(self, kind: str, event: Event) -> None:
        if event.step is not None and self._reporters.setdefault(kind, event.rank) == event.rank:
            self.reached[kind].append((event.time_s, event.step))

    def _resume(self, event: events.Resumed, recovered: events.VersionRecovered | None) -> None:
        found = (0.0, 0.0, 0.0) if recovered is None else (recovered.detect_s, recovered.plan_s, recovered.fetch_s)
        phases = dict(zip(_PHASES, (*found, max(0.0, event.seconds - sum(found))), strict=True))
        fetched = 0 if recovered is None else recovered.fetched_bytes
        told = {"time_s": event.time_s, "rank": event.rank, "node": event.node, "step": event.step}
        self.recoveries.append({**told, "source": event.source, "fetched_bytes": fetched, "seconds": phases})


def collect(paths: Sequence[str], report: Callable[[int, int], object] = lambda done, total: None) -> Facts:
    """Return the facts in files of events. Raise an `ObjectNotFoundError` if one cannot be read.

    Args:
        paths: of the files.
        report: called now and then with the bytes that are read, and all bytes.
    """
    facts = Facts()
    total, done = sum(os.path.getsize(path) for path in paths if os.path.isfile(path)), 0
    for path in paths:
        if not os.path.isfile(path):
            raise ObjectNotFoundError("no such file", path=path, hint="give the files that FLASHPOINT_EVENTS names")
        try:
            with open(path, "rb") as lines:
                for number in itertools.count():  # a line of any length must not be taken into memory
                    if not (line := lines.readline(_MOST_OF_A_LINE)):
                        break
                    done += len(line)
                    if number % _REPORT_EVERY == 0:
                        report(done, total)
                    event = decode_event(line)
                    if event is not None and _can_be(event):
                        facts.add(event)
                    else:
                        facts.left_out += bool(line.strip())
        except OSError as error:
            raise ObjectNotFoundError(f"cannot be read: {error.strerror}", path=path) from error
    for reached in facts.reached.values():
        reached.sort()
    return facts


def _can_be(event: Event) -> bool:
    """Return True if the numbers of an event are such as happen: `json` reads NaN and integers of any length."""
    if not 0 < event.time_s < _LATEST_S:
        return False
    for each in dataclasses.fields(event):
        value, is_time = getattr(event, each.name), each.name == "seconds" or each.name.endswith("_s")
        most = _LATEST_S if each.name == "time_s" else _MOST_SECONDS if is_time else _MOST
        if isinstance(value, (int, float)) and not 0 <= value < most:
            return False
    return True


def make_report(paths: list[str], *, to: str, as_json: bool) -> None:
    """Draw files of events as a page, or print the facts in them as JSON."""
    target = Path(to)
    if not as_json:
        require("report", "plotly")
        if any(os.path.exists(path) and target.exists() and target.samefile(path) for path in paths):
            raise InvalidArgumentError("is one of the files that are read", argument="--output", value=to)
    with output.progress("reading events") as report:
        facts = collect(paths, report)
    if not facts.count:
        text = f"no events in the files ({output.plural(facts.left_out, 'other line')})"
        hint = "give the files that FLASHPOINT_EVENTS names; see docs/operations.md"
        raise ObjectNotFoundError(text, path=", ".join(paths), hint=hint)
    if not as_json:
        try:
            replace_file(target, [page_of(facts).encode()], fsync=False, mode=0o644)
        except OSError as error:
            raise InvalidArgumentError(f"cannot be written: {error}", argument="--output", value=to) from error
        print(f"{to}: {facts.count} events of {output.plural(len(facts.ranks), 'rank')}", file=sys.stderr)
        return
    output.show({"files": paths, **_to_json(facts)}, as_json)


def _to_json(facts: Facts) -> dict[str, Any]:
    def of(each: Sum | None) -> dict[str, float] | None:
        return None if each is None else {"count": each.count, "mean_s": each.mean, "most_s": each.most}

    steps = sorted({step for by_step in facts.seconds.values() for step in by_step})
    ranks = [{"rank": rank, **dataclasses.asdict(each), "held": of(each.held)} for rank, each in facts.ranks.items()]
    return {
        "events": facts.count,
        "left_out": facts.left_out,
        "bases": sorted(facts.bases),
        "first_s": facts.first_s,
        "last_s": facts.last_s,
        "steps": [
            {"step": step, **{kind: of(each.get(step)) for kind, each in facts.seconds.items()}} for step in steps
        ],
        "ranks": ranks,
        "recoveries": list(facts.recoveries),
        "failures": [{"event": name_of(each), **dataclasses.asdict(each)} for each in facts.failures],
    }


# ---- the page -----------------------------------------------------------------------------------------------------


def page_of(facts: Facts) -> str:
    """Return the page: HTML of one file, which loads nothing. Its charts need plotly (https://plotly.com/python)."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    survives = (
        "What is verified survives the loss of a node." if facts.copies else "No copies were made on other nodes."
    )
    titles = [f"Steps over time. {survives}", "Seconds that saves held the loop", "Seconds until a save was safe"]
    titles += [f"Recoveries: {len(facts.recoveries)}", f"Failures: {sum(r.failures for r in facts.ranks.values())}", ""]
    kinds = [[{"type": "xy"}]] * 4 + [[{"type": "table"}]] * 2
    heights = [0.2, 0.15, 0.15, 0.2, 0.15, 0.15]
    figure = make_subplots(rows=6, cols=1, specs=kinds, subplot_titles=titles, row_heights=heights)
    for kind, points in facts.reached.items():
        times, steps = [_clock(at) for at, _ in points], [step for _, step in points]
        figure.add_trace(go.Scatter(x=times, y=steps, name=kind, line_shape="hv"), row=1, col=1)
    marks = [("failure", "x", [(each.time_s, each.step or 0) for each in facts.failures])]
    marks += [("recovery", "star", [(each["time_s"], each["step"] or 0) for each in facts.recoveries])]
    for name, symbol, places in marks:
        times, steps = [_clock(at) for at, _ in places], [step for _, step in places]
        marker = {"symbol": symbol, "size": 9}
        figure.add_trace(go.Scatter(x=times, y=steps, name=name, mode="markers", marker=marker), row=1, col=1)
    figure.add_trace(_line(facts.seconds["held"], "mean of ranks, held", lambda each: each.mean), row=2, col=1)
    figure.add_trace(_line(facts.seconds["held"], "slowest rank, held", lambda each: each.most), row=2, col=1)
    for kind in ("committed", "copied", "verified"):
        figure.add_trace(_line(facts.seconds[kind], f"slowest rank, {kind}", lambda each: each.most), row=3, col=1)
    shown = list(facts.recoveries)[-_MOST_ROWS:]
    names = [_safe(f"{_clock(each['time_s'])} rank {each['rank']} to step {each['step']}") for each in shown]
    for phase in _PHASES:
        seconds = [each["seconds"][phase] for each in shown]
        figure.add_trace(go.Bar(x=seconds, y=names, name=phase, orientation="h"), row=4, col=1)
    figure.add_trace(_table(_FAILURES, _failures(facts)), row=5, col=1)
    figure.add_trace(_table(_RANKS, _ranks(facts)), row=6, col=1)
    title = _safe(f"Checkpoints of {', '.join(sorted(facts.bases)[:3])}: {facts.count} events, times in UTC")
    figure.update_layout(title=title, height=2200, barmode="stack", template="plotly_white")
    return str(figure.to_html(include_plotlyjs=True))


def _line(by_step: dict[int, Sum], name: str, value: Callable[[Sum], float]) -> Any:
    """Return a line over steps. Of points that lie too close together, it has the one with the greatest value."""
    import plotly.graph_objects as go

    points = [(step, value(each)) for step, each in sorted(by_step.items())]
    size = -(-len(points) // _MOST_POINTS) or 1
    kept = [max(points[at : at + size], key=lambda point: point[1]) for at in range(0, len(points), size)]
    return go.Scatter(x=[step for step, _ in kept], y=[seconds for _, seconds in kept], name=name)


_FAILURES: Final = ("first", "ranks", "step", "what", "error")
_RANKS: Final = ("rank", "node", "saves", "failures", "verified", "part, bytes", "held, mean s", "held, at most s")


def _failures(facts: Facts) -> list[tuple[object, ...]]:
    """Return the newest failures first; alike ones of several ranks are one row."""
    alike: dict[tuple[int | None, str, str], list[Event]] = {}
    for event in reversed(facts.failures):
        alike.setdefault((event.step, name_of(event), str(getattr(event, "error", ""))[:500]), []).append(event)
    return [
        (_clock(found[-1].time_s), ranks_text({each.rank for each in found}), step, what, error)
        for (step, what, error), found in itertools.islice(alike.items(), _MOST_ROWS)
    ]


def _ranks(facts: Facts) -> list[tuple[object, ...]]:
    """Return the ranks with most failures, then those that were held longest."""
    worst = sorted(facts.ranks.items(), key=lambda each: (-each[1].failures, -each[1].held.mean))[:_MOST_ROWS]
    held = {rank: (f"{each.held.mean:.3g}", f"{each.held.most:.3g}") for rank, each in worst}
    return [
        (rank, each.node, each.saves, each.failures, each.verified, each.part_bytes, *held[rank])
        for rank, each in worst
    ]


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> Any:
    import plotly.graph_objects as go

    columns = [["-" if cell is None else _safe(str(cell)) for cell in column] for column in zip(*rows, strict=True)]
    return go.Table(header={"values": list(names), "align": "left"}, cells={"values": columns, "align": "left"})


def _safe(text: str) -> str:
    """Return a text that stays text where plotly would read markup, and in the direction of what follows it."""
    return escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s)) + f".{int(at_s * 1000) % 1000:03d}"
