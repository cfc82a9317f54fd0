"""Differences between releases of megatron-core, 0.13 to 0.19, each told by what the installed package has."""

from __future__ import annotations

import argparse
import io
import pickle
import re
import types
import warnings
from typing import Any, Final

import torch
from megatron.core import __version__ as _INSTALLED
from megatron.core.dist_checkpointing import ShardedObject, serialization
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies import torch as mcore

try:  # until 0.15: tensors of several dimensions of which a rank has a range of the flattened elements
    from megatron.core.dist_checkpointing.strategies import resharding as resharding
except ImportError:
    resharding = None

try:  # since 0.14
    from megatron.core.safe_globals import SAFE_GLOBALS
except ImportError:
    SAFE_GLOBALS = []

_UNTESTED: Final = (0, 20)
_COMMON_STATE: Final = "common_state"

# Since 0.19 `dist_checkpointing.save` hands the common state to the strategy, as a sharded object with this key.
# Releases before it write `common.pt` themselves, by one of these functions.
_common_state_is_an_object = not (
    hasattr(serialization, "save_common") or hasattr(serialization, "get_default_save_common_strategy")
)

# Since 0.17 `dist_checkpointing.save` replaces every strategy by a new one of this class, unless it is of this class or
# is megatron-core's wrapper. `AsyncSaveShardedStrategy`, the base class of earlier releases, is gone in 0.19.
SaveStrategyBase: Any = mcore.TorchDistSaveShardedStrategy


class AsyncRequest(async_utils.AsyncRequest):  # type: ignore[misc]
    """An asynchronous save, for megatron-core's queue and for that of nvidia-resiliency-ext."""

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call the finalizations, which are collective, as the queue of nvidia-resiliency-ext does. Return the number
        that the queue gave the request."""
        for finalize in self.finalize_fns:
            finalize()
        return int(self.call_idx)


def split_common_state(sharded_state_dict: dict[str, Any]) -> tuple[dict[str, Any], ShardedObject | None]:
    """Return what `dist_checkpointing.save` gives a strategy without the common state, and the object that holds that;
    None where the release writes it as a file."""
    found = sharded_state_dict.get(_COMMON_STATE) if _common_state_is_an_object else None
    if not isinstance(found, ShardedObject) or found.key != _COMMON_STATE:
        return sharded_state_dict, None
    return {key: value for key, value in sharded_state_dict.items() if key != _COMMON_STATE}, found


def object_types() -> list[Any]:
    """Return types that megatron-core allows in what it loads with ``torch.load``; those of today in all releases."""
    return [io.BytesIO, argparse.Namespace, types.SimpleNamespace, *SAFE_GLOBALS]


def refused_in_common(content: bytes) -> list[str]:
    """Return types in a common state, as ``torch.save`` made it, that megatron-core's own loader would refuse."""
    if resharding is not None:  # until 0.15, which refuse nothing
        return []
    if unlisted := torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content)):
        return sorted(unlisted)
    # The list has the types that a pickle names. It does not have those that are made of them, such as NumPy's dtypes.
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        return re.findall(r"<class '([^']+)'>", str(error)) or ["a type that is not named"]
    return []


def warn_if_untested(installed: str = _INSTALLED) -> None:
    """Warn of a release that is newer than those tested."""
    numbers = tuple(int(each) for each in re.findall(r"\d+", installed)[:2])
    if numbers >= _UNTESTED:
        warnings.warn(
            f"megatron-core {installed} is newer than the releases that ml_flashpoint is tested with (0.13 to 0.19). "
            "Try a save and a load before you rely on it, or install megatron-core<0.20",
            RuntimeWarning,
            stacklevel=2,
        )


warn_if_untested()
