"""What may be unpickled: names on the allow-list, whatever other threads do meanwhile."""

from __future__ import annotations

import collections
import datetime
import io
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from ml_flashpoint.format.errors import DamagedError, UnsafeContentError
from ml_flashpoint.unpickling.checks import check_bytes, unsafe_globals


class Suspect:
    pass


def _archive(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        complex(1, 2),
        bytearray(b"x"),
        collections.OrderedDict(a=1),
        collections.defaultdict(None, {"a": 1}),
        collections.deque([1]),
        datetime.datetime(2026, 1, 1),
        np.float64(2),
        np.random.get_state(legacy=False),
        random.getstate(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_are_allowed(value: Any) -> None:
    assert unsafe_globals(_archive(value)) == set()


def test_other_types_are_named_and_can_be_allowed() -> None:
    name = f"{__name__}.Suspect"
    stream = _archive({"a": Suspect()})
    assert unsafe_globals(stream) == {name}
    assert stream.tell() == 0
    assert unsafe_globals(stream, allowed=[Suspect]) == unsafe_globals(stream, allowed=[(Suspect, name)]) == set()
    with pytest.raises(UnsafeContentError, match="Suspect"):
        check_bytes(stream.getbuffer(), "key", path="path")
    check_bytes(stream.getbuffer(), "key", path="path", allowed=[Suspect])


def test_garbage_is_damaged() -> None:
    broken = bytearray(_archive([1]).getvalue())
    at = broken.index(b"data.pkl") + 64
    broken[at] ^= 0xFF
    with pytest.raises((DamagedError, UnsafeContentError)):
        check_bytes(memoryview(broken[:-30]), "key", path="path")


def test_checking_leaves_the_globals_of_other_threads_alone() -> None:
    done = threading.Event()

    def check() -> None:
        while not done.is_set():
            unsafe_globals(_archive(1), allowed=[Suspect])

    thread = threading.Thread(target=check)
    thread.start()
    try:
        for _ in range(200):
            with torch.serialization.safe_globals([collections.Counter]):
                assert collections.Counter in torch.serialization.get_safe_globals()
    finally:
        done.set()
        thread.join()
