"""`flashpoint status`: the saves of the ranks of one node, as their status files say; once, or again and again.

Owns how that is shown. `ml_flashpoint.status` owns the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ml_flashpoint.cli import base_view, output
from ml_flashpoint.cli.base_view import format_bytes, read_base, read_ranks
from ml_flashpoint.cli.bases import base_of
from ml_flashpoint.cli.losses import CAPTION, UNKNOWN, Loss, losses
from ml_flashpoint.memory.capacity import available_bytes
from ml_flashpoint.status import Status

_TRIES = 5


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank of this node.

    Attributes:
        rank: its number.
        pid: its process; None if it is not running.
        status: what it said last; None if it has saved nothing yet, or its door is one that says nothing.
    """

    rank: int
    pid: int | None
    status: Status | None

    @property
    def state(self) -> str:
        """In a word: ``ended``, ``silent``, ``degraded`` or ``ok``."""
        if self.pid is None:
            return "ended"
        if self.status is None:
            return "silent"
        return "degraded" if self.status.degraded else "ok"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        status = None if self.status is None else dataclasses.asdict(self.status)
        return {"rank": self.rank, "pid": self.pid, "state": self.state, "status": status}


def read_node(base: str) -> list[RankView]:
    """The ranks that have something in a base container, by rank.

    Raises:
        NotABaseContainerError: it is none.
    """
    return [
        RankView(rank, pid, status if status is not None and status.updated_s else None)
        for rank, (status, pid) in sorted(read_ranks(base).items())
    ]


def read_losses(base: str) -> tuple[list[RankView], list[Loss]]:
    """The ranks, and what the loss of a node would cost them.

    Raises:
        NotABaseContainerError: it is none.
    """
    for _ in range(_TRIES):
        ranks = read_node(base)
        saying = [rank for rank in ranks if rank.status is not None]
        running = [rank for rank in saying if rank.pid is not None] or saying
        told = [rank.status for rank in running if rank.status is not None]
        if found := losses(told, read_base(base).versions):
            break
        if all(status.verified is None for status in told):
            break  # else what was verified may have been replaced by a newer one, before it was looked at
    return ranks, found


def memory_of(base: Path) -> tuple[int, int]:
    """Return the bytes that checkpoints take on this node, own parts and copies, and the bytes left for more."""
    try:
        left = available_bytes(base)
    except OSError:
        left = 0
    return base_view.memory_of(base), left


@output.command
def show_status(base: str, *, every_s: float | None = None, as_json: bool = False) -> int | None:
    """Show the ranks of a node, and return the exit code of the command.

    Args:
        base: a base container, or the name of its last folder.
        every_s: seconds between two looks, until Ctrl-C; None to look once.
        as_json: print JSON: one document, or a line for each look.
    """
    base = base_of(base)
    with contextlib.ExitStack() as opened, contextlib.suppress(KeyboardInterrupt):
        live: Live | None = None
        while True:
            ranks, found = read_losses(base)
            if as_json:
                told = {"ranks": [rank.to_json() for rank in ranks], "losses": [loss.to_json() for loss in found]}
                print(json.dumps({"base": base, **told}, indent=None if every_s else 2), flush=True)
            elif not output.is_terminal():
                print("\n".join([*map(line_of, ranks), *(loss.text() for loss in found)]), flush=True)
                if every_s:
                    print("", flush=True)  # ends a look
            elif not every_s:
                output.console().print(_shown(base, ranks, found))
            elif live is None:
                shown = _shown(base, ranks, found)
                live = opened.enter_context(Live(shown, console=output.console(), auto_refresh=False, screen=True))
                live.refresh()
            else:
                live.update(_shown(base, ranks, found), refresh=True)
            if not every_s:
                return output.DAMAGE if any(rank.state == "degraded" for rank in ranks) else None
            time.sleep(every_s)
    return None


def _shown(base: str, ranks: list[RankView], found: list[Loss]) -> RenderableType:
    lines = [Text(loss.text(), style="" if loss.step is not None else "bold red") for loss in found]
    return Group(rank_table(base, ranks), *lines, Text(CAPTION if found else UNKNOWN, style="dim"))


def line_of(rank: RankView) -> str:
    """A rank in one line, for other programs."""
    head = f"rank={rank.rank} state={rank.state} pid={or_dash(rank.pid)}"
    told = rank.status
    if told is None:
        return head
    errors = " ".join(f"{name}={json.dumps(text)}" for name, text in errors_of(told))
    return (
        f"{head} resumed={or_dash(told.resumed)} committed={or_dash(told.committed)}"
        f" replicated={or_dash(told.replicated)} verified={or_dash(told.verified)} age_s={age_of(told)}"
        f" persisted={or_dash(told.persisted)}"
        f" held_s={told.held_s:.4f} bytes={told.part_bytes} saves={told.saves} failures={told.failures} {errors}"
    ).rstrip()


def rank_table(base: str, ranks: list[RankView]) -> RenderableType:
    """All ranks of a node, for people."""
    columns = (
        "rank",
        "state",
        "committed",
        "copied",
        "verified",
        "since",
        "held loop",
        "verified after",
        "persisted",
        "part",
    )
    table = Table(*columns, "saves", "failed", title=escape(base), title_justify="left", title_style="")
    styles = {"ok": "green", "degraded": "bold red", "silent": "yellow", "ended": "dim"}
    errors: list[str] = []
    for rank in ranks:
        state, told = f"[{styles[rank.state]}]{rank.state}[/]", rank.status
        if told is None:
            table.add_row(str(rank.rank), state)
            continue
        table.add_row(
            str(rank.rank),
            state,
            or_dash(told.committed),
            or_dash(told.replicated),
            or_dash(told.verified),
            f"{age_of(told)} s",
            f"{told.held_s * 1000:.1f} ms",
            f"{told.verified_after_s:.2f} s",
            or_dash(told.persisted),
            format_bytes(told.part_bytes),
            str(told.saves),
            str(told.failures),
        )
        errors += [f"rank {rank.rank}: {text}" for _, text in errors_of(told)]
    if errors:
        table.caption, table.caption_justify = escape("\n".join(errors)), "left"
    return table


def errors_of(told: Status) -> list[tuple[str, str]]:
    """What has failed, or is amiss, and why."""
    names = ("error", "replication_error", "agreement_error", "persist_error")
    return [(name, text) for name in names if (text := getattr(told, name)) is not None]


def age_of(told: Status, now_s: float | None = None) -> str:
    """Seconds since the newest step that nothing can take any more: what would be lost now."""
    now_s = time.time() if now_s is None else now_s
    return "-" if not told.verified_s else f"{max(0.0, now_s - told.verified_s):.0f}"


def or_dash(value: int | None) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else str(value)
