"""What can go wrong with the processes around a dictionary."""

from __future__ import annotations

import threading
from typing import Any

from ml_flashpoint.ddict.errors import DDictError


class ProcessFailedError(DDictError):
    """A process of a group ended with an exit code other than 0, or by a signal.

    Args:
        message: see `DDictError`, as for its other keywords.
        puid: of the process.
        exit_code: negative for the number of a signal.
    """

    def __init__(self, message: str, *, puid: int | None = None, exit_code: int | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.puid = puid
        self.exit_code = exit_code

    def _context(self) -> list[str]:
        named = (("puid", self.puid), ("exit code", self.exit_code))
        return [f"{name} {value}" for name, value in named if value is not None] + super()._context()


class BarrierBrokenError(DDictError, threading.BrokenBarrierError):
    """A process cannot pass a barrier: another one died, gave up, or aborted it."""
