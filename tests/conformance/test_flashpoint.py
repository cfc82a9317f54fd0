"""The façade."""

from __future__ import annotations

from pathlib import Path

from ml_flashpoint import Flashpoint
from tests.conformance.suite import Conformance, Door, State


class Holder:
    """Anything that has a state."""

    def __init__(self) -> None:
        self.state: State = {}

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


class FlashpointDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._holder = Holder()
        self._fp = self.open()
        self._asked = False

    def open(self) -> Flashpoint:
        return Flashpoint(str(self.base), strict=True, handle_sigterm=False).track(holder=self._holder)

    def save(self, step: int, state: State) -> None:
        if not self._asked:
            self.load_latest()  # as one must, where there may be something
        self._holder.state = state
        self._fp.save(step)
        assert self._fp.wait(60)

    def load_latest(self) -> tuple[int, State] | None:
        self._holder.state = {}
        step = self._fp.resume()
        self._asked = True
        return (step, self._holder.state) if self._holder.state else None

    def close(self) -> None:
        self._fp.close()


class TestFlashpoint(Conformance):
    door = FlashpointDoor
