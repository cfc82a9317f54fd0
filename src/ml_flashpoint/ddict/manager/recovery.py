"""Reading back the snapshots of a manager.

Owns the verification of every byte that a recovered snapshot consists of: from the own store, and what is missing or
damaged there from the holders. Which are wanted is known, as the coordinator names each by its part. What is in a part
is `index`'s; making, keeping, copying and dropping them, `snapshots`'.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

from ml_flashpoint.ddict.manager.copies import Copies, Holder
from ml_flashpoint.ddict.manager.index import (
    INLINE,
    STORED,
    BuiltSnapshot,
    Index,
    IndexEntry,
    decode_index,
    fold,
    index_bytes,
    parts_of,
    split_object,
)
from ml_flashpoint.ddict.manager.part_ref import PartRef, is_part
from ml_flashpoint.ddict.manager.shard import Entry, StoredValue, Value
from ml_flashpoint.ddict.manager.slots import ValueSlots, value_id_of
from ml_flashpoint.ddict.manager.store import HeldPart, PartStore
from ml_flashpoint.format.digest import verify_blocks
from ml_flashpoint.format.errors import DamagedError, FlashpointError, ManifestError, ObjectNotFoundError
from ml_flashpoint.net.channel import TransferCancelledError
from ml_flashpoint.net.transfers import BlockChecker, PartName

_log = logging.getLogger(__name__)
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
    _parts: dict[PartRef, HeldPart | FlashpointError] = field(default_factory=dict)
    # Each with the segment beside it.
    _indices: dict[PartRef, tuple[Index, memoryview]] = field(default_factory=dict)
    _known: dict[IndexEntry, Entry] = field(default_factory=dict)

    @property
    def _rank(self) -> int:
        return self._store.number

    def recover(self, snapshots: Iterable[PartRef]) -> None:
        """Every snapshot of these that can be had whole. Raises `TransferCancelledError`: `cancelled` returned true."""
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

    def _recover_one(self, ref: PartRef, pool: ThreadPoolExecutor) -> None:
        def bring(parts: Collection[PartRef]) -> None:
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

    def _index(self, ref: PartRef) -> tuple[Index, memoryview]:
        if ref not in self._indices:
            part = self._part(ref)
            path = f"{ref.save.version}/{part.record.name}"
            data, segment = split_object(part.data, part.record.file_size, path)
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
            raise DamagedError("this part is not the value", rank=self._rank, path=told.part.name)
        value_id = value_id_of(part.data, part.record.file_size)
        return self._values.hold(StoredValue(value_id, part.slot, told.length, part=told.part))

    # ---- parts --------------------------------------------------------------------------------------------

    def _part(self, ref: PartRef) -> HeldPart:
        """A part of this manager, verified; fetched if need be. No two threads ask for the same one."""
        return _once(self._parts, ref, lambda: self._own(ref) or self._fetch(ref))

    def _own(self, ref: PartRef) -> HeldPart | None:
        part = self._store.find(ref.save, self._rank)
        if part is None:
            return None
        record, path = part.record, f"{ref.save.version}/{part.record.name}"
        try:
            verify_blocks(part.data, record.digests, record.block_size, path=path)
        except DamagedError as error:
            _log.warning("manager %d: asking holders, because a part here is damaged: %s", self._rank, error)
            return None
        return part

    def _fetch(self, ref: PartRef) -> HeldPart:
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
        """Where a holder is. Looked up once, and once ``again``, for all parts: one that is away takes its time."""
        with self._looking:
            return _once(self._found, (number, again), lambda: self._copies.find(number))

    def _fetch_from(self, holder: Holder, ref: PartRef) -> HeldPart:
        name = PartName(ref.save, self._rank)
        with self._copies.connect(holder) as peer:
            manifest = peer.read_manifest(name)
            if manifest.world_size != len(self._copies.nodes) or not is_part(manifest):
                raise ManifestError("a holder gave the manifest of another part", node=holder.node)
            with (
                self._store.receiving(manifest) as buffer,
                BlockChecker(manifest.objects[0], buffer, str(name)) as blocks,
            ):
                peer.fetch(name, blocks, cancelled=self._cancelled)
        part = self._store.find(ref.save, self._rank)
        assert part is not None  # it was committed
        return part


def _once(known: dict[_Key, _Found | FlashpointError], key: _Key, find: Callable[[], _Found]) -> _Found:
    """What was found for a key, or why it could not be, now or before."""
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
