"""The comparison of a checkpoint with the tracked objects, before anything is loaded: all differences at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.private import flatten_state_dict

AS_SAVED = "make and track models and optimizers as they were when it was saved"


def check_fit(
    state: Mapping[str, Any], metadata: Metadata, *, without_state: Sequence[str] = (), lacking: Sequence[str] = ()
) -> None:
    """Compare what is to be loaded into with what the checkpoint has.

    What the checkpoint has too much is no difference by itself: another rank may have the place for it.

    Args:
        state: nested, by the names of the tracked objects.
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
    unexpected = unplaced(metadata, state, flat)
    told = [f"the checkpoint has no state of {', '.join(map(repr, without_state))}"] if without_state else []
    told += [f"the checkpoint lacks {', '.join(missing)}"] if missing else []
    told += [f"the checkpoint has {', '.join(unexpected)}, for which there is no place"] if unexpected else []
    raise LoadError("; ".join([*told, *others]), hint=AS_SAVED)


def unplaced(metadata: Metadata, structured: Collection[str], wanted: Collection[str] = ()) -> list[str]:
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
