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

from ml_flashpoint import local
from ml_flashpoint.local.errors import CompatibilityError
from ml_flashpoint.local.replication import GroupWrapper

PACKAGE = "nvidia_resiliency_ext"

_CHECKPOINTING = f"{PACKAGE}.checkpointing"
_MODULES = (
    "base_state_dict",
    "basic_state_dict",
    *(f"ckpt_managers{each}" for each in ("", ".base_manager", ".local_manager")),
    *(f"replication{each}" for each in ("", ".group_utils", ".strategies")),
)
_LOCAL = (f"{_CHECKPOINTING}.local", *(f"{_CHECKPOINTING}.local.{each}" for each in _MODULES))
_WHERE_NONE_IS = (PACKAGE, _CHECKPOINTING, f"{_CHECKPOINTING}.async_ckpt", f"{_CHECKPOINTING}.async_ckpt.core")


def install() -> None:
    """Make ``import nvidia_resiliency_ext.checkpointing.local...`` find this package. Safe to call twice.

    Call it before anything else imports those paths.

    Raises:
        CompatibilityError: they are imported already, from the package that they belong to.
    """
    taken = next((sys.modules[name] for name in _LOCAL if name in sys.modules), None)
    if isinstance(taken, _StandIn):
        return
    if taken is not None:
        text = f"{taken.__name__} is imported already, so its import path is taken"
        hint = "call install() before anything imports it, or import from ml_flashpoint.local instead"
        raise CompatibilityError(text, path=getattr(taken, "__file__", None), hint=hint)
    names = (*_WHERE_NONE_IS, *_LOCAL)
    if importlib.util.find_spec(PACKAGE) is not None:
        importlib.import_module(_CHECKPOINTING)
        names = _LOCAL
    for name in names:  # a package comes before what is in it
        sys.modules[name] = module = _StandIn(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


class _StandIn(types.ModuleType):
    """A package with all names of `ml_flashpoint.local`, whichever module of the other package had them."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Stand-in: see ml_flashpoint.local.compat.")
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        vars(self).update({each: value for each, value in vars(local).items() if callable(value) and each[0] != "_"})
        self.GroupWrapper, self.BaseCheckpointManager = GroupWrapper, local.LocalCheckpointManager
