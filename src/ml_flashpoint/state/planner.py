"""DCP's planners for loads of tracked state: packed items, and no silent differences."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.archive import SafeGlobal, load_archive
from ml_flashpoint.state.fit import AS_SAVED, unplaced
from ml_flashpoint.state.packed_state import PACKED
from ml_flashpoint.state.plain_modes import plain_modes
from ml_flashpoint.state.private import set_element


class TrackedLoadPlanner(DefaultLoadPlanner):
    """A planner that loads everything that was saved of the tracked objects, or nothing.

    Args:
        structured: names of tracked objects that were not packed.
        path: of the version, for errors.
        safe_globals: further types that may be loaded, see `Flashpoint`.
        device_of: gives the device that tensors in packed state are loaded to, see `load_archive`.

    Attributes:
        packed: the contents of the packed items, by key.
        touched: True once tensors may have been written to.
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
        self._plan: LoadPlan | None = None

    def plan(self, state: dict[str, Any], metadata: Metadata) -> list[str]:
        """Plan to load into a nested state, and return the tensors of tracked objects that would stay behind."""
        with plain_modes():
            self.set_up_planner(state, metadata, is_coordinator=False)
            self._plan = self.create_local_plan()
        return unplaced(metadata, self._structured, {item.dest_index.fqn for item in self._plan.items})

    def check_left(self, left: Collection[str]) -> None:
        """Check that nothing stays behind on all ranks.

        Raises:
            LoadError: it does.
        """
        if left:
            raise LoadError(f"the checkpoint has {', '.join(sorted(left))}, for which there is no place", hint=AS_SAVED)

    def load(self, reader: StorageReader) -> None:
        """Load what was planned."""
        assert self._plan is not None
        with plain_modes():
            reader.read_data(self.finish_plan(self._plan), self).wait()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Take note that reading starts."""
        self.touched = True
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an item that is no tensor.

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


class ArchivePlanner(DefaultLoadPlanner):
    """A planner that leaves packed items as they are.

    Attributes:
        archives: the items, by key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.archives: dict[str, bytes] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep an item."""
        self.archives[read_item.dest_index.fqn] = value.getvalue()
