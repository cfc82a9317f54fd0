"""What ranks do that recover while something is out of reach just now. Run in children of `tests.support.forked`."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.engine import recovery
from ml_flashpoint.format.errors import UnaskedVersionsError
from ml_flashpoint.net import client as net_client
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, ReplicationStrategy, RingReplicationStrategy
from tests.support.descriptors import NoDescriptors
from tests.support.forked import Report, said
from tests.support.loops import Stored
from tests.support.worker import base_path
from tests.workers.fault_engine import Rank

STRATEGIES: dict[str, Callable[[], ReplicationStrategy]] = {
    "none": NoReplicationStrategy,
    "next": lambda: RingReplicationStrategy(1),
}


def save_as(report: Report, rank: int, strategy: str, steps: list[int]) -> None:
    """Save these steps, each verified."""
    engine = Rank(base_path(), STRATEGIES[strategy]())
    for step in steps:
        engine.save("small", step, 0)
        assert engine.checkpointer.wait(30)
    dist.barrier()
    engine.close()


def load_as(report: Report, rank: int, strategy: str) -> Any:
    """Load; the error if it cannot be done."""
    engine = Rank(base_path(), STRATEGIES[strategy]())
    found = said(lambda: engine.load("small"))
    dist.barrier()
    engine.close()
    return found


def facade_saves(report: Report, rank: int, steps: int, stays: bool = False) -> None:
    """Train for some steps; ``stays``: and run on until killed."""
    with Flashpoint(base_path(), strict=True) as fp:
        counter = Stored(0)
        fp.track(counter=counter).resume()
        for _ in range(steps):
            counter.value += 1
            fp.step()
            assert fp.wait(60)
        if stays:
            assert events.flush()
            report("saved")
            threading.Event().wait()


def facade_goes_on(report: Report, rank: int) -> int:
    """The step that is gone on from."""
    with Flashpoint(base_path(), strict=True) as fp:
        return fp.track(counter=Stored(0)).resume()


@contextlib.contextmanager
def out_of_reach(rank: int, outage: str, times: int) -> Iterator[None]:
    """The first connections of rank 1 end where nobody answers, or nothing listens; or rank 0 cannot open manifests, as
    if other threads took every descriptor just then, or anything."""
    left, opened, connect_socket, connect = iter(range(times)), os.open, socket.create_connection, net_client.connect
    with contextlib.ExitStack() as stack:
        if outage in ("refused", "silent") and rank == 1:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            elsewhere = listener.getsockname()
            if outage == "refused":
                listener.close()

            def divert(address: Any, *args: Any, **how: Any) -> socket.socket:
                return connect_socket(address if next(left, None) is None else elsewhere, *args, **how)

            def connect_in_haste(*args: Any, **how: Any) -> Any:
                return connect(*args, **{**how, "within_s": 0.3})

            stack.enter_context(mock.patch.object(socket, "create_connection", divert))
            if outage == "silent":
                stack.enter_context(mock.patch.object(net_client, "connect", connect_in_haste))
        elif outage == "manifests" and rank == 0:

            def refuse(path: Any, *args: Any, **how: Any) -> int:
                if str(path).endswith(".manifest") and next(left, None) is not None:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
                return opened(path, *args, **how)

            stack.enter_context(mock.patch.object(os, "open", refuse))
        elif outage == "descriptors" and rank == 0:
            stack.enter_context(NoDescriptors())
        yield


def facade_resumes(report: Report, rank: int, outage: str, times: int, late_s: float = 0.0) -> tuple[Any, int, int]:
    """Resume while something is out of reach, and again if that fails; then a step. Rank 0 is late to tell what it
    has."""

    def read_late(*args: Any) -> Any:
        time.sleep(late_s if rank == 0 else 0.0)
        return read(*args)

    read = recovery.read_node
    with Flashpoint(base_path()) as fp, mock.patch.object(recovery, "read_node", read_late):
        counter = Stored(0)
        fp.track(counter=counter)
        with out_of_reach(rank, outage, times):
            first = said(fp.resume)
        if first != 3:
            assert fp.resume() == 3
        return first, counter.value, fp.step()


def facade_forgets(report: Report, rank: int, discard: bool) -> list[Any]:
    """Train without `resume`, and resume then."""
    found: list[Any] = []
    with Flashpoint(base_path(), strict=True, discard_existing=discard) as fp:
        fp.track(counter=Stored(0))
        for use in (fp.step, lambda: fp.save(7)):
            try:
                use()
                assert fp.wait(60)
                found.append("saved")
            except UnaskedVersionsError as error:
                found.append(str(error))
        return [*found, fp.resume()]


def start(report: Report, base: str) -> int:
    """Start from nothing, save a step and end; or from what there is, and run on."""
    report("starting")
    with Flashpoint(base) as fp:
        step = fp.track(value=Stored(1)).resume()
        report("resumed", step)
        if step:
            threading.Event().wait()
        fp.save(1)
    return step
