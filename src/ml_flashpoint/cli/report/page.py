"""The report's page: one file of HTML with its charts in it, which loads nothing and runs nothing.

Owns what it says and how it looks. Text from events is anybody's who could write to their files: all of it is escaped,
and a policy in the page forbids a browser to load or to run anything even so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from ml_flashpoint.cli.base_view import format_bytes, format_ranks
from ml_flashpoint.cli.report.charts import Bar, Series, Span, bar_chart, legend, line_chart
from ml_flashpoint.cli.report.collect import Collected, Sum
from ml_flashpoint.format.events import Event, name_of
from ml_flashpoint.format.recoveries import Recovery

_MOST_ROWS = 200
_MOST_BARS = 24
_MOST_RECOVERIES = 20
_MOST_RANKS = 128
_MOST_OF_AN_ERROR = 400
_TOGETHER_S = 120.0
_PHASES = ("detect", "plan", "fetch", "load")

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2430; --soft: #5c6776; --grid: #dfe4ea; --card: #f6f8fa;
  --a: #1f77b4; --b: #e07b16; --c: #2a9d4a; --d: #8458b3; --bad: #c62f3b; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --text: #e3e8ee; --soft: #97a3b2; --grid: #2b333d;
  --card: #1a2028; --a: #5aa9e6; --b: #f2a65a; --c: #5fc27e; --d: #b794e0; --bad: #ff6b73; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 960px; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0; color: var(--soft); } .none { font-style: italic; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: .6rem; margin: 1.2rem 0; }
.facts div { background: var(--card); border-radius: 8px; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.25rem; } .facts span { color: var(--soft); font-size: .85rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--grid); } .line { fill: none; stroke-width: 1.6; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); } .line.c { stroke: var(--c); } .line.d { stroke: var(--d); }
.dot { stroke: none; } .a, i.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .d { fill: var(--d); }
path.line { fill: none; } .fails { stroke: var(--bad); stroke-dasharray: 3 3; } .back { stroke: var(--d); }
i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
i.a { background: var(--a); } i.b { background: var(--b); } i.c { background: var(--c); } i.d { background: var(--d); }
i.fails { background: var(--bad); } i.back { background: var(--d); } .bad { color: var(--bad); }
.legend { color: var(--soft); font-size: .85rem; } .key { margin-right: 1.2em; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; margin-top: .4rem; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td.n, th.n { text-align: right; } 
  td:first-child { white-space: nowrap; } td.error { overflow-wrap: anywhere; font-family: ui-monospace, monospace; }
@media print { body { max-width: none; } }
"""


def page_of(collected: Collected) -> str:
    """The whole page."""
    title = ", ".join(sorted(collected.bases)[:3]) or "no events"
    sections = [
        _facts(collected),
        _section("How far it came", _progress_chart(collected)),
        _section("Time that saves held the loop", _held_chart(collected)),
        _section("Until a save was safe", _lag_chart(collected)),
        _section("Recoveries", _recoveries(collected)),
        _section("Failures", _failures(collected)),
        _section("Ranks", _ranks(collected)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Checkpoints of {_safe(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Checkpoints</h1><p>{_safe(title)}</p>{''.join(sections)}"
        f"<p>{_sources(collected)}</p></body></html>\n"
    )


def _safe(text: str) -> str:
    """Text as it is, whatever it contains: also what would change the direction of what follows it."""
    return escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _facts(collected: Collected) -> str:
    nodes = {rank.node for rank in collected.ranks.values()}
    verified = [rank.verified for rank in collected.ranks.values() if rank.verified is not None]
    held = Sum()
    for each in collected.held.values():
        held.count, held.total, held.most = (
            held.count + each.count,
            held.total + each.total,
            max(held.most, each.most),
        )
    version = sum(rank.part_bytes for rank in collected.ranks.values())
    seconds = max(0.0, collected.last_s - collected.first_s)
    facts = [
        (f"{len(collected.ranks)} on {len(nodes)}", "ranks on nodes"),
        (show_seconds(seconds), "from the first event to the last"),
        (str(max(verified)) if verified else "-", "newest verified step"),
        (format_bytes(version), "a version, of all ranks"),
        (show_seconds(held.mean) if held.count else "-", "held by a save, on average"),
        (show_seconds(held.most) if held.count else "-", "at most"),
        (str(len(_together(collected.recoveries))), "recoveries"),
        (str(collected.failure_count), "failures"),
    ]
    cells = (f"<div><b>{_safe(value)}</b><span>{what}</span></div>" for value, what in facts)
    return f'<div class="facts">{"".join(cells)}</div>'


def _progress_chart(collected: Collected) -> str:
    begin = collected.first_s
    series = [
        Series(what, [(at - begin, float(step)) for at, step in collected.progress[what]], style, steps=True)
        for what, style in (("committed", "a"), ("verified", "c"), ("persisted", "b"))
        if collected.progress.get(what)
    ]
    marks = [
        (max(0.0, recoveries[0].began_s - begin), "back", f"recovery, at {_clock(recoveries[0].began_s)}")
        for recoveries in _together(collected.recoveries)[:_MOST_ROWS]
    ]
    for event in collected.failures[-_MOST_ROWS:]:
        marks.append((event.time_s - begin, "fails", f"{name_of(event)}, rank {event.rank}, at {_clock(event.time_s)}"))
    chart = line_chart(series, label="steps over time", show_x=show_seconds, show_y=_number, marks=marks)
    key = legend([("recovery", "back"), ("failure", "fails")]) if marks and series else ""
    return f"<p>Steps over time, as one rank tells them. What is verified survives the loss of a node.</p>{chart}{key}"


def _held_chart(collected: Collected) -> str:
    by_step = sorted(collected.held.items())
    series = [
        Series("slowest rank", [(float(step), each.most) for step, each in by_step], "b"),
        Series("mean of ranks", [(float(step), each.mean) for step, each in by_step], "a"),
    ]
    return line_chart(series, label="seconds held over steps", show_x=_step, show_y=show_seconds)


def _lag_chart(collected: Collected) -> str:
    def slowest(by_step: dict[int, Sum]) -> list[tuple[float, float]]:
        return [(float(step), each.most) for step, each in sorted(by_step.items())]

    series = [
        Series("verified on all ranks", slowest(collected.verified), "c"),
        Series("making copies", slowest(collected.copied), "d"),
        Series("committed", slowest(collected.committed), "a"),
    ]
    text = "<p>From the begin of a save, on the slowest rank: until its part was committed, and until all ranks had all"
    chart = line_chart(
        [each for each in series if each.points], label="lag over steps", show_x=_step, show_y=show_seconds
    )
    return f"{text} copies. What it took to make copies is shown by itself.</p>{chart}"


def _together(recoveries: Sequence[Recovery]) -> list[list[Recovery]]:
    """Recoveries of ranks that recovered at the same time, by their begin."""
    groups: list[list[Recovery]] = []
    ends: list[float] = []
    for each in sorted(recoveries, key=lambda recovery: recovery.began_s):
        ranks = {recovery.rank for recovery in groups[-1]} if groups else set()
        if groups and each.rank not in ranks and each.began_s <= ends[-1] + _TOGETHER_S:
            groups[-1].append(each)
            ends[-1] = max(ends[-1], each.ended_s)
        else:
            groups.append([each])
            ends.append(each.ended_s)
    return groups


def _recoveries(collected: Collected) -> str:
    groups = _together(collected.recoveries)
    if not groups:
        return '<p class="none">There were none.</p>'
    shown = groups[-_MOST_RECOVERIES:]
    more = f"<p>The newest {len(shown)} of {len(groups)}.</p>" if len(groups) > len(shown) else ""
    styles = zip(_PHASES, "dbac", strict=True)
    return more + "".join(map(_recovery, shown)) + legend(list(styles))


def _recovery(group: Sequence[Recovery]) -> str:
    begin = min(each.began_s for each in group)
    seconds = max(each.ended_s for each in group) - begin
    slowest = sorted(group, key=lambda each: each.began_s - each.ended_s)[:_MOST_BARS]
    styles = dict(zip(_PHASES, "dbac", strict=True))
    bars = [
        Bar(
            f"rank {each.rank}",
            [
                Span(
                    phase.began_s - begin,
                    phase.ended_s - begin,
                    styles[phase.name],
                    f"rank {each.rank}: {phase.name} {show_seconds(phase.ended_s - phase.began_s)}",
                )
                for phase in each.phases
            ],
        )
        for each in sorted(slowest, key=lambda each: each.rank)
    ]
    steps = sorted({str(each.step) for each in group if each.step is not None})
    sources = sorted({each.source for each in group if each.source})
    fetched = sum(part.bytes for each in group for part in each.fetched)
    text = [_clock(begin), f"{len(group)} rank{'s' * (len(group) > 1)}", show_seconds(seconds)]
    text += [f"to step {', '.join(steps)}"] if steps else []
    text += [f"from {', '.join(sources)}"] if sources else []
    text += [f"{format_bytes(fetched)} from peers"] if fetched else []
    text += [f"only the slowest {len(bars)} are shown"] if len(bars) < len(group) else []
    back = dict.fromkeys(f"step {left.step}: {left.error}" for each in group for left in each.stepped_back)
    lines = "".join(f'<p class="bad">gone back from {_safe(line[:_MOST_OF_AN_ERROR])}</p>' for line in list(back)[:5])
    chart = bar_chart(bars, seconds=seconds, label="phases of a recovery by rank", show_x=show_seconds)
    return f"<p>{_safe('; '.join(text))}</p>{lines}{chart if any(bar.spans for bar in bars) else ''}"


def _failures(collected: Collected) -> str:
    if not collected.failures:
        return '<p class="none">There were none.</p>'
    alike: dict[tuple[str, int | None, str], list[Event]] = {}
    for event in reversed(collected.failures):
        error = str(getattr(event, "error", ""))[:_MOST_OF_AN_ERROR]
        alike.setdefault((name_of(event), event.step, error), []).append(event)
    rows = [
        (
            _clock(events[-1].time_s),
            format_ranks({event.rank for event in events}),
            ", ".join(sorted({event.node for event in events})),
            "-" if step is None else str(step),
            what,
            error,
        )
        for (what, step, error), events in list(alike.items())[:_MOST_ROWS]
    ]
    listed, count = len(collected.failures), collected.failure_count
    more = f"<p>Of the newest {listed} of {count}; alike ones of several ranks are one line.</p>"
    names = ("when, first", "ranks", "nodes", "step", "what", "error")
    return more + _table(names, rows, numbers=(3,), errors=(5,))


def _ranks(collected: Collected) -> str:
    ranks = sorted(collected.ranks.items())
    worst = sorted(ranks, key=lambda each: (-each[1].failures, -each[1].held.mean))[:_MOST_RANKS]
    more = f"<p>{len(worst)} of {len(ranks)}: most failures, then longest held.</p>" if len(ranks) > len(worst) else ""
    rows = [
        (
            str(number),
            rank.node,
            str(rank.saves),
            str(rank.failures),
            "-" if rank.verified is None else str(rank.verified),
            format_bytes(rank.part_bytes),
            show_seconds(rank.held.mean) if rank.held.count else "-",
            show_seconds(rank.held.most) if rank.held.count else "-",
        )
        for number, rank in sorted(worst)
    ]
    names = ("rank", "node", "saves", "failures", "verified", "part", "held, mean", "at most")
    return more + _table(names, rows, numbers=(0, 2, 3, 4, 5, 6, 7))


def _table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    errors: Sequence[int] = (),
) -> str:
    kinds = ["n" if i in numbers else "error" if i in errors else "" for i in range(len(names))]
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for kind, name in zip(kinds, names, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{_safe(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _sources(collected: Collected) -> str:
    files = ", ".join(collected.files[:10]) + (" …" if len(collected.files) > 10 else "")
    left_out = f", {collected.left_out} lines left out that are none" if collected.left_out else ""
    return _safe(f"{collected.events} events of {files}{left_out}. Times are those of the nodes' clocks, in UTC.")


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 10 else f"{value:g}"


def _step(value: float) -> str:
    return f"step {value:.0f}"


def show_seconds(seconds: float) -> str:
    """Seconds for people: ``3.8 ms``, ``12 s``, ``2.5 h``."""
    if seconds == 0:
        return "0"
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
