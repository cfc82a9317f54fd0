"""A coordinator whose managers are played by the test, and handles that keep to the protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ml_flashpoint.ddict.accounts import Write
from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.errors import (
    DDictTimeoutError,
)
from ml_flashpoint.format.errors import FlashpointError

DEADLINE_S = 20.0
SHORT_S = 0.1


class Managers:
    """What the coordinator asks of managers, and what they answer."""

    def __init__(self, count: int) -> None:
        self.incarnations = [f"first-{manager}" for manager in range(count)]
        self.asked: list[tuple[int, str, dict[str, Any]]] = []
        self.refusals: dict[str, Callable[[int, dict[str, Any]], FlashpointError | None]] = {}
        self.gates: dict[str, threading.Event] = {}
        self.changed = threading.Condition()
        self.persisted: list[int] = []
        self.removed_above: list[int] = []

    def call(self, manager: int, operation: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with self.changed:
            self.asked.append((manager, operation, fields))
            self.changed.notify_all()
        gate = self.gates.get(operation)
        if gate is not None and not gate.wait(min(timeout_s, DEADLINE_S)):
            raise DDictTimeoutError("the test kept it waiting")
        refuse = self.refusals.get(operation)
        error = None if refuse is None else refuse(manager, fields)
        if error is not None:
            raise error
        return {"incarnation": self.incarnations[manager], "receipt": f"receipt of {manager}"}

    def persist(self, checkpoint_id: int, receipts: list[str]) -> None:
        assert receipts == [f"receipt of {manager}" for manager in range(len(self.incarnations))]
        self.persisted.append(checkpoint_id)

    def await_asked(self, operation: str, count: int = 1) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of(operation)) >= count, DEADLINE_S)

    def of(self, operation: str) -> list[dict[str, Any]]:
        return [fields for _, asked, fields in self.asked if asked == operation]

    def committed(self) -> list[int]:
        """Ids that snapshots were taken of, in order, each once for a try."""
        return [fields["checkpoint_id"] for m, operation, fields in self.asked if (m, operation) == (0, "prepare")]

    def close_gate(self, operation: str) -> threading.Event:
        self.gates[operation] = threading.Event()
        return self.gates[operation]


class Play:
    """A coordinator with managers, and handles that keep to the protocol."""

    def __init__(self, coordinator: Coordinator, managers: Managers) -> None:
        self.coordinator = coordinator
        self.managers = managers

    def join(self, handle: str, position: int = 0, *wrote: Write) -> dict[str, Any]:
        return self.coordinator.join(handle, f"lease of {handle}", position, wrote)

    def move(self, handle: str, position: int, *wrote: Write, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        return self.coordinator.move(handle, f"lease of {handle}", position, wrote, timeout_s)

    def rollback(
        self, handle: str, to: int, *wrote: Write, timeout_s: float = DEADLINE_S, lost: Sequence[int] = ()
    ) -> dict[str, Any]:
        return self.coordinator.rollback(handle, f"lease of {handle}", to, wrote, timeout_s, lost)

    def newest(self, timeout_s: float = DEADLINE_S) -> int:
        return int(self.coordinator.newest(timeout_s)["committed"])

    def write(self, manager: int, need: int, *, fresh: bool = True) -> Write:
        return Write(manager, self.managers.incarnations[manager], need, fresh)


Make = Callable[..., Play]


def within(seconds: float, call: Callable[[], object]) -> float:
    """Time that a call took; fails if that is much more than it may."""
    began = time.monotonic()
    call()
    took = time.monotonic() - began
    assert took < seconds + DEADLINE_S / 4
    return took


def raises_in_time(error: type[BaseException], call: Callable[[float], object]) -> float:
    """Time that a call took that is given `SHORT_S`, and has to end with this error then."""

    def wait() -> None:
        with pytest.raises(error):
            call(SHORT_S)

    return within(SHORT_S, wait)


def move_until_told(play: Play, handle: str, position: int, *wrote: Write) -> None:
    """The loss is noticed by the next commit, which is on its way."""
    give_up = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up:
        play.move(handle, position, *wrote)
        play.newest()
        position += 1
