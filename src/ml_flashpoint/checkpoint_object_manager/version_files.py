"""The files of a version on one node: how a part appears there, how it goes, and how an object is mapped.

Owns the order of those steps, by which no instant shows a part without its bytes: links first and manifest
last on the way in, manifest first and links last on the way out. Used by stores, and by the saving process of
DCP, which has none. It knows nothing of pools; arenas are files here.

Beside the parts there may be *sidecar files*, which a framework looks for in a checkpoint's folder. They go with
the last part. What they hold is in the objects too (`core.sidecars`), so losing one loses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.reserve import give_up_reserve
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, validate_segment
from ml_flashpoint.format.errors import (
    CapacityError,
    FlashpointError,
    InvalidNameError,
    ObjectNotFoundError,
    SaveError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.manifest import (
    Manifest,
    manifest_name,
    parse_manifest_name,
    parse_object_name,
    write_manifest,
)
from ml_flashpoint.format.private_folders import make_tree, open_folder

_TRIES = 8
_INDEX = ".companions"
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and not waiting at a FIFO


def list_versions(base: Path) -> list[str]:
    """Names of the version directories in ``base``."""
    try:
        return [
            entry.name
            for entry in os.scandir(base)
            if CheckpointContainerId.parse_version_container(entry.name) is not None
            and entry.is_dir(follow_symlinks=False)
        ]
    except FileNotFoundError:
        return []


def commit_part(base: Path, manifest: Manifest, paths: Sequence[Path]) -> None:
    """Give the files at ``paths`` the names of the manifest's objects, then write the manifest, for which pages are
    kept beside them (`reserve`).

    Raises:
        SaveError, CapacityError: the filesystem refused; nothing of the part is left then.
    """
    directory = base / validate_segment(manifest.version)
    links = [directory / validate_segment(record.name) for record in manifest.objects]
    try:
        for tries_left in reversed(range(_TRIES)):
            try:
                with contextlib.suppress(FileExistsError):  # pathlib's exist_ok fails if it goes meanwhile
                    os.mkdir(directory, 0o700)
                os.close(open_folder(directory))  # no link is followed
                for path, link in zip(paths, links, strict=True):
                    _link(path, link)
                break
            except FileNotFoundError:
                # Another rank of this node may remove the directory, seen empty, between two of these calls.
                if not tries_left:
                    raise
        try:
            write_manifest(directory, manifest)
        except CapacityError:
            if not any(map(give_up_reserve, {path.parent for path in paths})):
                raise
            write_manifest(directory, manifest)
    except UnsafePathError as error:  # nothing in there is touched
        with contextlib.suppress(OSError):
            directory.rmdir()  # if it is empty
        raise SaveError(
            f"cannot commit: {error.message}", step=manifest.step, rank=manifest.rank, path=directory, hint=error.hint
        ) from error
    except BaseException as error:  # also of a signal's handler: what it lies in is another save's next
        with contextlib.suppress(OSError, FlashpointError):  # the first error says more
            remove_part(base, manifest.version, manifest.rank, manifest.save_id, [link.name for link in links])
        if not isinstance(error, OSError):
            raise
        kind = CapacityError if error.errno in (errno.ENOSPC, errno.EDQUOT) else SaveError
        raise kind(
            f"cannot commit: {error.strerror}", step=manifest.step, rank=manifest.rank, path=directory
        ) from error


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except FileExistsError:
        # The part is there already, damaged or sent twice: no instant may show it without its bytes.
        spare = link.with_name(f".{link.name}.{secrets.token_hex(4)}.tmp")
        os.link(path, spare)
        os.replace(spare, link)
        spare.unlink(missing_ok=True)  # still there if both were links to one file


def remove_part(base: Path, version: str, rank: int, save_id: str, names: Sequence[str]) -> None:
    """Undo :func:`commit_part`: the manifest goes first, so that no instant shows a part without its bytes."""
    _remove(base / version, [manifest_name(rank, save_id), *names])


def _remove(directory: Path, names: Sequence[str]) -> None:
    """Remove files, in this order, and the directory if no part is left in it then."""
    for name in names:
        (directory / name).unlink(missing_ok=True)
    remove_version_folder(directory)


def is_sidecar_name(name: str) -> bool:
    """Whether a file of this name beside the parts may be a sidecar: no file of a part, and not hidden."""
    return not name.startswith(".") and not _is_of_a_part(name)


def _is_of_a_part(name: str) -> bool:
    return parse_manifest_name(name) is not None or parse_object_name(name) is not None


def remove_version_folder(directory: Path, names: Collection[str] = ()) -> None:
    """Remove a version's directory with its sidecar files, unless there is still something of a part in it.

    What neither :func:`write_sidecars` has written nor ``names`` has stays, and so does the directory then. What a link
    leads to stays as it is.
    """
    with contextlib.suppress(OSError):
        directory.rmdir()
        return
    with contextlib.suppress(OSError, UnsafePathError):
        folder = open_folder(directory)
        try:
            found = {name: without_temporary(name) for name in os.listdir(folder)}
            if any(map(_is_of_a_part, found.values())):
                return
            ours = {_INDEX, *_indexed(folder), *names}
            for name, meant in found.items():
                if meant in ours:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
        directory.rmdir()


def _indexed(folder: int) -> list[str]:
    try:
        with open(os.open(_INDEX, _TO_READ, dir_fd=folder), errors="replace") as file:
            return file.read().splitlines()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return []
        raise


def without_temporary(name: str) -> str:
    """The name that a file is to get, if this is a temporary one."""
    return name[1:].rsplit(".", 2)[0] if name.startswith(".") and name.endswith(".tmp") else name


def write_sidecars(base: Path, version: str, files: Mapping[str, bytes]) -> None:
    """Put sidecar files into a version's directory, which is made if need be. Each appears whole or not at all.

    Raises:
        InvalidNameError: a name is not one of a sidecar. Nothing was written.
        OSError: the filesystem refused.
    """
    directory = base / validate_segment(version)
    for name in files:
        if not is_sidecar_name(validate_segment(name)):
            raise InvalidNameError("it would pass for a file of a part, or is hidden", path=directory / name)
    for tries_left in reversed(range(_TRIES)):
        try:
            make_tree(base, directory)
            _write_into(directory, files)
            return
        except FileNotFoundError:
            # A rank of this node that prunes may remove the directory, seen empty, between two of these calls.
            if not tries_left:
                raise


def _write_into(directory: Path, files: Mapping[str, bytes]) -> None:
    folder = open_folder(directory)
    try:
        # First of all, so that they are known for ours when they are to go.
        _replace(folder, _INDEX, "\n".join(files).encode())
        for name, content in files.items():
            with contextlib.suppress(OSError), open(os.open(name, _TO_READ, dir_fd=folder), "rb") as file:
                if file.read(len(content) + 1) == content:
                    continue
            _replace(folder, name, content)
    finally:
        os.close(folder)


def _replace(folder: int, name: str, content: bytes) -> None:
    """Write a file in an open folder: whoever exchanges that for another meanwhile leads nothing there."""
    temporary = f".{name}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(content)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def is_read(base: Path, version: str, rank: int, save_id: str) -> bool:
    """Return True while a reader holds a part: it has a shared lock (`flock`) on the manifest.

    A reader that takes the lock after this call finds that its manifest has no name any more, once the part is removed.
    """
    try:
        descriptor = os.open(base / version / manifest_name(rank, save_id), _TO_READ)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def map_object(base: Path, version: str, name: str) -> Iterator[memoryview]:
    """Bytes of an object file of this node. Nothing written to them would reach the file.

    Raises:
        ObjectNotFoundError: there is no such object, or it is empty.
        UnreadableError: it cannot be opened just now.
    """
    path = base / validate_segment(version) / validate_segment(name)
    try:
        fd = os.open(path, _TO_READ)
    except OSError as error:
        gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
        kind = ObjectNotFoundError if gone else UnreadableError
        raise kind(
            f"no such object: {error.strerror}" if gone else f"the object: {error.strerror}", path=path
        ) from error
    try:
        size = os.fstat(fd).st_size
        if size == 0 or not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ObjectNotFoundError("the object is empty", path=path)
        # Not read-only, which torch warns of.
        mapping = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise UnreadableError(f"the object: {error.strerror}", path=path) from error
    finally:
        os.close(fd)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        # Views that the caller kept keep the mapping alive; it goes with the last of them.
        with contextlib.suppress(BufferError):
            view.release()
            mapping.close()
