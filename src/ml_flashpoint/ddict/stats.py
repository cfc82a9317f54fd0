"""What a manager tells about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """One manager, as `DDict.stats` has it.

    Attributes:
        manager: its number.
        node: number of its node.
        keys: keys with any value in the working set.
        used_bytes: of values, those of older checkpoints included.
        limit_bytes: most that they may take.
        oldest: oldest checkpoint of the working set.
        sealed: checkpoints that it could be recovered at.
        copies: managers that are known to have verified copies of all of these.
        missing_copies: those that are to have them, and may not.
        copies_on_same_node: managers that are to have copies and are on its own node, whose loss would take both: on
            Ray, after a node was lost that there was no other for.
        frozen: whether it refuses writes.
        persisted: newest checkpoint of the whole dictionary that this run has persisted, or has begun with; -1: none.
        persist_error: why the last one that was due, or asked for, could not be; None: it could.
    """

    manager: int
    node: int
    keys: int
    used_bytes: int
    limit_bytes: int
    oldest: int
    sealed: tuple[int, ...]
    copies: tuple[int, ...]
    missing_copies: tuple[int, ...]
    copies_on_same_node: tuple[int, ...]
    frozen: bool
    persisted: int
    persist_error: str | None


def stats_of(answers: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> list[ManagerStats]:
    """What all managers, by number, and the coordinator have told."""
    found = []
    for told in answers:
        its = dict(told)
        holders, place, copies = its.pop("holders"), its.pop("place"), set(its.pop("copies"))
        found.append(
            ManagerStats(
                **{**its, "sealed": tuple(its["sealed"])},
                copies=tuple(each for each in holders if each in copies),
                missing_copies=tuple(each for each in holders if each not in copies),
                copies_on_same_node=tuple(each for each in holders if answers[each]["place"] == place),
                persisted=state["persisted"],
                persist_error=state["persist_error"],
            )
        )
    return found
