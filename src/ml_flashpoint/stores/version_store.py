"""The one interface of everything that holds versions of a job: a base container, a directory, a URL.

Owns what a version in a store is, and what every store can do. Digests are not the stores' affair: whoever reads
compares (`part.StoredObject`). Which version to take, and copying from store to store, is `tools`'.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DamagedError, ObjectNotFoundError, PrunedError, SaveError
from ml_flashpoint.format.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ObjectRecord,
    decode,
    encode,
    manifest_name,
)
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.lineage import RunRecord
from ml_flashpoint.stores.files import Files
from ml_flashpoint.stores.part import stored_object

if TYPE_CHECKING:
    from typing_extensions import Buffer

Content = Callable[[ObjectRecord], "Iterable[Buffer]"]
"""The bytes of an object, as many as its file has, in pieces."""


@dataclass
class Removed:
    """Account of a removal.

    Attributes:
        versions: names of the folders that were removed.
        freed_bytes: memory that the files took.
        left: names of what stays in the base container.
    """

    versions: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Version:
    """One save of one step, in one store.

    Attributes:
        step: training step; -1 if not known.
        save_id: the run that saved it, as its files spell it; "" if not known.
        folder: of the version, in the store.
        ranks: ranks whose parts are there, by the names of files or by the marker.
        world_size: number of ranks that saved it; 0 if not known.
        counts: True if the parts may be read: a durable version has its marker.
        problem: the damage that was found without reading parts; "" if none was.
    """

    step: int
    save_id: str
    folder: str
    ranks: Sequence[int] = ()
    world_size: int = 0
    counts: bool = False
    problem: str = ""

    @property
    def order(self) -> tuple[str, int]:
        """Later versions compare greater: by run, then by step."""
        return self.save_id, self.step

    @property
    def name(self) -> str:
        """Name of its folder: ``step-<n>_ckpt``."""
        return CheckpointContainerId.format_version_container(self.step)

    @property
    def save(self) -> SaveId:
        """Name of the save; of run 0 if the save id is not one of this format."""
        return SaveId(int(self.save_id) if self.save_id.isdecimal() else 0, self.step)

    @property
    def complete(self) -> bool:
        """True if the store has the parts of all ranks."""
        return self.counts and len(self.ranks) == self.world_size > 0


class VersionStore(ABC):
    """Versions in files. Calls block; several threads may read, and write parts of different ranks.

    What cannot be read just now is an `UnreadableError`, and no reason for an older version.

    Args:
        files: in which they are.
        path: path or URL, for messages.
    """

    durable: bool
    """True if its versions outlive memory: then the newest one is removed only when that is asked for."""

    def __init__(self, files: Files, path: str) -> None:
        self.files, self.path = files, path

    @abstractmethod
    def folder_of(self, version: str, save_id: str) -> str:
        """Return the folder of a save."""

    @abstractmethod
    def exists(self) -> bool:
        """Return True if there is anything of a job here."""

    @abstractmethod
    def versions(self) -> list[Version]:
        """Return all versions, the newest save first, with those that are incomplete or damaged."""

    @abstractmethod
    def has(self, version: str, rank: int, save_id: str) -> bool:
        """Return False if a part was removed since it was listed: then nothing about it is damage."""

    @abstractmethod
    def remove(self, step: int | None, check: Callable[[], None] = lambda: None) -> Removed:
        """Remove all versions of a step, or all there are, oldest first. To be called by the owner (`owned`).

        Args:
            step: of the versions; None for all, and for what else the job has left.
            check: called before each removal; may raise.

        Raises:
            ObjectNotFoundError: there is none.
            SaveError: one cannot be removed; those removed before are gone.
        """

    def manifest(self, version: Version, rank: int) -> Manifest:
        """Return the manifest of a rank's part, checked.

        Raises:
            ObjectNotFoundError: there is no such part.
            DamagedError: the manifest is not as it was saved.
        """
        if rank not in version.ranks:
            raise ObjectNotFoundError("there is no part of this rank", step=version.step, rank=rank, path=self.path)
        return self._manifest(f"{version.folder}/{manifest_name(rank, version.save_id)}")

    def _manifest(self, name: str) -> Manifest:
        return decode(self.files.read(name, limit=MAX_MANIFEST_BYTES), self.files.path_of(name))

    def check_sizes(self, manifest: Manifest) -> None:
        """Check that the objects of a part are there, and as long as they should be. Raises what `manifest` raises."""
        for record in manifest.objects:
            size = self.files.size(self._name_of(manifest, record))
            if size != record.file_size:
                text = f"the object has {size} bytes, and {record.file_size} were committed"
                raise DamagedError(text, rank=manifest.rank, path=self.path_of(manifest, record))

    def read_into(self, manifest: Manifest, record: ObjectRecord, begin: int, into: memoryview) -> None:
        """Fill a view with bytes of an object, from byte ``begin`` on. Raises what `manifest` raises."""
        self.files.read_into(self._name_of(manifest, record), begin, into)

    def path_of(self, manifest: Manifest, record: ObjectRecord) -> str:
        """Return the path or URL of an object."""
        return self.files.path_of(self._name_of(manifest, record))

    def _name_of(self, manifest: Manifest, record: ObjectRecord) -> str:
        return f"{self.folder_of(manifest.version, manifest.save_id)}/{record.name}"

    def write_part(self, manifest: Manifest, content: Content) -> bool:
        """Write a part, durably: its objects, then its manifest. Return False if it was there already.

        A part that is there is compared with its digests, and written anew if it differs.
        """
        folder = self.folder_of(manifest.version, manifest.save_id)
        name = f"{folder}/{manifest_name(manifest.rank, manifest.save_id)}"
        with contextlib.suppress(DamagedError, ObjectNotFoundError, PrunedError):  # the usual case
            if self._manifest(name) == manifest:
                for record in manifest.objects:
                    stored_object(manifest, [self], record).check()
                return False
        for record in manifest.objects:
            written = self.files.write(f"{folder}/{record.name}", content(record))
            if written != record.file_size:
                text = f"{written} bytes were written, and not {record.file_size}"
                raise SaveError(text, step=manifest.step, rank=manifest.rank, path=self.path_of(manifest, record))
        self.files.write(name, [encode(manifest)])
        return True

    def records(self) -> list[RunRecord]:
        """Return the records of runs that the store has, by which versions exist; none if it has no records."""
        return []

    def hold(self, manifest: Manifest) -> AbstractContextManager[None]:
        """Have a running job keep a part until this is left, if it can. Raise a `PrunedError` if the part went."""
        return contextlib.nullcontext()

    def watched(self, moved: Callable[[], None]) -> VersionStore:
        """Return the same store, which calls ``moved`` after each call and for each piece that is written."""
        return self

    def owned(
        self, period_s: float, moved: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[Callable[[], None]]:
        """Be the only one who completes and removes versions here. Yields a call that raises if that was lost.

        Args:
            period_s: seconds between renewals of a lease, for stores without locks.
            moved: called again and again while this waits.

        Raises:
            JobInUseError: somebody else is.
        """
        return contextlib.nullcontext(lambda: None)
