"""Which types a checkpoint may be made of, and how one is found again by its name.

Owns the allow-list. Found without being listed are only types whose instances can be made without running any of
their code: dataclasses, namedtuples, enums and `TensorAwareStateDict`s, in modules that this process has imported by
itself. Nothing is ever imported because a checkpoint names it.
"""

from __future__ import annotations

import argparse
import enum
import sys
from collections.abc import Sequence
from typing import Any

from ml_flashpoint.format.errors import UnsafeContentError
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.nesting import is_namedtuple, is_plain_dataclass, is_plain_object
from ml_flashpoint.state.archive import SafeGlobal

_ALWAYS: tuple[type, ...] = (argparse.Namespace,)


def name_of(kind: Any) -> str:
    """The full name of a type or function: ``module:qualified.name``."""
    return f"{kind.__module__}:{kind.__qualname__}"


class KnownTypes:
    """See the module.

    Args:
        listed: further types that the user trusts, as for ``torch.serialization.safe_globals``.
    """

    def __init__(self, listed: Sequence[SafeGlobal] = ()) -> None:
        self.listed = tuple(listed)
        self._by_name: dict[str, Any] = {name_of(kind): kind for kind in _ALWAYS}
        for item in self.listed:
            if isinstance(item, tuple):
                module, _, qualified = item[1].rpartition(".")
                self._by_name[f"{module}:{qualified}"] = item[0]
            else:
                self._by_name[name_of(item)] = item

    def is_object(self, kind: type) -> bool:
        """Whether instances may be stored by their attributes."""
        if not is_plain_object(kind):
            return False
        return is_plain_dataclass(kind) or issubclass(kind, TensorAwareStateDict) or self._is_listed(kind)

    def _is_listed(self, kind: type) -> bool:
        return self._by_name.get(name_of(kind)) is kind

    def find(self, name: str) -> type:
        """The type of this name.

        Raises:
            UnsafeContentError: it is not listed, and not one that may be found without that.
        """
        kind = self._by_name.get(name)
        if kind is None:
            kind = _imported(name)
            if kind is None:
                raise UnsafeContentError(
                    f"the checkpoint needs the type {name.replace(':', '.')}, which this process has not imported",
                    hint="import it before loading, or list it in safe_globals=",
                )
            found_freely = (
                is_namedtuple(kind)
                or is_plain_dataclass(kind)
                or issubclass(kind, enum.Enum)
                or (issubclass(kind, TensorAwareStateDict) and is_plain_object(kind))
            )
            if not found_freely:
                raise UnsafeContentError(
                    f"the checkpoint needs the type {name.replace(':', '.')}, which is not allowed",
                    hint="list it in safe_globals= if you trust it",
                )
        if not isinstance(kind, type):
            raise UnsafeContentError(f"{name.replace(':', '.')} is no type")
        return kind

    def nameable(self, kind: type, where: str) -> str:
        """The name of a type that is to be stored.

        Args:
            where: the place of the value in the state, for errors.

        Raises:
            UnsafeContentError: nobody could find it again by its name.
        """
        name = name_of(kind)
        if self._by_name.get(name, _imported(name)) is not kind:
            raise UnsafeContentError(
                f"{where or 'the state'}: the type {name.replace(':', '.')} cannot be found again by its name",
                hint="define it at the top level of a module",
            )
        return name


def _imported(name: str) -> type | None:
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        # Not getattr: modules and classes may run code for names that they do not have.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None
