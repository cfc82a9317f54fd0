"""Asking all managers of a dictionary the same thing at the same time.

Owns the threads for that. What they are asked is the coordinator's, how they are reached the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from ml_flashpoint.format.errors import FlashpointError

CALL_S = 30.0

Call: TypeAlias = Callable[[int, str, "dict[str, Any]", float], "dict[str, Any]"]
"""``(manager, operation, fields, timeout in seconds) -> fields of the answer``."""

Found: TypeAlias = "list[tuple[int, dict[str, Any] | FlashpointError]]"
"""For each manager, its answer, or why there is none."""


class AllManagers:
    """See the module. Thread-safe."""

    def __init__(self, call: Call, count: int) -> None:
        self._call = call
        self._count = count
        self._pool = self._threads("commit")
        self.unanswered: dict[int, str] = {}
        """Managers that commits wait for, and what they were asked."""

    def _threads(self, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(32, self._count), thread_name_prefix=f"ddict-{name}")

    def ask(self, operation: str, fields: dict[str, Any], timeout_s: float = CALL_S) -> list[dict[str, Any]]:
        """Their answers, or the first error once all have answered, or that of asking."""
        return _answers(self._ask(self._pool, range(self._count), operation, lambda _: dict(fields), timeout_s))

    def ask_at_length(self, operation: str, fields: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """The same for what takes long, with threads of its own: commits must not wait for one."""
        with self._threads(operation) as pool:
            within_s = max(0.05, timeout_s)
            return _answers(self._ask(pool, range(self._count), operation, lambda _: dict(fields), within_s))

    def ask_some(
        self, managers: Iterable[int], operation: str, fields: Callable[[int], dict[str, Any]], timeout_s: float
    ) -> Found:
        """The answers and errors of these, each with fields of its own."""
        return self._ask(self._pool, managers, operation, fields, timeout_s)

    def _ask(
        self,
        pool: ThreadPoolExecutor,
        managers: Iterable[int],
        operation: str,
        fields: Callable[[int], dict[str, Any]],
        timeout_s: float,
    ) -> Found:
        call = self._call_and_note if pool is self._pool else self._call
        try:
            asked = [(each, pool.submit(call, each, operation, fields(each), timeout_s)) for each in managers]
        except RuntimeError as error:  # no thread can be had; or the program ends, without `destroy`
            raise FlashpointError(f"managers cannot be asked to {operation}: {error}") from error
        found: Found = []
        for manager, answer in asked:
            try:
                found.append((manager, answer.result()))
            except FlashpointError as error:
                found.append((manager, error))
        return found

    def _call_and_note(self, manager: int, operation: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.unanswered[manager] = operation
        try:
            return self._call(manager, operation, fields, timeout_s)
        finally:
            self.unanswered.pop(manager, None)

    def close(self) -> None:
        """Ask nothing more. Does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _answers(found: Found) -> list[dict[str, Any]]:
    for _, answer in found:
        if isinstance(answer, FlashpointError):
            raise answer
    return [answer for _, answer in found if not isinstance(answer, FlashpointError)]
