"""One plot of each measure, as PNG, by matplotlib: extra `bench`.

``python -m benchmarks.rivals.plots docs/benchmarks.json docs`` draws those of the page from its rows.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, OTHERS, FLOOR = "#1f6feb", "#9aa4af", "#d5dae0"
Row = dict[str, Any]
Spread = tuple[float, float, float]
"""Median, low and high."""


@dataclass(frozen=True)
class _Measure:
    """What a plot shows.

    Attributes:
        spread: median, low and high of a row. told: a value, in words, at the end of its bar.
        starts: where bars start; None: below the shortest of all. ticks: what is told of the axis, as far as it goes.
    """

    title: str
    axis: str
    spread: Callable[[Row], Spread]
    told: Callable[[float], str]
    starts: float | None
    ticks: tuple[float, ...]


def _milliseconds(row: Row) -> Spread:
    return row["seconds"] * 1e3, row["low_s"] * 1e3, row["high_s"] * 1e3


def _in_ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.2g} ms"


_MEASURES = {
    "benchmarks-held.png": _Measure(
        "How long one save holds the training thread",
        "milliseconds, logarithmic; shorter is better",
        _milliseconds,
        _in_ms,
        None,
        tuple(digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)),
    ),
    "benchmarks-slowdown.png": _Measure(
        "A loop that saves at every step",
        "time of a step, × that of the same loop without saves, logarithmic; shorter is better",
        lambda row: tuple(row["slowdown"]),
        lambda value: f"× {value:.2f}" if value < 10 else f"× {value:.1f}",
        1.0,
        (1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100),
    ),
}


def drawn(rows: list[Row], folder: Path) -> Iterator[Path]:
    """Draw both, and tell where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, measure in _MEASURES.items():
        _draw([row for row in rows if row["runs"]], measure, folder / name)
        yield folder / name


def _draw(rows: list[Row], measure: _Measure, path: Path) -> None:
    """A panel for each loop, with a bar for each kind, the shortest on top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    states = list(dict.fromkeys(row["state"] for row in rows))
    most = max(sum(row["state"] == state for row in rows) for state in states)
    figure, panels = pyplot.subplots(
        len(states), 1, figsize=(10, (0.36 * most + 1.2) * len(states) + 0.4), squeeze=False
    )
    for state, panel in zip(states, panels[:, 0], strict=True):
        _panel(panel, [row for row in rows if row["state"] == state], measure)
    panels[-1, 0].set_xlabel(measure.axis)
    figure.suptitle(measure.title, fontweight="bold")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _panel(panel: Any, rows: list[Row], measure: _Measure) -> None:
    ordered = sorted(rows, key=lambda row: -measure.spread(row)[0])
    spreads = [measure.spread(row) for row in ordered]
    least, most = min(low for _, low, _ in spreads), max(high for _, _, high in spreads)
    starts = 0.6 * least if measure.starts is None else measure.starts
    places = range(len(ordered))
    colours = [OURS if _is_ours(row) else FLOOR if row["case"] == "copy" else OTHERS for row in ordered]
    panel.set_xscale("log")
    panel.barh(places, [median - starts for median, _, _ in spreads], left=starts, color=colours, height=0.72)
    beyond = [[median - low for median, low, _ in spreads], [high - median for median, _, high in spreads]]
    medians = [median for median, _, _ in spreads]
    panel.errorbar(medians, places, xerr=beyond, fmt="none", ecolor="#444c56", elinewidth=1, capsize=2)
    panel.set_yticks(places, [row["label"].replace("`", "") for row in ordered])
    for place, (median, _, high), row in zip(places, spreads, ordered, strict=True):
        weight = "bold" if _is_ours(row) else "normal"
        at = (max(high, starts), place)
        panel.annotate(measure.told(median), at, (5, 0), textcoords="offset points", va="center", weight=weight)
        panel.get_yticklabels()[place].set_fontweight(weight)
    left = min(starts, 0.98 * least)
    panel.set_xlim(left, most * (most / left) ** 0.12)  # room for the last figure
    ticks = _apart(measure.ticks, *panel.get_xlim())
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.set_xticks([], minor=True)
    panel.set_title(_told(rows), loc="left", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x", which="major", color="#e6e9ec")
    panel.set_axisbelow(True)


def _apart(ticks: tuple[float, ...], left: float, right: float) -> list[float]:
    """Those within the axis, as far as there is room for what they say."""
    kept: list[float] = []
    for tick in ticks:
        if left <= tick <= right and (not kept or math.log(tick / kept[-1]) > 0.05 * math.log(right / left)):
            kept.append(tick)
    return kept


def _is_ours(row: Row) -> bool:
    return str(row["case"]).startswith("ours")


def _told(rows: list[Row]) -> str:
    """What the loop is like: medians over all kinds."""
    alone, memcpy = (statistics.median(row[what] for row in rows) * 1e3 for what in ("alone_s", "memcpy_s"))
    return (
        f"{rows[0]['state'].partition(', ')[2]}: {alone:,.0f} ms without saves;"
        f" state of {rows[0]['nbytes'] / 2**20:,.0f} MiB, of which a memcpy takes {memcpy:,.0f} ms"
    )


def main(rows: str, folder: str) -> None:
    """Draw the rows of the page."""
    runs = json.loads(Path(rows).read_text(encoding="utf-8"))["runs"]
    found = [row for run in runs for row in run["rows"] if row["state"].startswith("rivals, ")]
    for path in drawn(found, Path(folder)):
        print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
