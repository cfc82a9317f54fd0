"""`flashpoint status`: the saves of the ranks of one node, and what the loss of a node would cost; once, or again."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.live import Live
from rich.text import Text

from ml_flashpoint.cli import output
from ml_flashpoint.cli.output import bytes_text, or_dash
from ml_flashpoint.cli.view import RankView, VersionView, base_named, read, read_ranks
from ml_flashpoint.status import Status

_TRIES = 5
_CAPTION = (
    "steps lost: up to the newest save; steps trained after that save are lost, too. Times are estimates from the "
    "newest copies, for fetching the parts to a new node; starting its processes takes additional time."
)
_UNKNOWN = "the cost of losing a node is unknown: no version was verified here since the processes started"


def show_status(base: str, *, every_s: float | None, as_json: bool) -> int:
    """Show the ranks of a node.

    Args:
        base: a base container, or the name of its last folder.
        every_s: seconds between two looks, until Ctrl-C; None to look once.
        as_json: print JSON: one document, or a line for each look.
    """
    base = base_named(base)
    with contextlib.ExitStack() as opened, contextlib.suppress(KeyboardInterrupt):
        live: Live | None = None
        while True:
            ranks, found = read_losses(base)
            document = {
                "base": base,
                "ranks": [rank.to_json() for rank in ranks],
                "losses": [loss.to_json() for loss in found],
            }
            if not every_s:
                output.show(document, as_json, _shown(base, ranks, found))
                return output.DAMAGE if any(rank.state == "degraded" for rank in ranks) else output.OK
            if as_json:
                print(json.dumps(document), flush=True)
            elif not output.is_terminal():
                output.show(document, as_json, _shown(base, ranks, found), "")  # an empty line ends a look
            elif live is None:
                shown = _shown(base, ranks, found)
                live = opened.enter_context(Live(shown, console=output.console(), auto_refresh=False, screen=True))
                live.refresh()
            else:
                live.update(_shown(base, ranks, found), refresh=True)
            time.sleep(every_s)
    return output.OK


def _shown(base: str, ranks: Sequence[RankView], found: Sequence[Loss]) -> Text:
    lines = [output.line(base)]
    if ranks:
        lines.append(output.table([_row(rank) for rank in ranks], ("failed", "saves", "part", "ready after", "held")))
    for rank in ranks:
        lines += [output.line((f"rank {rank.rank}: {text}", "red")) for text in _errors_of(rank.status)]
    lines += [output.line((loss.text(), "" if loss.step is not None else "bold red")) for loss in found]
    return Text("\n").join([*lines, output.line((_CAPTION if found else _UNKNOWN, "dim"))])


def _row(rank: RankView) -> dict[str, str]:
    told = rank.status or Status(rank=rank.rank, node=rank.node)
    return {
        "rank": str(rank.rank),
        "state": rank.state,
        "committed": or_dash(told.committed),
        "copied": or_dash(told.replicated),
        "verified": or_dash(told.verified),
        "since": f"{max(0.0, time.time() - told.verified_s):.0f} s" if told.verified_s else "-",
        "held": f"{told.held_s * 1000:.1f} ms",
        "ready after": f"{told.verified_after_s:.2f} s",
        "persisted": or_dash(told.persisted),
        "part": bytes_text(told.part_bytes),
        "saves": str(told.saves),
        "failed": str(told.failures),
    }


def _errors_of(told: Status | None) -> list[str]:
    names = ("error", "replication_error", "agreement_error", "persist_error")
    return [error for name in names if (error := getattr(told, name, None)) is not None]


# ---- losses ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a node, as far as this node can tell.

    Attributes:
        node: the node that is lost; None for each of the others, of which this node knows no more.
        here: True for this node.
        step: the step that the job goes back to; None if that is not in memory then, or cannot be told from here.
        steps_lost: from there to the newest save.
        seconds: an estimate of how long its parts take to a new node; None if there is nothing to go by.
        sources: nodes that they come from; empty if that is not known here.
        persisted: where there is no step in memory, the newest that all ranks of this node have persisted.
    """

    node: str | None
    here: bool = False
    step: int | None = None
    steps_lost: int = 0
    seconds: float | None = None
    sources: tuple[str, ...] = ()
    persisted: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        fields = ("node", "here", "step", "steps_lost", "seconds", "persisted")
        return {**{name: getattr(self, name) for name in fields}, "from": list(self.sources)}

    def text(self) -> str:
        """Return the loss in words."""
        named = "another node" if self.node is None else f"{self.node} (this node)" if self.here else self.node
        if self.step is None and self.node is None:
            return f"if {named} died now: cannot be told from this node; run flashpoint status there"
        if self.step is None:
            kept = f"its ranks have persisted step {self.persisted}"
            rest = "and nothing is persisted" if self.persisted is None else kept
            return f"if {named} died now: no version would be left in memory, {rest}"
        lost = f"{self.steps_lost} step{'' if self.steps_lost == 1 else 's'} lost, back at step {self.step}"
        if self.node is None:
            return f"if {named} died now: {lost}, from the nodes that hold its copies"
        time = "in an unknown time" if self.seconds is None else f"in about {_short(self.seconds)}"
        return f"if {named} died now: {lost} {time}, from {', '.join(self.sources)}"


def _short(seconds: float) -> str:
    seconds = max(1.0, seconds)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def read_losses(base: str) -> tuple[list[RankView], list[Loss]]:
    """Return the ranks of this node, and what the loss of a node would cost. Raises what `view.existing` raises."""
    for _ in range(_TRIES):
        ranks = read_ranks(base)
        running = [rank for rank in ranks if rank.pid is not None and rank.status is not None] or ranks
        told = [rank.status for rank in running if rank.status is not None]
        if found := losses(told, read(base).versions):
            break
        if all(status.verified is None for status in told):
            break  # else what was verified may have been replaced by a newer one, before it was looked at
    return ranks, found


def losses(told: Sequence[Status], versions: Sequence[VersionView]) -> list[Loss]:
    """Return what the loss of each node would cost: this node's first, then those of nodes whose copies it holds, then
    the others as one. Empty if nothing was verified since the processes started, or the version that was is not here.

    Args:
        told: status of the ranks that run on this node; or that ran last, if none does.
        versions: versions here, looked at later.
    """
    here = {status.node for status in told}
    verified = max((status.verified for status in told if status.verified is not None), default=None)
    version = next((each for each in versions if each.step == verified and not each.abandoned), None)
    if len(here) != 1 or version is None or version.problems or verified is None:
        return []
    if not {status.rank for status in told} <= set(version.own):
        return []
    (node,) = here
    newest = max(status.committed if status.committed is not None else verified for status in told)
    lost = max(0, newest - verified)
    found = [_own(node, told, verified, lost)]
    nodes, survives = max((status.nodes, status.survives) for status in told)
    held: dict[str, int] = {}  # bytes of the largest part of each node
    for part in version.parts:
        if part.rank in version.copied and part.manifest is not None:
            held[part.manifest.node] = max(part.bytes, held.get(part.manifest.node, 0))
    if not survives:  # a part of theirs may have no copy
        held.clear()
    for peer, size in sorted(held.items()):
        seconds = _slowest([_seconds(status, size) for status in told])
        found.append(Loss(peer, step=verified, steps_lost=lost, seconds=seconds, sources=(node,)))
    if nodes > 1 + len(held):
        found.append(Loss(None, step=verified if survives else None, steps_lost=lost if survives else 0))
    return found


def _own(node: str, told: Sequence[Status], verified: int, lost: int) -> Loss:
    if not all(status.copies_on for status in told):
        persisted = [status.persisted for status in told]
        least = None if None in persisted else min(each for each in persisted if each is not None)
        return Loss(node, here=True, persisted=least)
    seconds = _slowest([_seconds(status, status.part_bytes) for status in told])
    sources = tuple(sorted({holder for status in told for holder in status.copies_on}))
    return Loss(node, here=True, step=verified, steps_lost=lost, seconds=seconds, sources=sources)


def _slowest(seconds: Sequence[float | None]) -> float | None:
    return None if None in seconds else max(each for each in seconds if each is not None)


def _seconds(status: Status, size: int) -> float | None:
    """Return an estimate: a rank of a new node gets its own part, and the copies that it has to hold, one by one."""
    if not (status.copied_bytes and status.copied_in_s > 0):
        return None
    return (1 + len(status.copies_on)) * size * status.copied_in_s / status.copied_bytes
