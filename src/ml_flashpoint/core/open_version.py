"""Versions read from outside of the job, while it runs.

Owns the choice of the version, the holds on its parts (see `reader_holds`), and the error of a reader when one was
broken. An arena is used again as soon as nothing is kept in it, so whoever simply maps an object sees later steps
show through. Only what is on this node is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions, map_object
from ml_flashpoint.core.part_reader import ObjectReader, read_local_manifests
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError, ObjectNotFoundError, PrunedError, UnreadableError
from ml_flashpoint.format.failure_kinds import is_transient
from ml_flashpoint.format.manifest import Manifest, manifest_name
from ml_flashpoint.format.retention_record import RetentionRecord, read_record

TRIES: Final = 5
"""How often the newest version is looked for, when it goes while it is being opened."""

_LOOK_EVERY_S: Final = 0.01
_Version = TypeVar("_Version")


class HeldVersion:
    """A version whose parts are held. Made by `hold_version`; a context manager. Not thread-safe.

    Attributes:
        path: its folder.
        step: training step.
        world_size: number of ranks that saved it.
        manifests: those of the parts on this node, by rank.
    """

    def __init__(self, base: Path, manifests: list[Manifest]) -> None:
        first = manifests[0]
        self.path = base / first.version
        self.step = first.step
        self.world_size = first.world_size
        self.manifests = {manifest.rank: manifest for manifest in manifests}
        self._descriptors: dict[int, int] = {}
        try:
            for rank, manifest in self.manifests.items():
                self._descriptors[rank] = self._hold(manifest)
            self.check()
        except BaseException:
            self.close()
            raise

    def _hold(self, manifest: Manifest) -> int:
        path = self.path / manifest_name(manifest.rank, manifest.save_id)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise self._pruned(manifest.rank) from None
        except OSError as error:
            raise UnreadableError(f"the manifest: {error.strerror}", rank=manifest.rank, path=path) from error
        for tries_left in reversed(range(TRIES)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:  # its owner asks just now
                if not tries_left:
                    os.close(descriptor)
                    raise self._pruned(manifest.rank) from None
                time.sleep(_LOOK_EVERY_S)
            except OSError as error:
                os.close(descriptor)
                raise UnreadableError(f"it cannot be held: {error.strerror}", rank=manifest.rank, path=path) from error
        raise AssertionError

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks whose parts are not on this node."""
        return [rank for rank in range(self.world_size) if rank not in self.manifests]

    def check(self) -> None:
        """Check that nothing of it was let go, so that all that was read so far is what was saved.

        Raises:
            PrunedError: the job needed the room, or the hold took too long.
        """
        for rank, descriptor in self._descriptors.items():
            if os.fstat(descriptor).st_nlink == 0:
                raise self._pruned(rank)

    def _pruned(self, rank: int) -> PrunedError:
        return PrunedError(
            "the version was pruned while it was read: what was read may be anything",
            step=self.step,
            rank=rank,
            path=self.path,
            hint="read the newest version; for longer, raise FLASHPOINT_READER_HOLD_S of the job or leave it more room",
        )

    def close(self) -> None:
        """Let go of all parts. A second call does nothing."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> HeldVersion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.check()
        finally:
            self.close()


def hold_version(base: str | os.PathLike[str], step: int | None = None, *, partial: bool = False) -> HeldVersion:
    """Hold a version of a base container, so that the job keeps it for some time.

    Args:
        base: of a job, on this node.
        step: which version; by default the newest.
        partial: also one that is not whole on this node.

    Raises:
        ObjectNotFoundError: there is none, or none that is whole on this node.
        PrunedError: they went as fast as they were looked for.
        UnreadableError: that cannot be known just now: one that cannot be read may be the one that is meant.
        DamagedError: there is nothing but what cannot be read for good.
    """
    return _opened(HeldVersion, Path(base), step, partial)


def _opened(kind: Callable[[Path, list[Manifest]], _Version], base: Path, step: int | None, partial: bool) -> _Version:
    for tries_left in reversed(range(TRIES)):
        try:
            return kind(base, _choose(base, step, partial))
        except PrunedError:
            if not tries_left or step is not None:
                raise
    raise AssertionError


def _choose(base: Path, step: int | None, partial: bool) -> list[Manifest]:
    found: dict[tuple[str, int], list[Manifest]] = {}  # by age: what a crash would go back to comes last
    problems: list[FlashpointError] = []
    try:
        for version in list_versions(base):
            if step is None or CheckpointContainerId.parse_version_container(version) == step:
                manifests, errors = read_local_manifests(base, version)
                problems += errors
                for manifest in manifests:
                    found.setdefault((manifest.save_id, manifest.step), []).append(manifest)
    except OSError as error:
        raise UnreadableError(f"the versions cannot be listed: {error.strerror}", path=base) from error
    problems = [each for each in problems if is_transient(each) or not found]
    if problems:
        raise problems[0]
    record = _record_of(base)
    for key in sorted(found, reverse=True):
        if step is None and record.is_abandoned(key[0]):
            continue
        if partial or len(found[key]) == found[key][0].world_size:
            return found[key]
    wanted = "version" if step is None else f"version of step {step}"
    if not found:
        raise ObjectNotFoundError(f"there is no {wanted} here", path=base, hint="flashpoint ls shows what there is")
    raise ObjectNotFoundError(
        f"no {wanted} is whole on this node",
        path=base,
        hint="take what is here with partial=True (--partial), and the rest on the other nodes",
    )


def _record_of(base: Path) -> RetentionRecord:
    try:
        return read_record(base / PRIVATE_DIR)
    except FlashpointError:  # the job says so
        return RetentionRecord()


class OpenVersion(HeldVersion):
    """A version that can be read, by rank and name. What was read is right if `check`, or leaving it, does not raise.

    Everything is compared with its digests before it is handed out. Arrays and tensors are views of the job's memory:
    copy what is to outlive the version.
    """

    def __init__(self, base: Path, manifests: list[Manifest]) -> None:
        self._stack = contextlib.ExitStack()
        self._readers: dict[int, ObjectReader] = {}
        super().__init__(base, manifests)

    def reader(self, rank: int) -> ObjectReader:
        """The part of a rank, compared with its digests."""
        if rank not in self._readers:
            if rank not in self.manifests:
                raise ObjectNotFoundError("this node has no part of it", step=self.step, rank=rank, path=self.path)
            manifest = self.manifests[rank]
            record = manifest.objects[0]
            try:
                view = self._stack.enter_context(map_object(self.path.parent, manifest.version, record.name))
                path = os.fspath(self.path / record.name)
                self._readers[rank] = ObjectReader(manifest, record, local=view, path=path)
            except FlashpointError:
                self.check()  # which says more, if that is why
                raise
        return self._readers[rank]

    def keys(self, rank: int) -> Iterator[str]:
        """Names of the items in the part of a rank; those that hold bytes are in it, too."""
        return iter(self.reader(rank).layout.by_key)

    def tensor(self, rank: int, key: str) -> Any:
        """A tensor of the part of a rank, as a ``torch.Tensor``."""
        return self.reader(rank).tensor(key)

    def numpy(self, rank: int, key: str) -> Any:
        """A tensor of the part of a rank, as an array. Raises TypeError for dtypes that NumPy does not have."""
        return self.reader(rank).tensor(key).numpy()

    def bytes(self, rank: int, key: str) -> bytes:
        """An item of the part of a rank, as bytes."""
        return bytes(self.reader(rank).bytes_of(key))

    def close(self) -> None:
        """Let go of all parts. Views that are left are of no use any more."""
        self._readers.clear()
        self._stack.close()
        super().close()

    def __enter__(self) -> OpenVersion:
        return self


def open_version(base: str | os.PathLike[str], step: int | None = None, *, partial: bool = False) -> OpenVersion:
    """Open a version of a base container, for reading it while the job runs.

    ::

        with open_version("/dev/shm/me/job-145") as version:
            weight = version.tensor(0, "model.layer.weight").clone()

    The job keeps it for that long, for up to ``FLASHPOINT_READER_HOLD_S`` seconds from when it would let go of it, and
    never where its memory is full. If it was let go, `PrunedError` is raised on leaving, and by ``check()``.

    Args, raises: as `hold_version`.
    """
    return _opened(OpenVersion, Path(base), step, partial)
