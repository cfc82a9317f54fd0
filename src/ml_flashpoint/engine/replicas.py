"""Agreement of ranks on who writes what of the state that several of them have alike, by entries in the job's store.

Each rank publishes an entry: digests of its replicated items and of its whole plan, and the save that it has come to.
The lowest rank of each kind publishes its list of items once. What each rank writes follows from the entries of all
ranks (`state.replicas`), and so does the name of the table: ranks that write by tables of one name leave nothing out,
and write nothing twice. A save that ranks have written by different tables is not verified (`rounds`)::

    table/changes          number of structures published so far, so that a look shows if there is a new one
    table/entry/<rank>     [kind, digest of the plan, run, step]
    table/list/<kind>      items of a kind: [[name, bytes], ...]
    table/share/<table>/<rank>   what a rank publishes of what it writes by a table

A rank whose structure has changed waits until all entries are of its save or a later one. Other ranks publish theirs on
the board's thread, publish what they write by the new table, and go on to it with their next save, without waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from ml_flashpoint import events
from ml_flashpoint.engine.store import JobStore, SignedStore
from ml_flashpoint.format.errors import DeadlineError, FlashpointError, SaveError, UnreadableError
from ml_flashpoint.format.knobs import late_s
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.state.replicas import Replica, written_by
from ml_flashpoint.stores.bounded import in_background, result_of

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_PIECE = 4 << 20
"""Bytes of a value: a `TCPStore` takes less than 8 MiB."""
_LARGE_KEPT = 8
_SILENT_S, _ANSWER_S = 5.0, 1.0


@dataclass(frozen=True, slots=True)
class Table:
    """The part of the replicated state that each rank writes, for one structure of all ranks' states.

    Attributes:
        name: the same on all ranks that have the same table.
        written: names of the replicated items that this rank writes.
    """

    name: str
    written: frozenset[str]


_Structure: TypeAlias = tuple[str, str]
"""The structure of one rank's state: digests of its replicated items (its kind), and of everything."""
_UNKNOWN = ("", "")
"""Stands for that of a rank that could not read its state."""


class _NotYetError(UnreadableError):
    """The ranks have not agreed yet. ``missing`` are those that have not come to the save."""

    missing: tuple[int, ...] = ()


class Replicas:
    """One rank's view of what ranks have alike. Thread-safe. ``emit`` is `events.emit`, bound to a rank and base."""

    def __init__(
        self, rank: int, ranks: int, store: JobStore, emit: Callable[..., None] = lambda kind, step, **fields: None
    ) -> None:
        self._rank, self._ranks, self._store, self._emit = rank, ranks, store, emit
        self._calls = threading.Lock()  # of the client: its calls are short
        self._client: SignedStore | None = None
        self._has_failed = False
        self._large: dict[str, int] = {}  # keys of this rank's large values, and their pieces
        self._published: tuple[_Structure, SaveId] | None = None
        self._changes = -1  # the number of structures that were published when all were read last
        self._lock = threading.Lock()  # of what follows; never held in a call of the store
        self._own: _Structure | None = None
        self._items: Sequence[Replica] = ()
        self._share: Callable[[Table], bytes] | None = None  # of what is saved now
        self._seen = SaveId(0, 0)  # the newest save that this rank has come to
        self._table: Table | None = None
        self._agreed: list[_Structure] = []  # structures that the table is for
        self._given_up: _Structure | None = None

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
        """Return the table that this rank writes a save by. Waits only where this rank's structure has changed, and
        where that was in vain, saves of this structure fail without waiting until the ranks have agreed. Names the
        ranks that have not come after ``FLASHPOINT_LATE_S``, and again less and less often.

        Args:
            kind: digest of the replicated ``items``, the same on ranks that have the same.
            plan: digest of all that this rank has.
            share: returns what `publish` is given for a table. Where other ranks have changed, and this one has not,
                they need it before this rank saves again.

        Raises:
            DeadlineError: a rank has not published what it has. Names the lowest such rank.
            SaveError: a rank has nothing to publish; see `pass_over`.
        """
        own = (kind, plan)
        with self._lock:
            self._seen, self._share = save, share
            if own != self._own:
                self._own, self._items, self._table = own, items(), None
            if self._table is not None:
                return self._table
        deadline_s = 0.0 if own == self._given_up else deadline_s
        poll = partial(_polled, lambda: self._adopt(save), deadline_s, partial(self._report_missing, save))
        try:
            # While rank 0 is stopped, a call of the store does not return: torch's client has no deadlines.
            table = result_of(in_background(poll, "flashpoint-agree"), deadline_s + _ANSWER_S)
        except (UnreadableError, DeadlineError) as error:
            self._given_up = own
            raise DeadlineError(
                f"ranks have not agreed on who writes what: {error.message}",
                step=save.step,
                rank=self._rank,
                hint="have all ranks save at the same steps",
            ) from error
        self._given_up = None
        return table

    def _report_missing(self, save: SaveId, ranks: Sequence[int], seconds: float) -> None:
        text = "step %d is not saved: its state is of a new structure, and for %.0f s, nothing was heard of rank %s"
        _log.warning(text, save.step, seconds, events.named(ranks))
        self._emit(events.RanksMissing, save.step, ranks=tuple(ranks), seconds=seconds)

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

    def answer(self) -> None:
        """Publish this rank's entry, and adopt what others have published. On the board's thread. Does not wait.
        Raise a `FlashpointError` if the job's store failed."""
        if self._own is None:
            return
        with self._using() as store:
            self._publish_entry(store)
            changes = store.plain.add("changes", 0)
        if changes == self._changes:
            return
        try:
            table = self._adopt(None)
        except (_NotYetError, SaveError):
            return
        self._changes = changes
        with self._lock:
            share = self._share if table is self._table else None
        if share is not None:
            try:
                self.publish(table.name, partial(share, table))
            except (FlashpointError, ValueError) as error:  # this rank's next save fails by that, and says so
                _log.debug("rank %d cannot say what it writes: %s", self._rank, error)

    def publish(self, table: str, share: Callable[[], bytes]) -> None:
        """Publish, once, what this rank writes by a table of this name: what ``share`` returns, for rank 0."""
        key = f"share/{table}/{self._rank}"
        if key not in self._large:
            with self._using() as store:
                self._set_large(store, key, share)

    def collect(self, table: str, deadline_s: float) -> list[bytes]:
        """Wait for what all ranks publish of a table, and return it in rank order. Raise a `DeadlineError`, which names
        the rank, if one has not published in time."""
        until, found = time.monotonic() + deadline_s, list[bytes]()

        def share_of(rank: int) -> bytes:
            with self._using() as store:
                return _get_large(store, f"share/{table}/{rank}", f"rank {rank} has not published what it writes")

        for rank in range(self._ranks):
            try:
                found.append(_polled(partial(share_of, rank), until - time.monotonic()))
            except _NotYetError as error:
                raise DeadlineError(error.message, rank=rank) from error
        return found

    # ---- with the client of the store ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self) -> Iterator[SignedStore]:
        """Yield this object's client of the store, and make another one after it has failed."""
        # A call of the other thread may take as long as rank 0 is stopped: torch's client has no deadlines.
        if not self._calls.acquire(timeout=_SILENT_S):
            raise UnreadableError(f"the job's store has not answered for {_SILENT_S:.0f} s", rank=self._rank)
        try:
            if self._client is None:
                client = self._store.connect("table")
                if self._has_failed:  # the count may be no number: it begins anew, at one that it has not had
                    client.plain.delete_key("changes")
                    client.plain.add("changes", secrets.randbits(48))
                self._client, self._has_failed = client, False
            yield self._client
        except RuntimeError as error:  # of torch's store, when it is gone
            self._client, self._has_failed = None, True
            raise UnreadableError(f"the job's store failed: {error}", rank=self._rank) from error
        finally:
            self._calls.release()

    def _publish_entry(self, store: SignedStore) -> None:
        with self._lock:
            own, seen = self._own, self._seen
        if own is None or self._published == (own, seen):
            return
        store.set(f"entry/{self._rank}", json.dumps([*own, *seen]))
        if self._published is None or self._published[0] != own:
            store.plain.add("changes", 1)
        self._published = own, seen

    def _adopt(self, save: SaveId | None) -> Table:
        """Return the table for the entries of all ranks, by which this rank writes from now on. Raises as `agree`."""
        with self._using() as store:
            self._publish_entry(store)
            keys = [f"entry/{rank}" for rank in range(self._ranks)]
            blobs = store.multi_get(keys) if store.plain.check(keys) else [store.get(key) for key in keys]
            entries = {rank: json.loads(blob) for rank, blob in enumerate(blobs) if blob}
            behind = {rank: entry for rank, entry in entries.items() if save is not None and tuple(entry[2:]) < save}
            if missing := [rank for rank in range(self._ranks) if rank in behind or rank not in entries]:
                told = f"come to step {behind[missing[0]][3]}" if missing[0] in behind else "not saved"
                error = _NotYetError(f"rank {missing[0]} has {told}")
                error.missing = tuple(missing)
                raise error
            structures = [(kind, plan) for kind, plan, *_ in entries.values()]
            if _UNKNOWN in structures:
                rank = structures.index(_UNKNOWN)
                raise SaveError("a rank could not read its state; its log says why", step=save and save.step, rank=rank)
            with self._lock:
                own, items = self._own, self._items
                if self._table is not None and self._agreed == structures:
                    return self._table
            if own is None or structures[self._rank] != own:
                raise _NotYetError("the entry of this rank is on its way")
            kinds = [kind for kind, _ in structures]
            lists = self._lists(store, kinds, items)
        name = hashlib.blake2b(json.dumps(structures).encode(), digest_size=16).hexdigest()
        table = Table(name, written_by(self._rank, kinds, lists))
        with self._lock:
            if own != self._own:
                raise _NotYetError("the structure has changed once more")
            self._table, self._agreed = table, structures
        return table

    def _lists(
        self, store: SignedStore, kinds: Sequence[str], items: Sequence[Replica]
    ) -> dict[str, Sequence[Replica]]:
        """Return the items of each kind, and publish those of this rank if it is the lowest one of its kind."""
        own = kinds[self._rank]
        if kinds.index(own) == self._rank and kinds.count(own) < self._ranks:
            self._set_large(store, f"list/{own}", lambda: json.dumps(items, separators=(",", ":")).encode())
        lists: dict[str, Sequence[Replica]] = {own: items}
        for rank, kind in enumerate(kinds):
            if kind not in lists:
                blob = _get_large(store, f"list/{kind}", f"rank {rank} has not published its items")
                lists[kind] = [Replica(name, nbytes) for name, nbytes in json.loads(blob)]
        return lists

    def _set_large(self, store: SignedStore, key: str, data: Callable[[], bytes]) -> None:
        """Write a large value, once. Of those of this rank, only the few that were used last stay in the store."""
        if key in self._large:
            self._large[key] = self._large.pop(key)
            return
        packed = zlib.compress(data(), 1)
        begins = range(0, len(packed), _PIECE)
        for number, begin in enumerate(begins):
            store.set(f"{key}/{number}", packed[begin : begin + _PIECE])
        store.set(key, str(len(begins)))
        self._large[key] = len(begins)
        if len(self._large) > _LARGE_KEPT:
            old = next(iter(self._large))
            for each in (old, *(f"{old}/{number}" for number in range(self._large.pop(old)))):
                store.plain.delete_key(each)


def _get_large(store: SignedStore, key: str, if_none: str) -> bytes:
    """Return a large value. Raise a `_NotYetError` with a text if there is none."""
    pieces = [store.get(f"{key}/{number}") for number in range(int(store.get(key) or 0))]
    if not pieces or b"" in pieces:
        raise _NotYetError(if_none)
    return zlib.decompress(b"".join(pieces))


def _polled(
    call: Callable[[], _T],
    deadline_s: float,
    report_missing: Callable[[Sequence[int], float], None] = lambda ranks, seconds: None,
) -> _T:
    """Return the result of a call once it raises no `UnreadableError` any more, or raise that at the deadline."""
    began, pause_s, silence_s = time.monotonic(), _FIRST_PAUSE_S, late_s()
    while True:
        try:
            return call()
        except UnreadableError as error:
            waited_s = time.monotonic() - began
            if waited_s >= deadline_s:
                raise
            if waited_s >= silence_s and isinstance(error, _NotYetError) and error.missing:
                report_missing(error.missing, silence_s)
                silence_s *= 2
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
