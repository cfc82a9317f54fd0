"""Tensors of a state that need not be staged, because other ranks write them.

DCP leaves out replicated tensors only when it plans, which in asynchronous saves is after they were staged; but as long
as structure and planner stay, so does the plan. So one save teaches the next. A wrong guess costs a save and never a
byte: what was not staged has no data to write. Adapters that plan before they stage need none of this.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from ml_flashpoint.adapter.pytorch.tensor_leaves import TensorLeaves

if TYPE_CHECKING:
    from ml_flashpoint.adapter.pytorch.saves import Staged

_log = logging.getLogger(__name__)

# A planner that does these as torch's does writes each tensor under the name of its place, from itself alone.
_PLAIN_METHODS = ("set_up_planner", "create_local_plan", "finish_plan", "resolve_data", "lookup_object")


class Omission:
    """Learns from the saves of one writer. Not thread-safe: for the thread that stages."""

    def __init__(self) -> None:
        self._structure: object = None
        self._others: frozenset[str] = frozenset()
        self._failures = 0
        self._open: list[tuple[Staged, object, frozenset[str]]] = []

    def needed(self, leaves: TensorLeaves) -> list[int]:
        """Return the indices of the tensors to stage."""
        self._learn()
        structure = leaves.structure
        if structure != self._structure:
            self._structure, self._others, self._failures = structure, frozenset(), 0
        if not self._others or _ambiguous(leaves):
            return list(range(len(leaves.tensors)))
        others = self._others
        return sorted({i for path, i in zip(leaves.paths, leaves.indices, strict=True) if path not in others})

    def watch(self, staged: Staged, *, whole: bool) -> None:
        """Learn from a save of the state given last, once its outcome is known.

        Args:
            whole: everything was staged.
        """
        self._open.append((staged, self._structure, frozenset() if whole else self._others))

    def _learn(self) -> None:
        left = []
        for staged, structure, omitted in self._open:
            succeeded = staged.succeeded
            if succeeded is None:
                left.append((staged, structure, omitted))
            elif structure is self._structure:
                self._learn_from(staged.others, failed=not succeeded, omitted=omitted)
        self._open = left

    def _learn_from(self, others: frozenset[str] | None, *, failed: bool, omitted: frozenset[str]) -> None:
        if failed and omitted and (others is None or not omitted <= others):
            # The plan has changed on another rank, so this is learned anew. The second time, plans of several
            # kinds take turns: from then on only what all of them leave to others is.
            self._failures += 1
            self._others = frozenset() if self._failures == 1 else self._others & (others or frozenset())
        elif others is not None:
            # A save that failed for another reason teaches, too: there may be no room to stage the whole again.
            self._others = others if self._failures < 2 else self._others & others


def tensor_names(plan: SavePlan) -> frozenset[str] | None:
    """Return the names of the tensors in a rank's own plan; None if the plan is empty, and stands for a cached one."""
    if not getattr(plan, "usable", True):
        return None
    return frozenset(item.index.fqn for item in plan.items if item.type is not WriteItemType.BYTE_IO)


def left_to_others(planner: SavePlanner, own: frozenset[str] | None, final: SavePlan) -> frozenset[str] | None:
    """Return the names of this rank's tensors that its final plan does not have.

    Args:
        own: :func:`tensor_names` of the rank's own plan, or None to take the one that the planner has cached.

    Returns:
        Nothing, if the planner is not known to write each tensor under its name and from itself alone. None if
        the rank's own plan is not known.
    """
    kind = type(planner)
    if not isinstance(planner, DefaultSavePlanner) or any(
        getattr(kind, name) is not getattr(DefaultSavePlanner, name) for name in _PLAIN_METHODS
    ):
        return frozenset()
    if own is None:
        cached = getattr(SavePlanner, "_cached_save_plan", {}).get(getattr(planner, "_cached_plans_key", None))
        if cached is None:
            return None
        own = tensor_names(cached) or frozenset()
    names = {item.index.fqn for item in final.items}
    return own - names if names <= own | _byte_names(final) else frozenset()


def _ambiguous(leaves: TensorLeaves) -> bool:
    """Return True if a name stands for two places, ``a.b`` and b in a: planners that do not flatten tell them apart."""
    return len({*leaves.paths, *leaves.others}) != len(leaves.paths) + len(leaves.others)


def _byte_names(plan: SavePlan) -> set[str]:
    return {item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO}
