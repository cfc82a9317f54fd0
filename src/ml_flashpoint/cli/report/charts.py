"""Charts as inline SVG: lines over a number, and bars over time.

Owns their drawing, which needs no script and no font. Every text that is drawn is escaped here. Colours come from
classes, which the page defines for light and for dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH = 900
_HEIGHT = 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 14, 12, 34
_MOST_POINTS = 600
_MOST_DOTS = 120
_BAR = 20
_ABOVE = 56
_STYLE = """svg { background: #fff; } text { fill: #5c6776; font: 12px system-ui, sans-serif; }
.grid { stroke: #dfe4ea; }
.line { fill: none; stroke-width: 1.6; } line { stroke-dasharray: 3 3; } line.grid { stroke-dasharray: none; }
.a { fill: #1f77b4; stroke: #1f77b4; } .b { fill: #e07b16; stroke: #e07b16; } .c { fill: #2a9d4a; stroke: #2a9d4a; }
path.line { fill: none; } .dot { stroke: none; }"""


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart.

    Attributes:
        name: in the legend.
        points: by their first number.
        style: a class of the page.
        steps: whether a value holds until the next one.
    """

    name: str
    points: Sequence[Point]
    style: str
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a bar: seconds from the chart's begin, a class, and what is shown when it is pointed at."""

    began_s: float
    ended_s: float
    style: str
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: what stands before it, and its pieces."""

    label: str
    spans: Sequence[Span]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
    marks: Sequence[tuple[float, str, str]] = (),
) -> str:
    """Lines over a common number, from 0 upwards.

    Args:
        label: what it shows, for those who cannot see it.
        show_x, show_y: how numbers are written.
        marks: vertical lines: where, of which class, and what is shown when one is pointed at.
    """
    if not any(each.points for each in series):
        return '<p class="none">Nothing of that is in the events.</p>'
    lines = _lines(series, show_x, show_y, marks)
    return "".join([_head(_HEIGHT, label), *lines, "</svg>", legend([(each.name, each.style) for each in series])])


def svg_file(
    series: Sequence[Series],
    *,
    label: str,
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
    marks: Sequence[tuple[float, str, str]] = (),
) -> str:
    """The same as a file of its own, with the label and the legend above; there is at least one point."""
    parts = [_text(_LEFT, 22, label, "start")]
    for number, each in enumerate(series):
        x, y = _LEFT + number * (WIDTH - _LEFT) / len(series), 34
        parts.append(f'<rect class="{each.style}" x="{x:.1f}" y="{y}" width="12" height="12"/>')
        parts.append(_text(x + 18, y + 11, each.name, "start"))
    lines = _lines(series, show_x, show_y, marks)
    drawn = f'<g transform="translate(0 {_ABOVE})">{"".join(lines)}</g>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {_HEIGHT + _ABOVE}">'
    return "".join([head, f"<style>{_STYLE}</style>", *parts, drawn, "</svg>\n"])


def _lines(
    series: Sequence[Series],
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
    marks: Sequence[tuple[float, str, str]],
) -> list[str]:
    points = [point for each in series for point in each.points]
    xs = [x for x, _ in points] + [x for x, _, _ in marks]
    low, high = min(xs), max(xs)
    high = high if high > low else low + 1
    top = _ceiling(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - low) / (high - low) * (WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = []
    for number in range(5):
        x, y = place(low + (high - low) * number / 4, top * number / 4)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, show_y(top * number / 4), "end"))
        anchor = "start" if number == 0 else "end" if number == 4 else "middle"
        parts.append(_text(x, _HEIGHT - 12, show_x(low + (high - low) * number / 4), anchor))
    for x, style, title in marks:
        at = place(x, 0)[0]
        line = f'<line class="{style}" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
        parts.append(f"{line}<title>{escape(title)}</title></line>")
    for each in series:
        thinned = _thinned(each.points)
        path = _path([place(*point) for point in thinned], steps=each.steps)
        parts.append(f'<path class="line {each.style}" d="{path}"/>')
        if len(thinned) <= _MOST_DOTS:
            for point in thinned:
                x, y = place(*point)
                title = escape(f"{each.name}: {show_y(point[1])} at {show_x(point[0])}")
                dot = f'<circle class="dot {each.style}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                parts.append(f"{dot}<title>{title}</title></circle>")
    return parts


def bar_chart(bars: Sequence[Bar], *, seconds: float, label: str, show_x: Callable[[float], str]) -> str:
    """Bars over the same seconds, from 0 on."""
    height = _TOP + len(bars) * _BAR + _BOTTOM
    left = _LEFT + 90
    scale = (WIDTH - left - _RIGHT) / (seconds or 1.0)
    parts = [_head(height, label)]
    for number in range(5):
        x = left + (WIDTH - left - _RIGHT) * number / 4
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
        parts.append(_text(x, height - 12, show_x(seconds * number / 4), "end" if number == 4 else "middle"))
    for row, bar in enumerate(bars):
        y = _TOP + row * _BAR
        parts.append(_text(left - 8, y + _BAR - 6, bar.label, "end"))
        for span in bar.spans:
            width = max(1.0, (span.ended_s - span.began_s) * scale)
            where = f'x="{left + span.began_s * scale:.1f}" y="{y + 3}" width="{width:.1f}" height="{_BAR - 6}"'
            parts.append(f'<rect class="{span.style}" {where}><title>{escape(span.title)}</title></rect>')
    return "".join([*parts, "</svg>"])


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """What the classes of a chart stand for."""
    keys = (f'<span class="key"><i class="{style}"></i>{escape(name)}</span>' for name, style in entries)
    return f'<div class="legend">{"".join(keys)}</div>'


def _head(height: int, label: str) -> str:
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {height}">'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(places: Sequence[tuple[float, float]], *, steps: bool) -> str:
    parts = []
    for number, (x, y) in enumerate(places):
        if steps and number:
            parts.append(f"H{x:.1f}")
        parts.append(f"{'L' if number else 'M'}{x:.1f} {y:.1f}")
    return "".join(parts)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """As many points as can be told apart: of those that lie together, the one with the greatest value."""
    size = -(-len(points) // _MOST_POINTS)
    return [max(points[at : at + size], key=lambda point: point[1]) for at in range(0, len(points), max(size, 1))]


def _ceiling(value: float) -> float:
    """A round number that is at least so large."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= value * 0.999)
