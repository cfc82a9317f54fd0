"""The ranks of a job: who they are, on which nodes, and the few things they agree on.

The collectives cannot interleave with the user's. Everything sent is bytes or integers: nothing is pickled.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, JobInUseError, TopologyError, text_of
from ml_flashpoint.format.knobs import NODE_ID_VARIABLE, collective_deadline_s
from ml_flashpoint.format.names import validate_segment
from ml_flashpoint.ranks.collectives import Collectives
from ml_flashpoint.ranks.strategies import Topology

_T = TypeVar("_T")

SECRET_BYTES = 32
_GLOO_S = 0.3
_MOST_OF_AN_ERROR = 2000
_SHARED_MEMORY = "/dev/shm"


def local_node_id() -> str:
    """Return this process's failure domain: ``FLASHPOINT_NODE_ID``, or the host, its boot and its shared memory.

    Containers of one host that share its network, and so its name, have a ``/dev/shm`` each: they are nodes of their
    own.
    """
    given = os.environ.get(NODE_ID_VARIABLE)
    if given is not None:
        return validate_segment(given)
    try:
        memory = f"-{os.stat(_SHARED_MEMORY).st_dev:x}"
    except OSError:
        memory = ""
    return f"{socket.gethostname()}-{boot_id() or 'unknown'}{memory}"


def boot_id() -> str:
    """Return the id of this machine's boot, the same in all its containers; empty where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return ""


class RankGroup:
    """The ranks of the default process group. Made by `rank_group`. Without a process group it is a group of one. All
    methods are collective, and must be called in the same order on all ranks.

    Attributes:
        job: common to all ranks, and to all groups whose rank 0 is the same process.
        secret: 32 bytes known to this job's ranks only.
    """

    def __init__(self) -> None:
        self.node = local_node_id()
        self.rank, self.world_size = 0, 1
        if default_group() is not None:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._collectives: Collectives | None = None
        if self.world_size > 1:
            atexit.unregister(_let_gloo_finish)  # once is enough for all groups
            atexit.register(_let_gloo_finish)
            self._collectives = Collectives(collective_deadline_s())
        nodes = [blob.decode() for blob in self.gather(self.node.encode())]
        self.topology = Topology(tuple(nodes))
        self.job = self.broadcast(_own_job.encode()).decode()
        self.secret = self.broadcast(secrets.token_bytes(SECRET_BYTES))

    @property
    def is_node_leader(self) -> bool:
        """True if this rank is the lowest of its node."""
        return self.topology.ranks_of(self.node)[0] == self.rank

    def gather(self, blob: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order, by two collectives. Ranks that have nothing (``b""``) cost
        nothing."""
        if self._collectives is None:
            return [blob]
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
        sizes[self.rank] = len(blob)
        self._collectives.reduce("gather", sizes, dist.ReduceOp.SUM)
        ends = list(itertools.accumulate(sizes.tolist()))
        begins = [0, *ends[:-1]]
        # Each rank fills its own range of one buffer. Other than by an all-gather, no range is padded to the longest.
        data = torch.zeros(ends[-1], dtype=torch.uint8, device="cpu")
        if blob:
            data[begins[self.rank] : ends[self.rank]] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        if ends[-1]:
            self._collectives.reduce("gather", data, dist.ReduceOp.SUM)
        together = data.numpy().tobytes()
        return [together[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def broadcast(self, blob: bytes) -> bytes:
        """Return the bytes of rank 0, on every rank; what other ranks pass does not matter."""
        return self.gather(blob if self.rank == 0 else b"")[0]

    def all_ok(self, ok: bool) -> bool:
        """Return True if ``ok`` is true on every rank: the vote that keeps ranks from loading a mix."""
        if self._collectives is None:
            return ok
        vote = torch.tensor([ok], dtype=torch.int64, device="cpu")
        self._collectives.reduce("vote", vote, dist.ReduceOp.MIN)
        return bool(vote.item())

    def together(self, action: Callable[[], _T], kind: type[FlashpointError], what: str) -> _T:
        """Return what ``action`` returns, once it has succeeded on every rank: one rank's trouble is no hang of the
        others. Raise what ``action`` raised, or, where it failed on another rank, an error of a kind, which names that
        rank, the reason, and ``what`` has failed."""
        result: list[_T] = []
        failure: Exception | None = None
        try:
            result.append(action())
        except Exception as error:
            failure = error
        blob = b"" if failure is None else json.dumps(text_of(failure)[:_MOST_OF_AN_ERROR]).encode()
        for rank, reason in enumerate(self.gather(blob)):
            if reason:
                where = f"rank {rank}, {self.topology.node_of(rank)}"
                raise failure or kind(f"{what} failed on {where}: {json.loads(reason)}")
        return result[0]

    def agree_on(self, **arguments: object) -> None:
        """Raise an `InvalidArgumentError`, on all ranks, unless arguments, of plain values, are the same on all of
        them."""
        gathered = [json.loads(blob) for blob in self.gather(json.dumps(arguments).encode())]
        for argument, value in arguments.items():
            if len(values := sorted({each[argument] for each in gathered}, key=repr)) > 1:
                raise InvalidArgumentError(
                    f"differs between ranks: {values}", argument=argument, value=value, rank=self.rank
                )

    def check_nodes(self, base: Path) -> None:
        """Raise a `TopologyError`, on all ranks, unless ranks of one node have one base container."""
        nodes = self.topology.node_order
        if len(nodes) == self.world_size:
            return
        place = ""
        with contextlib.suppress(OSError):  # the other ranks wait
            found = os.stat(base)
            place = f"{boot_id()}-{found.st_dev:x}-{found.st_ino:x}"
        mine = [place, f"{socket.gethostname()} (boot id {boot_id() or 'unknown'})"]
        told = [json.loads(blob) for blob in self.gather(json.dumps(mine).encode())]
        for node in nodes:
            first, *others = self.topology.ranks_of(node)
            for other in others:
                if told[other][0] != told[first][0]:
                    raise TopologyError(
                        f"ranks {first}, on host {told[first][1]}, and {other}, on host {told[other][1]}, have the same"
                        " node id and do not share a base container: neither would have copies of the other",
                        rank=self.rank,
                        node=node,
                        hint=f"give each machine a {NODE_ID_VARIABLE} of its own, or unset it; ranks of one machine"
                        " use one base container",
                    )


def _let_gloo_finish() -> None:
    """Wait, at exit, while other threads can still have the interpreter.

    Gloo's threads free the tensors of the last collectives some time after these have ended. One that still needs the
    interpreter for that when it is being finalized makes torch abort the process.
    """
    time.sleep(_GLOO_S)


_current: tuple[object, RankGroup] | None = None
_own_job = secrets.token_hex(16)
_of_parents: list[object] = []
"""In a forked child: the groups of its parent. Their threads are not there, so that destroying one would hang."""
_lock = threading.Lock()


def _begin_anew() -> None:
    """In a forked child: it is a job of its own, and not one of the ranks of its parent's."""
    global _current, _own_job, _lock
    _lock = threading.Lock()  # it may be held by a thread that is not there
    _of_parents.append(_current)
    if dist.is_available() and dist.is_initialized():
        _of_parents.append(dist.group.WORLD)
    _current, _own_job = None, secrets.token_hex(16)


os.register_at_fork(after_in_child=_begin_anew)


def default_group() -> dist.ProcessGroup | None:
    """Return the default process group, None if there is none. Raise a `JobInUseError` if it is that of a forked
    parent."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    if any(world is each for each in _of_parents):
        raise JobInUseError(
            f"process {os.getpid()} was forked from one whose process group it cannot use",
            hint="start it by spawn or forkserver, or before init_process_group",
        )
    return world


def rank_group() -> RankGroup:
    """Return the group of the current default process group. Collective when first called for it."""
    global _current
    key = default_group()
    with _lock:
        if _current is None or _current[0] is not key:
            _current = (key, RankGroup())
        return _current[1]
