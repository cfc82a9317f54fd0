"""Stands in for `nvidia_resiliency_ext`, for programs whose imports cannot be changed.

Owns the import paths: :func:`install` makes the names that programs import from that package lead here. It is a
stand-in for local checkpointing alone; everything else of that package stays missing.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

from ml_flashpoint.local import async_queue, async_request, base_state_dict, basic_state_dict, errors, local_manager
from ml_flashpoint.local import replication as cliques
from ml_flashpoint.local.errors import CompatibilityError

PACKAGE = "nvidia_resiliency_ext"

_LOCAL = f"{PACKAGE}.checkpointing.local"
_NAMES: dict[str, dict[str, Any]] = {
    PACKAGE: {},
    f"{PACKAGE}.checkpointing": {},
    f"{PACKAGE}.checkpointing.async_ckpt": {},
    f"{PACKAGE}.checkpointing.async_ckpt.core": {
        "AsyncRequest": async_request.AsyncRequest,
        "AsyncCallsQueue": async_queue.AsyncCallsQueue,
    },
    _LOCAL: {},
    f"{_LOCAL}.base_state_dict": {"TensorAwareStateDict": base_state_dict.TensorAwareStateDict},
    f"{_LOCAL}.basic_state_dict": {
        "BasicTensorAwareStateDict": basic_state_dict.BasicTensorAwareStateDict,
        "TensorAwareStateDict": base_state_dict.TensorAwareStateDict,
    },
    f"{_LOCAL}.ckpt_managers": {},
    f"{_LOCAL}.ckpt_managers.base_manager": {"CheckpointingException": errors.CheckpointingException},
    f"{_LOCAL}.ckpt_managers.local_manager": {
        "CheckpointingException": errors.CheckpointingException,
        "LocalCheckpointManager": local_manager.LocalCheckpointManager,
    },
    f"{_LOCAL}.replication": {},
    f"{_LOCAL}.replication.group_utils": {"parse_group_sequence": cliques.parse_group_sequence},
    f"{_LOCAL}.replication.strategies": {
        "CliqueReplicationStrategy": cliques.CliqueReplicationStrategy,
        "LazyCliqueReplicationStrategy": cliques.LazyCliqueReplicationStrategy,
        "NoReplicasAvailableError": errors.NoReplicasAvailableError,
        "ReplicationStrategy": cliques.ReplicationStrategy,
    },
}


def install() -> None:
    """Make ``import nvidia_resiliency_ext.checkpointing.local...`` find this package. Idempotent.

    Call it before anything else imports those paths.

    Raises:
        CompatibilityError: that package is installed, or something else has taken its name.
    """
    present = sys.modules.get(PACKAGE)
    if present is not None:
        if getattr(present, "__stands_in__", False):
            return
        raise CompatibilityError(
            f"{PACKAGE} is imported already, so its import paths are taken",
            path=getattr(present, "__file__", None),
            hint="import from ml_flashpoint.local instead",
        )
    # Asked of the path alone: importing the package to find out would run it.
    spec = importlib.machinery.PathFinder.find_spec(PACKAGE)
    if spec is not None:
        locations = list(spec.submodule_search_locations or [])
        raise CompatibilityError(
            f"{PACKAGE} is installed, and its import paths lead there",
            path=spec.origin or (locations[0] if locations else None),
            hint="uninstall it, or import from ml_flashpoint.local instead",
        )
    for name, content in _NAMES.items():
        module: Any = types.ModuleType(name, "Stand-in: see ml_flashpoint.local.compat.")
        module.__stands_in__ = True
        if any(other.startswith(f"{name}.") for other in _NAMES):
            module.__path__ = []
        module.__dict__.update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
