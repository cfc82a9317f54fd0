"""The protocol by which parts travel between peers. A client asks a `transfer_service`

* ``ping``;
* ``manifest`` of a part: the reply has it as a blob;
* ``fetch`` a range of a part's object: the bytes are the payload of the reply;
* ``push`` a part, whose manifest is a blob, with a rider. Unless the reply is that the part is ``held`` already,
  ``data`` follows, with all bytes of the object as payload, and is answered once they are checked and committed.

A part has one object. A rider is JSON that the backend understands and this package does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol, TypeAlias

from ml_flashpoint.format import errors
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.manifest import MAX_MANIFEST_BYTES, Manifest
from ml_flashpoint.net.messages import Dialect, Fields

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
    """Name of a part: the version's directory, the save as manifests spell it, the rank."""

    version: str
    save: str
    rank: int

    @staticmethod
    def of(manifest: Manifest) -> PartName:
        """Return the name of the part that a manifest is of."""
        return PartName(manifest.version, manifest.save_id, manifest.rank)

    @property
    def step(self) -> int | None:
        """Step of the version."""
        return CheckpointContainerId.parse_version_container(self.version)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.version} ({self.save})"


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
            manifest: of a part with one object.
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
            error.step = part.step if error.step is None else error.step
            error.rank = part.rank if error.rank is None else error.rank
        error.node = node if error.node is None else error.node
        raise
