"""The DCP door, synchronous and asynchronous."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.suite import Conformance, Door, State, state_of
from tests.support import dcp


class DcpDoor(Door):
    mode = "sync"

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._door = dcp.Door(base)
        self._door.latest()  # as one must, where there may be something

    def save(self, step: int, state: State) -> None:
        self._door.save_by(self.mode, state, step)

    def load_latest(self) -> tuple[int, State] | None:
        step = self._door.latest()
        if step is None:
            return None
        return step, self._door.load(state_of(0, 99), step)

    def close(self) -> None:
        self._door.close()


class AsyncDcpDoor(DcpDoor):
    mode = "thread"


class TestDcp(Conformance):
    door = DcpDoor


@pytest.mark.slow
class TestAsyncDcp(Conformance):
    door = AsyncDcpDoor
