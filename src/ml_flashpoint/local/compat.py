"""Import paths of `nvidia_resiliency_ext`, for programs whose imports cannot be changed.

:func:`install` makes ``nvidia_resiliency_ext.checkpointing.local`` lead to this package, whether that package is
installed or not. The rest of an installed package stays what it is. Where none is installed, its asynchronous queue
leads here, too, and everything else of it stays missing.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec

from ml_flashpoint.local import async_queue, basic_state_dict, errors, local_manager
from ml_flashpoint.local import replication as cliques
from ml_flashpoint.local.errors import CompatibilityError

PACKAGE = "nvidia_resiliency_ext"

_LOCAL = f"{PACKAGE}.checkpointing.local"
_ALWAYS: dict[str, types.ModuleType | None] = {
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
"""Paths by the module that they lead to; None for a package."""
_WHERE_NONE_IS: dict[str, types.ModuleType | None] = {
    PACKAGE: None,
    f"{PACKAGE}.checkpointing": None,
    f"{PACKAGE}.checkpointing.async_ckpt": None,
    f"{PACKAGE}.checkpointing.async_ckpt.core": async_queue,
}


def install() -> None:
    """Make ``import nvidia_resiliency_ext.checkpointing.local...`` find this package. Safe to call twice.

    Call it before anything else imports those paths.

    Raises:
        CompatibilityError: they are imported already, from the package that they belong to.
    """
    taken = next((sys.modules[name] for name in _ALWAYS if name in sys.modules), None)
    if isinstance(taken, _StandIn):
        return
    if taken is not None:
        text = f"{taken.__name__} is imported already, so its import path is taken"
        hint = "call install() before anything imports it, or import from ml_flashpoint.local instead"
        raise CompatibilityError(text, path=getattr(taken, "__file__", None), hint=hint)
    names = {**_WHERE_NONE_IS, **_ALWAYS}
    if importlib.util.find_spec(PACKAGE) is not None:
        importlib.import_module(f"{PACKAGE}.checkpointing")
        names = _ALWAYS
    for name, source in names.items():  # a package comes before what is in it
        sys.modules[name] = module = _StandIn(name, source)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


class _StandIn(types.ModuleType):
    """A module with the public names of another one, or a package."""

    def __init__(self, name: str, source: types.ModuleType | None) -> None:
        super().__init__(name, "Stand-in: see ml_flashpoint.local.compat.")
        self.__spec__ = ModuleSpec(name, None, is_package=source is None)
        if source is None:
            self.__path__: list[str] = []
            return
        for each in (errors, source):
            vars(self).update((name, value) for name, value in vars(each).items() if name[0] != "_")
        self.BaseCheckpointManager = local_manager.LocalCheckpointManager
