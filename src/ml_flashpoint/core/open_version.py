"""Versions read from outside of the job, while it runs.

Owns the locks on the parts of a version: its job removes nothing that is locked. An arena is used again as soon as
nothing is kept in it, so whoever simply maps an object sees later steps show through. Only what is on this node is
read. Which versions there are is `core.gathered_parts`'.
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

from ml_flashpoint.checkpoint_object_manager.version_files import map_object
from ml_flashpoint.core.gathered_parts import GatheredSave, gathered_saves
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.errors import FlashpointError, ObjectNotFoundError, PrunedError, UnreadableError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, manifest_name

_TRIES: Final = 5
_LOOK_EVERY_S: Final = 0.01
_T = TypeVar("_T")
_Held = TypeVar("_Held", bound="HeldVersion")


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
        for tries_left in reversed(range(_TRIES)):
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

    def open_object(self, record: ObjectRecord) -> int:
        """A descriptor of the file of an object.

        Raises:
            PrunedError: the version went.
            ObjectNotFoundError: it is there still, without this file.
            UnreadableError: that cannot be known just now.
        """
        path = self.path / record.name
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            self.check()
            raise ObjectNotFoundError("the object is gone", step=self.step, path=path) from error
        except OSError as error:
            raise UnreadableError(f"the object: {error.strerror}", step=self.step, path=path) from error

    def check(self) -> None:
        """Check that nothing of it was let go, so that all that was read so far is what was saved.

        Raises:
            PrunedError: the part went before it was held, or somebody has removed it.
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
            hint="read the newest version",
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
    """Hold a version of a base container, so that the job keeps it.

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
    return opened(HeldVersion, Path(base), step, partial)


def opened(kind: Callable[[Path, list[Manifest]], _Held], base: Path, step: int | None, partial: bool) -> _Held:
    """What `hold_version` returns, of another kind."""
    return if_kept(lambda: kind(base, _choose(base, step, partial)), step)


def if_kept(attempt: Callable[[], _T], step: int | None) -> _T:
    """What an attempt returns; where the newest version is wanted and goes meanwhile, what a later attempt does."""
    for _ in range(_TRIES - 1 if step is None else 0):
        with contextlib.suppress(PrunedError):
            return attempt()
    return attempt()


def _choose(base: Path, step: int | None, partial: bool) -> list[Manifest]:
    for save in gathered_saves([base], step):
        if partial or not save.missing:
            return [holders[0][1] for holders in save.holders.values()]
    raise ObjectNotFoundError(
        f"no {'version' if step is None else f'version of step {step}'} is whole on this node",
        path=base,
        hint="take what is here with partial=True (--partial), and the rest on the other nodes",
    )


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

    The job keeps it for that long, which takes one more arena: where its memory is full, saves fail meanwhile.
    If it went before it was held, `PrunedError` is raised on leaving, and by ``check()``.

    Args, raises: as `hold_version`.
    """
    return opened(OpenVersion, Path(base), step, partial)


def hold_parts(
    stack: contextlib.ExitStack, save: GatheredSave, kind: Callable[[Path, list[Manifest]], _Held]
) -> dict[int, _Held]:
    """For each rank, what holds its part: of several base containers, the first one.

    Raises:
        PrunedError: a part went meanwhile.
        UnreadableError: a part cannot be held just now.
    """
    by_base: dict[Path, list[Manifest]] = {}
    for holders in save.holders.values():
        base, manifest = holders[0]
        by_base.setdefault(base, []).append(manifest)
    held = []
    for base, manifests in by_base.items():
        held.append(kind(base, manifests))
        stack.enter_context(held[-1])
    return {rank: each for each in held for rank in each.manifests}
