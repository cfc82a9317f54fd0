"""Translation of megatron-core's sharded state dicts to states that DCP can plan, and back.

megatron-core does both for its `torch_dist` format, with functions that are not public; nothing else imports those.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner

from ml_flashpoint.adapter.megatron.releases import refused_in_common, resharding
from ml_flashpoint.format.errors import SaveError, UnsafeContentError
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.state.archive import place_of, save_archive

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"


def state_to_save(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank saves, for DCP: shards of which it is the main replica, and its objects as bytes.

    The shards refer to the tensors of ``sharded_state_dict``, which is changed the way megatron-core does.

    Raises:
        SaveError: megatron-core could not load it.
    """
    for each in nested_values(sharded_state_dict):
        if isinstance(each, ShardedTensor) and each.data is not None and each.data.layout in _COMPRESSED:
            raise SaveError(
                f"{each.key!r} is a sharded tensor of layout {each.data.layout}, which megatron-core cannot load",
                hint="make it dense or torch.sparse_coo, or put it into a ShardedObject",
            )
    by_key, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
    tensors = {key: each for key, each in by_key.items() if not isinstance(each[0], ShardedObject)}
    state: dict[str, Any] = mcore.mcore_to_pyt_state_dict(tensors, False)
    return {key: state[key] if key in state else _archive(key, each) for key, each in by_key.items()}


def objects_to_save(objects: Sequence[ShardedObject]) -> dict[str, io.BytesIO]:
    """Return the same of objects alone, by their names in DCP's plans."""
    by_key, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(dict(enumerate(objects)), True)
    return {key: _archive(key, each) for key, each in by_key.items()}


def _archive(key: str, objects: Sequence[ShardedObject]) -> io.BytesIO:
    """Return the data of objects, as megatron-core loads it. Written here, since no pickle of NumPy is ever read."""
    return io.BytesIO(save_archive([each.data for each in objects], key, allowed=None))


def flattened_shapes(plan: SavePlan) -> dict[str, tuple[int, ...]]:
    """Return notes for loading: shapes of tensors of which ranks have ranges of the flattened elements."""
    data: dict[str, Any] = getattr(plan, "mcore_data", {})
    return {f"{key}\0shape": tuple(its[_ORIGINAL_SHAPE]) for key, its in data.items() if _ORIGINAL_SHAPE in its}


def save_planner() -> SavePlanner:
    """megatron-core's planner, each rank's plan of which stands by itself."""
    planner: SavePlanner = mcore.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    return planner


# ---- common state: whatever is no sharded tensor or object, as bytes that megatron-core's own loader accepts --------


def saved_common_state(common_state: Mapping[str, Any]) -> bytes:
    """Return the bytes of ``common.pt``. Raises `UnsafeContentError` if megatron-core would refuse to load them."""
    content = _plain_archive(common_state)
    if refused := refused_in_common(content):
        where = place_of(common_state, "common state", lambda each: bool(refused_in_common(_plain_archive(each))))
        raise _refused(where, refused)
    return content


def _plain_archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _refused(where: str, types: list[str]) -> UnsafeContentError:
    return UnsafeContentError(
        f"{where!r} holds {', '.join(types)}, which megatron-core would refuse when it loads its common state",
        hint="keep plain values and tensors in it, or trust these types by torch.serialization.add_safe_globals",
    )


def written_common_state(version: CheckpointContainerId) -> bytes | None:
    """Return the ``common.pt`` that `dist_checkpointing.save` wrote; None if the strategy is used without it."""
    path = Path(str(version)) / str(COMMON_STATE_FNAME)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if refused := refused_in_common(content):
        raise _refused("the common state", refused)
    return content


class LoadTranslation:
    """One load: ``state`` is what DCP fills by ``planner``, ``result()`` what megatron-core makes of it then. Raises
    `CheckpointingException` if the metadata does not say what is needed."""

    def __init__(self, sharded_state_dict: dict[str, Any], metadata: Metadata) -> None:
        self._restore: Any = None
        if resharding is not None:
            sharded_state_dict, self._restore = resharding.apply_nd_flattened_tensors_reformulation(
                sharded_state_dict, _flattened(sharded_state_dict, metadata)
            )
        tensors = [each for each in nested_values(sharded_state_dict) if isinstance(each, ShardedTensor)]
        self._template = sharded_state_dict
        by_key, self._paths, self._names = mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        self.state: dict[str, Any] = mcore.mcore_to_pyt_state_dict(by_key, True)
        self.planner: LoadPlanner = mcore.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[each for each in tensors if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={each.key: each for each in tensors if each.allow_shape_mismatch},
        )

    def result(self) -> dict[str, Any]:
        """Return the state dict in megatron-core's form, with what was loaded in place of what described it."""
        # A shard of any kind is a tensor to DCP; an object was replaced by the list that was loaded.
        loaded = {
            key: mcore._unwrap_pyt_sharded_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in self.state.items()
        }
        result: dict[str, Any] = mcore._replace_sharded_keys_with_state_dict_keys(loaded, self._paths, self._names)
        mcore._restore_dict_types(result, self._template)
        if resharding is not None:
            result = resharding.restore_nd_flattened_tensors_formulation(result, self._restore)
        return result


def _flattened(sharded_state_dict: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Return the layout in the checkpoint of tensors that are loaded by ranges of their flattened elements."""
    found = {}
    for each in nested_values(sharded_state_dict):
        if not resharding.is_nd_flattened_tensor(each):
            continue
        try:
            shape = metadata.planner_data[f"{each.key}\0shape"]
        except KeyError:
            raise CheckpointingException(f"the checkpoint has no shape of the flattened tensor {each.key}") from None
        stored: Any = metadata.state_dict_metadata[each.key]
        found[each.key] = resharding.TensorReformulationMetadata(shape, stored.size)
    return found
