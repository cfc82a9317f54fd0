"""Checks of arguments of users. Each refusal names the argument and the value."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ml_flashpoint.format.errors import InvalidArgumentError, InvalidNameError
from ml_flashpoint.format.names import CheckpointContainerId

if TYPE_CHECKING:
    from ml_flashpoint.state.archive import SafeGlobal

_F = TypeVar("_F", bound=Callable[..., object])
_log = logging.getLogger(__name__)


def ignored(owner: str, **given: object) -> None:
    """Log the names of arguments that ``owner`` accepts and does not use, if they are not None."""
    names = [f"{name}=" for name, value in given.items() if value is not None]
    if names:
        _log.info("%s ignores %s, which has no meaning here", owner, ", ".join(names))


def checked_base(base: str | os.PathLike[str], argument: str = "base") -> CheckpointContainerId:
    """Return the id of a base container. A relative path is refused: it depends on the working directory."""
    try:
        return CheckpointContainerId(base)
    except (InvalidNameError, TypeError) as error:
        raise InvalidArgumentError(f"must be an absolute path: {error}", argument=argument, value=base) from error


def checked_callable(argument: str, value: _F | None, what: str) -> _F | None:
    """Return a function, or None. ``what`` follows "must be a function" in the error."""
    if value is not None and not callable(value):
        raise InvalidArgumentError(f"must be a function {what}, or None", argument=argument, value=value)
    return value


def checked_integer(argument: str, value: int, minimum: int, maximum: int | None = None) -> int:
    """Return an integer within bounds."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    if not fits or (maximum is not None and value > maximum):
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise InvalidArgumentError(f"must be an integer {bounds}", argument=argument, value=value)
    return value


def checked_bool(argument: str, value: bool) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError("must be True or False", argument=argument, value=value)
    return value


def checked_choice(argument: str, value: str, *choices: str) -> str:
    """Return one of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(f"must be {' or '.join(map(repr, choices))}", argument=argument, value=value)
    return value


def checked_seconds(argument: str, value: float) -> float:
    """Return a positive, finite duration."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidArgumentError("must be a positive number of seconds", argument=argument, value=value)
    return float(value)


def checked_globals(given: Sequence[SafeGlobal]) -> tuple[SafeGlobal, ...]:
    """Return types, or pairs of a type and its full name."""
    items = tuple(given) if isinstance(given, (list, tuple, set, frozenset)) else (None,)
    for item in items:
        kind, *name = item if isinstance(item, tuple) and len(item) == 2 else (item,)
        if not callable(kind) or not all(isinstance(each, str) for each in name):
            text = "must be a list of types, or of pairs of a type and its full name"
            raise InvalidArgumentError(text, argument="safe_globals", value=given)
    return items
