"""What ranks do that recover while something is out of reach just now. Run in children of `tests.support.forked`."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.engine import recovery
from ml_flashpoint.format.errors import FlashpointError, UnaskedVersionsError
from ml_flashpoint.net import client as net_client
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, ReplicationStrategy, RingReplicationStrategy
from tests.support.descriptors import NoDescriptors
from tests.support.forked import Report
from tests.workers.fault_engine import Rank, base_here

STRATEGIES: dict[str, Callable[[], ReplicationStrategy]] = {
    "none": NoReplicationStrategy,
    "ring": lambda: RingReplicationStrategy(2),
    "next": lambda: RingReplicationStrategy(1),
}


def rank_with(strategy: str) -> Rank:
    """The engine, with a strategy by name."""
    return Rank(base_here(), strategy=STRATEGIES[strategy]())


def save_as(report: Report, rank: int, strategy: str, steps: list[int]) -> None:
    """Save these steps, each verified."""
    engine = rank_with(strategy)
    for step in steps:
        engine.save("small", step, 0)
        assert engine.checkpointer.wait(30)
    dist.barrier()
    engine.close()


def load_as(report: Report, rank: int, strategy: str) -> Any:
    """Load; the error if it cannot be done."""
    engine = rank_with(strategy)
    found = said(engine)
    dist.barrier()
    engine.close()
    return found


def said(engine: Rank) -> Any:
    """The step and life that were loaded, or the error."""
    try:
        return engine.load("small")
    except FlashpointError as error:
        return f"{type(error).__name__}: {error}"


# ---- peers ----------------------------------------------------------------------------------------------------


def refused_at_first(report: Report, rank: int, times: int, late_s: float = 0.0) -> Any:
    """The first connections that rank 1 makes end where nothing listens. Rank 0 is late to tell what it has."""
    engine = Rank(base_here(), replicate=True)
    if rank == 0:
        read = recovery.read_node

        def read_late(*args: Any) -> Any:
            time.sleep(late_s)
            return read(*args)

        recovery.read_node = read_late
    if rank == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            closed = probe.getsockname()
        left = [closed] * times
        real = socket.create_connection

        def connect(address: Any, *args: Any, **kwargs: Any) -> socket.socket:
            return real(left.pop() if left else address, *args, **kwargs)

        net_client.socket.create_connection = connect  # type: ignore[assignment]
    found = said(engine)
    dist.barrier()
    engine.close()
    return found


def never_answered(report: Report, rank: int) -> list[Any]:
    """Rank 1 is connected to somebody who says nothing; then to the right one, in the same process."""
    engine = Rank(base_here(), replicate=True)
    silent = socket.create_server(("127.0.0.1", 0))
    real_connection, real_connect = socket.create_connection, net_client.connect
    if rank == 1:
        net_client.socket.create_connection = (  # type: ignore[assignment]
            lambda address, *args, **kwargs: real_connection(silent.getsockname(), *args, **kwargs)
        )
        net_client.connect = lambda *args, **kwargs: real_connect(*args, **{**kwargs, "within_s": 0.3})
    first = said(engine)
    kept = sorted(path.name for path in Path(base_here()).glob("step-*_ckpt"))
    net_client.socket.create_connection = real_connection
    second = said(engine)
    dist.barrier()
    engine.close()
    return [first, kept, second]


# ---- descriptors ----------------------------------------------------------------------------------------------


class NoManifests:
    """While entered, manifests cannot be opened, as if other threads took every descriptor just then."""

    def __enter__(self) -> NoManifests:
        self._before = os.open

        def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
            if str(path).endswith(".manifest"):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
            return self._before(path, *args, **kwargs)

        os.open = refuse
        return self

    def __exit__(self, *_: object) -> None:
        os.open = self._before


SHORTAGES = {"descriptors": NoDescriptors, "manifests": NoManifests}


def short_of_descriptors(report: Report, rank: int, kind: str, until_first_pause: bool) -> list[Any]:
    """Rank 0 cannot read what it has: until it tries again, or for the whole of its first recovery."""
    engine = Rank(base_here(), replicate=True)
    found = []
    if rank == 0:
        shortage = SHORTAGES[kind]()
        real = recovery.pauses

        def pauses(until: float) -> Iterator[None]:
            for each in real(until):
                if until_first_pause:
                    shortage.__exit__()
                yield each

        recovery.pauses = pauses
        shortage.__enter__()
        found.append(said(engine))
        if not until_first_pause:
            shortage.__exit__()
        recovery.pauses = real
    else:
        found.append(said(engine))
    found.append(said(engine))
    dist.barrier()
    engine.close()
    return found


# ---- the façade -----------------------------------------------------------------------------------------------


class Counter:
    """Something to track."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def facade_saves(report: Report, rank: int, steps: int, stays: bool = False) -> None:
    """Train for some steps; ``stays``: and run on until killed."""
    with Flashpoint(base_here(), strict=True) as fp:
        counter = Counter()
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
    with Flashpoint(base_here(), strict=True) as fp:
        return fp.track(counter=Counter()).resume()


def facade_resumes(report: Report, rank: int, peers: bool) -> list[Any]:
    """Resume while the peer, or a descriptor, is out of reach, then again."""
    with Flashpoint(base_here()) as fp:
        counter = Counter()
        fp.track(counter=counter)
        first = resumed_with(fp, rank, peers)
        return [first, fp.resume(), counter.value, fp.step()]


def resumed_with(fp: Flashpoint, rank: int, peers: bool) -> Any:
    real = socket.create_connection
    shortage = NoManifests()
    if peers and rank == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            closed = probe.getsockname()
        net_client.socket.create_connection = (  # type: ignore[assignment]
            lambda address, *args, **kwargs: real(closed, *args, **kwargs)
        )
    if not peers and rank == 0:
        shortage.__enter__()
    try:
        return fp.resume()
    except FlashpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        net_client.socket.create_connection = real
        if not peers and rank == 0:
            shortage.__exit__()


def facade_forgets(report: Report, rank: int, discard: bool) -> list[Any]:
    """Train without `resume`."""
    with Flashpoint(base_here(), strict=True, discard_existing=discard) as fp:
        counter = Counter()
        fp.track(counter=counter)
        found: list[Any] = [sorted(path.name for path in Path(base_here()).glob("step-*_ckpt"))]
        for use in (fp.step, lambda: fp.save(7)):
            try:
                use()
                assert fp.wait(60)
                found.append("saved")
            except UnaskedVersionsError as error:
                found.append(str(error))
        found.append(fp.resume())
        return found
