"""The items of a version, by their names in DCP: what is read from outside of a job.

Owns putting them together from the parts of several ranks. What holds these in memory is `core.open_version`'s, what
reads those that are persisted is `core.open_persisted`'s. Not collective.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.storage_data import ItemPlace
from ml_flashpoint.copy.cpu import typed_view
from ml_flashpoint.copy.dtypes import torch_dtype
from ml_flashpoint.core.gathered_parts import whole_saves
from ml_flashpoint.core.loader import MLFlashpointCheckpointLoader
from ml_flashpoint.core.open_persisted import PersistedParts, open_persisted
from ml_flashpoint.core.open_version import OpenVersion, hold_parts, open_version
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, ObjectNotFoundError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.persist.opening import persisted_url
from ml_flashpoint.state.archive import load_archive

Progress = Callable[[int, int], object]

Parts = OpenVersion | PersistedParts
"""What parts are read from."""


def open_items(
    stack: contextlib.ExitStack,
    sources: Sequence[str | os.PathLike[str]],
    step: int | None = None,
    *,
    prefix: str = "",
    names: Mapping[str, str] | None = None,
    progress: Progress = lambda done, total: None,
) -> VersionItems:
    """Open a version that was saved through DCP, `Flashpoint` or Lightning.

    Args:
        stack: what closes it.
        sources: the base container, or those of several nodes, which together have the parts of all ranks; or one URL
            or folder of persisted versions.
        step: which version; by default the newest that is whole.
        prefix: only names that start so.
        names: only these, by others.
        progress: called with how many bytes of tensors were used, of how many.

    Raises:
        ObjectNotFoundError: there is no such version, or not all of it.
        LoadError: it was not saved through DCP, or the store cannot be read.
        PrunedError, DamagedError, DigestMismatchError: it went, or is not what was saved.
        InvalidArgumentError: no name has the prefix, one of `names` is not there, or there are several sources
            and one of them is persisted.
    """
    return VersionItems(_whole(stack, sources, step), prefix, progress, names)


def _whole(
    stack: contextlib.ExitStack, sources: Sequence[str | os.PathLike[str]], step: int | None
) -> Mapping[int, Parts]:
    """For each rank, what to read its part from."""
    urls = [url for url in map(persisted_url, sources) if url is not None]
    if urls:
        if len(sources) > 1:
            raise InvalidArgumentError("persisted versions are whole, and come alone", argument="SOURCE", value=urls[0])
        persisted = open_persisted(urls[0], step)
        return dict.fromkeys(persisted.manifests, persisted)
    bases = [Path(os.path.abspath(source)) for source in sources]  # DCP's reader takes no others
    if len(bases) == 1:
        version = stack.enter_context(open_version(bases[0], step))
        return dict.fromkeys(version.manifests, version)
    return hold_parts(stack, whole_saves(bases, step)[0], OpenVersion)


class _HeldLoader(MLFlashpointCheckpointLoader):
    """Reads what is held, for the reader of DCP checkpoints."""

    def __init__(self, parts: Mapping[int, Parts]) -> None:
        self._parts = parts

    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str]
    ) -> CheckpointContainerId | None:
        raise NotImplementedError

    def discard(self, version: CheckpointContainerId) -> NoReturn:
        raise NotImplementedError

    def read_manifest(self, version: CheckpointContainerId, rank: int) -> Manifest:
        if rank not in self._parts:
            raise ObjectNotFoundError("there is no such part", rank=rank, path=str(version))
        return self._parts[rank].manifests[rank]

    def open_object(self, version: CheckpointContainerId, manifest: Manifest, record: ObjectRecord) -> ObjectReader:
        return self._parts[manifest.rank].reader(manifest.rank)

    def release(self) -> None:
        """They are held until all is read."""


class VersionItems:
    """The items of a version.

    Attributes:
        step: of the version.
        items, places: where each item lies, and which items there are of each name.
        names: of all that is wanted, in order.
        tensors, others: of these, what is said of the tensors, and the names of everything else.
    """

    def __init__(
        self,
        parts: Mapping[int, Parts],
        prefix: str,
        progress: Progress = lambda done, total: None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        any_part = next(iter(parts.values()))
        self.step, self._parts, self._progress, self._done = any_part.step, parts, progress, 0
        self._path = any_part.path
        self._loader = _HeldLoader(parts)
        reader = MemoryStorageReader(any_part.path, self._loader, trust_bytes=True)
        self.metadata: Metadata = reader.read_metadata()
        reader.set_up_storage_reader(self.metadata, True)
        self.items: dict[MetadataIndex, ItemPlace] = self.metadata.storage_data
        self.places: dict[str, list[MetadataIndex]] = {}
        for index in self.items:
            self.places.setdefault(index.fqn, []).append(index)
        described = self.metadata.state_dict_metadata
        self._paths: Mapping[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        # As the state was nested, as far as that is known.
        order = dict.fromkeys([*(fqn for fqn in self._paths if fqn in described), *described])
        if names is None:
            self._short: dict[str, str] = {fqn: fqn[len(prefix) :] for fqn in order if fqn.startswith(prefix)}
        else:
            self._short = dict(names)
            if missing := [fqn for fqn in names if fqn not in described]:
                raise InvalidArgumentError(
                    f"the checkpoint has none of {len(missing)} names", argument="names", value=missing
                )
        self._prefix = prefix if names is None else None
        if prefix and not self._short:
            first = ", ".join(dict.fromkeys(f"{fqn.partition('.')[0]}." for fqn in order))
            raise InvalidArgumentError(
                "no name in the checkpoint starts so", argument="prefix", value=prefix, hint=f"names start with {first}"
            )
        named = {fqn: described[fqn] for fqn in self._short}
        self.names = list(named)
        self.tensors = {fqn: each for fqn, each in named.items() if isinstance(each, TensorStorageMetadata)}
        self.others = [fqn for fqn in named if fqn not in self.tensors]
        for fqn in named:
            self._check_whole(fqn)
        self.nbytes = sum(each.size.numel() * each.properties.dtype.itemsize for each in self.tensors.values())

    def _check_whole(self, fqn: str) -> None:
        found, of = self.places.get(fqn, []), self.tensors.get(fqn)
        whole = bool(found)
        if of is not None and whole:
            begins = {of.chunks[0].offsets if index.offset is None else index.offset for index in found}
            whole = all(chunk.offsets in begins for chunk in of.chunks if chunk.sizes.numel())
        if not whole:
            raise LoadError(f"the checkpoint does not say where all of {fqn!r} is", step=self.step)

    def check(self) -> None:
        """Check that all that was read is what was saved."""
        for part in set(self._parts.values()):
            part.check()

    def short(self, fqn: str) -> str:
        """The name by which it is wanted."""
        return self._short[fqn]

    def path_of(self, fqn: str) -> tuple[str | int, ...]:
        """Where it is in the nested state, below the prefix."""
        short = (self.short(fqn),)
        if self._prefix is None:
            return short
        # What holds all of it is a dict, also below the name of a list.
        first, *rest = _below(self._prefix, self._paths.get(fqn, (fqn,))) or short
        return str(first), *rest

    def written(self, nbytes: int) -> None:
        """Take note that so many bytes of tensors are written."""
        self._done += nbytes
        self._progress(self._done, self.nbytes)

    def value(self, fqn: str) -> Any:
        """What is no tensor, unpickled if that is safe."""
        reader, key = self._find(MetadataIndex(fqn))
        return load_archive(reader.bytes_of(key), fqn, path=reader.path)

    def octets(self, index: MetadataIndex) -> io.BytesIO:
        """The same as it was saved."""
        reader, key = self._find(index)
        return io.BytesIO(reader.bytes_of(key))

    def stored(self, index: MetadataIndex) -> torch.Tensor:
        """What one rank has saved of a tensor; with a storage of its own, so that ``torch.save`` writes no more.

        Of what is persisted, it is in memory for as long as it is used.
        """
        reader, key = self._find(index)
        entry = reader.entry(key)
        if entry.kind == "bytes":  # more than its memory
            found = load_archive(reader.bytes_of(key), index.fqn, path=reader.path)
            assert isinstance(found, torch.Tensor)
            return found
        dtype = torch_dtype(entry.dtype)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        octets = torch.frombuffer(reader.bytes_of(key), dtype=torch.uint8)
        return typed_view(octets, 0, entry.nbytes, dtype, entry.shape)

    def tensor(self, fqn: str, scratch: Path | None = None, *, on_disk: bool = False) -> torch.Tensor:
        """A whole tensor: a view of what was saved where it has one part, else put together of its parts.

        Args:
            scratch: a folder for files, in which tensors are put together; in memory if there is none.
            on_disk: the tensor is kept for long: in a file, if it would take memory.
        """
        wanted = self.tensors[fqn]
        places = self.places[fqn]
        dtype, size = wanted.properties.dtype, wanted.size
        nbytes = size.numel() * dtype.itemsize
        first = self.stored(places[0])
        to_disk = on_disk and isinstance(self._parts[self.items[places[0]].rank], PersistedParts)
        if first.shape == size and (not to_disk or first.layout is not torch.strided):
            return first
        if not nbytes:
            return torch.empty(size, dtype=dtype, device="cpu")
        if scratch is None:
            whole = torch.empty(size, dtype=dtype, device="cpu")
        else:
            path = scratch / secrets.token_hex(8)
            flat = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
            path.unlink()
            whole = typed_view(flat, 0, nbytes, dtype, size)
        for index in places:
            chunk = first if index is places[0] else self.stored(index)
            box = tuple(slice(at, at + n) for at, n in zip(index.offset or (), chunk.shape, strict=True))
            whole[box].copy_(chunk)
        return whole

    def _find(self, index: MetadataIndex) -> tuple[ObjectReader, str]:
        place = self.items.get(index)
        if place is None:
            raise ObjectNotFoundError(f"the checkpoint has no {index}", step=self.step)
        if place.rank not in self._parts:
            raise ObjectNotFoundError(
                f"the part that has {index.fqn!r} is not here", step=self.step, rank=place.rank, path=self._path
            )
        return self._parts[place.rank].reader(place.rank), place.key


def _below(prefix: str, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The rest of a path whose name starts so; nothing, if the prefix ends where no name can begin."""
    while prefix and path:
        first = str(path[0])
        if prefix.startswith(f"{first}."):
            prefix, path = prefix[len(first) + 1 :], path[1:]
        elif first.startswith(prefix) and first != prefix:
            return first[len(prefix) :], *path[1:]
        else:
            return ()
    return path
