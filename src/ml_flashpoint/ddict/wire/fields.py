"""The fields of requests: how they are checked, and how methods answer requests that have their arguments as fields.

A peer that knows the secret may still be wrong. Times are in seconds; ``t`` is what is left to the client. ``c`` is a
checkpoint, ``w`` the handle, ``g`` the generation of its request, ``e`` the epoch, ``n`` a number that orders requests.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from ml_flashpoint.ddict.wire.written import Written
from ml_flashpoint.format.errors import ProtocolError
from ml_flashpoint.net.client import check_address
from ml_flashpoint.net.messages import Fields, integer, list_of, text

if TYPE_CHECKING:
    from typing_extensions import Buffer

Result: TypeAlias = "tuple[Fields, Sequence[Buffer]]"

_LONGEST_S = 1e6  # that a client may say it has


def left_of(fields: Fields) -> float:
    """Seconds that the client has left. Raises `ProtocolError`, as all of these do, if the field is wrong."""
    left = fields.get("t")
    if not isinstance(left, (int, float)) or not 0 <= left <= _LONGEST_S:
        raise ProtocolError("field 't' must be the seconds that are left")
    return float(left)


def deadline_of(fields: Fields) -> float:
    """When its time is up, by ``time.monotonic()``."""
    return time.monotonic() + left_of(fields)


def integers(fields: Fields, name: str) -> list[int]:
    """A field that must be a list of integers."""
    value = list_of(fields, name)
    if not all(type(each) is int for each in value):
        raise ProtocolError(f"field {name!r} must be a list of integers")
    return value


def _flag(fields: Fields, name: str) -> bool:
    return fields.get(name) is True


def _same(parse: Callable[..., Any], names: str, *how: Any) -> dict[str, Callable[[Any, Fields], Any]]:
    """Arguments that are the fields of their names."""

    def one(name: str) -> Callable[[Any, Fields], Any]:
        return lambda session, fields: parse(fields, name, *how)

    return {name: one(name) for name in names.split()}


ARGUMENTS: dict[str, Callable[[Any, Fields], Any]] = {
    **_same(integer, "back base checkpoint_id committed to", -1),
    **_same(integer, "before cut manager of oldest"),
    **_same(integers, "keep pinned"),
    **_same(text, "incarnation node run"),
    **_same(_flag, "dead frozen if_written onwards"),
    "addresses": lambda session, fields: list(map(check_address, list_of(fields, "addresses"))),
    "copies": lambda session, fields: [str(each) for each in list_of(fields, "keep")],
    "deadline": lambda session, fields: deadline_of(fields),
    "epoch": lambda session, fields: integer(fields, "e"),
    "generation": lambda session, fields: integer(fields, "g"),
    "handle": lambda session, fields: text(fields, "w"),
    "is_gone": lambda session, fields: session.peer.is_gone,
    "number": lambda session, fields: integer(fields, "n"),
    "position": lambda session, fields: integer(fields, "c"),
    "session": lambda session, fields: session,
    "session_id": lambda session, fields: text(fields, "session"),
    "session_if_any": lambda session, fields: None if fields.get("session") is None else text(fields, "session"),
    "timeout_s": lambda session, fields: left_of(fields),
    "written": lambda session, fields: Written(integer(fields, "written", -1), integer(fields, "late", -1)),
    "until": lambda session, fields: time.monotonic() + integer(fields, "s"),
}
"""How arguments of methods are read from the fields of a request, by their names."""


@cache
def _parsers(function: Callable[..., Any]) -> list[Callable[[Any, Fields], Any]]:
    its = inspect.signature(function).parameters.values()
    return [ARGUMENTS[each.name] for each in its if each.name != "self" and each.kind is not each.KEYWORD_ONLY]


def asking(method: str, *, gives: str | None = None) -> Callable[[Any, Any, Fields, list[bytes]], Result]:
    """A request that a method of whoever is asked answers, given the arguments that its parameters are called after,
    but for those that are keywords only. ``gives``: the field that what it returns is told in; None: it returns all
    fields, or nothing."""
    find = attrgetter(method)

    def ask(asked: Any, session: Any, fields: Fields, blobs: list[bytes]) -> Result:
        function = find(asked)
        found = function(*(parse(session, fields) for parse in _parsers(function.__func__)))
        return (found or {}) if gives is None else {gives: found}, ()

    return ask
