"""Processes that read and write large values, for tests that kill or stop them."""

from __future__ import annotations

import fcntl
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint.ddict.client.values import ValueWriter, encode, object_size, read_value
from ml_flashpoint.ddict.errors import DDictError, StaleValueError
from ml_flashpoint.ddict.manager.shard import StoredValue
from ml_flashpoint.ddict.manager.store import PartStore, ValueSlots

INCARNATION = "0123456789abcdef"


def open_store(base: Path) -> PartStore:
    return PartStore(base, 0, 1, lock_deadline_s=5)


def put(slots: ValueSlots, writer: ValueWriter, value: object) -> StoredValue:
    """What a client and a manager do together."""
    encoded = encode(value)
    room = slots.allocate(object_size(encoded))
    with writer.writing(room.path, room.value_id) as write:
        write(encoded)
        return slots.adopt(room.value_id)


def is_free(path: str | Path) -> bool:
    """Whether nobody has a lock on a file."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


# ---- children ---------------------------------------------------------------------------------------------------


def hold_a_view(report: Any, path: str, value_id: str) -> None:
    value = read_value(path, value_id)
    assert isinstance(value, torch.Tensor)
    report("holding", float(value[0]))
    report.listen()
    report("still", float(value[0]), float(value[-1]))
    del value
    report("let go", is_free(path))
    report.listen()


def write_and_wait(report: Any, path: str, value_id: str, when: str) -> None:
    """Stands still before the value is written, or after."""
    with ValueWriter().writing(path, value_id) as write:
        if when == "after":
            write(encode(torch.full((100_000,), 7.0)))
        report("locked")
        report.listen()
        if when == "before":
            write(encode([torch.full((1 << 20,), 7.0), "text"]))


def write_late(report: Any, path: str, value_id: str) -> None:
    report("ready")
    report.listen()
    try:
        with ValueWriter().writing(path, value_id) as write:
            write(encode(torch.full((100_000,), 666.0)))
    except StaleValueError as error:
        report("refused", str(error))
    else:
        report("written")


def read_for_ever(report: Any, path: str, value_id: str, first: float) -> None:
    """Reads until the value is gone; every value seen must be the one."""
    report("reading")
    seen = 0
    while True:
        try:
            value = read_value(path, value_id)
        except StaleValueError:
            report("gone", seen)
            return
        assert isinstance(value, torch.Tensor)
        assert bool((value == first).all()), value
        seen += 1
        del value
        time.sleep(0.001)  # or the slot would hardly ever be free


def hold_many_views(report: Any, path: str, value_id: str, count: int) -> None:
    """With a soft limit on open files below that many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = len(os.listdir("/proc/self/fd")) + count // 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    views = [read_value(path, value_id) for _ in range(count)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    try:
        read_value(path, value_id)
    except DDictError as error:
        report("refused", str(error))
    assert len(views) == count
