"""Versions read from outside of a job: by rank and key, or by the names that the state had, whichever ranks saved it.

Everything is compared with its digests as it is read, into memory of its own, so a version may be larger than memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ml_flashpoint.adapter.pytorch.metadata_format import METADATA_KEY, ItemPlace, decode_metadata
from ml_flashpoint.copy.cpu import typed_view
from ml_flashpoint.copy.dtypes import torch_dtype
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, ObjectNotFoundError
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.state.archive import load_archive
from ml_flashpoint.stores.version_store import StoredObject
from ml_flashpoint.tools.sources import FoundVersion, Progress, Source, no_progress, stores_of, with_newest

_SMALL_BYTES: Final = 1 << 16


class OpenVersion:
    """A version that is held and can be read. Made by `open_version`; a context manager. Not thread-safe.

    Attributes:
        world_size: number of ranks that saved it.
        manifests: those of the parts that are here, by rank.
    """

    def __init__(self, found: FoundVersion) -> None:
        self.step, self.world_size = found.save.step, found.world_size
        with contextlib.ExitStack() as stack:
            self._objects = found.parts(stack)
            self._held = stack.pop_all()
        self.manifests: dict[int, Manifest] = {rank: part.manifest for rank, part in self._objects.items()}

    def object(self, rank: int) -> StoredObject:
        """Return the object of a rank. Raise an `ObjectNotFoundError` if it is not here."""
        if rank not in self._objects:
            raise ObjectNotFoundError("the part is not here", step=self.step, rank=rank)
        return self._objects[rank]

    def keys(self, rank: int) -> Iterator[str]:
        """Iterate over the names of the items in the part of a rank, also those that hold bytes."""
        return iter(self.object(rank).layout.by_key)

    def tensor(self, rank: int | str, key: str | None = None) -> Any:
        """Return a tensor: ``version.tensor("model.layer.weight")``, whichever ranks have saved it.

        Args:
            rank: the name; only of versions that were saved through DCP, `Flashpoint` or Lightning.
            key: with a rank before it, the name of an item of that rank's part: ``version.tensor(0, key)``.

        Raises:
            ObjectNotFoundError: there is no such tensor, or a part of it is not here.
            LoadError: the version was not saved through DCP.
            PrunedError, DamagedError: the version went, or is not what was saved.
        """
        if not isinstance(rank, str):
            return _tensor(self.object(rank), key or "")
        if rank not in self._items.tensors:
            raise ObjectNotFoundError(f"the version has no tensor {rank!r}", step=self.step)
        return self._items.tensor(rank)

    def numpy(self, rank: int | str, key: str | None = None) -> Any:
        """Return the same as an array. Raises TypeError for dtypes that NumPy does not have."""
        return self.tensor(rank, key).numpy()

    def bytes(self, rank: int, key: str) -> bytes:
        """Return an item of the part of a rank as bytes."""
        return bytes(self.object(rank).bytes_of(key))

    def state_dict(self, prefix: str = "") -> dict[str, Any]:
        """Return the state, or what lies below a name: ``version.state_dict("model.")`` has the weights of a model that
        was tracked as ``model``, for its ``load_state_dict``.

        Tensors are whole, and on the CPU. What was nested is nested again, such as the extra state of a module.

        Args:
            prefix: only names that start so, without it.

        Raises:
            InvalidArgumentError: no name starts so.
            ObjectNotFoundError: a part is not here.
            LoadError: the version was not saved through DCP.
            UnsafeContentError: it holds a type that is not loaded without trusting it.
            PrunedError, DamagedError: the version went, or is not what was saved.
        """
        items = VersionItems(self, prefix)
        flat = {name: items.tensor(name) if name in items.tensors else items.value(name) for name in items.in_place}
        paths = {name: items.path_of(name) for name in items.names}
        return unflatten_state_dict({name: flat[name] for name in items.names}, paths)

    @cached_property
    def _items(self) -> VersionItems:
        return VersionItems(self)

    def close(self) -> None:
        """Let the job remove the version. Safe to call twice."""
        self._objects.clear()
        self._held.close()

    def __enter__(self) -> OpenVersion:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def open_version(source: Source | list[Source], step: int | None = None, *, partial: bool = False) -> OpenVersion:
    """Open a version for reading. A job may be using it.

    ::

        with open_version("/dev/shm/me/job-145") as version:
            weights = version.state_dict("model.")

    A running job keeps it for that long, which takes one more slot: where its memory is full, saves fail meanwhile.
    What was read is right in any case, and the reader's own.

    Args:
        source: a base container on this node, a URL, a folder of durable versions; or several.
        step: which version; by default the newest.
        partial: also one of which parts are missing.

    Raises:
        ObjectNotFoundError, MissingPartsError: there is no such version, or not all parts of it.
        PrunedError, DamagedError: versions went as fast as they were looked for, or are all damaged.
        UnreadableError, LoadError: a store cannot be read just now.
    """
    return with_newest(stores_of(source), step, OpenVersion, partial=partial)


class VersionItems:
    """The items of an open version that was saved through DCP, `Flashpoint` or Lightning, by their names in DCP.

    See `export_version` for ``prefix``, ``names`` and ``progress``.

    Attributes:
        metadata: DCP's.
        items, places: where each item lies, and the items of each name.
        names: all that are wanted, as the state was nested.
        tensors, others: of these, the descriptions of tensors, and the names of everything else.
        nbytes: of these tensors.

    Raises:
        LoadError: it was not saved through DCP.
        InvalidArgumentError: no name has the prefix, or one of ``names`` is not there.
    """

    def __init__(
        self,
        version: OpenVersion,
        prefix: str = "",
        names: Mapping[str, str] | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self.step, self._version, self._progress, self._done = version.step, version, progress, 0
        self.metadata = _metadata(version)
        self.items: dict[MetadataIndex, ItemPlace] = self.metadata.storage_data
        self.places: dict[str, list[MetadataIndex]] = {}
        for index in self.items:
            self.places.setdefault(index.fqn, []).append(index)
        described = self.metadata.state_dict_metadata
        self._paths: Mapping[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        self._prefix = prefix if names is None else None
        self._short = self._wanted(prefix) if names is None else dict(names)
        if missing := [fqn for fqn in self._short if fqn not in described]:
            raise InvalidArgumentError(
                f"the checkpoint has none of {len(missing)} names", argument="names", value=missing
            )
        self.names = list(self._short)
        named = {fqn: described[fqn] for fqn in self.names}
        self.tensors = {fqn: each for fqn, each in named.items() if isinstance(each, TensorStorageMetadata)}
        self.others = [fqn for fqn in named if fqn not in self.tensors]
        for fqn in named:
            self._check_whole(fqn)
        self.nbytes = sum(map(nbytes_of, self.tensors.values()))

    def _wanted(self, prefix: str) -> dict[str, str]:
        """Return the names that start so, as the state was nested where that is known, and the rest of each."""
        described = self.metadata.state_dict_metadata
        order = dict.fromkeys([*(fqn for fqn in self._paths if fqn in described), *described])
        found = {fqn: fqn[len(prefix) :] for fqn in order if fqn.startswith(prefix)}
        if prefix and not found:
            hint = f"names start with {', '.join(dict.fromkeys(fqn.partition('.')[0] + '.' for fqn in order))}"
            text = "no name in the checkpoint starts so"
            raise InvalidArgumentError(text, argument="prefix", value=prefix, hint=hint)
        return found

    def _check_whole(self, fqn: str) -> None:
        found, of = self.places.get(fqn, []), self.tensors.get(fqn)
        whole = bool(found)
        if of is not None and whole:
            begins = {of.chunks[0].offsets if index.offset is None else index.offset for index in found}
            whole = all(chunk.offsets in begins for chunk in of.chunks if chunk.sizes.numel())
        if not whole:
            raise LoadError(f"the checkpoint does not say where all of {fqn!r} is", step=self.step)

    @property
    def in_place(self) -> list[str]:
        """All that are wanted, as they lie in the parts: blocks that small items share are read once in this order."""

        def place(fqn: str) -> tuple[int, int]:
            found, key = self._find(self.places[fqn][0])
            return self.items[self.places[fqn][0]].rank, found.entry(key).begin

        return sorted(self.names, key=place)

    def short(self, fqn: str) -> str:
        """Return the name by which it is wanted."""
        return self._short[fqn]

    def path_of(self, fqn: str) -> tuple[str | int, ...]:
        """Return the place of a name in the nested state, below the prefix."""
        short = (self.short(fqn),)
        if self._prefix is None:
            return short
        # What holds all of it is a dict, also below the name of a list.
        first, *rest = _below(self._prefix, self._paths.get(fqn, (fqn,))) or short
        return str(first), *rest

    def written(self, nbytes: int) -> None:
        """Count bytes of tensors that are used."""
        self._done += nbytes
        self._progress(self._done, self.nbytes)

    def value(self, fqn: str) -> Any:
        """Return an item that is no tensor, unpickled if that is safe."""
        found, key = self._find(self.places[fqn][0])
        return load_archive(found.bytes_of(key), fqn, path=found.path)

    def octets(self, index: MetadataIndex) -> io.BytesIO:
        """Return the same as it was saved."""
        found, key = self._find(index)
        return io.BytesIO(found.bytes_of(key))

    def stored(self, index: MetadataIndex) -> torch.Tensor:
        """Return the chunk of a tensor that one rank has saved, with a storage of its own."""
        found, key = self._find(index)
        if found.entry(key).kind == "bytes":  # more than its memory
            value: torch.Tensor = load_archive(found.bytes_of(key), index.fqn, path=found.path)
            return value
        return _tensor(found, key)

    def tensor(self, fqn: str, scratch: Path | None = None, *, on_disk: bool = False) -> torch.Tensor:
        """Return a whole tensor.

        Args:
            scratch: a folder for files, in which tensors are put together; in memory if there is none.
            on_disk: True if the tensor is kept for long: then it is in a file in any case, unless it is small.
        """
        wanted, places = self.tensors[fqn], self.places[fqn]
        nbytes = nbytes_of(wanted)
        found, key = self._find(places[0])
        if found.entry(key).kind == "bytes":
            return self.stored(places[0])
        if tuple(found.entry(key).shape) == tuple(wanted.size):
            return _tensor(found, key, scratch if on_disk and nbytes > _SMALL_BYTES else None)
        whole = typed_view(_memory(nbytes, scratch), 0, nbytes, wanted.properties.dtype, wanted.size)
        for index in places if nbytes else ():
            chunk = self.stored(index)
            box = tuple(slice(at, at + n) for at, n in zip(index.offset or (), chunk.shape, strict=True))
            whole[box].copy_(chunk)
        return whole

    def _find(self, index: MetadataIndex) -> tuple[StoredObject, str]:
        place = self.items[index]
        return self._version.object(place.rank), place.key


def nbytes_of(described: TensorStorageMetadata) -> int:
    """Return the bytes of a whole tensor."""
    return described.size.numel() * described.properties.dtype.itemsize


def _metadata(version: OpenVersion) -> Metadata:
    first = version.object(0)
    if METADATA_KEY not in first.layout.by_key:
        text = "this version was not saved through DCP: names of its state are not known"
        raise LoadError(text, step=version.step, path=first.path)
    return decode_metadata(bytes(first.bytes_of(METADATA_KEY)), path=first.path)


def _tensor(found: StoredObject, key: str, scratch: Path | None = None) -> torch.Tensor:
    entry = found.entry(key)
    flat = _memory(entry.nbytes, scratch)
    octets: Any = flat.numpy()
    found.read_into(entry.begin, memoryview(octets))
    return typed_view(flat, 0, entry.nbytes, torch_dtype(entry.dtype), entry.shape)


def _memory(nbytes: int, scratch: Path | None) -> torch.Tensor:
    """Return bytes, in a file in a folder if there is one."""
    if scratch is None or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    path = scratch / secrets.token_hex(8)
    with open(path, "xb") as file:  # a store to a mapped page that a full disk has no room for is SIGBUS
        os.posix_fallocate(file.fileno(), 0, nbytes)
    flat = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
    path.unlink()
    return flat


def _below(prefix: str, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return the rest of a path whose name starts so; nothing, if the prefix ends where no name can begin."""
    while prefix and path:
        first = str(path[0])
        if prefix.startswith(f"{first}."):
            prefix, path = prefix[len(first) + 1 :], path[1:]
        elif first.startswith(prefix) and first != prefix:
            return first[len(prefix) :], *path[1:]
        else:
            return ()
    return path
