"""``python docs/site_pictures.py``: draws the pictures of docs/pictures from what the code says.

Owns their looks. What is drawn comes from elsewhere: the layers from the contract in pyproject.toml, who holds
copies of whom from the strategies themselves. ``--check`` writes nothing, and fails where a picture is out of date; a
test does so.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from ml_flashpoint.ranks.strategies import (
    CliqueStrategy,
    PairwiseReplicationStrategy,
    ReplicationStrategy,
    RingReplicationStrategy,
    Topology,
)

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "pictures"

_INK, _SOFT, _PAPER, _EDGE = "#1b1f3b", "#5c6385", "#ffffff", "#c9cde4"
_FILLS = ("#e3e7fb", "#e0f1ee", "#fdf0dc", "#f6e4ef", "#e6f0fa")
_LINES = ("#3f51b5", "#00796b", "#b26a00", "#ad1457", "#0277bd")

_LAYERS = {
    "cli": "commands",
    "core": "the user guide's import paths, of classes that adapter.pytorch has",
    "tools": "copy, verify, open, export, persist, remove: from store to store",
    "adapter.lightning": "adapters on adapters",
    "adapter.accelerate": "Accelerate, of which the Trainer of Transformers consists",
    "flashpoint": "the loop's five lines",
    "checkpointer": "the public face: states in and out; the place in the data",
    "adapter.megatron": "adapters; the dictionary",
    "adapter.pytorch": "DCP, which Megatron-LM's adapter saves and loads through, too",
    "engine": "saving, committing, copying, rounds, recovering, reading, persisting",
    "config": "what every adapter takes",
    "stores": "where versions are: a base container, a directory, a URL",
    "memory": "slots, the pool, capacity, the lock of a job, the lineage of runs",
    "state": "state as a tree of tensors and an archive, and the plan to write it",
    "copy": "bytes from tensors into slots",
    "ranks": "who takes part, strategies, recovery planning; the wire",
    "events": "who is told of what happens",
    "format": "names, dtypes, layouts, manifests, digests; no torch",
    "extras": "what is not installed by itself",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws all pictures, or tells which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a picture is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for name, draw in PICTURES.items():
        path, drawn = FOLDER / name, draw()
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            stale.append(name)
            if not options.check:
                FOLDER.mkdir(exist_ok=True)
                path.write_text(drawn, encoding="utf-8")
    if options.check and stale:
        print(f"out of date: {', '.join(stale)}; python docs/site_pictures.py draws them", file=sys.stderr)
    return int(bool(stale) and options.check)


def layers() -> str:
    """The packages, each above those that it may import."""
    contracts = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    found, *_ = re.findall(r"^layers = (\[.*?^\])", contracts, re.MULTILINE | re.DOTALL)  # of the whole package first
    rows: list[str] = ast.literal_eval(found)  # a list of strings looks alike; Python 3.10 has no tomllib
    engine = next(index for index, row in enumerate(rows) if row == "engine")
    high, top, parts = 34, 44, [_text(24, 28, "each imports only from those below it", soft=True)]
    for index, row in enumerate(rows):
        names = [each.strip() for each in row.split("|")]
        y, width = top + index * (high + 8), (440 - 8 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            fill = _FILLS[0] if name == "engine" else _FILLS[1] if index < engine else _FILLS[4]
            size = 9 if len(name) > 20 else 11
            parts.append(_box(24 + place * (width + 8), y, width, high, name, fill, size))
        parts.append(_text(480, y + high / 2 + 4, _LAYERS[names[0]]))
    return _svg(900, top + len(rows) * (high + 8) + 10, "Layers of ml_flashpoint", parts)


def strategies() -> str:
    """Who holds copies of whose parts."""
    shown: list[tuple[ReplicationStrategy, int]] = [
        (PairwiseReplicationStrategy(), 4),
        (PairwiseReplicationStrategy(), 5),
        (RingReplicationStrategy(), 4),
        (RingReplicationStrategy(copies=2), 4),
        (CliqueStrategy(factor=2, jump=2), 4),
        (CliqueStrategy(factor=3, jump=2), 6),
    ]
    parts = [_text(24, 28, "an arc leads from a rank to a rank that holds a copy of its part", soft=True)]
    for index, (strategy, nodes) in enumerate(shown):
        parts += _strategy(strategy, nodes, 24 + index % 2 * 460, 56 + index // 2 * 190)
    return _svg(940, 56 + (len(shown) + 1) // 2 * 190, "Strategies of replication", parts)


def _strategy(strategy: ReplicationStrategy, nodes: int, left: float, top: float) -> list[str]:
    topology = Topology(tuple(f"node-{rank // 2}" for rank in range(2 * nodes)))
    losses = strategy.survivable_losses(topology)
    wide, floor = 430 / nodes, top + 118
    at = {rank: left + wide * (rank // 2) + wide / 2 + (-13 if rank % 2 == 0 else 13) for rank in range(2 * nodes)}
    parts = [
        _text(left, top, repr(strategy), bold=True),
        _text(left, top + 17, f"survives the loss of any {losses} node{'s' * (losses != 1)}", soft=True),
    ]
    for node in range(nodes):
        x = left + wide * node + 4
        parts.append(
            f'<rect x="{x:.0f}" y="{floor - 18}" width="{wide - 8:.0f}" height="44" rx="6" '
            f'fill="{_FILLS[node % len(_FILLS)]}" stroke="{_EDGE}"/>'
        )
        parts.append(_text(x + wide / 2 - 4, floor + 40, f"node-{node}", soft=True, middle=True))
    for rank in range(2 * nodes):
        colour = _LINES[rank // 2 % len(_LINES)]
        for holder in strategy.copies_of(rank, topology):
            lift = floor - 20 - 18 - abs(at[holder] - at[rank]) / 3.2
            to = at[holder] + (3 if at[holder] > at[rank] else -3)
            parts.append(
                _path(
                    f"M{at[rank]:.0f} {floor - 6} Q{(at[rank] + to) / 2:.0f} {lift:.0f} {to:.0f} {floor - 14}", colour
                )
            )
    for rank, x in at.items():
        parts.append(f'<circle cx="{x:.0f}" cy="{floor + 3}" r="10" fill="{_PAPER}" stroke="{_LINES[rank // 2 % 5]}"/>')
        parts.append(_text(x, floor + 7, str(rank), size=10, middle=True))
    return parts


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    markers = "".join(
        f'<marker id="a{index}" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for index, colour in enumerate(_LINES)
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'font-family="Roboto, Helvetica, Arial, sans-serif">\n<title>{escape(title)}</title>\n<defs>{markers}</defs>\n'
        f'<rect width="100%" height="100%" rx="10" fill="{_PAPER}" stroke="{_EDGE}"/>\n{body}\n</svg>\n'
    )


def _box(x: float, y: float, width: float, height: float, label: str, fill: str, size: int) -> str:
    text = _text(x + width / 2, y + height / 2 + size / 3, label, size=size, middle=True)
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" fill="{fill}" '
        f'stroke="{_EDGE}"/>{text}'
    )


def _text(
    x: float, y: float, text: str, *, size: int = 12, soft: bool = False, bold: bool = False, middle: bool = False
) -> str:
    style = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if middle else "")
    colour = _SOFT if soft else _INK
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{colour}"{style}>{escape(text)}</text>'


def _path(points: str, colour: str, *, dashed: bool = False) -> str:
    style = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="1.5"{style} '
        f'marker-end="url(#a{_LINES.index(colour)})"/>'
    )


PICTURES: dict[str, Callable[[], str]] = {
    "layers.svg": layers,
    "strategies.svg": strategies,
}

if __name__ == "__main__":
    raise SystemExit(main())
