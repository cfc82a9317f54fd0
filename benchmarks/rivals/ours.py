"""Ours: the façade, as a loop uses it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.rivals.kinds import Saves
from benchmarks.rivals.loops import Loop
from ml_flashpoint import Flashpoint

WAIT_S = 60.0


class Overlapped(Saves):
    """As it is without options: it finds out by itself whether copying beside the next step is best."""

    warmups = 12
    overlap = True

    def __init__(self, loop: Loop, folder: Path) -> None:
        super().__init__(loop, folder)
        self._fp = Flashpoint(folder / "job", strict=True, overlap=self.overlap)
        self._fp.track(model=loop.model, optimizer=loop.optimizer).resume()

    def save(self, step: int) -> None:
        self._fp.step()

    def settle(self) -> None:
        if not self._fp.wait(WAIT_S):
            raise TimeoutError("the save did not end")

    def stored(self) -> int:
        return self._fp.health.bytes

    def close(self) -> None:
        self._fp.close()


class Blocking(Overlapped):
    """Copies before it returns."""

    warmups = 3
    overlap = False
