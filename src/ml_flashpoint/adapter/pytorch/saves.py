"""The saves of DCP in the process that trains: their order, giving up abandoned ones, and those of saving processes.

A saving process is a client of the trainer: see `saving_process`.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ml_flashpoint import events
from ml_flashpoint.adapter.pytorch.saving_process import WIRE, RemoteSaves, pickled
from ml_flashpoint.adapter.pytorch.staging import Places, StagedStateDict, TensorLeaves
from ml_flashpoint.copy.cpu import cpu_clones
from ml_flashpoint.copy.dtypes import torch_dtype
from ml_flashpoint.copy.overlap import LateCopy
from ml_flashpoint.engine.checkpointer import Checkpointer, Phase
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.errors import InvalidArgumentError, NotStagedError, ProtocolError, SaveError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.names import CheckpointContainerId, SaveId
from ml_flashpoint.net.messages import Fields, list_of, text
from ml_flashpoint.net.server import Peer, RequestServer
from ml_flashpoint.ranks.rank_group import RankGroup

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_GIVEN_S = 1e-3
"""Seconds in which a thread that DCP has just started lets the training thread return to its loop."""
_POLL_S = 0.002
_TAKE_UP_S = 10.0
"""Seconds after which a single rank goes on beside a staged state that no thread has begun to save."""


class Staged:
    """A save of DCP's. The copies of one that was staged lie in its slot, a file that another process can map, so that
    only places travel there. Before a base container is known they are copies like any others.

    Args:
        checkpointer: None if no base container is known yet.

    Attributes:
        key: ticket of a process that is to write the save.
        save: None before it is begun.
        error: why there is nothing to save; raised as DCP plans.
        others: names of this rank's tensors that other ranks write, once its final plan is known; see `Omission`.
        held_s: time that staging held the training loop; 0 if nothing was staged.
        state: refers to the state that consists of the copies, for as long as DCP keeps that.
        is_claimed: True once a save has read what was staged.
    """

    def __init__(self, checkpointer: Checkpointer | None) -> None:
        self.key = secrets.token_hex(16)
        self.save: Save | None = None
        self.error: BaseException | None = None
        self.others: frozenset[str] | None = None
        self.held_s = 0.0
        self.state: Callable[[], object] = object
        self.is_claimed = False
        self._checkpointer = checkpointer
        self._late: LateCopy | None = None
        self._thread: threading.Thread | None = None  # saves it, or waits for the process that does
        self._stager = threading.current_thread()
        self._threads = weakref.WeakSet(threading.enumerate())

    def copy(self, tensors: Sequence[TensorItem], late: LateCopy | None) -> Sequence[torch.Tensor]:
        """Begin the save, if a base container is known, and copy tensors away. Return the copies in order."""
        if self._checkpointer is None:
            return cpu_clones([tensor for _, tensor in tensors])
        self.save, self._late = self._checkpointer.begin(explicit=True), late
        return self.save.stage(tensors, late=late)

    @property
    def is_copied(self) -> bool:
        """True if nothing is copied any more: nothing was late, or it is over."""
        return self._late is None or self._late.over

    def await_copies(self) -> None:
        """Wait until all is copied: whoever reads the copies needs all of them."""
        if self._late is None or self.error is not None:
            return
        try:
            self._late.wait(seal_deadline_s())
        except SaveError as error:
            self.fail(error)

    def sent(self, state: dict[str, Any]) -> tuple[Any, ...]:
        """Return what a state that consists of the copies is pickled as."""
        if (thread := threading.current_thread()) is not self._stager:
            time.sleep(_GIVEN_S)  # for pickling, its thread would keep the interpreter's lock
            self._thread = thread
        self.await_copies()
        return pickled(self.key, state, (lambda tensor: None) if self.save is None else self.save.place_of)

    def claim(self, checkpointer: Checkpointer, step: int) -> None:
        """Give the save its step, on the thread that saves it. Raises `FlashpointError`, also if staging failed."""
        self._thread = self._thread or threading.current_thread()
        self.await_copies()
        failure = self.error
        try:
            if self.save is None:
                self.save = checkpointer.begin(step, explicit=True)
            else:
                self.save.name(step)
            if failure is not None:
                raise failure
        except Exception as error:
            self.fail(error)
            if failure is not None:
                raise SaveError(f"staging failed: {failure}", step=step) from failure
            raise

    def tensor_at(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the copy, or a part of it, that lies at an offset. Raises `SaveError` if there is none."""
        if self.error is not None:
            raise self.error
        assert self.save is not None
        return self.save.tensor_at(offset, dtype, shape)

    def fill(self, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Bring all items into one object."""
        assert self.save is not None
        self.save.fill(tensors, byte_items)

    def commit(self, extra: Sequence[BytesItem] = ()) -> None:
        """Commit the object; return when this rank's part is committed."""
        assert self.save is not None
        self.save.commit(extra=extra)
        self.save.committed.result()

    def fail(self, error: BaseException) -> None:
        """Give it up. Safe to repeat, and after it was committed."""
        self.error = self.error or error
        if self.save is not None:
            self.save.fail(error)

    @property
    def has_ended(self) -> bool:
        """True once this rank's part is committed, or there will be none."""
        return self.error is not None or (self.save is not None and self.save.committed.done())

    @property
    def is_over(self) -> bool:
        """True if DCP does nothing with it any more: its thread has ended or begins another save, its state is dropped,
        or, on the thread that has staged it, no thread has been started for it."""
        current = threading.current_thread()
        if self._thread is not None:
            return self._thread is current or not self._thread.is_alive()
        if self.state() is None:
            return True
        # DCP starts a thread for each asynchronous save before that returns.
        started = set(threading.enumerate()).difference(self._threads)
        return current is self._stager and all(each.name.startswith("flashpoint-") for each in started)


class Omission:
    """Tensors that need not be staged, because other ranks write them. For the thread that stages.

    DCP leaves out replicated tensors only when it plans, which in asynchronous saves is after they were staged; but as
    long as structure and planner stay, so does the plan. So one save teaches the next. A wrong guess costs a save and
    never a byte: what was not staged has no data to write.
    """

    def __init__(self) -> None:
        self.places: Places | None = None
        self._others: frozenset[str] = frozenset()
        self._last: Staged | None = None
        self._has_failed = False

    def needed(self, leaves: TensorLeaves, staged: Staged) -> list[int]:
        """Return the indices of the tensors to stage for a save. It teaches the next one of the same structure."""
        last, self._last = self._last, staged
        if leaves.places is not self.places:
            self.places, self._others, self._has_failed = leaves.places, frozenset(), False
        elif last is not None and isinstance(last.error, NotStagedError):
            # Another rank has another plan now, or plans of several kinds take turns.
            self._others, self._has_failed = frozenset(), True
        elif last is not None and last.others is not None and not self._has_failed:
            self._others = last.others
        others = self._others
        return sorted({i for path, i in zip(leaves.places.paths, leaves.indices, strict=True) if path not in others})


class LocalSaves:
    """Saves into the slots of this process, and the server of processes that write them. Thread-safe.

    Args:
        ranks: of the job.
        open_base: returns the checkpointer of a base container, which it opens the first time: then it is collective.
        opened: returns the checkpointer of the base container that was opened, None before.
    """

    def __init__(
        self,
        ranks: RankGroup,
        open_base: Callable[[CheckpointContainerId], Checkpointer],
        opened: Callable[[], Checkpointer | None],
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._ranks = ranks
        self._open_base, self._opened = open_base, opened
        self._lock = threading.Lock()
        self._entering = threading.Lock()
        self._entered = SaveId(0, -1)
        self._open: list[Staged] = []
        self._previous: Staged | None = None
        self._stager: threading.Thread | None = None
        self._tickets: weakref.WeakValueDictionary[str, Staged] = weakref.WeakValueDictionary()
        self._server: RequestServer | None = None
        self._secret = secrets.token_bytes(32)
        self._address = f"\0flashpoint-{secrets.token_hex(16)}"  # an abstract name: there is no file

    @classmethod
    def of(cls, checkpointer: Checkpointer) -> LocalSaves:
        """Return saves into a base container that is open."""

        def open_base(base: CheckpointContainerId) -> Checkpointer:
            if base != checkpointer.base:
                text = f"a writer saves into one base container, {checkpointer.base} here"
                raise InvalidArgumentError(text, argument="checkpoint_id", value=str(base))
            return checkpointer

        return cls(checkpointer.ranks, open_base, lambda: checkpointer)

    def enter(self, version: CheckpointContainerId) -> Checkpointer:
        """Return the checkpointer of a version that all ranks are about to save. Collective where its base container is
        not open yet, or where its step was saved before: that begins a new run. Raises `InvalidArgumentError` if the
        path is that of no version, or another base container is open."""
        checkpointer = self._open_base(checked_version(version).parent)
        with self._entering:
            name = SaveId(checkpointer.run, version.step or 0)
            if checkpointer.phase is Phase.BETWEEN_RUNS or (checkpointer.run and name <= self._entered):
                checkpointer.latest()
            self._entered = SaveId(checkpointer.run, version.step or 0)
        return checkpointer

    # ---- order ------------------------------------------------------------------------------------------------

    def next(self) -> Staged:
        """Return the save of a state that is about to be staged, once it is its turn."""
        self._stager = threading.current_thread()
        self.await_previous()
        self.give_up()
        return Staged(self._opened())

    def staged(self, staged: Staged, state: dict[str, Any]) -> StagedStateDict:
        """Return the state that consists of the copies of a save, for DCP."""
        made = StagedStateDict(state, staged)
        staged.state = weakref.ref(made)
        self._previous = staged
        with self._lock:
            self._open.append(staged)
            self._tickets[staged.key] = staged
        return made

    def await_previous(self) -> None:
        """Let the asynchronous save that was staged last go on first; on another thread than stages, for a moment.

        A single rank waits until that save has its step: steps rise in the order of the calls. Several wait until it is
        over: DCP's collectives of two saves on one group would be mixed up, and DCP's own tutorial does not wait.
        """
        if self._stager is not threading.current_thread():
            if self._stager is not None:
                time.sleep(_GIVEN_S)
            return
        staged, self._previous, alone = self._previous, None, self.world_size == 1
        until = time.monotonic() + (_TAKE_UP_S if alone else seal_deadline_s())
        while staged is not None and not (staged.is_over or (alone and (staged.is_claimed or staged.error))):
            if time.monotonic() > until:
                _log.error("an asynchronous save is still in flight; going on")
                return
            time.sleep(_POLL_S)

    def give_up(self, *, besides: Staged | None = None) -> None:
        """Give up saves that nobody goes on with: DCP does not say that a save has failed on another rank. Not done as
        DCP drops a state: that may be under any lock."""
        with self._lock:
            self._open = [each for each in self._open if not each.has_ended]
            gone = [each for each in self._open if each is not besides and each.is_over]
        for staged in gone:
            text = "given up: the checkpoint failed on another rank, or nobody has saved what was staged"
            staged.fail(SaveError(text, rank=self.rank))

    def wait(self, deadline_s: float) -> None:
        """Wait until saves in flight are committed, on whatever thread or process they are, at most for a time."""
        until = time.monotonic() + deadline_s
        while True:
            self.give_up()
            with self._lock:
                waiting = list(self._open)
            # A save that was staged before a base container was known begins once DCP's thread or process goes on.
            if all(each.save is not None for each in waiting) or time.monotonic() > until:
                break
            time.sleep(_POLL_S)
        begun = [each.save.committed for each in waiting if each.save is not None]
        concurrent.futures.wait(begun, max(0.0, until - time.monotonic()))

    def begin(self, version: CheckpointContainerId, staged: Staged | None) -> Staged:
        """Start a save of what was staged, or of what `Staged.fill` is given if ``staged`` is None. Collective as
        `enter`. Raises `FlashpointError`; what was staged is of no use then."""
        checkpointer = self.enter(version)
        self.give_up(besides=staged)
        with self._lock:
            if staged is None:
                staged = Staged(checkpointer)
                self._open.append(staged)
            elif staged.is_claimed:
                raise SaveError("what was staged was saved or given up before, and is not kept", rank=self.rank)
            staged.is_claimed = True
        staged.claim(checkpointer, version.step or 0)
        if staged.held_s:
            self.note_held(version, staged.held_s)
        return staged

    def note_held(self, version: CheckpointContainerId, seconds: float) -> None:
        """Publish how long a save has held the loop."""
        events.emit(events.LoopHeld, self._ranks, version.parent, version.step, seconds=seconds)

    # ---- saving processes ---------------------------------------------------------------------------------------

    def sent(self) -> RemoteSaves:
        """Return the saves of this process as another one sees them. The server listens from the first time on. Raises
        `SaveError` if its socket or its thread cannot be made."""
        with self._lock:
            if self._server is None:
                try:
                    self._server = RequestServer(
                        self._secret, self, WIRE, unix_path=self._address, idle_s=seal_deadline_s()
                    )
                except (OSError, RuntimeError) as error:
                    raise SaveError(f"no other process can save: {error}", rank=self.rank) from error
        return RemoteSaves(self._address, self._secret, self.rank, self.world_size)

    def close(self) -> None:
        """Break off what saving processes are writing. Safe to call twice."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def open(self, peer: Peer) -> SimpleNamespace:
        """Return the session of a saving process, which writes one save; see `RequestHandler`."""
        return SimpleNamespace(save=None, tensors=[], byte_items=[])

    def closed(self, session: SimpleNamespace) -> None:
        """Give up what the saving process had not committed; see `RequestHandler`."""
        if session.save is not None:
            hint = "the next save is not affected"
            session.save.fail(SaveError("its process is gone", rank=self.rank, hint=hint))

    def handle(
        self, session: SimpleNamespace, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]] | None:
        """Carry out one call of `RemoteSave`; see `RequestHandler`."""
        save: Staged | None = session.save
        if op == "begin":
            version, key = CheckpointContainerId(text(fields, "version")), fields.get("key")
            with self._lock:
                staged = None if key is None else self._tickets.pop(str(key), None)
            if staged is None and key is not None:
                raise SaveError("the save was given up before this process began", rank=self.rank)
            session.save = self.begin(version, staged)
        elif save is None:
            raise ProtocolError(f"{op} comes before a save was begun")
        elif op == "fill":
            tensors, byte_items = _items(save, fields, iter(blobs))
            session.tensors += tensors
            session.byte_items += byte_items
        elif op == "commit":
            others = json.loads(b"".join(blobs))
            save.others = None if others is None else frozenset(others)
            save.fill(session.tensors, session.byte_items)
            save.commit()
        elif op == "fail":
            save.fail(WIRE.rebuild(fields["error"]))
        else:
            raise ProtocolError(f"there is no call {op}")
        return {}, ()


def _items(save: Staged, fields: Fields, blobs: Iterator[bytes]) -> tuple[list[TensorItem], list[BytesItem]]:
    """Return the items of a call, of what was sent and of what was staged."""

    def take(count: int) -> bytearray:
        found = list(islice(blobs, count))
        if len(found) != count:
            raise ProtocolError("less was sent than was announced")
        return bytearray().join(found)

    tensors: list[TensorItem] = []
    byte_items: list[BytesItem] = []
    for key, count, *described in list_of(fields, "items"):
        if not described:
            byte_items.append((str(key), bytes(take(count))))
            continue
        name, shape, offset = described
        dtype = torch_dtype(name)
        if offset is not None:
            tensors.append((str(key), save.tensor_at(offset, dtype, shape)))
            continue
        data = take(count)
        if len(data) != torch.Size(shape).numel() * dtype.itemsize:
            raise ProtocolError(f"{key!r} was not sent as it was announced")
        octets = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        tensors.append((str(key), octets.view(dtype).view(tuple(shape))))
    return tensors, byte_items


def checked_version(path: str | os.PathLike[str] | None) -> CheckpointContainerId:
    """Return the version that a path is. Raise `InvalidArgumentError`, `InvalidNameError` if it is none."""
    version = None if path is None else CheckpointContainerId(path)
    if version is None or version.step is None:
        raise InvalidArgumentError(
            "must be the path of a version, .../step-<n>_ckpt",
            argument="checkpoint_id",
            value=None if path is None else str(path),
            hint="CheckpointContainerId.create_child(base, CheckpointContainerId.format_version_container(step))",
        )
    return version
