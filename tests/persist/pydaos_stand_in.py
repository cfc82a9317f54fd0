"""As much of `pydaos` as the store of a DAOS container uses, in memory: DAOS needs a cluster of its own.

Containers are given; whatever would make or destroy one is not here, so calling it fails.
"""

from __future__ import annotations

import types
from collections.abc import Iterator


class DObjNotFound(Exception):
    pass


class PyDError(Exception):
    pass


class DDict:
    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.fails = False
        self.puts_left: int | None = None
        """If set, later puts fail. Some of a put that fails may have been done, here all of it if `half_done`."""
        self.half_done = False
        self.late: dict[str, bytes] = {}
        """What puts that failed for lack of space or an answer were for: they may be done later."""

    def put(self, key: str, value: bytes | None) -> None:
        self.bput({key: value})

    def get(self, key: str) -> bytes:
        found: dict[str, bytes | None] = {key: None}
        self.bget(found)
        value = found[key]
        if value is None:
            raise KeyError(key)
        return value

    def bput(self, values: dict[str, bytes | None]) -> None:
        if self.fails:
            raise PyDError("no target is up")
        refused = self.puts_left == 0 and None not in values.values()
        if refused:
            self.late.update((key, value) for key, value in values.items() if value)
        if refused and not self.half_done:
            raise PyDError("no space")
        if self.puts_left:
            self.puts_left -= 1
        for key, value in values.items():
            assert isinstance(key, str)
            assert value is None or isinstance(value, bytes)
            # As there: no value, or an empty one, deletes.
            if value:
                self.content[key] = value
            else:
                self.content.pop(key, None)
        if refused:
            raise PyDError("no answer")

    def bget(self, values: dict[str, bytes | None]) -> None:
        if self.fails:
            raise PyDError("no target is up")
        for key in values:
            values[key] = self.content.get(key)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.content))


def module(containers: dict[tuple[str, str], dict[str, DDict]]) -> types.ModuleType:
    """A module whose containers are these; their objects by name."""

    class DCont:
        def __init__(self, pool: str | None = None, cont: str | None = None, path: str | None = None) -> None:
            assert path is None
            if (pool, cont) not in containers:
                raise PyDError("failed to access container")
            self._objects = containers[pool, cont]  # type: ignore[index]

        def get(self, name: str) -> DDict:
            if name not in self._objects:
                raise DObjNotFound(name)
            return self._objects[name]

        def dict(self, name: str) -> DDict:
            self._objects[name] = DDict()
            return self._objects[name]

    made = types.ModuleType("pydaos")
    made.__spec__ = types.SimpleNamespace(name="pydaos")  # type: ignore[assignment]
    vars(made).update(DCont=DCont, DDict=DDict, DObjNotFound=DObjNotFound, PyDError=PyDError)
    return made
