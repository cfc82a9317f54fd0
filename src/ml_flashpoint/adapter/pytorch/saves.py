"""Saves of DCP's: in the process that trains, and in one that DCP has started for them.

One asynchronous save at a time is under way in a process: DCP's collectives of two on one group would be mixed up. So
the next save begins once DCP's thread of the one before has ended.

A saving process is a client of the trainer, over a Unix socket. Pickled are the address of that socket, its secret, and
a ticket for what was staged. Tensors that lie in the staged slot go back as offsets in it, what a planner made of
others as bytes. The trainer names and commits the save, which fails as the connection ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import logging
import mmap
import os
import pickle
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ml_flashpoint import events
from ml_flashpoint.adapter.pytorch.staging import LeftOut, Places, TensorLeaves
from ml_flashpoint.copy.cpu import cpu_clones
from ml_flashpoint.copy.dtypes import dtype_name, octets_of, torch_dtype
from ml_flashpoint.copy.overlap import LateCopy
from ml_flashpoint.engine.checkpointer import Checkpointer, Phase
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format import errors
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, NotStagedError, ProtocolError, SaveError
from ml_flashpoint.format.knobs import collective_deadline_s, seal_deadline_s
from ml_flashpoint.format.names import CheckpointContainerId, SaveId
from ml_flashpoint.net.client import Connection
from ml_flashpoint.net.messages import Dialect, Fields, errors_of, list_of, text
from ml_flashpoint.net.server import Peer, RequestServer
from ml_flashpoint.ranks.rank_group import RankGroup

if TYPE_CHECKING:
    from _collections_abc import dict_items

    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_GIVEN_S = 1e-3
"""Seconds in which a thread that DCP has just started lets the training thread return to its loop."""
_LOOK_S = 0.1

WIRE = Dialect(b"ml-flashpoint saving process 4", errors_of(errors), SaveError)
_BLOB_BYTES = 1 << 30
_ITEMS = 4096
"""Most items in one message: of fields and blobs, a message takes only so many."""
_RANGES = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^Anonymous: +(\d+)", re.M | re.S)
"""The ranges in ``smaps``, and the KiB of each that are the process's own."""


# ---- a staged state -----------------------------------------------------------------------------------------------

_reading = threading.local()


class StagedStateDict(dict[str, Any]):
    """A state that consists of copies. DCP saves it on a thread of its own, or sends it to another process, and says
    neither; so the state notes which thread reads it. ``staged`` is a `Staged`, or an `ArrivedState` in another
    process."""

    def __init__(self, state: dict[str, Any], staged: Any) -> None:
        super().__init__(state)
        self.staged = staged

    def items(self) -> dict_items[str, Any]:
        """Return the items."""
        _reading.staged = self.staged
        self.staged.read()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = self.staged.sent(dict(self))
        return reduced


def take_read() -> Any:
    """Return what was staged of the state that the calling thread has read since the last call; None if it was no
    staged one."""
    staged, _reading.staged = getattr(_reading, "staged", None), None
    return staged


class Staged:
    """A state that was staged for an asynchronous save. The copies lie in the slot of the save, a file that another
    process can map, so that only places travel there. Before a base container is known they are copies like any others.

    Args:
        checkpointer: None if no base container is known yet.
        alone: True if there are no other ranks.

    Attributes:
        key: ticket of a process that is to write the save.
        save: None before it is begun.
        thread: of DCP's, which saves it, or waits for the process that does; None before.
        others: names of this rank's tensors that other ranks write, once its final plan is known; see `Omission`.
        error: why staging failed; raised as DCP plans.
        held_s: time that staging held the training loop.
        state: refers to the state that consists of the copies, for as long as DCP keeps that.
    """

    def __init__(self, checkpointer: Checkpointer | None, *, alone: bool) -> None:
        self.key = secrets.token_hex(16)
        self.save: Save | None = None
        self.thread: threading.Thread | None = None
        self.others: frozenset[str] | None = None
        self.error: BaseException | None = None
        self.held_s = 0.0
        self.state: Callable[[], object] = object
        self.stager = threading.current_thread()
        self._checkpointer, self._alone = checkpointer, alone
        self._late: LateCopy | None = None
        self._taken_up = threading.Event()
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

    def fail(self, error: BaseException) -> None:
        """Give it up. Safe to repeat, and after it was committed."""
        self.error = self.error or error
        if self.save is not None:
            self.save.fail(error)

    def sent(self, state: dict[str, Any]) -> tuple[Any, ...]:
        """Return what the state is pickled as: the ticket, and the state with places for the tensors in the slot."""
        self.read()
        self.await_copies()
        stream = io.BytesIO()
        pickler = _Pickler(stream, self.save)
        pickler.dump(state)
        return _arrived, (self.key, pickler.path, stream.getvalue())

    def read(self) -> None:
        """Note the calling thread as DCP's, except the one that has staged: that one may only look."""
        if (thread := threading.current_thread()) is not self.stager:
            self.take_up(thread)

    def take_up(self, thread: threading.Thread) -> None:
        """Note the thread of DCP's, on that thread, unless there was one before."""
        if self.thread is None:
            self.thread = thread
            self._taken_up.set()
            if thread is not self.stager:
                time.sleep(_GIVEN_S)

    def name(self, save: Save, step: int) -> None:
        """Have the save begin in earnest, by its step. Raises `FlashpointError`, also if staging failed."""
        self.await_copies()
        self.save = save
        try:
            if save.id is None:
                save.name(step)
        except Exception:
            if self.error is None:
                raise
        if self.error is not None:
            save.fail(self.error)
            raise SaveError(f"staging failed: {self.error}", step=step) from self.error

    @property
    def has_ended(self) -> bool:
        """True once this rank's part is committed, or there will be none."""
        return self.error is not None or (self.save is not None and self.save.committed.done())

    @property
    def failure(self) -> BaseException | None:
        """Return why there is no part; None if there is one, or may still be."""
        ended = self.error is None and self.save is not None and self.save.committed.done()
        return self.save.committed.exception() if ended and self.save is not None else self.error

    @property
    def is_over(self) -> bool:
        """True if DCP does nothing with it any more: its state is dropped, its thread has ended or begins another save,
        or, on the thread that has staged it, no thread was started for it."""
        current = threading.current_thread()
        if self.state() is None or (self._alone and self.has_ended):
            return True
        if self.thread is not None:
            return self.thread is current or not self.thread.is_alive()
        # DCP starts a thread for each asynchronous save before that returns. It is a daemon where its creator is one.
        started = (each for each in threading.enumerate() if each not in self._threads)
        own = (each.daemon != current.daemon or each.name.startswith("flashpoint-") for each in started)
        return current is self.stager and all(own)

    def wait(self, deadline_s: float, *, committed: bool = False) -> bool:
        """Wait until it is over; or, with ``committed``, until this rank's part is. Return True if so in time."""
        until = time.monotonic() + deadline_s
        while not (self.is_over or (committed and self.has_ended)):
            if time.monotonic() > until:
                return False
            if self.thread is None:
                self._taken_up.wait(_LOOK_S)
            else:
                self.thread.join(_LOOK_S)
        return True


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
        elif last is not None and isinstance(last.failure, NotStagedError):
            # Another rank has another plan now, or plans of several kinds take turns.
            self._others, self._has_failed = frozenset(), True
        elif last is not None and last.others is not None and not self._has_failed:
            self._others = last.others
        others = self._others
        return sorted({i for path, i in zip(leaves.places.paths, leaves.indices, strict=True) if path not in others})


# ---- in the trainer -----------------------------------------------------------------------------------------------


class LocalSaves:
    """Saves into the slots of this process, and the server of processes that write them. Thread-safe.

    Args:
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
        self._begun: list[tuple[threading.Thread, Save]] = []  # with the thread of DCP's
        self._staged: Staged | None = None  # the latest
        self._server: RequestServer | None = None
        self._secret = secrets.token_bytes(32)
        self._address = f"\0flashpoint-{secrets.token_hex(16)}"  # an abstract name: there is no file

    def enter(self, version: CheckpointContainerId) -> Checkpointer:
        """Return the checkpointer of a version that all ranks are about to save. Collective where its base container is
        not open yet, or where its step was saved before: that begins a new run. Raises `InvalidArgumentError` if the
        path is that of no version, or another base container is open."""
        checkpointer = self._open_base(checked_version(version).parent)
        if checkpointer.base != version.parent:
            text = f"a writer saves into one base container, {checkpointer.base} here"
            raise InvalidArgumentError(text, argument="checkpoint_id", value=str(version))
        with self._entering:
            name = SaveId(checkpointer.run, version.step or 0)
            if checkpointer.phase is Phase.BETWEEN_RUNS or (checkpointer.run and name <= self._entered):
                checkpointer.latest()
            self._entered = SaveId(checkpointer.run, version.step or 0)
        return checkpointer

    def next(self) -> Staged:
        """Return the save of a state that is about to be staged, once the one before is over."""
        self._await_staged()
        return Staged(self._opened(), alone=self.world_size == 1)

    def staged(self, staged: Staged, state: dict[str, Any]) -> StagedStateDict:
        """Return the state that consists of the copies of a save, for DCP."""
        made = StagedStateDict(state, staged)
        staged.state = weakref.ref(made)
        self._staged = staged
        return made

    def _await_staged(self) -> None:
        """Let the asynchronous save that was staged last go on first. DCP's own tutorial does not wait."""
        if self._staged is not None and not self._staged.wait(seal_deadline_s()):
            _log.error("an asynchronous save is still in flight; going on")
        self.give_up()

    def begin(self, path: str | os.PathLike[str] | None, staged: Staged | None) -> Save:
        """Begin a save of what was staged, or of what `Save.fill` is given if ``staged`` is None. Collective as
        `enter`. Raises `FlashpointError`; what was staged is of no use then."""
        thread = threading.current_thread()
        if staged is not None:
            staged.take_up(thread)
        version = checked_version(path)
        step = version.step or 0
        if staged is None:
            self._await_staged()
        checkpointer, save = self.enter(version), None if staged is None else staged.save
        if save is None:
            save = checkpointer.begin(step, explicit=True)
        elif save.id is not None:
            raise SaveError("what was staged was saved or given up before, and is not kept", rank=self.rank)
        with self._lock:
            self._begun.append((thread if staged is None else staged.thread or thread, save))
        if staged is not None:
            staged.name(save, step)
            self.note_held(version, staged.held_s)
        return save

    def give_up(self) -> None:
        """Give up saves that nobody goes on with: DCP does not say that a save has failed on another rank. Not done as
        DCP drops a state: that may be under any lock."""
        text = "given up: the checkpoint failed on another rank, or nobody has saved what was staged"
        error, current = SaveError(text, rank=self.rank), threading.current_thread()
        with self._lock:
            self._begun = [each for each in self._begun if not each[1].committed.done()]
            left = [save for thread, save in self._begun if thread is current or not thread.is_alive()]
        for save in left:
            save.fail(error)
        if self._staged is not None and self._staged.is_over and not self._staged.has_ended:
            self._staged.fail(error)

    def wait(self, deadline_s: float) -> None:
        """Wait until saves in flight are committed, on whatever thread or process they are, at most for a time."""
        until = time.monotonic() + deadline_s
        if self._staged is not None:
            self._staged.wait(deadline_s, committed=True)
        self.give_up()
        with self._lock:
            begun = [save.committed for _, save in self._begun]
        concurrent.futures.wait(begun, max(0.0, until - time.monotonic()))

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
        return SimpleNamespace(save=None, staged=None, tensors=[], byte_items=[])

    def closed(self, session: SimpleNamespace) -> None:
        """Give up what the saving process had not committed; see `RequestHandler`."""
        if session.save is not None:
            hint = "the next save is not affected"
            session.save.fail(SaveError("its process is gone", rank=self.rank, hint=hint))

    def handle(
        self, session: SimpleNamespace, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]] | None:
        """Carry out one call of `RemoteSave`; see `RequestHandler`."""
        save: Save | None = session.save
        if op == "begin":
            version, key = text(fields, "version"), fields.get("key")
            staged = None if key is None else self._staged
            if key is not None and (staged is None or staged.key != key):
                raise SaveError("the save was given up before this process began", rank=self.rank)
            session.staged, session.save = staged, self.begin(version, staged)
        elif save is None:
            raise ProtocolError(f"{op} comes before a save was begun")
        elif save.committed.done() and (failure := save.committed.exception()) is not None:
            raise failure
        elif op == "fill":
            tensors, byte_items = _items(save, fields, iter(blobs))
            session.tensors += tensors
            session.byte_items += byte_items
        elif op == "commit":
            others = json.loads(b"".join(blobs))
            if session.staged is not None and others is not None:
                session.staged.others = frozenset(others)
            save.fill(session.tensors, session.byte_items)
            save.commit()
            save.committed.result()
        elif op == "fail":
            save.fail(WIRE.rebuild(fields["error"]))
        else:
            raise ProtocolError(f"there is no call {op}")
        return {}, ()


def _items(save: Save, fields: Fields, blobs: Iterator[bytes]) -> tuple[list[TensorItem], list[BytesItem]]:
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


# ---- in a saving process ------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Writes places in the slot of a save for the tensors there."""

    def __init__(self, stream: io.BytesIO, save: Save | None) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.path: str | None = None
        self._save = save

    def persistent_id(self, value: Any) -> tuple[int | None, torch.dtype, tuple[int, ...]] | None:
        offset = None
        save = self._save
        if save is not None and type(value) is torch.Tensor and (place := save.place_of(value)) is not None:
            self.path, offset = place
        elif type(value) is not LeftOut:
            return None
        return offset, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, file: _PrivateFile | None) -> None:
        super().__init__(io.BytesIO(data))
        self._file = file

    def persistent_load(self, place: Any) -> torch.Tensor:
        offset, dtype, shape = place
        if self._file is None or offset is None:
            return LeftOut.of(torch.empty(shape, dtype=dtype, device="meta"))
        return self._file.tensor_at(offset, dtype, shape)


class _PrivateFile:
    """The file that staged tensors lie in. What this process writes to the mapping stays here."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            self._mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=protection)
        finally:
            os.close(descriptor)
        self._begin = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self._end = self._begin + len(self._mapping)

    def tensor_at(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor at an offset, with a storage of its own: torch pickles all of a storage with a view."""
        count = torch.Size(shape).numel() * dtype.itemsize
        if not count:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with torch.inference_mode(False):
            data = torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=offset)
            return data.view(dtype).view(tuple(shape))

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Return where the memory of a tensor begins in the file; None if it is elsewhere, or not all of its memory."""
        offset = tensor.data_ptr() - self._begin
        plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        return offset if plain and offset >= 0 and tensor.data_ptr() + tensor.nbytes <= self._end else None

    @property
    def changed(self) -> bool:
        """True if this process, where a planner transforms in place, may have written to the mapping."""
        with open("/proc/self/smaps") as maps:
            own = [(begin, end) for begin, end, kib in _RANGES.findall(maps.read()) if int(kib)]
        return any(int(begin, 16) < self._end and int(end, 16) > self._begin for begin, end in own)


@dataclass(eq=False, slots=True)
class ArrivedState:
    """A staged state, in the process that it was sent to: see `Staged`. ``file`` is what its tensors lie in."""

    key: str | None
    file: _PrivateFile | None = None
    others: frozenset[str] | None = None

    def read(self) -> None:
        """Do nothing: no save of this process waits for it."""


def _arrived(key: str, path: str | None, data: bytes) -> StagedStateDict:
    file = None
    if path is not None:
        try:
            file = _PrivateFile(path)
        except (OSError, ValueError) as error:
            # DCP's saving process would end with it, for good. So only this save fails: its tensors have no data.
            _log.error("the staged state cannot be read: %s", error)
    return StagedStateDict(_Unpickler(data, file).load(), ArrivedState(key, file))


class RemoteSaves:
    """The saves of a trainer, in a process that writes one of them. Picklable."""

    def __init__(self, address: str, secret: bytes, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._address, self._secret = address, secret

    def begin(self, path: str | os.PathLike[str] | None, staged: ArrivedState | None) -> RemoteSave:
        """See `LocalSaves.begin`."""
        version = checked_version(path)
        # Not when this arrives: what cannot be unpickled would end DCP's saving process, and all later saves with it.
        address = ("unix", self._address)
        connection = Connection(address, self._secret, WIRE, connect_timeout_s=collective_deadline_s())
        staged = staged or ArrivedState(None)
        save = RemoteSave(connection, staged)
        save.request("begin", {"version": str(version), "key": staged.key})
        return save


class RemoteSave:
    """A save of a trainer's: see `Save`. It fails as its connection ends."""

    def __init__(self, connection: Connection, staged: ArrivedState) -> None:
        self.committed: Future[None] = Future()
        self._connection, self._staged = connection, staged
        self._items: list[tuple[Any, ...]] = []
        self._blobs: list[list[memoryview]] = []  # of each item

    def fill(self, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Take what the trainer does not have of the items."""
        file = self._staged.file
        if file is not None and file.changed:
            file = None
        for key, tensor in tensors:
            place = None if file is None else file.place_of(tensor)
            is_sent = place is None and tensor.numel() > 0
            data = octets_of(tensor.cpu().contiguous()).data if is_sent else memoryview(b"")
            self._add(key, data, dtype_name(tensor.dtype), tuple(tensor.shape), place)
        for key, content in byte_items:
            self._add(key, memoryview(content))

    def _add(self, key: str, data: memoryview, *described: Any) -> None:
        blobs = [data[begin : begin + _BLOB_BYTES] for begin in range(0, data.nbytes, _BLOB_BYTES)]
        self._items.append((key, len(blobs), *described))
        self._blobs.append(blobs)

    def commit(self, *, extra: Sequence[BytesItem] = ()) -> None:
        """Have the object made and committed; return when the trainer's part is."""
        self.fill((), extra)
        for begin in range(0, len(self._items), _ITEMS):
            some = slice(begin, begin + _ITEMS)
            self.request("fill", {"items": self._items[some]}, list(chain.from_iterable(self._blobs[some])))
        others = self._staged.others
        self.request("commit", {}, [json.dumps(None if others is None else sorted(others)).encode()])
        self._connection.close()
        self.committed.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Give it up."""
        with contextlib.suppress(FlashpointError):  # the trainer is gone, or has given it up before
            self.request("fail", {"error": WIRE.describe(error)})
        self._connection.close()

    def request(self, op: str, fields: Fields, blobs: Sequence[Buffer] = ()) -> None:
        """Have the trainer do something for this save. Raises `FlashpointError` as it does."""
        self._connection.request(op, fields, blobs, timeout_s=seal_deadline_s())


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
