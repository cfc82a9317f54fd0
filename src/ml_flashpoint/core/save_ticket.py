"""One save on one rank, and how it crosses to another process and back.

Owns the ticket (what is known of a save while it is under way) and the notices: small files in a private
directory by which a saving process, which cannot call the trainer, tells it what became of a save.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.core.attempts import SaveIdentity
from ml_flashpoint.core.commit_queue import PendingSave
from ml_flashpoint.core.object_writer import FilledObject, StagedObject
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import SaveError, UnsafePathError
from ml_flashpoint.format.private_folders import open_folder, open_own

_BOARD_PREFIX = "flashpoint-notices-"
_OWNER = ".owner"


@dataclass(slots=True, eq=False)
class SaveTicket:
    """One save of this rank. Travels by pickle; what belongs to this process stays behind.

    Attributes:
        attempt, sequence: identity of the save, the same on all ranks once it is adopted; see `core.attempts`.
        number, key: of this saver's saves on this rank alone, in the order in which they began.
        adopted: whether the identity is final.
        staged: copies made before the plan was known.
        error: why staging failed. The save then fails at its write, which is where all ranks notice.
        version: set by the write.
        filled: the object, set by the write.
        spare: an arena to fill where nothing was staged, so that a saving process need not make a new one.
        others: keys of tensors that the plan leaves to other ranks, so that they need not be staged the next
            time; None while unknown. Set by the door.
        worker: the thread that writes and seals the save, if the door says so. Once it is gone, so is the save.
        handed_off_at: when it was handed to another process, in seconds of the monotonic clock.
        abandoned: nobody can write the save any more, although it was staged and offered.
        deserted: the same of a save that was never staged: the call that made it has ended.
        given_back: its arenas are no longer its own, because it failed.
        asked: whether this run is known to know what earlier ones have left in the base container.
        taking: it is about to take an arena, or has and is filling it.
    """

    attempt: str
    sequence: int
    number: int = 0
    key: str = ""
    adopted: bool = False
    staged: StagedObject | None = None
    error: BaseException | None = None
    version: CheckpointContainerId | None = None
    filled: FilledObject | None = None
    others: frozenset[str] | None = None
    spare: Arena | None = None
    spare_path: Path | None = None
    pending: PendingSave | None = field(default=None, repr=False)
    worker: threading.Thread | None = field(default=None, repr=False)
    handed_off_at: float = 0.0
    abandoned: bool = False
    deserted: bool = False
    given_back: bool = False
    asked: bool = False
    taking: bool = False

    @property
    def arenas(self) -> set[Arena]:
        """The arenas that this save has taken from its process's store."""
        held = [part.arena for part in (self.filled, self.staged) if part is not None]
        return {arena for arena in (*held, self.spare) if arena is not None}

    @property
    def holds_arena(self) -> bool:
        """Whether an arena is in use for it."""
        pending = self.pending
        if pending is None:
            return False
        if pending.part is not None:
            return pending.store is not None and pending.store.find(pending.attempt, pending.part.rank) is not None
        return not pending.resolved.is_set() and (self.taking or bool(self.arenas))

    def __getstate__(self) -> tuple[Any, ...]:
        spare_path = self.spare.path if self.spare is not None else None
        identity = self.attempt, self.sequence, self.number, self.key, self.adopted, self.asked
        return identity, self.staged, self.error, spare_path

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        identity, self.staged, self.error, self.spare_path = state
        self.attempt, self.sequence, self.number, self.key, self.adopted, self.asked = identity
        self.spare = self.version = self.filled = self.others = self.pending = self.worker = None
        self.handed_off_at = 0.0
        self.abandoned = self.deserted = self.given_back = self.taking = False


@dataclass(frozen=True, slots=True)
class Notice:
    """What a saving process reports.

    Attributes:
        base, version: where it saved.
        arenas: files of the part's objects, in the manifest's order; empty if the save failed.
        others: see :class:`SaveTicket`.
        error: why it failed, or None.
    """

    base: str
    version: str
    arenas: tuple[str, ...] = ()
    others: tuple[str, ...] | None = None
    error: str | None = None


class NoticeBoard:
    """A private directory of notices, one file a save, by its key. Picklable: the other process posts, this one takes.

    Args:
        directory: of the board of another process; by default a new one, which this process owns. Those whose owner
            was killed are swept then.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._owned: BinaryIO | None = None
        self._owner = os.getpid()
        if directory is None:
            _sweep_boards()
            directory = Path(tempfile.mkdtemp(prefix=_BOARD_PREFIX))
            # Under its name only once it is locked.
            self._owned = open(directory / f"{_OWNER}.tmp", "wb")  # noqa: SIM115
            fcntl.flock(self._owned, fcntl.LOCK_EX)
            os.rename(self._owned.name, directory / _OWNER)
        self.directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        return NoticeBoard, (self.directory,)

    def remove(self) -> None:
        """Remove the board, if this process owns it. A forked child has its parent's, which the parent still needs."""
        if self._owner != os.getpid():
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    def post(self, attempt: str, notice: Notice) -> None:
        """Publish a notice; it appears whole or not at all."""
        fields = {name: getattr(notice, name) for name in Notice.__slots__}
        temporary = self.directory / f".{attempt}.tmp"
        temporary.write_text(json.dumps(fields))
        os.replace(temporary, self.directory / attempt)

    def note(self, attempt: str, identity: SaveIdentity) -> None:
        """Say what ranks have come to for a save that this process has taken on."""
        temporary = self.directory / f".{attempt}.as.tmp"
        temporary.write_text(json.dumps([identity.run_id, identity.sequence, identity.step]))
        os.replace(temporary, self.directory / f".{attempt}.as")

    def noted(self, attempt: str) -> SaveIdentity | None:
        """What ranks have come to for a save, if they have; once."""
        path = self.directory / f".{attempt}.as"
        try:
            run_id, sequence, step = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        path.unlink(missing_ok=True)
        return SaveIdentity(str(run_id), int(sequence), int(step))

    def sign(self, attempt: str) -> None:
        """Say that this process has taken on a save.

        Raises:
            SaveError: too late: it was given up, and its arenas may be another save's.
        """
        try:
            signed = self._claim(attempt, str(os.getpid())) or self.process_of(attempt) is not None
        except FileNotFoundError:  # the board is gone, with its owner
            signed = False
        if not signed:
            raise SaveError(
                f"the save {attempt} was given up before this process began", hint="the next save is not affected"
            )

    def revoke(self, attempt: str) -> bool:
        """See to it that no process can sign for a save any more. Returns false if one has."""
        try:
            return self._claim(attempt, "") or self.process_of(attempt) is None
        except FileNotFoundError:  # the board was removed, and nobody can
            return True

    def _claim(self, attempt: str, signature: str) -> bool:
        # A link, so that the file appears whole, and only once.
        temporary = self.directory / f".{attempt}.{os.getpid()}.tmp"
        temporary.write_text(signature)
        try:
            os.link(temporary, self.directory / f".{attempt}.pid")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def process_of(self, attempt: str) -> int | None:
        """Pid of the process that signed for a save, if any did."""
        try:
            return int((self.directory / f".{attempt}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def take(self, attempt: str) -> Notice | None:
        """The notice of a save, once; None while there is none."""
        path = self.directory / attempt
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        path.unlink(missing_ok=True)
        (self.directory / f".{attempt}.pid").unlink(missing_ok=True)
        return Notice(
            base=str(fields["base"]),
            version=str(fields["version"]),
            arenas=tuple(map(str, fields["arenas"])),
            others=None if fields["others"] is None else tuple(map(str, fields["others"])),
            error=fields["error"],
        )


def _sweep_boards() -> None:
    # Everybody may put something by such a name there: it is left alone, and not waited for.
    for board in Path(tempfile.gettempdir()).glob(f"{_BOARD_PREFIX}*"):
        with contextlib.suppress(OSError, UnsafePathError):
            os.close(open_folder(board))
            with open(open_own(board / _OWNER, os.O_RDONLY), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(board, ignore_errors=True)


def lost(ticket: SaveTicket, why: str, rank: int) -> SaveError:
    """The error of a save whose process is gone."""
    return SaveError(f"the save {ticket.attempt} was lost: {why}", rank=rank, hint="the next save is not affected")
