"""State of what is neither module nor optimizer, and everything else that is saved as bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.state.archive import SafeGlobal, place_of, save_archive
from ml_flashpoint.state.private import tree_leaves

PACKED = "_flashpoint"
"""Top-level key of the packed items, ``_flashpoint.rank-00003.<name>``; no tracked name starts like it."""


def rank_key(rank: int) -> str:
    """Return the key of what belongs to a rank."""
    return f"rank-{rank:05d}"


def packed_items(
    read_items: Callable[[Iterable[str]], Mapping[str, bytes]], rank: int, names: Iterable[str]
) -> dict[str, bytes]:
    """Return the packed items of a rank, by the names of the tracked objects."""
    keys = {name: f"{PACKED}.{rank_key(rank)}.{name}" for name in names}
    found = read_items(keys.values())
    return {name: found[key] for name, key in keys.items()}


class PackedState:
    """State that is one item, and is packed once the save has begun.

    Attributes:
        value: the state, which nothing changes any more.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value


def copied(value: Any, name: str) -> Any:
    """Return a copy of a value, so that training does not change what is written.

    Raises:
        SaveError: it cannot be copied; names the place.
    """
    try:
        made, devices = _copied(value)
    except Exception as error:  # of whatever kind a value's own copying raises
        where = place_of(value, name, _cannot_be_copied) if not isinstance(error, RecursionError) else name
        raise SaveError(f"the state of {where!r} cannot be saved: {type(error).__name__}: {error}") from error
    for device in devices:  # another thread writes the copy, for which the device works in another order
        torch.cuda.current_stream(device).synchronize()
    return made


def _copied(value: Any) -> tuple[Any, set[torch.device]]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    known: dict[int, Any] = {
        id(each): each.detach().clone().requires_grad_(each.requires_grad)
        for each in tensors
        if each.grad_fn is not None or not is_plain_strided(each)  # of which torch makes no deep copies
    }
    return copy.deepcopy(value, known), {each.device for each in tensors if each.is_cuda}


def _cannot_be_copied(value: Any) -> bool:
    try:
        _copied(value)
    except Exception:  # of whatever kind a value's own copying raises
        return True
    return False


def item_bytes(fqn: str, value: Any, *, allowed: Sequence[SafeGlobal] = ()) -> bytes:
    """Return the bytes that are saved of a value: what ``torch.save`` writes.

    Args:
        fqn: its name, for errors.
        value: a `PackedState`, a tensor that is more than its memory, or anything else.
        allowed: further types that may be saved, see `Flashpoint`.

    Raises:
        UnsafeContentError: it holds a type that loading does not allow.
    """
    if isinstance(value, PackedState):
        fqn, value = fqn.rpartition(".")[2] if fqn.startswith(f"{PACKED}.") else fqn, value.value
    return save_archive(value, fqn, allowed=allowed)
