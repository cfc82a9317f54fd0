"""Pushing to several holders at once, over connections that stay.

Owns the threads for that, that none of them fails in silence, and when a connection is made anew. What is pushed, and
to whom, is its callers' to decide: ranks of a job and managers of a dictionary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ml_flashpoint.format.errors import FlashpointError, ReplicationError
from ml_flashpoint.net.channel import ConnectionLostError
from ml_flashpoint.net.transfer_client import PeerConnection

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def push_to_all(targets: Sequence[int], push: Callable[[int], None]) -> None:
    """Call ``push(target)`` for each, all at once; returns when all have ended.

    Raises:
        FlashpointError: what one of them failed with. Others may have worked.
    """
    failures: list[FlashpointError] = []

    def guarded(target: int) -> None:
        try:
            push(target)
        except FlashpointError as error:
            failures.append(error)
        except Exception as error:  # lost with its thread, it would pass for an acknowledgement
            _log.exception("pushing a copy to rank %d failed", target)
            failures.append(ReplicationError(f"{type(error).__name__}: {error}", rank=target))

    mine, threads = list(targets[:1]), []
    for target in targets[1:]:
        thread = threading.Thread(target=guarded, args=(target,), daemon=True, name=f"flashpoint-push-{target}")
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:  # no more threads to be had
            mine.append(target)
    for target in mine:
        guarded(target)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class HolderLink:
    """The connection to one holder, which stays until something goes wrong on it. For one thread at a time, but `close`
    may be called by any.

    Attributes:
        acknowledged: for its user: what the holder has said that it has, over this connection. On a new one there may
            be another process, which does not have it.
    """

    def __init__(self) -> None:
        self.acknowledged: set[str] = set()
        self._connection: PeerConnection | None = None
        self._closed = False

    def use(self, connect: Callable[[], PeerConnection], push: Callable[[PeerConnection], _Result]) -> _Result:
        """What ``push`` returns, given a connection: a new one if there is none. One that was there may have broken
        while it was idle: then ``push`` is called once more.

        Raises:
            FlashpointError: what either of them failed with.
        """
        was_there = self._connection is not None
        while True:
            try:
                if self._connection is None:
                    self._connection = connect()
                if self._closed:  # looked at after the connection is there, and `close` looks after it has said so
                    raise ReplicationError("this end was closed")
                return push(self._connection)
            except BaseException as error:
                self.drop()
                if not (was_there and isinstance(error, ConnectionLostError)):
                    raise
                was_there = False

    def drop(self) -> None:
        """Have a new connection the next time."""
        self.acknowledged = set()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Break off what is under way. Of no use from then on."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            connection.interrupt()
