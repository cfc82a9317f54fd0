"""Common state of a save: whatever is no sharded tensor or object, as bytes that megatron-core's own loader accepts."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from ml_flashpoint.adapter.megatron.releases import refused_in_common
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import UnsafeContentError
from ml_flashpoint.state.archive import place_of


def saved_common_state(common_state: Mapping[str, Any]) -> bytes:
    """Return the bytes of ``common.pt``.

    Raises:
        UnsafeContentError: megatron-core would refuse to load them.
    """
    content = _archive(common_state)
    if refused := refused_in_common(content):
        where = place_of(common_state, "common state", lambda each: bool(refused_in_common(_archive(each))))
        raise _refused(where, refused)
    return content


def _archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _refused(where: str, types: list[str]) -> UnsafeContentError:
    return UnsafeContentError(
        f"{where!r} holds {', '.join(types)}, which megatron-core would refuse when it loads its common state",
        hint="keep plain values and tensors in it, or trust these types by torch.serialization.add_safe_globals",
    )


def written_common_state(version: CheckpointContainerId) -> bytes | None:
    """Return the ``common.pt`` that `dist_checkpointing.save` wrote; None if the strategy is used without it.

    Raises:
        UnsafeContentError: megatron-core would refuse to load it.
    """
    path = Path(str(version)) / str(COMMON_STATE_FNAME)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if refused := refused_in_common(content):
        raise _refused("the common state", refused)
    return content
