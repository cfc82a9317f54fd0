"""A load of tracked state: what fits, told before anything is touched, then tensors in place and packed items."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.archive import SafeGlobal, load_archive
from ml_flashpoint.state.plain_modes import plain_modes
from ml_flashpoint.state.private import flatten_state_dict, set_element

AS_SAVED = "make and track models and optimizers as they were when it was saved"


class Reader(Protocol):
    """A reader of one version: DCP's, and for items that are no tensors."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy everything in a plan into the planner's tensors."""

    def read_items(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return items that are no tensors as they are, by name."""


class TrackedLoadPlanner(DefaultLoadPlanner):
    """A planner that loads everything that was saved of the tracked objects, or nothing.

    Args:
        structured: names of tracked objects that were not packed.
        path: of the version, for errors.
        safe_globals: further types that may be loaded, see `Flashpoint`.
        device_of: see `load_archive`.

    Attributes:
        touched: True once tensors may have been written to.
    """

    def __init__(
        self,
        structured: Collection[str],
        *,
        path: str,
        safe_globals: Sequence[SafeGlobal],
        device_of: Callable[[str], torch.device],
    ) -> None:
        super().__init__()
        self._structured = frozenset(structured)
        self._options: Any = {"path": path, "allowed": tuple(safe_globals), "device_of": device_of}
        self.touched = False
        self._plan: LoadPlan | None = None

    def plan(self, state: dict[str, Any], metadata: Metadata) -> list[str]:
        """Plan to load into a nested state, and return the tensors of tracked objects that would stay behind."""
        with plain_modes():
            self.set_up_planner(state, metadata, is_coordinator=False)
            self._plan = self.create_local_plan()
        return _unplaced(metadata, self._structured, {item.dest_index.fqn for item in self._plan.items})

    def check_left(self, left: Collection[str]) -> None:
        """Raise a `LoadError` if something stays behind on all ranks."""
        if left:
            raise LoadError(f"the checkpoint has {', '.join(sorted(left))}, for which there is no place", hint=AS_SAVED)

    def load(self, reader: Reader) -> None:
        """Load what was planned."""
        assert self._plan is not None
        self.touched = True
        with plain_modes():
            reader.read_data(self.finish_plan(self._plan), self).wait()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an item that is no tensor."""
        fqn = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[fqn], load_archive(value.getbuffer(), fqn, **self._options))


def check_fit(
    state: Mapping[str, Any], metadata: Metadata, *, without_state: Sequence[str] = (), lacking: Sequence[str] = ()
) -> None:
    """Compare what is to be loaded into with what the checkpoint has.

    What the checkpoint has too much is no difference by itself: another rank may have the place for it.

    Args:
        without_state: names of tracked objects that the checkpoint has nothing of.
        lacking: further names of items that it should have.

    Raises:
        LoadError: they differ; lists all differences.
    """
    flat, _ = flatten_state_dict(dict(state))
    saved = metadata.state_dict_metadata
    missing = [*(key for key in flat if key not in saved), *lacking]
    others = [text for key, value in flat.items() if key in saved and (text := _difference(key, value, saved[key]))]
    if not (without_state or missing or others):
        return
    unexpected = _unplaced(metadata, state, flat)
    told = [f"the checkpoint has no state of {', '.join(map(repr, without_state))}"] if without_state else []
    told += [f"the checkpoint lacks {', '.join(missing)}"] if missing else []
    told += [f"the checkpoint has {', '.join(unexpected)}, for which there is no place"] if unexpected else []
    raise LoadError("; ".join([*told, *others]), hint=AS_SAVED)


def _unplaced(metadata: Metadata, structured: Collection[str], wanted: Collection[str]) -> list[str]:
    """Return the names of items of these objects, other than the wanted ones, that hold anything."""
    return [
        key
        for key, entry in metadata.state_dict_metadata.items()
        if key not in wanted
        and key.partition(".")[0] in structured
        and not (isinstance(entry, TensorStorageMetadata) and entry.size.numel() == 0)
    ]


def _difference(key: str, value: object, entry: object) -> str | None:
    if not isinstance(entry, TensorStorageMetadata):
        return f"{key} is a tensor, and was none when it was saved" if isinstance(value, torch.Tensor) else None
    if not isinstance(value, torch.Tensor):
        return f"{key} is no tensor, and was one when it was saved"
    now, then = tuple(value.size()), tuple(entry.size)
    return None if now == then else f"{key} has the shape {now}, and had {then} when it was saved"
