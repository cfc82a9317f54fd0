"""The protocol by which parts travel between peers. A client asks a `transfer_service`

* ``ping``;
* ``manifest`` of a part: the reply has it as a blob;
* ``fetch`` a range of a part's object: the bytes are the payload of the reply;
* ``push`` a part, whose manifest is a blob, with a rider. Unless the reply is that the part is ``held`` already,
  ``data`` follows, with all bytes of the object as payload, and is answered once they are checked and committed.

A part has one object, named after it. A rider is JSON that the backend understands and this package does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol, TypeAlias

from ml_flashpoint.format import errors
from ml_flashpoint.format.manifest import MAX_MANIFEST_BYTES, Manifest, object_name
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.net.messages import Dialect, Fields, integer, text

Address: TypeAlias = tuple[str, int]
"""Host and port."""

DEADLINE_S: Final = 30.0
"""Default time without progress after which a transfer is given up."""

TRANSFERS: Final = Dialect(
    purpose=b"ml_flashpoint.replication transfers",
    errors={
        error.__name__: error
        for error in (
            errors.CapacityError,
            errors.DamagedError,
            errors.DeadlineError,
            errors.DigestMismatchError,
            errors.JobInUseError,
            errors.ManifestError,
            errors.ObjectFormatError,
            errors.ObjectNotFoundError,
            errors.ProtocolError,
            errors.PrunedError,
            errors.ReplicationError,
            errors.UnreadableError,
        )
    },
    failure=errors.ReplicationError,
    json_bytes=64 << 10,
    blobs=1,
    blob_bytes=MAX_MANIFEST_BYTES,
)
"""What is spoken. The blob is a manifest."""


class PartName(NamedTuple):
    """Name of a part: its save and its rank."""

    save: SaveId
    rank: int

    @staticmethod
    def of(manifest: Manifest) -> PartName:
        """Return the name of the part that a manifest is of.

        Raises:
            ManifestError: it is of no save, or does not have one object that is named after the part.
        """
        save, rank = SaveId.of(manifest), manifest.rank
        names = [record.name for record in manifest.objects]
        if save is None or names != [object_name(rank, save.text)]:
            message = f"no part of a save: it is of {manifest.save_id!a} and has the objects {names}"
            raise errors.ManifestError(message, step=manifest.step, rank=rank)
        return PartName(save, rank)

    def to_fields(self) -> Fields:
        """Return the name as fields of a request."""
        return {"version": self.save.version, "save": self.save.text, "rank": self.rank}

    @staticmethod
    def from_fields(fields: Fields) -> PartName:
        """Return the name in the fields of a request. Raise `ProtocolError` if there is none."""
        save = SaveId.parse(text(fields, "version"), text(fields, "save"))
        if save is None:
            raise errors.ProtocolError(f"not a save: {fields['version']!a}, {fields['save']!a}")
        return PartName(save, integer(fields, "rank"))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.save.version} (run {self.save.run})"


class TransferBackend(Protocol):
    """The parts that a `TransferService` serves from and stores to. Called by many threads at once.

    Errors reach the peer: a `FlashpointError` with its type and text, anything else by its name.
    """

    def open_part(self, part: PartName) -> AbstractContextManager[memoryview]:
        """Return the bytes of a committed object, which stay as they are until the context is left.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...

    def read_manifest(self, part: PartName) -> bytes:
        """Return the encoded manifest of a part.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...

    def receive(self, manifest: Manifest, rider: Fields) -> AbstractContextManager[memoryview | None]:
        """Make room for a part; entering returns where its bytes go, or None if the part is held already.

        The part is committed when the context is left: all bytes are there and have the manifest's digests. If the
        context is left by an error, they have not, and the room is free.

        Args:
            manifest: of the part.
            rider: sent along by the peer.

        Raises:
            FlashpointError: the part is refused.
        """
        ...


@contextlib.contextmanager
def error_context(part: PartName | None, node: str | None = None) -> Iterator[None]:
    """Have the errors that are raised inside name the step, rank and node, unless they name some already."""
    try:
        yield
    except errors.FlashpointError as error:
        if part is not None:
            error.step = part.save.step if error.step is None else error.step
            error.rank = part.rank if error.rank is None else error.rank
        error.node = node if error.node is None else error.node
        raise
