"""What the loss of a node would cost a job now, as far as one of its nodes can tell.

Owns what follows from what the ranks of this node say and from the parts that lie here, and the words for it. What is
verified is on all nodes that the strategy names, so one node knows of its own loss, of that of the nodes whose copies
it holds, and of the others no more than the step. Times are estimates: what the parts of a node take at the rate of the
newest copies, to a node that replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ml_flashpoint.cli.base_view import VersionView
from ml_flashpoint.status import Status

CAPTION = (
    "lost: steps since the one gone back to, up to the newest save, and what was trained since. Times are estimates, "
    "by the newest copies: for the parts to come to a new node, beside what its processes take to start."
)
"""What every reader of these lines has to know."""

UNKNOWN = "what the loss of a node would cost cannot be told: nothing here was verified since its processes started"


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a node.

    Attributes:
        node: which; None for each of the others, of which this node knows no more.
        here: whether it is this one.
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
        """As plain JSON values."""
        fields = ("node", "here", "step", "steps_lost", "seconds", "persisted")
        named = {name: getattr(self, name) for name in fields}
        return {**named, "from": list(self.sources)}

    def text(self) -> str:
        """In words."""
        named = "another node" if self.node is None else f"{self.node} (this node)" if self.here else self.node
        if self.step is None and self.node is None:
            return f"if {named} died now: cannot be told from here, see there"
        if self.step is None:
            rest = (
                "and nothing is persisted"
                if self.persisted is None
                else f"its ranks have persisted step {self.persisted}"
            )
            return f"if {named} died now: no version would be left in memory, {rest}"
        lost = f"{self.steps_lost} step{'' if self.steps_lost == 1 else 's'} lost, back at step {self.step}"
        if self.node is None:
            return f"if {named} died now: {lost}, from those that hold its copies"
        time = "in a time that is not known" if self.seconds is None else f"in about {_short(self.seconds)}"
        return f"if {named} died now: {lost} {time}, from {', '.join(self.sources)}"


def losses(told: Sequence[Status], versions: Sequence[VersionView]) -> list[Loss]:
    """What the loss of each node would cost.

    Args:
        told: what the ranks that run on this node say; or those that ran last, if none does.
        versions: what lies here, looked at later.

    Returns:
        This node first, then those whose copies it holds, then the others as one. Empty if nothing is known: no version
        was verified since the processes started, or the one that was is not here any more, or not whole.
    """
    here = {status.node for status in told}
    verified = max((status.verified for status in told if status.verified is not None), default=None)
    version = next((each for each in versions if each.step == verified and not each.abandoned), None)
    if len(here) != 1 or version is None or version.problems or verified is None:
        return []
    ranks = {status.rank for status in told}
    if not ranks <= set(version.own_ranks):
        return []
    (node,) = here
    newest = max(status.committed if status.committed is not None else verified for status in told)
    lost = max(0, newest - verified)
    found = [_own(node, told, verified, lost)]
    nodes, survives = max((status.nodes, status.survives) for status in told)
    held: dict[str, int] = {}  # bytes of the largest part of each node
    for part in version.parts:
        if part.copy and part.manifest is not None and part.manifest.node != node:
            held[part.manifest.node] = max(part.bytes, held.get(part.manifest.node, 0))
    if not survives:  # a part of theirs may have no copy
        held.clear()
    for peer, size in sorted(held.items()):
        seconds = [_seconds(status, size) for status in told]
        slowest = None if None in seconds else max(each for each in seconds if each is not None)
        found.append(Loss(peer, step=verified, steps_lost=lost, seconds=slowest, sources=(node,)))
    if nodes > 1 + len(held):
        found.append(Loss(None, step=verified if survives else None, steps_lost=lost if survives else 0))
    return found


def _own(node: str, told: Sequence[Status], verified: int, lost: int) -> Loss:
    if not all(status.copies_on for status in told):
        persisted = [status.persisted for status in told]
        least = None if None in persisted else min(each for each in persisted if each is not None)
        return Loss(node, here=True, persisted=least)
    seconds = [_seconds(status, status.part_bytes) for status in told]
    return Loss(
        node,
        here=True,
        step=verified,
        steps_lost=lost,
        seconds=None if None in seconds else max(each for each in seconds if each is not None),
        sources=tuple(sorted({holder for status in told for holder in status.copies_on})),
    )


def _seconds(status: Status, size: int) -> float | None:
    """A rank of a new node gets its own part, and the copies that it has to hold, one after the other."""
    if not (status.copied_bytes and status.copied_in_s > 0):
        return None
    return (1 + len(status.copies_on)) * size * status.copied_in_s / status.copied_bytes


def _short(seconds: float) -> str:
    if seconds < 1:
        return "1 s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
