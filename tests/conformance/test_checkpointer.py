"""The public `Checkpointer`."""

from __future__ import annotations

from pathlib import Path

from ml_flashpoint import Checkpointer
from tests.conformance.suite import Conformance, Door, State
from tests.conformance.test_flashpoint import Holder


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
