"""Asking all managers the same thing at once, and knowing which of them commits wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeAlias, TypeVar

from ml_flashpoint.format.errors import FlashpointError

CALL_S = 30.0

Call: TypeAlias = Callable[[int, str, "dict[str, Any]", float], "dict[str, Any]"]
"""``(manager, operation, fields, timeout in seconds) -> fields of the answer``."""

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

    def ask(
        self, operation: str, fields: dict[str, Any], timeout_s: float = CALL_S, *, apart: bool = False
    ) -> list[dict[str, Any]]:
        """Their answers. ``apart``: see `at_once`."""
        call, left = (self._call if apart else self.call), max(0.05, timeout_s)
        return self.at_once(
            range(self._count), operation, lambda each: call(each, operation, dict(fields), left), apart=apart
        )

    def at_once(
        self, managers: Iterable[int], operation: str, ask: Callable[[int], _Found], *, apart: bool = False
    ) -> list[_Found]:
        """Return what ``ask`` returns for each of these, or the first error once all have answered, or that of asking.
        ``apart``: with threads of its own, as it takes long, and commits must not wait for it."""
        with self._threads(operation) if apart else contextlib.nullcontext(self._pool) as pool:
            try:
                asked = [pool.submit(ask, each) for each in managers]
            except RuntimeError as error:  # no thread can be had; or the program ends, without `destroy`
                raise FlashpointError(f"managers cannot be asked to {operation}: {error}") from error
            wait(asked)
            return [each.result() for each in asked]

    def call(self, manager: int, operation: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of one that commits wait for."""
        self.unanswered[manager] = operation
        try:
            return self._call(manager, operation, fields, timeout_s)
        finally:
            self.unanswered.pop(manager, None)

    def close(self) -> None:
        """Ask nothing more. Does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)
