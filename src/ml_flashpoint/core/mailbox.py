"""How a saving process, which cannot call the trainer, reports to it what became of a save.

Owns completion records, and the mailbox that they are left in: a private directory with a small file for each.

Files, because DCP leaves nothing else: it starts its saving process by itself and keeps it for all saves, a writer can
take no pipe or queue along on its way there, and what that process answers are DCP's results, or nothing where it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ml_flashpoint.core.save import Save
from ml_flashpoint.core.save_identity import SaveIdentity
from ml_flashpoint.format.errors import SaveError, UnsafePathError
from ml_flashpoint.format.private_folders import open_folder, open_own

_PREFIX = "flashpoint-mailbox-"
_OWNER = ".owner"
_COMPLETE = ".complete"


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """What a saving process reports.

    Attributes:
        base, version: where it saved.
        arenas: files of the part's objects, in the manifest's order; empty if the save failed.
        others, complete: see :class:`Save`.
        error: why it failed, or None.
    """

    base: str
    version: str
    arenas: tuple[str, ...] = ()
    others: tuple[str, ...] | None = None
    complete: bool | None = None
    error: str | None = None


class Mailbox:
    """A private directory of completion records, one file a save, by its key. Picklable: the other process posts,
    this one takes.

    Args:
        directory: of the mailbox of another process; by default a new one, which this process owns. Those whose owner
            was killed are swept then.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._owned: BinaryIO | None = None
        self._owner = os.getpid()
        if directory is None:
            _sweep_mailboxes()
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
            # Under its name only once it is locked.
            self._owned = open(directory / f"{_OWNER}.tmp", "wb")  # noqa: SIM115
            fcntl.flock(self._owned, fcntl.LOCK_EX)
            os.rename(self._owned.name, directory / _OWNER)
        self.directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        return Mailbox, (self.directory,)

    def remove(self) -> None:
        """Remove the mailbox, if this process owns it. A forked child has its parent's, which that still needs."""
        if self._owner != os.getpid():
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    def post(self, save_id: str, record: CompletionRecord) -> None:
        """Leave a record; it appears whole or not at all."""
        fields = {name: getattr(record, name) for name in CompletionRecord.__slots__}
        temporary = self.directory / f".{save_id}.tmp"
        temporary.write_text(json.dumps(fields))
        os.replace(temporary, self.directory / save_id)

    def note(self, save_id: str, identity: SaveIdentity) -> None:
        """Report what ranks have come to for a save that this process has taken on."""
        temporary = self.directory / f".{save_id}.as.tmp"
        temporary.write_text(json.dumps([identity.run_id, identity.sequence, identity.step]))
        os.replace(temporary, self.directory / f".{save_id}.as")

    def identity_of(self, save_id: str) -> SaveIdentity | None:
        """What ranks have come to for a save, if they have."""
        try:
            run_id, sequence, step = json.loads((self.directory / f".{save_id}.as").read_text())
        except FileNotFoundError:
            return None
        return SaveIdentity(str(run_id), int(sequence), int(step))

    def sign(self, save_id: str) -> None:
        """Report that this process has taken on a save.

        Raises:
            SaveError: too late: it was given up, and its arenas may be another save's.
        """
        try:
            signed = self._claim(save_id, str(os.getpid())) or self.process_of(save_id) is not None
        except FileNotFoundError:  # the mailbox is gone, with its owner
            signed = False
        if not signed:
            raise SaveError(
                f"the save {save_id} was given up before this process began", hint="the next save is not affected"
            )

    def revoke(self, save_id: str) -> bool:
        """See to it that no process can sign for a save any more. Returns false if one has."""
        try:
            return self._claim(save_id, "") or self.process_of(save_id) is None
        except FileNotFoundError:  # the mailbox was removed, and nobody can
            return True

    def _claim(self, save_id: str, signature: str) -> bool:
        # A link, so that the file appears whole, and only once.
        temporary = self.directory / f".{save_id}.{os.getpid()}.tmp"
        temporary.write_text(signature)
        try:
            os.link(temporary, self.directory / f".{save_id}.pid")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def process_of(self, save_id: str) -> int | None:
        """Pid of the process that signed for a save, if any did."""
        try:
            return int((self.directory / f".{save_id}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def record_of(self, save_id: str) -> CompletionRecord | None:
        """The record of a save; None while there is none."""
        try:
            fields = json.loads((self.directory / save_id).read_text())
        except FileNotFoundError:
            return None
        return CompletionRecord(
            base=str(fields["base"]),
            version=str(fields["version"]),
            arenas=tuple(map(str, fields["arenas"])),
            others=None if fields["others"] is None else tuple(map(str, fields["others"])),
            complete=fields["complete"],
            error=fields["error"],
        )

    def note_complete(self, save_id: str) -> None:
        """Report that all ranks have committed a save, in place of the one that was said so of before."""
        temporary = self.directory / f".{save_id}.complete.tmp"
        with contextlib.suppress(FileNotFoundError):  # the mailbox is gone, with its owner
            temporary.write_text(save_id)
            os.replace(temporary, self.directory / _COMPLETE)

    def newest_complete(self) -> str | None:
        """The save that all ranks have committed last, as far as was reported."""
        try:
            return (self.directory / _COMPLETE).read_text()
        except OSError:  # for want of descriptors, say: it is asked again before the next save makes way
            return None

    def clear(self, save_id: str) -> None:
        """Remove what was reported of a save. Where there is no record, its signature stays: nobody signs late."""
        with contextlib.suppress(FileNotFoundError):
            (self.directory / save_id).unlink()
            (self.directory / f".{save_id}.pid").unlink()
        (self.directory / f".{save_id}.as").unlink(missing_ok=True)


def _sweep_mailboxes() -> None:
    # Everybody may put something by such a name there: it is left alone, and not waited for.
    for mailbox in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, UnsafePathError):
            os.close(open_folder(mailbox))
            with open(open_own(mailbox / _OWNER, os.O_RDONLY), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mailbox, ignore_errors=True)


def lost(save: Save, why: str, rank: int) -> SaveError:
    """The error of a save whose process is gone."""
    return SaveError(f"the save {save.save_id} was lost: {why}", rank=rank, hint="the next save is not affected")
