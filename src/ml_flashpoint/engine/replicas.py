"""Agreement of ranks on who writes what of the state that several of them have alike, by entries in the job's store.

A rank publishes an entry when the structure of its state changes: digests of its replicated items and of its whole
plan, and the save that it has looked at. The lowest rank of each kind publishes its list of items once. What each rank
writes follows from the entries of all ranks (`state.replicas`), and so does the name of the table: ranks that write by
tables of one name leave nothing out, and write nothing twice. A save that ranks have written by different tables is not
verified (`rounds`)::

    table/changes          number of entries published so far, so that a look shows if there is a new one
    table/asked            newest save for which a rank waits
    table/entry/<rank>     [kind, digest of the plan, run, step]
    table/list/<kind>      items of a kind: [[name, bytes], ...]
    table/share/<table>/<rank>   what a rank publishes of what it writes by a table

The rank whose structure has changed waits until all entries are of its save or a later one. Other ranks renew theirs on
the board's thread, publish what they write by the new table, and go on to it with their next save, without waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ml_flashpoint.engine.store import JobStore, SignedStore
from ml_flashpoint.format.errors import DeadlineError, FlashpointError, ProtocolError, SaveError, UnreadableError
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.state.replicas import Replica, written_by

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_PIECE = 4 << 20
"""Bytes of a value: a `TCPStore` takes less than 8 MiB."""
_MOST_BYTES = 1 << 30
_TABLES_KEPT = 4
_NEVER = SaveId(0, -1)
_SILENT_S = 5.0


@dataclass(frozen=True, slots=True)
class Table:
    """The part of the replicated state that each rank writes, for one structure of all ranks' states.

    Attributes:
        name: the same on all ranks that have the same table.
        written: names of the replicated items that this rank writes.
    """

    name: str
    written: frozenset[str]


class _Structure(NamedTuple):
    """The structure of one rank's state: digests of its replicated items, and of everything."""

    kind: str
    plan: str


_UNKNOWN = _Structure("", "")
"""Stands for that of a rank that could not read its state."""


class Replicas:
    """One rank's view of what ranks have alike. Thread-safe.

    Args:
        rank, ranks: this rank, and how many there are.
        store: the job's store.
    """

    def __init__(self, rank: int, ranks: int, store: JobStore) -> None:
        self._rank, self._ranks, self._store = rank, ranks, store
        self._client: SignedStore | None = None
        self._has_failed = False
        self._calls = threading.Lock()  # one thread at a time uses the client: its calls are short
        self._lock = threading.Lock()
        self._own: _Structure | None = None
        self._items: Sequence[Replica] = ()
        self._share: Callable[[Table], bytes] | None = None  # of what is saved now
        self._seen = _NEVER  # the newest save whose structure is `_own`
        self._asked = _NEVER  # the newest save that another rank waits for
        self._published: tuple[_Structure, SaveId] | None = None
        self._changes = -1  # the number of entries that were published when all were read last
        self._table: Table | None = None
        self._agreed: list[_Structure] = []  # structures that the table is for
        self._given_up: _Structure | None = None
        self._lists: OrderedDict[str, None] = OrderedDict()
        self._shares: OrderedDict[str, None] = OrderedDict()
        self._shared: str | None = None  # the table of the newest share

    # ---- the training thread -------------------------------------------------------------------------------

    def agree(
        self,
        save: SaveId,
        kind: str,
        plan: str,
        items: Callable[[], Sequence[Replica]],
        deadline_s: float,
        *,
        share: Callable[[Table], bytes] | None = None,
    ) -> Table:
        """Return the table that this rank writes a save by. Waits only where this rank's structure has changed.

        Args:
            save: the save.
            kind: digest of the replicated items, the same on ranks that have the same.
            plan: digest of all that this rank has.
            items: returns the replicated items.
            deadline_s: seconds at most to wait. After that, saves of this structure fail without waiting, until the
                ranks have agreed.
            share: returns what `publish` is given for a table. Where other ranks have changed, and this one has not,
                they need it before this rank saves again.

        Raises:
            DeadlineError: a rank has not published what it has. Names the lowest such rank.
            SaveError: a rank has nothing to publish; see `pass_over`.
        """
        own = _Structure(kind, plan)
        with self._lock:
            self._seen = save
            if own != self._own:
                self._own, self._items, self._table = own, items(), None
            self._share = share
            if self._table is not None:
                return self._table
            until = time.monotonic() + (0.0 if own == self._given_up else deadline_s)
        pause_s, error = _FIRST_PAUSE_S, ""
        while True:
            table = None
            try:
                with self._using() as store:
                    table, error = self._try(store, save)
            except SaveError:
                raise
            except FlashpointError as failure:
                error = str(failure)
            if table is not None:
                self._given_up = None
                return table
            if time.monotonic() >= until:
                self._given_up = own
                raise DeadlineError(
                    f"ranks have not agreed on who writes what: {error}",
                    step=save.step,
                    rank=self._rank,
                    hint="have all ranks save at the same steps",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def pass_over(self, save: SaveId) -> None:
        """Note that this rank has come to a save, and could not read its state: other ranks do not wait for it, if they
        have changed. Does not wait."""
        with self._lock:
            self._seen = save
            if self._own is None:
                self._own = _UNKNOWN

    def forget(self) -> None:
        """Have the next `agree` wait for all ranks. To be called on all of them, after a save that one has failed."""
        with self._lock:
            self._own = self._table = None

    def _try(self, store: SignedStore, save: SaveId) -> tuple[Table | None, str]:
        """Return the table, or None and what it lacks."""
        self._publish_entry(store)
        found, error = self._entries(store)
        if not found:
            return None, error
        behind = [rank for rank, (_, seen) in enumerate(found) if seen < save]
        if not behind:
            for rank, (structure, _) in enumerate(found):
                if structure == _UNKNOWN:
                    raise SaveError("a rank could not read its state; its log says why", step=save.step, rank=rank)
            return self._adopt(store, [each for each, _ in found])
        if _asked(store) < save:
            store.set("asked", json.dumps(save))
            store.add("changes", 1)
        return None, f"rank {behind[0]} has come to step {found[behind[0]][1].step}"

    @contextlib.contextmanager
    def _using(self) -> Iterator[SignedStore]:
        """Yield this object's client of the store, and make another one after it has failed."""
        # A call of the other thread may take as long as rank 0 is stopped: torch's client has no deadlines.
        if not self._calls.acquire(timeout=_SILENT_S):
            raise UnreadableError(f"the job's store has not answered for {_SILENT_S:.0f} s", rank=self._rank)
        with contextlib.ExitStack() as stack:
            stack.callback(self._calls.release)
            try:
                if self._client is None:
                    client = self._store.connect("table")
                    if self._has_failed:
                        client.restart("changes")
                    self._client, self._has_failed = client, False
                yield self._client
            except RuntimeError as error:  # of torch's store, when it is gone
                self._client, self._has_failed = None, True
                raise UnreadableError(f"the job's store failed: {error}", rank=self._rank) from error

    # ---- the board's thread --------------------------------------------------------------------------------

    def answer(self) -> None:
        """Renew this rank's entry if another rank waits for it, and adopt what others have published. Does not wait.

        Raises:
            FlashpointError: the job's store failed.
        """
        with self._lock:
            if self._own is None or self._ranks == 1:
                return
        table: Table | None = None
        with self._using() as store:
            changes = store.add("changes", 0)
            if changes != self._changes:
                self._asked = _asked(store)
                found, _ = self._entries(store)
                table = self._adopt(store, [each for each, _ in found])[0] if found else None
                if table is not None:
                    self._changes = changes
            with self._lock:
                due = self._published is None or self._published[1] < self._asked <= self._seen
            if due:
                self._publish_entry(store)
        with self._lock:
            share = self._share if table is self._table else None
        if table is not None and share is not None:
            try:
                self.publish(table.name, partial(share, table))
            except (FlashpointError, ValueError) as error:  # this rank's next save fails by that, and says so
                _log.debug("rank %d cannot say what it writes: %s", self._rank, error)

    # ---- either thread -------------------------------------------------------------------------------------

    def _publish_entry(self, store: SignedStore) -> None:
        with self._lock:
            own, seen, before = self._own, self._seen, self._published
        if own is None or before == (own, seen):
            return
        store.set(f"entry/{self._rank}", json.dumps([*own, *seen]))
        if before is None or before[0] != own:
            store.add("changes", 1)
        self._published = own, seen

    def _entries(self, store: SignedStore) -> tuple[list[tuple[_Structure, SaveId]], str]:
        """Return all ranks' entries; or none, and why."""
        keys = [f"entry/{rank}" for rank in range(self._ranks)]
        blobs = store.multi_get(keys) if store.check(keys) else [_get(store, key) for key in keys]
        if None in blobs or b"" in blobs:
            return [], f"rank {next(rank for rank, blob in enumerate(blobs) if not blob)} has not saved"
        return [_entry(blob or b"", rank) for rank, blob in enumerate(blobs)], ""

    def _adopt(self, store: SignedStore, structures: list[_Structure]) -> tuple[Table | None, str]:
        """Return the table for these structures, by which this rank writes from now on; or None, and what it lacks."""
        with self._lock:
            own, items = self._own, self._items
            if structures[self._rank] != own:
                return None, "the entry of this rank is on its way"
            if _UNKNOWN in structures:
                return None, f"rank {structures.index(_UNKNOWN)} could not read its state"
            if self._table is not None and self._agreed == structures:
                return self._table, ""
        lists: dict[str, Sequence[Replica]] = {own.kind: items}
        kinds = [kind for kind, _ in structures]
        if kinds.index(own.kind) == self._rank and kinds.count(own.kind) < self._ranks:
            if own.kind not in self._lists:
                _set_large(store, f"list/{own.kind}", json.dumps(items, separators=(",", ":")).encode())
            _keep(store, self._lists, own.kind, "list/{}")
        for rank, kind in enumerate(kinds):
            if kind not in lists:
                blob = _get_large(store, f"list/{kind}")
                if blob is None:
                    return None, f"rank {rank} has not published its items"
                lists[kind] = _replicas(blob, rank)
        written = written_by(self._rank, kinds, lists)
        name = hashlib.blake2b(json.dumps(structures).encode(), digest_size=16).hexdigest()
        with self._lock:
            if structures[self._rank] != self._own:
                return None, "the structure has changed once more"
            self._table, self._agreed = Table(name, written), structures
            return self._table, ""

    # ---- what ranks write by a table -----------------------------------------------------------------------

    def publish(self, table: str, share: Callable[[], bytes]) -> None:
        """Publish what this rank writes by a table, once.

        Args:
            table: name of the table.
            share: returns the bytes for rank 0.
        """
        with self._lock:
            if table == self._shared:
                return
        with self._using() as store:
            if table not in self._shares:
                _set_large(store, f"share/{table}/{self._rank}", share())
            _keep(store, self._shares, table, f"share/{{}}/{self._rank}")
        with self._lock:
            self._shared = table

    def collect(self, table: str, deadline_s: float) -> list[bytes]:
        """Return what all ranks have published of a table, in rank order. Waits for them.

        Raises:
            DeadlineError: a rank has not. Names it.
        """
        until, pause_s = time.monotonic() + deadline_s, _FIRST_PAUSE_S
        found: list[bytes] = []
        while len(found) < self._ranks:
            with self._using() as store:
                blob = _get_large(store, f"share/{table}/{len(found)}")
            if blob is not None:
                found.append(blob)
                continue
            if time.monotonic() >= until:
                raise DeadlineError("a rank has not published what it writes", rank=len(found))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return found


def _keep(store: SignedStore, known: OrderedDict[str, None], name: str, key: str) -> None:
    """Note that a value is in use, and delete the one unused longest where there are too many."""
    known[name] = None
    known.move_to_end(name)
    if len(known) > _TABLES_KEPT:
        old, _ = known.popitem(last=False)
        _delete_large(store, key.format(old))


# ---- values ------------------------------------------------------------------------------------------------


def _get(store: SignedStore, key: str) -> bytes | None:
    return (store.get(key) or None) if store.check([key]) else None


def _asked(store: SignedStore) -> SaveId:
    blob = _get(store, "asked")
    return _NEVER if blob is None else _save(blob)


def _set_large(store: SignedStore, key: str, data: bytes) -> None:
    packed = zlib.compress(data, 1)
    pieces = [packed[begin : begin + _PIECE] for begin in range(0, len(packed), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, json.dumps([len(pieces), len(data)]))


def _get_large(store: SignedStore, key: str) -> bytes | None:
    head = _get(store, key)
    if head is None:
        return None
    count, size = _parsed(head, 2)
    if not (type(count) is type(size) is int and 0 <= size <= _MOST_BYTES and 0 <= count <= _MOST_BYTES // _PIECE):
        raise ProtocolError(f"the job's store has no size for {key}")
    packed = b"".join(store.get(f"{key}/{number}") for number in range(count))
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(packed, size + 1)
    if len(data) != size:
        raise ProtocolError(f"{key} in the job's store is damaged")
    return data


def _delete_large(store: SignedStore, key: str) -> None:
    head = _get(store, key)
    store.delete_key(key)
    for number in range(_parsed(head, 2)[0] if head else 0):
        store.delete_key(f"{key}/{number}")


def _parsed(blob: bytes, length: int | None = None) -> list[Any]:
    try:
        found = json.loads(blob)
    except ValueError as error:
        raise ProtocolError(f"a value in the job's store is no JSON: {error}") from error
    if not isinstance(found, list) or (length is not None and len(found) != length):
        raise ProtocolError(f"a value in the job's store must be a list of {length}, got {str(found)[:80]}")
    return found


def _entry(blob: bytes, rank: int) -> tuple[_Structure, SaveId]:
    kind, plan, run, step = _parsed(blob, 4)
    if not (isinstance(kind, str) and isinstance(plan, str) and type(run) is int and type(step) is int):
        raise ProtocolError("an entry must be two digests, a run and a step", rank=rank)
    return _Structure(kind, plan), SaveId(run, step)


def _save(blob: bytes) -> SaveId:
    run, step = _parsed(blob, 2)
    if type(run) is not int or type(step) is not int:
        raise ProtocolError("a save must be a run and a step")
    return SaveId(run, step)


def _replicas(blob: bytes, rank: int) -> list[Replica]:
    found = _parsed(blob)
    if not all(
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and type(each[1]) is int
        for each in found
    ):
        raise ProtocolError("items must be pairs of a name and a number of bytes", rank=rank)
    return [Replica(name, nbytes) for name, nbytes in found]
