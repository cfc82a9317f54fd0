"""Local checkpoints, synchronous and asynchronous."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml_flashpoint.local import AsyncCallsQueue, BasicTensorAwareStateDict, LocalCheckpointManager
from tests.conformance.suite import Conformance, Door, State


class LocalDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._manager = LocalCheckpointManager(base)
        self._manager.find_latest()  # as one must, where there may be something
        self._manager._oldest_accepted = 0  # the suite also goes back

    def save(self, step: int, state: State) -> None:
        self._manager.save(BasicTensorAwareStateDict(state), step)

    def load_latest(self) -> tuple[int, State] | None:
        if self._manager.find_latest() == -1:
            return None
        state, (iteration, _, _) = self._manager.load()
        return iteration, state.state_dict  # type: ignore[attr-defined]

    def close(self) -> None:
        self._manager.close()


class AsyncLocalDoor(LocalDoor):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._queue = AsyncCallsQueue()

    def save(self, step: int, state: State) -> None:
        request = self._manager.save(BasicTensorAwareStateDict(state), step, is_async=True)
        assert request is not None
        self._queue.schedule_async_request(request)
        self._queue.maybe_finalize_async_calls(blocking=True)


class TestLocal(Conformance):
    door = LocalDoor


@pytest.mark.slow
class TestAsyncLocal(Conformance):
    door = AsyncLocalDoor
