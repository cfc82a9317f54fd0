"""Snapshots of a manager: sealed in its store, copied to the managers that hold copies of it, and recovered.

Owns the life of snapshots and of the sealed values that they refer to: when a part is committed, pushed, kept and
dropped. The bytes of a snapshot are `snapshot_format`'s, what goes into a part `snapshot_parts`', the copies at other
managers `snapshot_copies`', reading it all back `snapshot_recovery`'s. Which checkpoint is committed, and which
retires, is decided by the coordinator; which entries are in a checkpoint, by the shard.

A snapshot is a part of the version ``step-<checkpoint>_ckpt`` in the manager's store, one object with an index of the
entries and the small values written since the snapshot before. Large values are parts of their own, committed the first
time that a snapshot refers to them. So a snapshot of what did not change copies no value, neither here nor to a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.errors import FlashpointError
from ml_flashpoint.ddict.entries import Entry, StoredValue
from ml_flashpoint.replication.channel import Address
from ml_flashpoint.replication.strategies import ReplicationStrategy

PeerAddress = Callable[[int], "Address | None"]
"""``(manager) -> (host, port)``: where its :attr:`Snapshots.address` is now; None: it is not there."""

TellHolder = Callable[[int, "list[str]", str], None]
"""``(holder, keep, before)``: have that manager call ``drop_copies(<us>, keep, before)``; raises `FlashpointError`."""

AskHolder = Callable[[int], "list[SnapshotRecord]"]
"""``(holder) -> records``: what that manager's ``inventory(<us>)`` returns; raises `FlashpointError`."""


@dataclass(frozen=True, slots=True, order=True)
class SnapshotRecord:
    """A snapshot that some manager holds, complete. Orders by checkpoint, then by age.

    Attributes:
        checkpoint_id: of the snapshot.
        attempt: name of its part; later ones of a manager compare greater.

    Raises:
        InvalidArgumentError: a field has the wrong type or form.
    """

    checkpoint_id: int
    attempt: str

    def to_json(self) -> list[object]:
        """Two fields that JSON can carry."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, fields: object) -> SnapshotRecord:
        """What :meth:`to_json` gave. Trusts nothing.

        Raises:
            ProtocolError: it is none.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RecoveredSnapshot:
    """A snapshot of which every byte was verified and is in the own store.

    Attributes:
        checkpoint_id: of the snapshot.
        entries: as they were sealed, in no particular order. Those that several snapshots share are the same objects.
    """

    checkpoint_id: int
    entries: list[Entry]


class Pin:
    """Keeps stored values from being reused; see `Snapshots.pin`. Thread-safe."""

    def release(self) -> None:
        """Let go of them. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Snapshots:
    """See the module. Thread-safe; seals come one after the other. Never calls back with a lock of its own held.

    Args:
        store: of this manager; its rank is the manager's number.
        nodes: node of every manager, by number. Their number is the world size.
        strategy: who holds copies of whom.
        secret: of the dictionary, 16 bytes or more.
        peer_address: see `PeerAddress`.
        tell_holder: see `TellHolder`. Must have a deadline of its own.
        in_use: whether a value id is still in the shard's history, so that its part must stay although no snapshot
            needs it. Called without locks. An id for which it was false is never asked for again.
        release: frees the arena of a value that :meth:`let_go` took over and that did not become a part after all;
            by default ``store.release(value.arena)``.
        incarnation: of this manager process, letters and digits.
        host: address to serve peers on, and the one told to them.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        store: RankStore,
        *,
        nodes: Sequence[str],
        strategy: ReplicationStrategy,
        secret: bytes,
        peer_address: PeerAddress,
        tell_holder: TellHolder,
        in_use: Callable[[str], bool],
        incarnation: str,
        release: Callable[[StoredValue], None] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        raise NotImplementedError

    # ---- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve peers: take in their copies, give them theirs back. Before :meth:`recover`: they may need ours.

        Does nothing where no manager holds anything of another.

        Raises:
            ReplicationError: cannot listen.
        """
        raise NotImplementedError

    @property
    def address(self) -> Address | None:
        """Where peers reach :meth:`start`'s service; None if there is none."""
        raise NotImplementedError

    @property
    def holders(self) -> tuple[int, ...]:
        """Managers that hold copies of this one."""
        raise NotImplementedError

    @property
    def held(self) -> tuple[int, ...]:
        """Managers that this one holds copies of."""
        raise NotImplementedError

    def close(self) -> None:
        """Break off what is under way and stop serving. Idempotent. The store and its parts stay."""
        raise NotImplementedError

    # ---- values -------------------------------------------------------------------------------------------

    def pin(self, entries: Iterable[Entry]) -> Pin:
        """Keep the values of these entries until released, also those let go of meanwhile.

        For the time between taking the entries from the shard and :meth:`seal`: call it under the same lock.
        """
        raise NotImplementedError

    def let_go(self, value: StoredValue) -> bool:
        """The shard has no more use for a value. Returns whether its arena is now this object's business, because it
        is part of a snapshot or about to be: it is freed when no snapshot needs it. False: the caller releases it.
        """
        raise NotImplementedError

    # ---- sealing ------------------------------------------------------------------------------------------

    def seal(self, checkpoint_id: int, entries: Sequence[Entry], deadline_s: float) -> None:
        """Have a verified snapshot of this checkpoint here and at every holder.

        What is there already is not written or sent again, so that calling it again after an error is cheap, as long
        as the entries are the same objects. Sealing a checkpoint again with other entries replaces its snapshot. Copies
        of earlier snapshots that a holder has lost are pushed first.

        Args:
            checkpoint_id: of the snapshot, 0 or more.
            entries: all entries that the checkpoint needs, deleted keys among them if they matter. Stored values must
                be pinned by the caller, or in the shard until this returns.
            deadline_s: seconds.

        Raises:
            DeadlineError: not all holders had it in time.
            CapacityError: no room, here or at a holder.
            FlashpointError: a holder is not there or refuses; a value is not what was sealed before.
        """
        raise NotImplementedError

    def replicate(self, deadline_s: float) -> None:
        """Push whatever a holder lacks of the snapshots here, oldest first: after a holder came back without them.

        Raises:
            FlashpointError: as :meth:`seal`.
        """
        raise NotImplementedError

    def sealed(self) -> dict[int, SnapshotRecord]:
        """The snapshots in this store, by checkpoint. Not only those whose copies are verified."""
        raise NotImplementedError

    # ---- retention ----------------------------------------------------------------------------------------

    def retain(self, checkpoint_ids: Collection[int]) -> None:
        """Drop the snapshots older than the newest of these, except these, and what only those needed; here and at
        the holders. Snapshots above the newest stay: they are on their way to being committed.

        A holder that cannot be told now is told the next time.
        """
        raise NotImplementedError

    def forget_after(self, checkpoint_id: int) -> None:
        """Drop the snapshots above this checkpoint, which were rolled back, here and at the holders."""
        raise NotImplementedError

    def drop_copies(self, of: int, keep: Collection[str], before: str) -> None:
        """On the holder's side of `TellHolder`: drop what this manager holds of another one.

        Args:
            of: the manager whose copies they are.
            keep: attempts that it still needs.
            before: parts sealed later than this stamp stay: the message was written before them.

        Raises:
            InvalidArgumentError: an argument has the wrong type or form.
        """
        raise NotImplementedError

    # ---- recovery -----------------------------------------------------------------------------------------

    def inventory(self, of: int) -> list[SnapshotRecord]:
        """The snapshots of another manager of which every part is in this store, newest first.

        Raises:
            InvalidArgumentError: there is no such manager.
        """
        raise NotImplementedError

    def recover(self, ask_holder: AskHolder) -> list[RecoveredSnapshot]:
        """What this manager can go on from, newest first: once, before anything is sealed.

        Parts in the own store are verified; missing and damaged ones are fetched from the holders. A snapshot that
        cannot be had whole is left out, see :attr:`recovery_failures`; so are the snapshots that only a holder has
        which cannot be asked. The caller must know which checkpoint was committed and not go on without it:
        the next :meth:`retain` has holders drop what is not here.

        Values of snapshots that are not gone on from stay until :meth:`forget_after` and :meth:`retain`.
        """
        raise NotImplementedError

    @property
    def recovery_failures(self) -> list[tuple[int | None, FlashpointError]]:
        """What :meth:`recover` could not do: checkpoint (None: a holder could not be asked) and why."""
        raise NotImplementedError

    @property
    def pushed_bytes(self) -> int:
        """Bytes of objects sent to holders so far."""
        raise NotImplementedError
