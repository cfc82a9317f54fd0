"""Goodput over the interval between saves, as `flashpoint plan` draws it in a terminal.

Owns which intervals are drawn, and the drawing. `cli.plan` knows the ways of checkpointing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

Point = tuple[float, float]

_POINTS: Final = 60
_ROWS: Final = 20  # of 5 % each
_LEAST_PERIODS: Final = 2.0
_LETTERS: Final = "abcdefgh"


@dataclass(frozen=True, slots=True)
class Curve:
    """Goodput of a way of checkpointing.

    Attributes:
        name: of the way.
        points: seconds of training between two saves, and the share of time that is training then.
        best: the one that the plan takes.
    """

    name: str
    points: tuple[Point, ...]
    best: Point


def curve(
    name: str, best: Point, goodput_at: Callable[[float], float], *, from_s: float, shortest_s: float, longest_s: float
) -> Curve:
    """One of them, at as many intervals between ``from_s`` and ``longest_s`` as all have, evenly in their logarithms.

    Args:
        shortest_s: the shortest interval that this way can have: no version before the one before is safe.
    """
    growth = (max(longest_s, _LEAST_PERIODS * from_s) / from_s) ** (1 / (_POINTS - 1))
    intervals = [from_s * growth**number for number in range(_POINTS)]
    points = tuple((each, goodput_at(each)) for each in intervals if each >= shortest_s * 0.999)
    return Curve(name, points, best)


def text_plot(curves: Sequence[Curve], show_x: Callable[[float], str]) -> str:
    """The curves in characters: a letter for each, the best interval of each as a capital one."""
    xs = [x for each in curves for x, _ in each.points]
    low, high = math.log(min(xs)), math.log(max(xs))
    rows = [[" "] * _POINTS for _ in range(_ROWS + 1)]
    for letter, each in zip(_LETTERS, curves, strict=False):
        for (x, y), shown in [*((point, letter) for point in each.points), (each.best, letter.upper())]:
            column = round((math.log(x) - low) / (high - low) * (_POINTS - 1))
            row = _ROWS - round(min(1.0, max(0.0, y)) * _ROWS)
            if shown.isupper() or not rows[row][min(_POINTS - 1, max(0, column))].isupper():
                rows[row][min(_POINTS - 1, max(0, column))] = shown
    lines = [
        f"{(f'{100 - 5 * number} %' if number % 4 == 0 else ''):>6} │{''.join(row).rstrip()}"
        for number, row in enumerate(rows)
    ]
    ticks = [show_x(math.exp(low + (high - low) * number / 3)) for number in range(4)]
    axis = "".join(f"{tick:<{_POINTS // 3 - 3}}" for tick in ticks[:3]) + ticks[3]
    keys = [f"{letter} {each.name}" for letter, each in zip(_LETTERS, curves, strict=False)]
    return "\n".join([*lines, f"{'':>6} └{'─' * _POINTS}", f"{'':>8}{axis}", f"{'':>8}{', '.join(keys)}"])
