"""Snapshots of a manager: sealed in its store, copied to the managers that hold copies of it, and recovered.

Owns the life of snapshots (`Snapshots`): what goes into a part, when it is committed, pushed, kept and dropped; the
copies at other managers (`Copies`); and reading back (`Recoverer`). The bytes of a snapshot are `index`'s. Which
checkpoint is committed, and which retires, is decided by the coordinator; which entries are in it, by the shard.

A snapshot is a part of the version ``step-<checkpoint>_ckpt`` in the manager's store, one object with an index of the
entries and the small values written since the snapshot before. Large values are parts of their own, committed the first
time that a snapshot refers to them. So a snapshot of what did not change copies no value, neither here nor to a peer.
The number of a part is taken from the clock, and is higher than that of every part of the manager before it.

It is full after `index.LONGEST_CHAIN` that were not, and when those would take more than twice what a full one does: so
there is never more in their segments that is dead than what lives.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, product
from typing import NamedTuple, TypeAlias, TypeVar

from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.ddict.manager.index import (
    GONE,
    INLINE,
    LONGEST_CHAIN,
    NO_SNAPSHOT,
    STORED,
    BuiltSnapshot,
    Index,
    IndexEntry,
    decode_index,
    encode_index,
    fold,
    gather,
    index_bytes,
    join_object,
    part_of,
    parts_of,
    split_object,
)
from ml_flashpoint.ddict.manager.shard import Entry, StoredValue, Value
from ml_flashpoint.ddict.manager.store import HeldPart, PartStore, ValueSlots, is_part, value_id_of
from ml_flashpoint.ddict.options import check_checkpoint_id, next_number
from ml_flashpoint.ddict.wire.requests import DropCopies, Hello, Request
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
from ml_flashpoint.memory.slot import Slot
from ml_flashpoint.net.channel import ConnectionLostError, TransferCancelledError
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.transfers import Address, BlockChecker, PartName, PeerConnection, TransferService, push_to_all

_log = logging.getLogger(__name__)

AskPeer: TypeAlias = Callable[[int, Request], Fields]
"""``(manager, request)``: the answer of another manager. Has a deadline of its own; raises `FlashpointError`."""

_MAX_CONNECT_S = 10.0


class Holder(NamedTuple):
    """A manager that has copies, or is to have them: its node, and where its service listens."""

    node: str
    address: Address


@dataclass
class _Link:
    """The way to a holder, and the names of the parts that it has acknowledged on its last connection."""

    peer: PeerConnection
    connections: int = 0
    acknowledged: set[SaveId] = field(default_factory=set)


class Copies:
    """The holders of one manager's parts: where they are, and what they have. `push` is for one thread at a time; the
    rest is thread-safe. ``nodes``: of all managers. ``holders``: numbers of managers, in order of preference."""

    def __init__(
        self, store: PartStore, nodes: Sequence[str], holders: Sequence[int], secret: bytes, ask: AskPeer
    ) -> None:
        self.nodes = nodes
        self.holders = holders
        self.ask = ask
        self.pushed_bytes = 0
        self._secret = check_secret(secret)
        self._store = store
        self._links: dict[int, _Link] = {}
        self._closed = False

    def find(self, manager: int) -> Holder:
        """Return where the service of a manager listens. Raises `FlashpointError`: it is not there."""
        node, address = self.nodes[manager], self.ask(manager, Hello())["transfers"]
        if address is None:
            raise ReplicationError("this manager takes no copies yet", rank=manager, node=node)
        return Holder(node, (str(address[0]), int(address[1])))

    def connect(self, holder: Holder, within_s: float = _MAX_CONNECT_S) -> PeerConnection:
        """Return a connection to a service."""
        timeout_s = min(_MAX_CONNECT_S, max(within_s, 0.001))
        deadline_s = transfer_deadline_s()
        return PeerConnection(
            holder.address, self._secret, node=holder.node, deadline_s=deadline_s, connect_timeout_s=timeout_s
        )

    def push(self, parts: Sequence[SaveId], needed: Collection[SaveId], deadline: float) -> None:
        """Have every holder have every part, in this order: what others refer to comes before them."""
        push_to_all(self.holders, lambda holder: self._push_to(holder, list(parts), needed, deadline))

    def _push_to(self, number: int, parts: list[SaveId], needed: Collection[SaveId], deadline: float) -> None:
        def is_over() -> bool:
            return self._closed or time.monotonic() > deadline

        was_there = number in self._links
        while True:
            try:
                if number not in self._links:
                    self._links[number] = _Link(self.connect(self.find(number), deadline - time.monotonic()))
                return self._push_over(self._links[number], parts, needed, is_over)
            except BaseException as error:
                self._drop(number)
                if isinstance(error, TransferCancelledError) and not self._closed:
                    raise DeadlineError("a copy was not verified in time", node=self.nodes[number]) from error
                if not (was_there and isinstance(error, ConnectionLostError)):
                    raise
                was_there = False  # it may have come back elsewhere

    def _push_over(
        self, link: _Link, parts: list[SaveId], needed: Collection[SaveId], is_over: Callable[[], bool]
    ) -> None:
        link.acknowledged.intersection_update(parts)  # others are not asked for again
        while True:
            # It may lead to a process that is gone, and nothing may be left to push that would show it.
            link.peer.ping(cancelled=is_over)
            if link.connections != link.peer.connections:  # there may be another process behind it
                link.connections, link.acknowledged = link.peer.connections, set()
            lacking = [ref for ref in parts if ref not in link.acknowledged]
            if not lacking:
                return
            for ref in lacking:
                try:
                    with self._store.reading(ref, self._store.number) as part:
                        if link.peer.push(part.manifest, part.data, cancelled=is_over):
                            self.pushed_bytes += part.record.size
                    link.acknowledged.add(ref)
                except (DamagedError, ObjectNotFoundError) as error:
                    if ref in needed:
                        raise
                    _log.warning("a part of an earlier snapshot cannot be copied: %s", error)
                    parts.remove(ref)

    def _drop(self, number: int) -> None:
        if (link := self._links.pop(number, None)) is not None:
            link.peer.close()

    def held_by(self, parts: Collection[SaveId]) -> list[int]:
        """Holders that have acknowledged all of these, and have not been found gone since."""
        names = set(parts)
        return [number for number, link in list(self._links.items()) if link.acknowledged >= names]

    def close(self) -> None:
        """Break off a push under way and close the connections. Idempotent."""
        self._closed = True
        for link in list(self._links.values()):
            link.peer.close()


_Key = TypeVar("_Key")
_Found = TypeVar("_Found")

_AT_ONCE = 8  # parts that are verified, or fetched, at a time


@dataclass
class Recoverer:
    """Recovers the snapshots of one manager. For one thread; its store must not change meanwhile.

    Attributes:
        built: each snapshot that could be had whole, by checkpoint. Entries that several share are the same objects.
            Every byte was verified, and is in the own store.
        failures: why others could not.
    """

    _store: PartStore
    _values: ValueSlots
    _copies: Copies
    _cancelled: Callable[[], bool]  # once true, what is under way is broken off
    built: dict[int, BuiltSnapshot] = field(default_factory=dict)
    failures: dict[int, FlashpointError] = field(default_factory=dict)
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _found: dict[tuple[int, bool], Holder | FlashpointError] = field(default_factory=dict)
    _parts: dict[SaveId, HeldPart | FlashpointError] = field(default_factory=dict)
    # Each with the segment beside it.
    _indices: dict[SaveId, tuple[Index, memoryview]] = field(default_factory=dict)
    _known: dict[IndexEntry, Entry] = field(default_factory=dict)

    @property
    def _rank(self) -> int:
        return self._store.number

    def recover(self, snapshots: Iterable[SaveId]) -> None:
        """Recover these snapshots, each that can be had whole."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ddict-recover") as pool:
            for ref in sorted(snapshots, key=lambda ref: ref.step, reverse=True):
                try:
                    self._recover_one(ref, pool)
                except TransferCancelledError:
                    raise
                except FlashpointError as error:
                    _log.warning("manager %d: checkpoint %d is lost: %s", self._rank, ref.step, error)
                    self.failures[ref.step] = error
        for _, segment in self._indices.values():
            segment.release()

    def _recover_one(self, ref: SaveId, pool: ThreadPoolExecutor) -> None:
        def bring(parts: Collection[SaveId]) -> None:
            list(pool.map(self._part, set(parts)))

        chain = [*self._index(ref)[0].chain, ref]
        bring(chain)
        indices = [self._index(each)[0] for each in chain]
        told = fold(indices)
        bring([each.part for each in told if each.kind == STORED])
        entries = frozenset(map(self._entry, told))
        if not indices[-1].entries and len(chain) > 1:
            chain.pop()
        chain_bytes = sum(self._index(each)[1].nbytes for each in chain) + sum(len(each.entries) for each in indices)
        self.built[ref.step] = BuiltSnapshot(
            ref, tuple(chain), entries, parts_of(entries), chain_bytes, index_bytes(entries)
        )

    def _index(self, ref: SaveId) -> tuple[Index, memoryview]:
        if ref not in self._indices:
            part = self._part(ref)
            path = f"{ref.version}/{part.manifest.object_name}"
            data, segment = split_object(part.data, path)
            self._indices[ref] = decode_index(data, ref, self._rank, len(self._copies.nodes), path), segment
        return self._indices[ref]

    def _entry(self, told: IndexEntry) -> Entry:
        if told not in self._known:
            self._known[told] = told.entry(self._value(told))
        return self._known[told]

    def _value(self, told: IndexEntry) -> Value:
        if told.kind == INLINE:
            return told.inline_value(self._index(told.part)[1])
        part = self._part(told.part)
        if told.length != part.record.size:
            raise DamagedError("this part is not the value", rank=self._rank, path=told.part.text)
        value_id = value_id_of(part.data)
        return self._values.hold(StoredValue(value_id, part.slot, told.length, part=told.part))

    # ---- parts --------------------------------------------------------------------------------------------

    def _part(self, ref: SaveId) -> HeldPart:
        """A part of this manager, verified; fetched if need be. No two threads ask for the same one."""
        return _once(self._parts, ref, lambda: self._own(ref) or self._fetch(ref))

    def _own(self, ref: SaveId) -> HeldPart | None:
        part = self._store.find(ref, self._rank)
        if part is None:
            return None
        record, path = part.record, f"{ref.version}/{part.manifest.object_name}"
        try:
            record.check(part.data, path=path)
        except DamagedError as error:
            _log.warning("manager %d: asking holders, because a part here is damaged: %s", self._rank, error)
            return None
        return part

    def _fetch(self, ref: SaveId) -> HeldPart:
        failures: list[FlashpointError] = []
        for again, number in product((False, True), self._copies.holders):  # one may just have come back
            try:
                return self._fetch_from(self._find(number, again), ref)
            except TransferCancelledError:
                raise
            except FlashpointError as error:
                _log.warning("manager %d: manager %d gives no %s: %s", self._rank, number, ref, error)
                failures.append(error)
        raise next(iter(failures), ObjectNotFoundError("nobody holds a copy", step=ref.step, rank=self._rank))

    def _find(self, number: int, again: bool) -> Holder:
        """Look up where a holder is, once for all parts, and once ``again``: one that is away takes its time."""
        with self._looking:
            return _once(self._found, (number, again), lambda: self._copies.find(number))

    def _fetch_from(self, holder: Holder, ref: SaveId) -> HeldPart:
        name = PartName(ref, self._rank)
        with self._copies.connect(holder) as peer:
            manifest = peer.read_manifest(name)
            if manifest.world_size != len(self._copies.nodes) or not is_part(manifest):
                raise ManifestError("a holder gave the manifest of another part", node=holder.node)
            with (
                self._store.receiving(manifest) as buffer,
                BlockChecker(manifest.record, buffer, str(name)) as blocks,
            ):
                peer.fetch(name, blocks, cancelled=self._cancelled)
        part = self._store.find(ref, self._rank)
        assert part is not None  # it was committed
        return part


def _once(known: dict[_Key, _Found | FlashpointError], key: _Key, find: Callable[[], _Found]) -> _Found:
    """Return what was found for a key, or raise why it could not be, now or before."""
    if key not in known:
        try:
            known[key] = find()
        except TransferCancelledError:
            raise
        except FlashpointError as error:
            known[key] = error
    found = known[key]
    if isinstance(found, FlashpointError):
        raise found
    return found


class Snapshots:
    """See the module. Thread-safe; seals come one after the other. Where a manager holds anything of another, it
    serves peers from construction on: takes in their copies, and gives them theirs back, for which they wait.

    Args:
        store: of this manager.
        nodes: node of every manager, by number. Their number is the world size.
        holders: of every manager, those that hold copies of it.
        ask: see `AskPeer`.
        values: of this manager, whose parts stay while they are needed, although no snapshot needs them.
        host: address to serve peers on, and the one told to them.

    Attributes:
        holders, held: managers that are to have copies of all this; managers that this one holds copies of.
        copies: what the holders have."""

    def __init__(
        self,
        store: PartStore,
        *,
        nodes: Sequence[str],
        holders: Sequence[Sequence[int]],
        secret: bytes,
        ask: AskPeer,
        values: ValueSlots,
        host: str = "127.0.0.1",
    ) -> None:
        manager = store.number
        self._store = store
        self._manager = manager
        self._values = values
        self.holders = tuple(holders[manager])
        self.held = tuple(owner for owner, its in enumerate(holders) if manager in its)
        self.copies = Copies(store, nodes, self.holders, secret, ask)
        self._service: TransferService | None = None
        # Taken in this order. Network is only waited for with the first. What changes, does so with the second.
        self._sealing = threading.Lock()
        self._building = threading.Lock()
        self._snapshots: dict[int, BuiltSnapshot] = {}  # ascending; never changed, but replaced
        self._newest = self._newest_number()
        self._closed = threading.Event()
        if self.holders or self.held:
            self._service = TransferService(secret, self, host=host, deadline_s=transfer_deadline_s())

    @property
    def address(self) -> Address | None:
        """The address that peers reach it at; None if it serves none."""
        return None if self._service is None else self._service.address

    def close(self) -> None:
        """Break off what is under way and stop serving. Idempotent. The store and its parts stay."""
        self._closed.set()
        self.copies.close()
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
        rank, save = manifest.rank, manifest.save
        if rank not in self.held or manifest.world_size != len(self.copies.nodes) or not is_part(manifest):
            raise ProtocolError("this manager holds no copies of that one, or this is no part", rank=rank)
        held = self._store.find(save, rank)
        if held is not None and held.manifest == manifest:
            yield None
            return
        with self._store.receiving(manifest) as buffer:
            yield buffer

    # ---- sealing ------------------------------------------------------------------------------------------

    def seal(self, checkpoint_id: int, entries: Sequence[Entry], deadline_s: float) -> SaveId:
        """Have a verified snapshot of this checkpoint, with the entries of all keys that there are, here and at every
        holder; return its part."""
        check_checkpoint_id(checkpoint_id)
        deadline = time.monotonic() + deadline_s
        with self._turn(deadline):
            with self._building, collection_paused():
                built = self._build(checkpoint_id, entries, deadline)
            self._push(deadline)
        return built.ref

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """Wait until no other seal is under way."""
        if not self._sealing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineError("another seal is still under way", rank=self._manager)
        try:
            yield
        finally:
            self._sealing.release()

    def _build(self, checkpoint_id: int, entries: Sequence[Entry], deadline: float) -> BuiltSnapshot:
        """Commit a snapshot, and before it every large value that is no part yet."""
        newest = max(self._snapshots, default=-1)
        before = self._snapshots.get(newest, NO_SNAPSHOT)
        if checkpoint_id < newest:
            why = f"checkpoint {newest} is sealed already"
            raise InvalidArgumentError(why, argument="checkpoint_id", value=checkpoint_id)
        current = frozenset(entries)
        if checkpoint_id == newest and before.entries == current:
            return before

        def check() -> None:
            if self._closed.is_set():
                raise ReplicationError("the snapshots were closed", rank=self._manager)
            if time.monotonic() > deadline:
                raise DeadlineError("not sealed in time", step=checkpoint_id, rank=self._manager)

        lost, fresh = list(before.entries - current), list(current - before.entries)
        for entry in fresh:
            if isinstance(entry.value, StoredValue) and entry.value.part is None:
                check()
                self._seal_value(checkpoint_id, entry.value)
        check()
        new_keys = {entry.key for entry in fresh}
        missing = [entry.key for entry in lost if entry.key not in new_keys]
        stored = (before.stored - parts_of(lost)) | parts_of(fresh)
        changes = index_bytes(fresh) + sum(map(len, missing))
        live_bytes = before.live_bytes + index_bytes(fresh) - index_bytes(lost)
        told, chain_bytes = before.chain, before.chain_bytes + changes
        is_long = len(told) >= LONGEST_CHAIN and changes > 0
        if is_long or chain_bytes >= max(1, 2 * live_bytes) or not self._has_all(told):
            told, fresh, missing, chain_bytes = (), list(entries), [], live_bytes
        own = self._next_ref(checkpoint_id)
        chain = (*told, own) if fresh or missing or not told else told
        self._write(own, told, fresh, missing)
        built = BuiltSnapshot(own, chain, current, stored, chain_bytes, live_bytes)
        self._snapshots = {**self._snapshots, checkpoint_id: built}
        return built

    def _has_all(self, parts: Iterable[SaveId]) -> bool:
        return all(self._store.find(ref, self._manager) is not None for ref in parts)

    def _seal_value(self, checkpoint_id: int, value: StoredValue) -> None:
        ref = self._next_ref(checkpoint_id)
        self._commit(ref, value.slot, value.size)
        value.part = ref  # its slot is the store's to free

    def _write(self, own: SaveId, told: tuple[SaveId, ...], entries: list[Entry], missing: list[bytes]) -> None:
        listed, segment = gather(own, entries, part_of)
        listed += [IndexEntry(key, 0, "", 0, GONE, own, 0, 0) for key in missing]
        index = encode_index(Index(own, self._manager, len(self.copies.nodes), told, listed))
        data = join_object(index, segment)
        slot = self._store.take(len(data))
        try:
            slot.buffer[: len(data)] = data
            self._commit(own, slot, len(data))
        except BaseException:
            self._store.free(slot)
            raise

    def _commit(self, ref: SaveId, slot: Slot, size: int) -> None:
        nodes, manager, block = self.copies.nodes, self._manager, block_bytes()
        with slot.buffer[:size] as view:
            digests = digest_blocks(view, block_size=block)
        record = ObjectRecord(size, slot.size, digests, block)
        self._store.commit(slot, Manifest(ref, manager, len(nodes), nodes[manager], record))

    def _push(self, deadline: float) -> None:
        snapshots = [built.needs for built in self._snapshots.values()]
        # By age: what a holder has without what it refers to, which was sealed before it, is of no use to anyone.
        parts = sorted(set(chain(*snapshots)))
        self.copies.push(parts, snapshots[-1] if snapshots else (), deadline)

    def _next_number(self) -> int:
        self._newest = next_number(self._newest)
        return self._newest

    def _next_ref(self, checkpoint_id: int) -> SaveId:
        return SaveId(self._next_number(), checkpoint_id)

    def replicate(self, deadline_s: float) -> None:
        """Push whatever a holder lacks of the snapshots here, oldest first: after a holder came back without them."""
        deadline = time.monotonic() + deadline_s
        with self._turn(deadline):
            self._push(deadline)

    def sealed(self) -> dict[int, SaveId]:
        """The snapshots in this store, by checkpoint. Not only those whose copies are verified."""
        return {checkpoint_id: built.ref for checkpoint_id, built in self._snapshots.items()}

    def copied_to(self) -> list[int]:
        """Return those of `holders` that are known to have verified copies of every snapshot here."""
        return self.copies.held_by(self._needed())

    def _needed(self) -> set[SaveId]:
        return {ref for built in self._snapshots.values() for ref in built.needs}

    # ---- retention ----------------------------------------------------------------------------------------

    def drop(self, is_dropped: Callable[[int], bool]) -> None:
        """Drop the snapshots of some cuts, and what only those needed; here and at the holders."""
        with self._building:
            self._snapshots = {each: built for each, built in self._snapshots.items() if not is_dropped(each)}
            keep = self._sweep()
            before = self._next_number()  # no holder will drop for this message what is sealed from now on
        for holder in self.holders:
            try:
                self.copies.ask(holder, DropCopies(self._manager, tuple(keep), before))
            except FlashpointError as error:
                _log.warning("a holder keeps copies that are not needed until it can be told: %s", error)

    def _sweep(self) -> list[str]:
        """Drop the parts that nothing needs; returns the names of the others."""
        needed = self._needed() | self._values.needed_parts()
        mine = self._store.parts_of(self._manager)
        self._store.drop([part for part in mine if part.save not in needed])
        return [part.save.text for part in mine if part.save in needed]

    def drop_copies(self, of: int, copies: Collection[str], before: int) -> None:
        """Drop, as a holder, what this manager has of another one, but for the ``copies`` that it still needs."""
        if of not in self.held:
            raise InvalidArgumentError("nothing is held of this one", argument="of", value=of)
        held, kept = self._store.parts_of(of), set(copies)
        self._store.drop([part for part in held if part.save.text not in kept and part.save.run < before])

    # ---- recovery -----------------------------------------------------------------------------------------

    def recover(self, snapshots: Iterable[SaveId]) -> tuple[dict[int, list[Entry]], dict[int, FlashpointError]]:
        """Recover these snapshots, each that can be had whole."""
        with self._building:
            recoverer = Recoverer(self._store, self._values, self.copies, self._closed.is_set)
            with collection_paused():
                recoverer.recover(snapshots)
            self._snapshots = dict(sorted({**self._snapshots, **recoverer.built}.items()))
            self._newest = max(self._newest, self._newest_number())
        return {step: list(built.entries) for step, built in recoverer.built.items()}, recoverer.failures

    def _newest_number(self) -> int:
        """The highest number that a part of this manager is known to have."""
        return max((part.save.run for part in self._store.parts_of(self._manager)), default=0)
