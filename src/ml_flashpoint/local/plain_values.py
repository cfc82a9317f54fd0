"""Immutable values of the standard library (and deques), as a name and parts that a description can hold.

Owns the table; what the parts are described by is `structure`'s. Making a value runs nothing but its constructor, with
arguments of plain types.
"""

from __future__ import annotations

import datetime
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any


@dataclass(frozen=True, slots=True)
class _Kind:
    type: type
    parts: Callable[[Any], Sequence[Any]]
    make: Callable[..., Any]


def _make_time(kind: type) -> Callable[..., Any]:
    def make(*parts: Any) -> Any:
        *fields, zone, fold = parts
        return kind(*fields, tzinfo=zone, fold=fold)

    return make


_DATE = ("year", "month", "day")
_TIME = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")


def _fields(*names: str) -> Callable[[Any], Sequence[Any]]:
    return lambda value: [getattr(value, name) for name in names]


def _path_parts(value: PurePosixPath) -> Sequence[Any]:
    return [str(value)]


_KINDS = {
    "date": _Kind(datetime.date, _fields(*_DATE), datetime.date),
    "time": _Kind(datetime.time, _fields(*_TIME), _make_time(datetime.time)),
    "datetime": _Kind(datetime.datetime, _fields(*_DATE, *_TIME), _make_time(datetime.datetime)),
    "timedelta": _Kind(datetime.timedelta, _fields("days", "seconds", "microseconds"), datetime.timedelta),
    "timezone": _Kind(datetime.timezone, lambda value: value.__getinitargs__(), datetime.timezone),
    "decimal": _Kind(Decimal, lambda value: [str(value)], Decimal),
    "fraction": _Kind(Fraction, _fields("numerator", "denominator"), Fraction),
    "uuid": _Kind(uuid.UUID, lambda value: [value.int], lambda number: uuid.UUID(int=number)),
    "path": _Kind(type(Path()), _path_parts, Path),
    "pure path": _Kind(PurePosixPath, _path_parts, PurePosixPath),
    "deque": _Kind(deque, lambda value: [list(value), value.maxlen], deque),
    "ellipsis": _Kind(type(...), lambda value: [], lambda: ...),
}
_NAMES = {kind.type: name for name, kind in _KINDS.items()}


def plain_parts(value: Any) -> tuple[str, Sequence[Any]] | None:
    """Name and parts of a value of exactly one of these types; None of others."""
    name = _NAMES.get(type(value))
    return None if name is None else (name, _KINDS[name].parts(value))


def plain_value(name: str, parts: Sequence[Any]) -> Any:
    """What :func:`plain_parts` took apart.

    Raises:
        KeyError, TypeError, ValueError, ArithmeticError: there is no such value.
    """
    return _KINDS[name].make(*parts)
