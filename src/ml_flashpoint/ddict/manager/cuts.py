"""The cuts of a manager: prepared, sealed in its store, copied to the managers that hold copies, and recovered.

A cut has the entries of all keys at one checkpoint. Sealed, it is a part of the manager's store: a *snapshot*, one
object with an index and all small values. Each large value is a part of its own, committed the first time that a
snapshot refers to it. A cut at which nothing has changed has the snapshot of the cut before: nothing is written and
nothing is pushed. In place of a run, the name of a part has a number that is taken from the clock, and is higher than
that of every earlier part.

Which checkpoint is committed, and which cuts are kept, is decided by the coordinator; which entries are in a cut, by
the shard.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, TypeAlias, TypeVar

from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.ddict.manager.index import (
    IndexEntry,
    decode_index,
    encode_index,
    encode_lines,
    join_object,
    segment_of,
    split_object,
)
from ml_flashpoint.ddict.manager.shard import Entry, StoredValue, Value
from ml_flashpoint.ddict.manager.share import CutTable, part_of
from ml_flashpoint.ddict.manager.store import HeldPart, PartStore, ValueSlots, part_id, value_id_of
from ml_flashpoint.ddict.options import Configuration, next_number
from ml_flashpoint.ddict.wire.requests import DropCopies, Hello, Request, SealedPart
from ml_flashpoint.format.digest import digest_blocks
from ml_flashpoint.format.errors import (
    DamagedError,
    DeadlineError,
    FlashpointError,
    InvalidArgumentError,
    ManifestError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.knobs import block_bytes, transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, encode
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.slot import PAGE, Slot
from ml_flashpoint.net.channel import TransferCancelledError
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.transfers import Address, BlockChecker, PartName, PeerConnection, TransferService, push_to_all

_log = logging.getLogger(__name__)

AskPeer: TypeAlias = Callable[[int, Request], Fields]
"""``(manager, request)``: the answer of another manager. Has a deadline of its own; raises `FlashpointError`."""

_MAX_CONNECT_S = 10.0
_AT_ONCE = 8  # parts that are verified, or fetched, at a time
_Key = TypeVar("_Key")
_Found = TypeVar("_Found")


class Home(NamedTuple):
    """The process of a manager that has copies, or is to have them: where it takes them, and which one it is."""

    address: Address
    incarnation: str


@dataclass
class _Link:
    """The way to a holder, and the parts that it has acknowledged."""

    home: Home
    peer: PeerConnection
    acknowledged: set[SaveId] = field(default_factory=set)


class Cuts:
    """See the module. Thread-safe; seals come one after the other. Where a manager holds anything of another, or is
    held, it serves peers from construction on: takes in their copies, and gives them theirs back.

    Args:
        store, values, table: of this manager. Parts of values stay while anything refers to those.
        ask: see `AskPeer`.
        host: address to serve peers on, and the one told to them.

    Attributes:
        holders, held: managers that are to have copies of all this, the best ones first; managers that this one holds
            copies of.
        address: for peers to connect to; None if it serves none.
    """

    def __init__(
        self,
        store: PartStore,
        values: ValueSlots,
        table: CutTable,
        configuration: Configuration,
        ask: AskPeer,
        host: str,
    ) -> None:
        self._store, self._values, self._table, self._ask = store, values, table, ask
        self._manager = store.number
        self._nodes = [f"node-{node}" for node in configuration.options.nodes]
        self._secret = configuration.secret
        self.holders = tuple(configuration.holders[self._manager])
        self.held = tuple(owner for owner, its in enumerate(configuration.holders) if self._manager in its)
        # Taken in this order. Network is only waited for with the first. Parts are made and dropped with the second.
        self._sealing, self._building = threading.Lock(), threading.Lock()
        self._links: dict[int, _Link] = {}  # changed with the first
        self._newest = self._newest_number()
        self._closed = threading.Event()
        self._service: TransferService | None = None
        if self.holders or self.held:
            self._service = TransferService(self._secret, self, host=host, deadline_s=transfer_deadline_s())
        self.address = None if self._service is None else self._service.address

    def close(self) -> None:
        """Break off what is under way and stop serving. Idempotent. The store and its parts stay."""
        self._closed.set()
        for link in list(self._links.values()):
            link.peer.close()
        if self._service is not None:
            self._service.close()

    # ---- peers: see `TransferBackend` ---------------------------------------------------------------------

    @contextlib.contextmanager
    def open_part(self, part: PartName) -> Iterator[memoryview]:
        """See `TransferBackend`."""
        with self._store.reading(*part) as found:
            yield found.data

    def read_manifest(self, part: PartName) -> bytes:
        """See `TransferBackend`."""
        with self._store.reading(*part) as found:
            return encode(found.manifest)

    @contextlib.contextmanager
    def receive(self, manifest: Manifest, rider: Fields) -> Iterator[memoryview | None]:
        """See `TransferBackend`."""
        if manifest.rank not in self.held or not self._is_part(manifest):
            raise ProtocolError("this manager holds no copies of that one, or this is no part", rank=manifest.rank)
        held = self._store.find(manifest.save, manifest.rank)
        if held is not None and held.manifest == manifest:
            yield None
            return
        with self._store.receiving(manifest) as buffer:
            yield buffer

    def _is_part(self, manifest: Manifest) -> bool:
        """A part of this dictionary fills a slot."""
        return manifest.world_size == len(self._nodes) and manifest.record.file_size % PAGE == 0

    # ---- parts --------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Drop the parts that nothing needs since a sealed cut was let go; here and at the holders."""
        if not self._table.is_less:
            return
        with self._building:
            self._table.is_less = False
            needed, mine = self._table.needed() | self._values.needed_parts(), self._store.parts_of(self._manager)
            self._store.drop([part for part in mine if part.save not in needed])
            keep = tuple(part.save.text for part in mine if part.save in needed)
            before = self._next_number()  # no holder will drop for this message what is sealed from now on
        for holder in self.holders:
            try:
                self._ask(holder, DropCopies(self._manager, keep, before))
            except FlashpointError as error:
                self._table.is_less = True
                _log.warning("a holder keeps copies that are not needed until it can be told: %s", error)

    def drop_copies(self, told: DropCopies) -> None:
        """Drop, as a holder, what this manager has of another one, except what that still needs."""
        if told.of not in self.held:
            raise InvalidArgumentError("nothing is held of this one", argument="of", value=told.of)
        held, kept = self._store.parts_of(told.of), set(told.keep)
        self._store.drop([part for part in held if part.save.text not in kept and part.save.run < told.before])

    # ---- sealing ------------------------------------------------------------------------------------------

    def seal(self, number: int, deadline: float) -> SaveId:
        """Have a verified snapshot of a cut, here and at every holder; return its part."""
        with self._turn(deadline):
            with self._building, collection_paused():
                part = self._build(number, deadline)
            self._push(deadline)
        return part

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """Wait until no other seal is under way."""
        if not self._sealing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineError("another seal is still under way", rank=self._manager)
        try:
            yield
        finally:
            self._sealing.release()

    def _build(self, number: int, deadline: float) -> SaveId:
        """Commit a snapshot, and before it every large value that is no part yet."""
        cut, before = self._table.find(number), self._table.newest_sealed(below=number)
        if cut.part is None and before is not None and before.entries == cut.entries:
            cut.part, cut.needs, cut.lines, before.lines = before.part, before.needs, before.lines, []
        if cut.part is None:
            for entry in cut.entries:
                if isinstance(entry.value, StoredValue) and entry.value.part is None:
                    self._check_time(deadline)
                    ref = SaveId(self._next_number(), number)
                    self._commit(ref, entry.value.slot, entry.value.size)
                    entry.value.part = ref  # its slot is the store's to free
            self._check_time(deadline)
            known = ((), ()) if before is None else (before.entries, before.lines)
            lines = encode_lines(cut.entries, part_of, *known)
            cut.seal(self._write(number, lines, segment_of(cut.entries)))
            cut.lines = lines
            if before is not None:
                before.lines = []
        assert cut.part is not None
        return cut.part

    def _check_time(self, deadline: float) -> None:
        if self._closed.is_set():
            raise ReplicationError("the snapshots were closed", rank=self._manager)
        if time.monotonic() > deadline:
            raise DeadlineError("not sealed in time", rank=self._manager)

    def _write(self, number: int, lines: Sequence[bytes], segment: Sequence[bytes]) -> SaveId:
        own = SaveId(self._next_number(), number)
        data = join_object(encode_index(own, self._manager, len(self._nodes), lines), segment)
        slot = self._store.take(len(data))
        try:
            slot.buffer[: len(data)] = data
            self._commit(own, slot, len(data))
        except BaseException:
            self._store.free(slot)
            raise
        return own

    def _commit(self, ref: SaveId, slot: Slot, size: int) -> None:
        block = block_bytes()
        with slot.buffer[:size] as view:
            digests = digest_blocks(view, block_size=block)
        record = ObjectRecord(size, slot.size, digests, block)
        manifest = Manifest(ref, self._manager, len(self._nodes), self._nodes[self._manager], record)
        self._store.commit(slot, manifest)

    def _next_number(self) -> int:
        self._newest = next_number(self._newest)
        return self._newest

    def _newest_number(self) -> int:
        return max((part.save.run for part in self._store.parts_of(self._manager)), default=0)

    # ---- copies -------------------------------------------------------------------------------------------

    def replicate(self, deadline_s: float) -> None:
        """Push what holders lack of the snapshots here: after one came back without its copies."""
        deadline = time.monotonic() + deadline_s
        with self._turn(deadline):
            self._push(deadline)

    def _push(self, deadline: float) -> None:
        """Have every holder have every part. The newest snapshot must be whole; of others, what is damaged is left."""
        newest = self._table.newest_sealed()
        needed = frozenset[SaveId]() if newest is None else newest.needs
        parts = sorted(self._table.needed())  # by age: what a snapshot refers to was sealed before it
        push_to_all(self.holders, lambda holder: self._push_to(holder, parts, needed, deadline))

    def _push_to(self, holder: int, parts: list[SaveId], needed: Collection[SaveId], deadline: float) -> None:
        def is_over() -> bool:
            return self._closed.is_set() or time.monotonic() > deadline

        try:
            link = self._link(holder, deadline)
            link.acknowledged.intersection_update(parts)  # others are not asked for again
            for ref in parts:
                if ref not in link.acknowledged:
                    try:
                        with self._store.reading(ref, self._manager) as part:
                            link.peer.push(part.manifest, part.data, cancelled=is_over)
                        link.acknowledged.add(ref)
                    except (DamagedError, ObjectNotFoundError) as error:
                        if ref in needed:
                            raise
                        _log.warning("a part of an earlier snapshot cannot be copied: %s", error)
        except BaseException as error:
            if (broken := self._links.pop(holder, None)) is not None:
                broken.peer.close()
            if isinstance(error, TransferCancelledError) and not self._closed.is_set():
                raise DeadlineError("a copy was not verified in time", node=self._nodes[holder]) from error
            raise

    def _link(self, holder: int, deadline: float) -> _Link:
        """Return the way to a holder: another one if there is another process by now, which may have no copies."""
        home, link = self._find(holder), self._links.get(holder)
        if link is None or link.home != home:
            if link is not None:
                link.peer.close()
            link = self._links[holder] = _Link(home, self._connect(holder, home, deadline - time.monotonic()))
        return link

    def _find(self, manager: int) -> Home:
        """Return where the service of a manager listens. Raises `FlashpointError`: it is not there."""
        told = self._ask(manager, Hello())
        if told["transfers"] is None:
            raise ReplicationError("this manager takes no copies yet", rank=manager, node=self._nodes[manager])
        host, port = told["transfers"]
        return Home((str(host), int(port)), str(told["incarnation"]))

    def _connect(self, manager: int, home: Home, within_s: float = _MAX_CONNECT_S) -> PeerConnection:
        node, timeout_s = self._nodes[manager], min(_MAX_CONNECT_S, max(within_s, 0.001))
        deadline_s = transfer_deadline_s()
        return PeerConnection(home.address, self._secret, node=node, deadline_s=deadline_s, connect_timeout_s=timeout_s)

    def copied_to(self) -> list[int]:
        """Return those of `holders` that are known to have verified copies of every snapshot here."""
        needed = self._table.needed()
        return [number for number, link in list(self._links.items()) if link.acknowledged >= needed]

    # ---- recovery -----------------------------------------------------------------------------------------

    def recover(self, sealed: Iterable[SealedPart]) -> dict[int, FlashpointError]:
        """Have the cuts of sealed snapshots that are not here, each that can be had whole: every byte was verified, and
        is in the own store. Return why others cannot, by their checkpoints."""
        failures: dict[int, FlashpointError] = {}
        missing = [part for part in sealed if self._table.get(part.cut) is None]
        with self._building, collection_paused(), ThreadPoolExecutor(_AT_ONCE) as pool:
            recovery = _Recovery(self, pool)
            for part in sorted(missing, key=lambda each: each.cut, reverse=True):
                try:
                    ref = part_id(part.run, part.step)
                    entries = _once(recovery.entries, ref, recovery.read)
                    self._table.add(part.cut, part.checkpoint_id, entries).seal(ref)
                except TransferCancelledError:
                    raise
                except FlashpointError as error:
                    _log.warning("manager %d: checkpoint %d is lost: %s", self._manager, part.checkpoint_id, error)
                    failures[part.checkpoint_id] = error
            self._newest = max(self._newest, self._newest_number())
        return failures

    def fetch(self, ref: SaveId, holder: int, home: Home) -> HeldPart:
        """Fetch a part of this manager from a holder into the own store."""
        name = PartName(ref, self._manager)
        with self._connect(holder, home) as peer:
            manifest = peer.read_manifest(name)
            if not self._is_part(manifest):
                raise ManifestError("a holder gave the manifest of another part", node=self._nodes[holder])
            with (
                self._store.receiving(manifest) as buffer,
                BlockChecker(manifest.record, buffer, str(name)) as blocks,
            ):
                peer.fetch(name, blocks, cancelled=self._closed.is_set)
        part = self._store.find(ref, self._manager)
        assert part is not None  # it was committed
        return part


class _Recovery:
    """A recovery of snapshots that share parts: each part is verified, or fetched from a holder, once."""

    def __init__(self, its: Cuts, pool: ThreadPoolExecutor) -> None:
        self._its, self._pool, self._looking = its, pool, threading.Lock()
        self._homes: dict[tuple[int, bool], Home | FlashpointError] = {}
        self._parts: dict[SaveId, HeldPart | FlashpointError] = {}
        self.entries: dict[SaveId, list[Entry] | FlashpointError] = {}

    def read(self, ref: SaveId) -> list[Entry]:
        """Read a snapshot."""
        its, part = self._its, self._part(ref)
        path = f"{ref.version}/{part.manifest.object_name}"
        index, segment = split_object(part.data, path)
        told = decode_index(index, ref, its._manager, len(its._nodes), path)
        list(self._pool.map(self._part, {each.part for each in told if each.part is not None}))
        return [each.entry(self._value(each, segment)) for each in told]

    def _value(self, told: IndexEntry, segment: memoryview) -> Value:
        if told.part is None:
            return told.inline_value(segment)
        part = self._part(told.part)
        if told.length != part.record.size:
            raise DamagedError("this part is not the value", rank=self._its._manager, path=told.part.text)
        value = StoredValue(value_id_of(part.data), part.slot, told.length, part=told.part)
        return self._its._values.hold(value)

    def _part(self, ref: SaveId) -> HeldPart:
        return _once(self._parts, ref, self._have)  # no two threads ask for the same one

    def _have(self, ref: SaveId) -> HeldPart:
        its, failures = self._its, list[FlashpointError]()
        if (part := its._store.find(ref, its._manager)) is not None:
            try:
                part.record.check(part.data, path=f"{ref.version}/{part.manifest.object_name}")
                return part
            except DamagedError as error:
                _log.warning("manager %d: asking holders, because a part here is damaged: %s", its._manager, error)
        for again, holder in product((False, True), its.holders):  # one may just have come back
            try:
                with self._looking:  # once for all parts, and once again: one that is away takes its time
                    home = _once(self._homes, (holder, again), lambda asked: its._find(asked[0]))
                return its.fetch(ref, holder, home)
            except TransferCancelledError:
                raise
            except FlashpointError as error:
                _log.warning("manager %d: manager %d gives no %s: %s", its._manager, holder, ref, error)
                failures.append(error)
        raise next(iter(failures), ObjectNotFoundError("nobody holds a copy", step=ref.step, rank=its._manager))


def _once(known: dict[_Key, _Found | FlashpointError], key: _Key, find: Callable[[_Key], _Found]) -> _Found:
    """Return what was found for a key, or raise why it could not be, now or before."""
    if key not in known:
        try:
            known[key] = find(key)
        except TransferCancelledError:
            raise
        except FlashpointError as error:
            known[key] = error
    found = known[key]
    if isinstance(found, FlashpointError):
        raise found
    return found
