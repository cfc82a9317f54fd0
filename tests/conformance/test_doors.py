"""Ways in that need no framework but torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ml_flashpoint import Checkpointer
from ml_flashpoint.engine import checkpointer as engine
from ml_flashpoint.local import AsyncCallsQueue, BasicTensorAwareStateDict, LocalCheckpointManager
from tests.conformance.suite import Conformance, Door, FlashpointDoor, Holder, State, state_of
from tests.support import dcp


class TestFlashpoint(Conformance):
    door = FlashpointDoor


class CheckpointerDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._holder = Holder()
        self._checkpointer = Checkpointer(base)
        self._asked = False

    def save(self, step: int, state: State) -> None:
        if not self._asked:
            self.load_latest()  # as one must, where there may be something
        self._holder.state = state
        self._checkpointer.save(step, {"holder": self._holder}).verified.result(60)

    def load_latest(self) -> tuple[int, State] | None:
        self._holder.state = {}
        step = self._checkpointer.load({"holder": self._holder})
        self._asked = True
        return (step, self._holder.state) if self._holder.state else None

    def close(self) -> None:
        self._checkpointer.close()


class TestCheckpointer(Conformance):
    door = CheckpointerDoor


class EngineDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._checkpointer = engine.Checkpointer(base)
        self._checkpointer.latest()  # as one must, where there may be something
        self._highest = -1

    def save(self, step: int, state: State) -> None:
        if step <= self._highest:
            self._checkpointer.latest()  # a new run, in which the step may be saved again
        self._highest = step
        tensors = [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        others = [(key, json.dumps(value).encode()) for key, value in state.items() if not torch.is_tensor(value)]
        save = self._checkpointer.begin(step, explicit=True)
        save.fill(tensors, others)
        save.commit()
        save.committed.result()

    def load_latest(self) -> tuple[int, State] | None:
        found = self._checkpointer.latest()
        if found is None:
            return None
        with self._checkpointer.open_version(found) as version:
            reader = version.open(0)
            state: State = {e.key: reader.tensor(e.key).clone() for e in reader.layout.tensors}
            state |= {e.key: json.loads(bytes(reader.bytes_of(e.key))) for e in reader.layout.byte_items}
        assert found.step is not None
        return found.step, state

    def close(self) -> None:
        self._checkpointer.close()


@pytest.mark.slow
class TestEngine(Conformance):
    door = EngineDoor


class DcpDoor(Door):
    """Saves odd steps synchronously, and even ones asynchronously."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._door = dcp.Door(base)
        self._door.latest()  # as one must, where there may be something

    def save(self, step: int, state: State) -> None:
        self._door.save_by("sync" if step % 2 else "thread", state, step)

    def load_latest(self) -> tuple[int, State] | None:
        step = self._door.latest()
        if step is None:
            return None
        return step, self._door.load(state_of(0, 99), step)

    def close(self) -> None:
        self._door.close()


class TestDcp(Conformance):
    door = DcpDoor


class LocalDoor(Door):
    """Saves odd iterations synchronously, and even ones asynchronously."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._manager, self._queue = LocalCheckpointManager(base), AsyncCallsQueue()
        self._manager.find_latest()  # as one must, where there may be something
        self._manager._oldest_accepted = 0  # the suite also goes back

    def save(self, step: int, state: State) -> None:
        request = self._manager.save(BasicTensorAwareStateDict(state), step, is_async=step % 2 == 0)
        if request is not None:
            self._queue.schedule_async_request(request)
            self._queue.maybe_finalize_async_calls(blocking=True)

    def load_latest(self) -> tuple[int, State] | None:
        if self._manager.find_latest() == -1:
            return None
        state, (iteration, _, _) = self._manager.load()
        return iteration, state.state_dict  # type: ignore[attr-defined]

    def close(self) -> None:
        self._manager.close()


class TestLocal(Conformance):
    door = LocalDoor
