"""``python docs/site_pictures.py``: draws the pictures of docs/pictures from what the code says.

Owns their looks. What is drawn comes from elsewhere: the layers from the contract in pyproject.toml, the states of a
save from `core.save`, who holds copies of whom from the strategies themselves. ``--check`` writes nothing, and fails
where a picture is out of date; a test does so.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from ml_flashpoint.core import save
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
    "tools": "copy, verify, open, export, persist, remove: from store to store",
    "adapter.lightning": "doors on doors",
    "flashpoint": "the façade's one class",
    "facade": "saves and loads of the façade; the place in the data",
    "adapter.megatron": "doors",
    "adapter.pytorch": "the DCP door, which most of the above save and load through",
    "core": "the engine: saving, committing, recovering, loading",
    "replication": "copies: sending, receiving, verifying; stores of versions",
    "checkpoint_object_manager": "arenas and versions on tmpfs",
    "memory": "the lock of a job, the room on a node; slots",
    "state": "state as a tree of tensors and an archive, and the plan to write it",
    "copy": "bytes from tensors into arenas",
    "ranks": "who takes part, strategies, recovery planning; requests",
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
    (found,) = re.findall(r"^layers = (\[.*?^\])", contracts, re.MULTILINE | re.DOTALL)
    rows: list[str] = ast.literal_eval(found)  # a list of strings looks alike; Python 3.10 has no tomllib
    engine = next(index for index, row in enumerate(rows) if "core" in row.split(" | "))
    high, top, parts = 34, 44, [_text(24, 28, "each imports only from those below it", soft=True)]
    for index, row in enumerate(rows):
        names = [each.strip() for each in row.split("|")]
        y, width = top + index * (high + 8), (440 - 8 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            fill = _FILLS[0] if name == "core" else _FILLS[1] if index < engine else _FILLS[4]
            size = 9 if len(name) > 20 else 11
            parts.append(_box(24 + place * (width + 8), y, width, high, name, fill, size))
        parts.append(_text(480, y + high / 2 + 4, _LAYERS[names[0]]))
    return _svg(900, top + len(rows) * (high + 8) + 10, "Layers of ml_flashpoint", parts)


_STATES = {  # where they are; the row, and what follows what, is theirs
    "BEGUN": (40, 110),
    "STAGED": (190, 110),
    "FILLED": (340, 110),
    "COMMITTED": (490, 110),
    "REPLICATED": (640, 110),
    "VERIFIED": (790, 110),
    "FAILED": (190, 230),
    "EVICTED": (565, 230),
}


def save_states() -> str:
    """What a save of one rank may become, and who takes it there."""
    wide, high, parts = 110, 40, []
    parts.append(f'<rect x="24" y="36" width="450" height="260" rx="10" fill="{_FILLS[4]}" stroke="none"/>')
    parts.append(f'<rect x="482" y="36" width="434" height="260" rx="10" fill="{_FILLS[2]}" stroke="none"/>')
    parts += [_text(40, 58, "the saver", soft=True), _text(498, 58, "the commit queue, in the background", soft=True)]
    for state, following in save._NEXT.items():
        for other in sorted(following, key=lambda each: each.name):
            (x, y), (to_x, to_y) = _STATES[state.name], _STATES[other.name]
            if to_y != y:
                bent = (y + high + to_y) / 2
                start, end = x + wide / 2, to_x + wide / 2
                parts.append(
                    _path(f"M{start} {y + high} C{start} {bent} {end} {bent} {end} {to_y - 7}", _LINES[3], dashed=True)
                )
            elif to_x - x > 150:
                middle = (x + to_x + wide) / 2
                lift = y - 14 - (to_x - x) / 14
                parts.append(_path(f"M{x + wide - 20} {y} Q{middle} {lift} {to_x + 20} {y - 7}", _LINES[0]))
            else:
                parts.append(_path(f"M{x + wide} {y + high / 2} L{to_x - 7} {y + high / 2}", _LINES[0]))
    for state in save.SaveState:
        x, y = _STATES[state.name]
        fill = _FILLS[1] if state.name == "VERIFIED" else _FILLS[3] if y > 200 else _PAPER
        parts.append(_box(x, y, wide, high, state.value, fill, 13))
    return _svg(940, 320, "States of a save", parts)


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
    "save-states.svg": save_states,
    "strategies.svg": strategies,
}

if __name__ == "__main__":
    raise SystemExit(main())
