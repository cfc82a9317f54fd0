"""Import paths of `nvidia_resiliency_ext`, for programs whose imports cannot be changed.

:func:`install` makes ``nvidia_resiliency_ext.checkpointing.local`` lead to this package, whether that package is
installed or not. The rest of an installed package stays what it is. Where none is installed, its asynchronous queue
leads here, too, and everything else of it stays missing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from ml_flashpoint.local import async_queue, async_request, base_state_dict, basic_state_dict, errors, local_manager
from ml_flashpoint.local import replication as cliques
from ml_flashpoint.local.errors import CompatibilityError

PACKAGE = "nvidia_resiliency_ext"

_LOCAL = f"{PACKAGE}.checkpointing.local"
# Always found here.
_REPLACED: dict[str, dict[str, Any]] = {
    _LOCAL: {},
    f"{_LOCAL}.base_state_dict": {"TensorAwareStateDict": base_state_dict.TensorAwareStateDict},
    f"{_LOCAL}.basic_state_dict": {
        "BasicTensorAwareStateDict": basic_state_dict.BasicTensorAwareStateDict,
        "TensorAwareStateDict": base_state_dict.TensorAwareStateDict,
    },
    f"{_LOCAL}.ckpt_managers": {},
    f"{_LOCAL}.ckpt_managers.base_manager": {
        "BaseCheckpointManager": local_manager.LocalCheckpointManager,
        "CheckpointingException": errors.CheckpointingException,
    },
    f"{_LOCAL}.ckpt_managers.local_manager": {
        "CheckpointingException": errors.CheckpointingException,
        "LocalCheckpointManager": local_manager.LocalCheckpointManager,
    },
    f"{_LOCAL}.replication": {},
    f"{_LOCAL}.replication.group_utils": {
        "GroupWrapper": cliques.GroupWrapper,
        "parse_group_sequence": cliques.parse_group_sequence,
    },
    f"{_LOCAL}.replication.strategies": {
        "CliqueReplicationStrategy": cliques.CliqueReplicationStrategy,
        "LazyCliqueReplicationStrategy": cliques.LazyCliqueReplicationStrategy,
        "NoReplicasAvailableError": errors.NoReplicasAvailableError,
        "ReplicationStrategy": cliques.ReplicationStrategy,
    },
}
# Found here where nobody else has them.
_ADDED: dict[str, dict[str, Any]] = {
    PACKAGE: {},
    f"{PACKAGE}.checkpointing": {},
    f"{PACKAGE}.checkpointing.async_ckpt": {},
    f"{PACKAGE}.checkpointing.async_ckpt.core": {
        "AsyncRequest": async_request.AsyncRequest,
        "AsyncCallsQueue": async_queue.AsyncCallsQueue,
    },
}


class _Loader(importlib.abc.Loader):
    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def exec_module(self, module: types.ModuleType) -> None:
        module.__doc__ = "Stand-in: see ml_flashpoint.local.compat."
        module.__dict__.update(self._content)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: Mapping[str, Mapping[str, Any]]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        is_package = not self._modules[fullname]
        return importlib.machinery.ModuleSpec(fullname, _Loader(self._modules[fullname]), is_package=is_package)


def install() -> None:
    """Make ``import nvidia_resiliency_ext.checkpointing.local...`` find this package. Idempotent.

    Call it before anything else imports those paths.

    Raises:
        CompatibilityError: they are imported already, from the package that they belong to.
    """
    if any(isinstance(each, _Finder) for each in sys.meta_path):
        return
    for name in _REPLACED:
        if (present := sys.modules.get(name)) is not None:
            raise CompatibilityError(
                f"{name} is imported already, so its import path is taken",
                path=getattr(present, "__file__", None),
                hint="call install() before anything imports it, or import from ml_flashpoint.local instead",
            )
    sys.meta_path.insert(0, _Finder(_REPLACED))
    sys.meta_path.append(_Finder(_ADDED))
