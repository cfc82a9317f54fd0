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


def _begin_batch(handle: DDict) -> None:
    handle.start_batch_put()
    for number in range(20):
        handle[f"small{number}"] = number


CALLS: dict[str, tuple[Callable[[DDict], Any], Callable[[DDict], Any] | None]] = {
    "put in a batch": (lambda handle: handle.put("big", torch.ones(BIG)), _begin_batch),
    "batch": (lambda handle: handle.end_batch_put(), _begin_batch),
    "update": (lambda handle: handle.update(MANY, big=torch.ones(BIG), other=torch.zeros(BIG)), None),
    "bput": (lambda handle: handle.bput("everywhere", 1), _begin_batch),
    "delete": (lambda handle: handle.__delitem__("key"), _begin_batch),
    "pop": (lambda handle: handle.pop("key"), _begin_batch),
    "popitem": (lambda handle: handle.popitem(), _begin_batch),
    "setdefault": (lambda handle: handle.setdefault("absent", 1), _begin_batch),
    "fetch_add": (lambda handle: handle.fetch_add("number"), _begin_batch),
    "wait_for": (lambda handle: handle.wait_for("key", 1), None),
    "items": (lambda handle: handle.items(), None),
    "keys": (lambda handle: handle.keys(), None),
    "clear": (lambda handle: handle.clear(), None),
    "freeze": (lambda handle: (handle.freeze(), handle.unfreeze())[0], None),
    "stats": (lambda handle: handle.stats(), None),
    "checkpoint": (lambda handle: handle.checkpoint(), _begin_batch),
    "rollback": (lambda handle: handle.rollback(), _begin_batch),
    "sync": (lambda handle: handle.sync_to_newest_checkpoint(), _begin_batch),
    "persist": (lambda handle: handle.persist(), _begin_batch),
    "advance": (lambda handle: handle.advance(), None),
}


def test_an_update_is_not_late_because_its_items_are() -> None:
    with DDict(2, timeout=DEADLINE_S) as dictionary:
        handle = DDict.attach(dictionary.serialize(), timeout=3.0)

        def items() -> Iterator[tuple[int, int]]:
            for number in range(3):
                time.sleep(1.2)
                yield number, number

        handle.update(items())
        assert dict(dictionary) == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_one_deadline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act, prepare = CALLS[name]
    timeout_s = 1_000.0
    deadlines: list[float] = []
    attempt = Links.attempt

    def noting(links: Links, *args: Any, deadline: float, **named: Any) -> Any:
        if links is not handle._access.client.links:
            return attempt(links, *args, deadline=deadline, **named)  # the coordinator's
        if deadline > time.monotonic() + timeout_s / 2:  # not those of this process's own threads
            deadlines.append(deadline)
        return attempt(links, *args, deadline=deadline, **named)

    with DDict(
        2,
        timeout=DEADLINE_S,
        working_set_size=4,
        persister_class=PosixCheckpointPersister,
        persist_path=str(tmp_path),
        persist_freq=1,
        persist_count=-1,
    ) as dictionary:
        handle = DDict.attach(dictionary.serialize(), timeout=timeout_s)
        dictionary.update({"key": 1, "number": 1})
        dictionary.checkpoint()
        dictionary.checkpoint()
        dictionary.persist()
        handle["own"] = 1
        if prepare is not None:
            prepare(handle)
        monkeypatch.setattr(Links, "attempt", noting)
        began = time.monotonic()
        act(handle)
        monkeypatch.undo()
        handle.detach()

    if name == "update":  # later by as long as the caller takes to give the items, which here is nothing
        assert max(deadlines) - min(deadlines) < 1.0
        assert len(deadlines) > 4
    else:
        assert len(set(deadlines)) == (2 if name == "freeze" else 1)  # there and back
    assert began < deadlines[0] - timeout_s < began + 5
