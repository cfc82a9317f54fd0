"""Whether anything was set in or taken out of dictionaries: thousands of them, in a millisecond.

Owns the use of the versions that Python keeps of dictionaries, which torch's guards of compiled functions give. Where
there are none that answer as they should, everybody has to look into the dictionaries instead.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

VersionOf = Callable[[Any], int]


class _Object:
    """Something whose attributes are in a dictionary of its own."""

    def __init__(self) -> None:
        self.one = 1


def versions_of(tables: Sequence[Any]) -> list[int] | None:
    """Numbers that are the same for the same dictionaries later on only if nothing was set in them, or taken out of
    them, meanwhile; None where nobody can tell. They may change where nothing has."""
    version = _version_of()
    return None if version is None else list(map(version, tables))


@functools.cache
def _version_of() -> VersionOf | None:
    try:
        from torch._C._dynamo import guards  # not in all releases

        version: VersionOf = guards.dict_version
        return version if _answers_rightly(version) else None
    except Exception:  # of whatever kind another release raises
        return None


def _answers_rightly(version: VersionOf) -> bool:
    changed: list[Callable[[Any], object]] = [
        lambda table: table.__setitem__("one", 2),
        lambda table: table.__setitem__("two", 1),
        lambda table: table.__delitem__("one"),
        lambda table: table.update(one=3),
        lambda table: table.update({"three": 3}),
        lambda table: table.__ior__({"one": 4}),
        lambda table: table.setdefault("four", 4),
        lambda table: table.pop("one"),
        lambda table: table.popitem(),
        lambda table: table.clear(),
    ]
    for change in changed:
        for table in ({"one": 1}, OrderedDict(one=1), defaultdict(int, one=1), vars(_Object())):
            before = version(table)
            _ = table["one"], table.get("two"), list(table.items()), len(table)
            if version(table) != before:
                return False  # it would be of no use
            change(table)
            if version(table) == before:
                return False
    by_attribute: list[Callable[[_Object], object]] = [
        lambda each: setattr(each, "one", 2),
        lambda each: setattr(each, "two", 1),
        lambda each: delattr(each, "one"),
        lambda each: object.__setattr__(each, "one", 3),
    ]
    for change in by_attribute:
        each = _Object()
        before = version(vars(each))
        change(each)
        if version(vars(each)) == before:
            return False
    return True
