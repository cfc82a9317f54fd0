"""`flashpoint top`: how saving goes on all nodes of a job, again and again.

Owns how that is shown. What the nodes say is `cli.job_view`'s.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import format_bytes, format_ranks
from ml_flashpoint.cli.bases import base_of
from ml_flashpoint.cli.job_view import JobView, JobWatch, NodeView
from ml_flashpoint.cli.losses import CAPTION, UNKNOWN, Loss
from ml_flashpoint.cli.status import age_of, errors_of, line_of, or_dash, rank_table
from ml_flashpoint.format.status import RankStatus

_STYLES = {"ok": "green", "degraded": "bold red", "silent": "yellow", "ended": "dim", "no answer": "bold red"}
_MOST_LOSSES = 9
"""Lines about the loss of a node. With more nodes, those that are alike are one."""
_MOST_ERRORS = 8


@output.command
def show_top(
    bases: Sequence[str], *, every_s: float, count: int = 0, ranks: bool = False, as_json: bool = False
) -> int | None:
    """Show it so many times, or until somebody presses Ctrl-C; returns the exit code of the command."""
    code: int | None = None
    with contextlib.ExitStack() as opened:
        jobs = [opened.enter_context(JobWatch(base_of(base))) for base in bases]
        live: Live | None = None
        looks = 0
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                views = [job.look() for job in jobs]
                looks += 1
                code = output.DAMAGE if any(view.is_degraded for view in views) else None
                if as_json:
                    for view in views:
                        print(json.dumps(view.to_json()), flush=True)
                elif not output.is_terminal():
                    for view in views:
                        _print_lines(view)
                else:
                    shown = Group(*(_shown(view, ranks=ranks) for view in views))
                    if count == looks == 1:
                        output.console().print(shown)
                    elif live is None:
                        live = Live(shown, console=output.console(), auto_refresh=False, screen=count != 1)
                        opened.enter_context(live)
                        live.refresh()
                    else:
                        live.update(shown, refresh=True)
                if looks == count:
                    return code
                time.sleep(every_s)
    return None


# ---- lines, for other programs ----------------------------------------------------------------------------------


def _print_lines(view: JobView) -> None:
    for node in view.nodes:
        head = f"node={node.node or '-'} here={'yes' if node.here else 'no'} state={node.state.replace(' ', '-')}"
        if node.error is not None:
            print(f"{head} error={json.dumps(node.error)}")
            continue
        print(f"{head} arena_bytes={node.arena_bytes} available_bytes={node.available_bytes}")
        for rank in node.ranks:
            print(f"node={node.node or '-'} {line_of(rank)}")
    for loss in view.losses:
        print(loss.text())
    print("", flush=True)


# ---- tables, for people -----------------------------------------------------------------------------------------


def _shown(view: JobView, *, ranks: bool) -> RenderableType:
    parts: list[RenderableType] = [_node_table(view)]
    if ranks or len(view.nodes) == 1:
        name = view.nodes[0].node or "this node"
        parts.append(rank_table(f"ranks of {name}", list(view.nodes[0].ranks)))
    parts += [Text(line, style="" if sure else "bold red") for line, sure in _loss_lines(view.losses)]
    parts.append(Text(CAPTION if view.losses else UNKNOWN, style="dim"))
    parts += [Text(line, style="yellow") for line in _error_lines(view)]
    return Group(*parts)


def _node_table(view: JobView) -> RenderableType:
    table = Table(title=escape(view.base), title_justify="left", title_style="bold")
    table.add_column("node", overflow="fold")
    for name in ("ranks", "state", "step", "copied", "verified", "since", "persisted", "held", "copies on", "rate"):
        table.add_column(name, no_wrap=name != "copies on")
    for name in ("memory", "free"):
        table.add_column(name, no_wrap=True, justify="right")
    for node in view.nodes:
        table.add_row(*_node_row(node))
    return table


def _node_row(node: NodeView) -> list[str]:
    name = escape(node.node or "this node") + (" *" if node.here and node.node else "")
    head = [name, format_ranks(rank.rank for rank in node.ranks), f"[{_STYLES[node.state]}]{node.state}[/]"]
    told = node.told
    if not told:
        return head
    ages = [age_of(each, node.time_s) for each in told]
    holders = sorted({holder for each in told for holder in each.copies_on})
    return [
        *head,
        _steps([each.committed for each in told]),
        _steps([each.replicated for each in told]),
        _steps([each.verified for each in told]),
        "-" if "-" in ages else f"{max(map(int, ages))} s",
        _steps([each.persisted for each in told]),
        f"{max(each.held_s for each in told) * 1000:.1f} ms",
        escape(", ".join(holders)) or "-",
        _rate(told),
        format_bytes(node.arena_bytes),
        format_bytes(node.available_bytes),
    ]


def _steps(steps: Sequence[int | None]) -> str:
    """One number where ranks agree, else from where to where."""
    found = sorted({-1 if step is None else step for step in steps})
    least, most = (None if found[0] < 0 else found[0]), (None if found[-1] < 0 else found[-1])
    return or_dash(least) if least == most else f"{or_dash(least)}-{or_dash(most)}"


def _rate(told: Sequence[RankStatus]) -> str:
    """Of the newest copies of a node's ranks, which are made at the same time."""
    seconds = max((each.copied_in_s for each in told), default=0.0)
    return f"{sum(each.copied_bytes for each in told) / seconds / 1e9:.2f} GB/s" if seconds > 0 else "-"


def _loss_lines(losses: Sequence[Loss]) -> list[tuple[str, bool]]:
    """What is said of the loss of a node, and whether that is good news. Of many nodes that are alike, one line."""
    if len(losses) <= _MOST_LOSSES:
        return [(loss.text(), loss.is_sure) for loss in losses]
    alike = [loss for loss in losses if loss.is_sure and not loss.here and loss.node is not None]
    apart = [loss for loss in losses if loss not in alike]
    lines = [(loss.text(), loss.is_sure) for loss in apart]
    if alike:
        slowest = max(alike, key=lambda loss: (loss.seconds is None, loss.seconds or 0.0))
        lines.append((f"of the other {len(alike)} nodes, the slowest: {slowest.text()}", True))
    return lines


def _error_lines(view: JobView) -> list[str]:
    """What is amiss, and the newest failures, those of this node first."""
    silent = [f"{node.node} does not answer: {node.error}" for node in view.nodes if node.error is not None]
    failed = [
        f"{node.node} rank {rank.rank}: {text}"
        for node in view.nodes
        for rank in node.ranks
        if rank.status is not None
        for _, text in errors_of(rank.status)
    ]
    lines = silent + failed
    more = len(lines) - _MOST_ERRORS
    return lines[:_MOST_ERRORS] + ([f"and {more} more"] if more > 0 else [])
