"""A call has one deadline for all that it asks for, of however many managers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.links import Links
from tests.support.dictionaries import DEADLINE_S

pytestmark = pytest.mark.slow

BIG = 300_000  # elements of a float32 tensor that does not fit into a message
MANY = {f"many{number}": "x" * 100 for number in range(5_000)}  # more than a batch collects for two managers
TIMEOUT_S = 1_000.0

CALLS: dict[str, Callable[[DDict], Any]] = {
    "rollback": lambda handle: handle.rollback(),
    "put in a batch": lambda handle: handle.put("big", torch.ones(BIG)),
    "batch": lambda handle: handle.end_batch_put(),
    "update": lambda handle: handle.update(MANY, big=torch.ones(BIG), other=torch.zeros(BIG)),
    "bput": lambda handle: handle.bput("everywhere", 1),
    "delete": lambda handle: handle.__delitem__("key"),
    "pop": lambda handle: handle.pop("key"),
    "popitem": lambda handle: handle.popitem(),
    "setdefault": lambda handle: handle.setdefault("absent", 1),
    "fetch_add": lambda handle: handle.fetch_add("number"),
    "wait_for": lambda handle: handle.wait_for("key", 1),
    "items": lambda handle: handle.items(),
    "keys": lambda handle: handle.keys(),
    "clear": lambda handle: handle.clear(),
    "freeze": lambda handle: handle.freeze(),
    "unfreeze": lambda handle: handle.unfreeze(),
    "stats": lambda handle: handle.stats(),
    "checkpoint": lambda handle: handle.checkpoint(),
    "sync": lambda handle: handle.sync_to_newest_checkpoint(),
    "persist": lambda handle: handle.persist(),
    "advance": lambda handle: handle.advance(),
}
NO_BATCH = ("update", "wait_for", "items", "keys", "clear", "freeze", "unfreeze", "stats", "advance")


def test_an_update_is_not_late_because_its_items_are() -> None:
    with DDict(2, timeout=DEADLINE_S) as dictionary:
        handle = DDict.attach(dictionary.serialize(), timeout=3.0)

        def items() -> Iterator[tuple[int, int]]:
            for number in range(3):
                time.sleep(1.2)
                yield number, number

        handle.update(items())
        assert dict(dictionary) == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("names", [sorted(CALLS.keys() - {"rollback", "advance"}), ["rollback"], ["advance"]])
def test_each_call_has_one_deadline(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "persist_count": -1}
    with DDict(2, timeout=DEADLINE_S, working_set_size=4, persist_freq=1, **stored) as dictionary:  # type: ignore[arg-type]
        for name in names:
            dictionary.unfreeze()
            handle = DDict.attach(dictionary.serialize(), timeout=TIMEOUT_S)
            dictionary.update({"key": 1, "number": 1})
            dictionary.checkpoint()
            dictionary.checkpoint()
            dictionary.persist()
            handle["own"] = 1
            if name not in NO_BATCH:
                handle.start_batch_put()
                for number in range(20):
                    handle[f"small{number}"] = number
            with monkeypatch.context() as patched:
                deadlines = noted(patched, handle)
                began = time.monotonic()
                CALLS[name](handle)
            if name == "update":  # later by as long as the caller takes to give the items, which here is nothing
                assert max(deadlines) - min(deadlines) < 1.0
                assert len(deadlines) > 4
            else:
                assert len(set(deadlines)) == 1, name
            assert began < deadlines[0] - TIMEOUT_S < began + 5, name
            handle.detach()


def noted(patched: pytest.MonkeyPatch, handle: DDict) -> list[float]:
    """Note the deadlines of what a handle asks for."""
    deadlines: list[float] = []
    attempt = Links.attempt

    def noting(links: Links, *args: Any, deadline: float, **named: Any) -> Any:
        # Not those of the coordinator, and of this process's own threads.
        if links is handle._access.client.links and deadline > time.monotonic() + TIMEOUT_S / 2:
            deadlines.append(deadline)
        return attempt(links, *args, deadline=deadline, **named)

    patched.setattr(Links, "attempt", noting)
    return deadlines
