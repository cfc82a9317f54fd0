"""What `LocalCheckpointManager` accepts: folders and states."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ml_flashpoint.format.arguments import checked_base
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, validate_segment
from ml_flashpoint.format.errors import InvalidArgumentError, InvalidNameError
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.errors import CallOrderError


def base_container(root: str | os.PathLike[str], session_id: str) -> CheckpointContainerId:
    """The base container of a job.

    Raises:
        InvalidArgumentError: an argument is unusable.
    """
    base = checked_base(root, "root_local_ckpt_dir")
    if session_id == "":
        return base
    try:
        return CheckpointContainerId.create_child(base, validate_segment(session_id))
    except InvalidNameError as error:
        raise InvalidArgumentError(f"must be a name: {error}", argument="session_id", value=session_id) from error


def check_state(state_dict: TensorAwareStateDict) -> None:
    """Refuse what cannot be saved.

    Raises:
        InvalidArgumentError: it is no state. CallOrderError: its tensors were taken out.
    """
    if not isinstance(state_dict, TensorAwareStateDict):
        raise InvalidArgumentError(
            "must be a TensorAwareStateDict",
            argument="state_dict",
            value=type(state_dict),
            hint="wrap it: BasicTensorAwareStateDict(state_dict)",
        )
    with contextlib.suppress(NotImplementedError):
        hollow: Any = state_dict.is_hollow
        if hollow() if callable(hollow) else hollow:  # some subclasses override the property by a method
            raise CallOrderError("the state is hollow: its tensors were taken out", hint="call insert_tensors first")
