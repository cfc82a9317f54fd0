"""A coordinator whose managers are played by the test, and handles that keep to the protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ml_flashpoint.ddict.checkpoints.coordinator import Coordinator
from ml_flashpoint.ddict.checkpoints.writers import Session
from ml_flashpoint.ddict.errors import DDictTimeoutError
from ml_flashpoint.ddict.persister import PersistedCheckpoint
from ml_flashpoint.ddict.wire.written import Written
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.server import Peer

DEADLINE_S = 20.0
SHORT_S = 0.1


class Managers:
    """What the coordinator asks of managers, and what they answer."""

    def __init__(self, count: int) -> None:
        self.count = count
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
        return {"receipt": f"receipt of {manager}", "attempt": "s"}

    def persist(self, checkpoint_id: int, receipts: list[str]) -> None:
        assert receipts == [f"receipt of {manager}" for manager in range(self.count)]
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


class Run:
    """What is persisted, as far as the coordinator sees it."""

    def __init__(self, complete: Callable[[int, list[str]], None], remove_above: Callable[[int], None]) -> None:
        self.complete = complete
        self.remove_above = remove_above
        self.run_id = "first"
        self.persister = self
        self.back: int | None = None

    def go_back(self, to: int) -> None:
        self.run_id += " again"
        self.back = to

    def record(self) -> None:
        if self.back is not None:
            self.remove_above(self.back)
            self.back = None

    def locate(self, checkpoint_id: int) -> PersistedCheckpoint:
        return PersistedCheckpoint(checkpoint_id, "earlier", 1, ("receipt",))

    def begin(self, run_id: str, restored: PersistedCheckpoint) -> None:
        self.run_id = run_id


class Play:
    """A coordinator with managers, and handles that keep to the protocol.

    Attributes:
        epochs: of handles that have heard of one.
        sessions: of the processes of handles.
    """

    def __init__(self, coordinator: Coordinator, managers: Managers) -> None:
        self.coordinator = coordinator
        self.managers = managers
        self.epochs: dict[str, int] = {}
        self.sessions: dict[str, Session] = {}

    def attach(self, handle: str, *, is_gone: Callable[[], bool] = lambda: False) -> None:
        """The process of a handle has a connection."""
        self.sessions[handle] = Session(Peer(f"process of {handle}", None, is_gone))
        self.coordinator.attach(self.sessions[handle], f"session of {handle}")

    def kill(self, handle: str) -> None:
        """It has none any more."""
        self.coordinator.session_ended(self.sessions[handle])

    def join(self, handle: str, position: int = 0) -> dict[str, Any]:
        self.epochs.setdefault(handle, self.coordinator.epoch)
        return self.coordinator.join(handle, f"session of {handle}", position, self.epochs[handle])

    def move(self, handle: str, position: int, *, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        return self.coordinator.move(handle, f"session of {handle}", position, self.epochs[handle], timeout_s)

    def move_all(self, position: int, *handles: str) -> None:
        """Have handles move that wait for each other."""
        threads = [threading.Thread(target=self.move, args=(handle, position)) for handle in handles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def rollback(self, handle: str, to: int, *, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        session = f"session of {handle}"
        state = self.coordinator.rollback(handle, session, to, self.epochs[handle], timeout_s)
        self.epochs[handle] = state["epoch"]
        return state

    def leave(self, handle: str, written: int = -1) -> None:
        self.coordinator.leave(handle, Written(written), self.epochs[handle])

    def catch_up(self, handle: str, position: int, written: int = -1, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """What a handle hears that was refused."""
        wrote, epoch = Written(written), self.epochs.get(handle, 0)
        answer = self.coordinator.catch_up(handle, position, wrote, epoch, timeout_s)
        self.epochs[handle] = answer["epoch"]
        return answer

    def lose(self, manager: int, incarnation: str = "second") -> None:
        """A manager dies and comes back."""
        self.coordinator.returned(manager, incarnation)

    def newest(self, timeout_s: float = DEADLINE_S) -> int:
        return int(self.coordinator.newest(None, timeout_s)["committed"])


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
