"""CUDA's runtime library, played: it keeps its rules about locked memory, and its errors until they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from ml_flashpoint.copy import cuda


class PlayedRuntime:
    """Stands in for `cuda.Runtime`.

    Args:
        room: bytes that may be locked.

    Attributes:
        locked: size of what is locked by each call, by address.
        error: the one that the next kernel of this process would raise.
        devices: what the calls were about, each in a guard.
    """

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.locked: dict[int, int] = {}
        self.error = 0
        self.calls: list[str] = []
        self.devices: list[int] = []
        self._guarded = 0

    @contextlib.contextmanager
    def guard(self, device: int) -> Iterator[None]:
        self._guarded += 1
        self.devices.append(device)
        yield
        self._guarded -= 1

    def register(self, address: int, size: int) -> int:
        self.calls.append("register")
        assert self._guarded, "it would be about the first device"
        if any(address < begin + length and begin < address + size for begin, length in self.locked.items()):
            return self._fail(712)
        if sum(self.locked.values()) + size > self.room:
            return self._fail(2)
        self.locked[address] = size
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append("unregister")
        assert self._guarded
        return 0 if self.locked.pop(address, None) else self._fail(713)

    def last_error(self) -> int:
        error, self.error = self.error, 0
        return error

    def _fail(self, status: int) -> int:
        self.error = status
        return status


def play(monkeypatch: pytest.MonkeyPatch, runtime: PlayedRuntime, device: int | None = 1) -> None:
    """Have this process use CUDA, as far as page-locking asks."""
    process = cuda._Process()
    process.runtime, process.device = runtime, device
    monkeypatch.setattr(cuda, "_process", process)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
