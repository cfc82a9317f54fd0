"""Asking all managers the same thing at once, and knowing which of them commits wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeAlias, TypeVar

from ml_flashpoint.ddict.wire.requests import Request, name_of
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.messages import Fields

CALL_S = 30.0

Call: TypeAlias = Callable[[int, Request, float], Fields]
"""``(manager, request, timeout in seconds) -> fields of the answer``."""

_Found = TypeVar("_Found")


class AllManagers:
    """See the module. Thread-safe."""

    def __init__(self, call: Call, count: int) -> None:
        self._call = call
        self._count = count
        self._pool = self._threads("commit")
        self.unanswered: dict[int, str] = {}  # managers that commits wait for, and what they were asked

    def _threads(self, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(32, self._count), thread_name_prefix=f"ddict-{name}")

    def ask(self, request: Request, timeout_s: float = CALL_S, *, apart: bool = False) -> list[Fields]:
        """Return their answers. ``apart``: see `at_once`."""
        call, left = (self._call if apart else self.call), max(0.05, timeout_s)
        return self.at_once(range(self._count), name_of(request), lambda each: call(each, request, left), apart=apart)

    def at_once(
        self, managers: Iterable[int], name: str, ask: Callable[[int], _Found], *, apart: bool = False
    ) -> list[_Found]:
        """Return what ``ask`` returns for each of these, or the first error once all have answered, or that of asking.
        ``apart``: with threads of its own, as it takes long, and commits must not wait for it."""
        with self._threads(name) if apart else contextlib.nullcontext(self._pool) as pool:
            try:
                asked = [pool.submit(ask, each) for each in managers]
            except RuntimeError as error:  # no thread can be had; or the program ends, without `destroy`
                raise FlashpointError(f"managers cannot be asked to {name}: {error}") from error
            wait(asked)
            return [each.result() for each in asked]

    def call(self, manager: int, request: Request, timeout_s: float) -> Fields:
        """Return the answer of one that commits wait for."""
        self.unanswered[manager] = name_of(request)
        try:
            return self._call(manager, request, timeout_s)
        finally:
            self.unanswered.pop(manager, None)

    def close(self) -> None:
        """Ask nothing more. Does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)
