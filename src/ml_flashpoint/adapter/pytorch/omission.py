"""Tensors of a state that need not be staged, because other ranks write them.

DCP leaves out replicated tensors only when it plans, which in asynchronous saves is after they were staged; but as long
as structure and planner stay, so does the plan. So one save teaches the next. A wrong guess costs a save and never a
byte: what was not staged has no data to write. Adapters that plan before they stage need none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from ml_flashpoint.adapter.pytorch.tensor_leaves import Places, TensorLeaves

if TYPE_CHECKING:
    from ml_flashpoint.adapter.pytorch.saves import Staged

# A planner that does these as torch's does writes each tensor under the name of its place, from itself alone.
_PLAIN_METHODS = ("set_up_planner", "create_local_plan", "finish_plan", "resolve_data", "lookup_object")


class Omission:
    """Learns from the saves of one writer. Not thread-safe: for the thread that stages.

    Attributes:
        places: of the last state; None before.
    """

    def __init__(self) -> None:
        self.places: Places | None = None
        self._others: frozenset[str] = frozenset()
        self._failures = 0
        self._open: list[tuple[Staged, frozenset[str]]] = []

    def needed(self, leaves: TensorLeaves) -> list[int]:
        """Return the indices of the tensors to stage."""
        if leaves.places is not self.places:
            self.places, self._others, self._failures, self._open = leaves.places, frozenset(), 0, []
        self._learn()
        others, paths = self._others, leaves.places.paths
        if not others or leaves.places.is_ambiguous:
            return list(range(len(leaves.tensors)))
        return sorted({index for path, index in zip(paths, leaves.indices, strict=True) if path not in others})

    def watch(self, staged: Staged) -> None:
        """Learn from a save of the state given last, once its outcome is known."""
        self._open.append((staged, self._others))

    def _learn(self) -> None:
        known = [each for each in self._open if each[0].succeeded is not None]
        self._open = [each for each in self._open if each not in known]
        for staged, omitted in known:
            others = staged.others
            if not staged.succeeded and omitted and (others is None or not omitted <= others):
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
    return own - names if (tensor_names(final) or frozenset()) <= own else frozenset()
