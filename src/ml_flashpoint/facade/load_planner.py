"""DCP's planner for the façade's loads: packed items, and no silent differences.

Owns what differs from torch's default planner. What a state dict holds is `tracked_state`'s business.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ml_flashpoint.facade.fit import AS_SAVED, unplaced
from ml_flashpoint.facade.packed_state import PACKED
from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.archive import SafeGlobal, load_archive


class FacadeLoadPlanner(DefaultLoadPlanner):
    """Loads everything that was saved of the objects that are tracked, or nothing.

    Args:
        structured: names of tracked objects that were not packed.
        path: of the version, for errors.
        safe_globals: further types that may be loaded, see `Flashpoint`.
        device_of: where tensors in packed state are loaded to, see `load_archive`.

    Attributes:
        packed: what the packed items held, by key.
        touched: whether tensors may have been written to.
    """

    def __init__(
        self,
        structured: Collection[str],
        *,
        path: str,
        safe_globals: Sequence[SafeGlobal] = (),
        device_of: Callable[[str], torch.device] | None = None,
    ) -> None:
        super().__init__()
        self._structured = frozenset(structured)
        self._path = path
        self._safe_globals = tuple(safe_globals)
        self._device_of = device_of
        self.packed: dict[str, Any] = {}
        self.touched = False

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: check that no tensor of a tracked object stays behind."""
        wanted = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        assert self.metadata is not None
        if left := unplaced(self.metadata, self._structured, wanted):
            raise LoadError(f"the checkpoint has {', '.join(left)}, for which there is no place", hint=AS_SAVED)
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Reading starts after this."""
        self.touched = True
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take in an item that is no tensor, as it comes from the checkpoint.

        Raises:
            UnsafeContentError: it names something that is not allowed.
            DamagedError: it makes no sense.
        """
        fqn = read_item.dest_index.fqn
        packed = fqn.startswith(f"{PACKED}.")
        device_of = self._device_of if packed else None
        loaded = load_archive(value.getbuffer(), fqn, path=self._path, allowed=self._safe_globals, device_of=device_of)
        if packed:
            self.packed[fqn] = loaded
        else:
            set_element(self.original_state_dict, self.mappings[fqn], loaded)
