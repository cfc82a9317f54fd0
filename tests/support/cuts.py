"""Connections between ranks that break in the midst of what they carry."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ml_flashpoint.net.channel import Channel


@contextlib.contextmanager
def cut_in_the_midst(nth: int = 1) -> Iterator[list[int]]:
    """In this process, the connection that carries the nth payload from here breaks when half of it is sent.

    Yields:
        How large that payload was, once it was cut.
    """
    real, count, cuts = Channel.send_payload, itertools.count(1), list[int]()

    def send(channel: Channel, view: memoryview, **options: Any) -> None:
        half = len(view) // 2 if next(count) == nth else 0
        if half:
            real(channel, view[:half], **options)
            cuts.append(len(view))
            channel.interrupt()
        real(channel, view[half:], **options)

    with mock.patch.object(Channel, "send_payload", send):
        yield cuts
