"""DCP planners of the façade: plans kept between saves, packed items, and no silent differences at loading.

Owns what differs from torch's default planners. What a state dict holds is `tracked_state`'s business.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType

from ml_flashpoint.format.errors import LoadError, SaveError, UnsafeContentError
from ml_flashpoint.unpickling.checks import place_of, unsafe_globals
from ml_flashpoint.unpickling.safe_archive import SafeGlobal, load_archive

PACKED = "_flashpoint"
"""Top-level key of the packed items, ``_flashpoint.rank-00003.<name>``; no tracked name starts like it."""

_CAN_CACHE = "enable_plan_caching" in inspect.signature(DefaultSavePlanner.__init__).parameters
# Where torch's planners keep plans between saves: class-level, by planner. Not all versions have all of them.
_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)


class PackedState(bytes):
    """State of one tracked object on one rank: an archive of ``torch.save``, made when the save began.

    Attributes:
        made_of: what was packed, to say where in it something is that cannot be saved; None in another process.
    """

    made_of: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedState, (bytes(self),)


class FacadeSavePlanner(DefaultSavePlanner):
    """Plans one save; the plan is reused by later saves of the same structure.

    It makes local plans just as torch's own does: the writer relies on that to stage no tensor that others write.

    Args:
        cache_key: identity of the façade: plans of others in this process are never taken for its own.
        safe_globals: further types that may be saved, see `Flashpoint`.
    """

    def __init__(self, cache_key: str, safe_globals: Sequence[SafeGlobal] = ()) -> None:
        super().__init__(**({"enable_plan_caching": True} if _CAN_CACHE else {}))
        self._cached_plans_key = cache_key
        self._safe_globals = tuple(safe_globals)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: the plans of all ranks."""
        known = getattr(SavePlanner, "_cached_all_plans", {})
        if _CAN_CACHE and self._cached_plans_key not in known and not all(plan.usable for plan in all_plans):
            # Torch would take the missing plans for empty ones, and save a part of the state.
            raise SaveError("ranks disagree about the plan of the last save", hint="the next save plans anew")
        return super().create_global_plan(all_plans)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Bytes of an item that is no tensor, refused if it could not be loaded again.

        Raises:
            UnsafeContentError: it holds a type that loading does not allow.
        """
        if write_item.type is not WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        fqn = write_item.index.fqn
        if isinstance(object, PackedState):
            stream, name, value = io.BytesIO(object), fqn.rpartition(".")[2], object.made_of
        else:
            stream, name, value = super().transform_object(write_item, object), fqn, object
        try:
            unsafe = ", ".join(sorted(unsafe_globals(stream, allowed=self._safe_globals)))
        except Exception as error:
            raise UnsafeContentError(
                f"the state of {name!r} cannot be checked, so it could not be loaded: {error}"
            ) from error
        if unsafe:
            name = place_of(value, name, lambda each: _is_refused(each, self._safe_globals))
            raise UnsafeContentError(
                f"the state of {name!r} holds {unsafe}, which loading would refuse, because such types may run code",
                hint=f"keep plain values in it, or pass Flashpoint(..., safe_globals=[{unsafe}]) if you trust that",
            )
        return stream


def _is_refused(value: Any, allowed: Sequence[SafeGlobal]) -> bool:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        return bool(unsafe_globals(stream, allowed=allowed))
    except Exception:  # of whatever kind pickling raises
        return True


class FailingSavePlanner(FacadeSavePlanner):
    """Plans a save that this rank can take no part in: planning fails, where DCP tells all ranks.

    Args:
        cache_key: as for the save that was to be.
        error: why.
    """

    def __init__(self, cache_key: str, error: Exception) -> None:
        super().__init__(cache_key)
        self._error = error

    def create_local_plan(self) -> SavePlan:
        """Raises the error."""
        raise self._error


def forget_plans(cache_key: str) -> None:
    """Drop what planners with this key keep between saves. After a failure on some rank, no rank may reuse it."""
    for name in _CACHES:
        getattr(SavePlanner, name, {}).pop(cache_key, None)


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
        left = [
            key
            for key, entry in self.metadata.state_dict_metadata.items()
            if key not in wanted and key.partition(".")[0] in self._structured and not _is_empty(entry)
        ]
        if left:
            raise LoadError(
                f"the checkpoint has {len(left)} items that the tracked objects have no place for, such as {left[0]!r}",
                hint="the model or optimizer differs from the one that was saved",
            )
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


def _is_empty(entry: object) -> bool:
    return isinstance(entry, TensorStorageMetadata) and entry.size.numel() == 0
