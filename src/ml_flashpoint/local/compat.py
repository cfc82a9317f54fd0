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

from ml_flashpoint.local import async_queue, basic_state_dict, errors, local_manager
from ml_flashpoint.local import replication as cliques
from ml_flashpoint.local.errors import CompatibilityError

PACKAGE = "nvidia_resiliency_ext"

_LOCAL = f"{PACKAGE}.checkpointing.local"
_REPLACED: dict[str, types.ModuleType | None] = {
    _LOCAL: None,
    f"{_LOCAL}.base_state_dict": basic_state_dict,
    f"{_LOCAL}.basic_state_dict": basic_state_dict,
    f"{_LOCAL}.ckpt_managers": None,
    f"{_LOCAL}.ckpt_managers.base_manager": local_manager,
    f"{_LOCAL}.ckpt_managers.local_manager": local_manager,
    f"{_LOCAL}.replication": None,
    f"{_LOCAL}.replication.group_utils": cliques,
    f"{_LOCAL}.replication.strategies": cliques,
}
"""Paths that always lead here, by the module that they lead to; None for a package."""
_ADDED: dict[str, types.ModuleType | None] = {
    PACKAGE: None,
    f"{PACKAGE}.checkpointing": None,
    f"{PACKAGE}.checkpointing.async_ckpt": None,
    f"{PACKAGE}.checkpointing.async_ckpt.core": async_queue,
}
"""Paths that lead here where nobody else has them."""


class _Loader(importlib.abc.Loader):
    def __init__(self, leads_to: types.ModuleType | None) -> None:
        self._leads_to = leads_to

    def exec_module(self, module: types.ModuleType) -> None:
        module.__doc__ = "Stand-in: see ml_flashpoint.local.compat."
        if self._leads_to is not None:
            for source in (errors, self._leads_to):
                module.__dict__.update((name, each) for name, each in vars(source).items() if name[0].isupper())
                module.__dict__.update((name, vars(source)[name]) for name in getattr(source, "__all__", ()))
            module.__dict__["BaseCheckpointManager"] = local_manager.LocalCheckpointManager


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: Mapping[str, types.ModuleType | None]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        is_package = self._modules[fullname] is None
        return importlib.machinery.ModuleSpec(fullname, _Loader(self._modules[fullname]), is_package=is_package)


def install() -> None:
    """Make ``import nvidia_resiliency_ext.checkpointing.local...`` find this package. Safe to call twice.

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
