"""Versions as files that other tools read: a plain DCP directory, safetensors, a file of ``torch.save``.

Owns these formats, and that an export is the whole version or is not there: parts are held while they are read, their
bytes are compared with their digests, everything is written to a hidden folder, and only once the holds are found
unbroken does that get its name. Memory is bounded: parts stay mapped, and one tensor at a time is written.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.storage_data import ItemPlace
from ml_flashpoint.core.arguments import checked_choice
from ml_flashpoint.core.loader import MLFlashpointCheckpointLoader
from ml_flashpoint.core.open_version import TRIES, OpenVersion, open_version
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.dtypes import stored_tensor
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, ObjectNotFoundError, PrunedError, SaveError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, sync_directory
from ml_flashpoint.format.object_format import encode_header
from ml_flashpoint.format.object_layout import plan_layout
from ml_flashpoint.format.private_folders import check_unplanted
from ml_flashpoint.staging.copy import typed_view
from ml_flashpoint.staging.torch_dtypes import bytes_of, dtype_name
from ml_flashpoint.unpickling.safe_archive import load_archive

FORMATS: Final = ("dcp", "safetensors", "torch")
SHARD_BYTES: Final = 4 << 30
"""Bytes of a safetensors file, about."""

Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        path: the folder, or the file.
        step: of the version.
        tensors: how many.
        nbytes: bytes of these tensors.
        left_out: names of what the format has no place for.
    """

    path: Path
    step: int
    tensors: int
    nbytes: int
    left_out: tuple[str, ...] = ()


def export_version(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    step: int | None = None,
    *,
    format: str = "dcp",
    prefix: str = "",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write a version that was saved through DCP, `Flashpoint` or Lightning as files that other tools read.

    Args:
        sources: the base container, or those of several nodes, which together have the parts of all ranks. Jobs may be
            using them.
        destination: what to make: a folder, or for ``"torch"`` a file. It must not be there.
        step: which version; by default the newest that is whole, and if that goes meanwhile, the newest then.
        format: ``"dcp"`` (``dcp.load`` with a ``FileSystemReader`` reads it), ``"safetensors"`` (tensors only, in files
            named as Hugging Face does, with an index) or ``"torch"`` (a nested dict, by ``torch.save``).
        prefix: only names that start so, without it: ``"model."``, for a model's own names. Not for ``"dcp"``; for
            ``"torch"``, the dict has then no other dicts in it.
        shard_bytes: for ``"safetensors"``, bytes of a file, about; a larger tensor has a file of its own.
        progress: called with how many bytes of tensors are written, of how many.

    Raises:
        InvalidArgumentError: an argument is unusable, or no name has the prefix.
        ObjectNotFoundError: there is no such version, or not all of it.
        LoadError: it was not saved through DCP, or holds what the format cannot.
        UnsafeContentError: for ``"torch"``, it holds types that are not loaded without trusting them.
        PrunedError, DamagedError, DigestMismatchError: it went while it was read, or is not what was saved.
        SaveError: the files cannot be written, or there are some already.
    """
    checked_choice("format", format, *FORMATS)
    if prefix and format == "dcp":
        raise InvalidArgumentError("the names of a DCP checkpoint stay as they are", argument="prefix", value=prefix)
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    target, bases = Path(os.path.abspath(destination)), [Path(source) for source in sources]
    for tries_left in reversed(range(TRIES)):
        try:
            with contextlib.ExitStack() as stack:
                version = _Version(_whole(stack, bases, step), prefix, progress)
                left_out = _write(version, target, partial(_WRITERS[format], shard_bytes=shard_bytes))
            return Exported(target, version.step, len(version.tensors), version.nbytes, tuple(left_out))
        except PrunedError:
            if not tries_left or step is not None:
                raise
    raise AssertionError


def _write(version: _Version, target: Path, write: Callable[[_Version, Path], tuple[Path, list[str]]]) -> list[str]:
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if os.path.lexists(target):
            raise SaveError("it is there already", path=target, hint="remove it first")
        check_unplanted(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        check_unplanted(target.parent)  # nobody else can be there first any more
        hidden.mkdir(mode=0o700)
        try:
            made, left_out = write(version, hidden)
            version.check()
            os.rename(made, target)
            sync_directory(target.parent)
            return left_out
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        raise SaveError(f"the export cannot be written: {error.strerror or error}", path=target) from error


# ---- what is read ---------------------------------------------------------------------------------------------------


def _whole(stack: contextlib.ExitStack, bases: Sequence[Path], step: int | None) -> dict[int, OpenVersion]:
    """For each rank, what to read its part from."""
    if len(bases) == 1:
        version = stack.enter_context(open_version(bases[0], step))
        return dict.fromkeys(version.manifests, version)
    opened = [stack.enter_context(open_version(base, step, partial=True)) for base in bases]
    saves = {(each.step, manifest.save_id) for each in opened for manifest in each.manifests.values()}
    for wanted in sorted(saves, reverse=True):
        parts = {
            rank: each
            for each in opened
            for rank, manifest in each.manifests.items()
            if (each.step, manifest.save_id) == wanted
        }
        if parts and len(parts) == next(iter(parts.values())).world_size:
            return parts
    raise ObjectNotFoundError(
        "the folders have no version whose parts are all there",
        path=", ".join(map(str, bases)),
        hint="give the step that all have, as the newest may differ: flashpoint ls shows what there is",
    )


class _HeldLoader(MLFlashpointCheckpointLoader):
    """Reads what is held, for the reader of DCP checkpoints."""

    def __init__(self, parts: Mapping[int, OpenVersion]) -> None:
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


class _Version:
    """The items of a version.

    Attributes:
        names: of all that is exported, in order.
        tensors, others: of these, what is said of the tensors, and the names of everything else.
    """

    def __init__(self, parts: Mapping[int, OpenVersion], prefix: str, progress: Progress) -> None:
        any_part = next(iter(parts.values()))
        self.step, self._parts, self._progress, self._done = any_part.step, parts, progress, 0
        self._loader = _HeldLoader(parts)
        reader = MemoryStorageReader(any_part.path, self._loader, trust_bytes=True)
        self.metadata: Metadata = reader.read_metadata()
        reader.set_up_storage_reader(self.metadata, True)
        self.items: dict[MetadataIndex, ItemPlace] = self.metadata.storage_data
        self._prefix = prefix
        described = self.metadata.state_dict_metadata
        self._paths: Mapping[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        # As the state was nested, as far as that is known.
        order = dict.fromkeys([*(fqn for fqn in self._paths if fqn in described), *described])
        named = {fqn: described[fqn] for fqn in order if fqn.startswith(prefix)}
        if prefix and not named:
            raise InvalidArgumentError("no name in the checkpoint starts so", argument="prefix", value=prefix)
        self.names = list(named)
        self.tensors = {fqn: each for fqn, each in named.items() if isinstance(each, TensorStorageMetadata)}
        self.others = [fqn for fqn in named if fqn not in self.tensors]
        self.nbytes = sum(each.size.numel() * each.properties.dtype.itemsize for each in self.tensors.values())

    def check(self) -> None:
        """Check that all that was read is what was saved."""
        for part in set(self._parts.values()):
            part.check()

    def short(self, fqn: str) -> str:
        """A name without the prefix."""
        return fqn[len(self._prefix) :]

    def path_of(self, fqn: str) -> tuple[str | int, ...]:
        """Where it is in the nested state; with a prefix, names are all that is left of that."""
        return (self.short(fqn),) if self._prefix else self._paths.get(fqn, (fqn,))

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
        """What one rank has saved of a tensor; with a storage of its own, so that ``torch.save`` writes no more."""
        reader, key = self._find(index)
        entry = reader.entry(key)
        if entry.kind == "bytes":  # more than its memory
            found = load_archive(reader.bytes_of(key), index.fqn, path=reader.path)
            assert isinstance(found, torch.Tensor)
            return found
        plain = reader.tensor(key)
        if not plain.numel():
            return plain.clone()
        octets = torch.frombuffer(reader.bytes_of(key), dtype=torch.uint8)
        return typed_view(octets, 0, entry.nbytes, plain.dtype, plain.shape)

    def tensor(self, fqn: str, scratch: Path) -> torch.Tensor:
        """A whole tensor. One of several parts is put together in a file, not in memory."""
        wanted = self.tensors[fqn]
        chunks = [(index, self.stored(index)) for index in self.items if index.fqn == fqn]
        if len(chunks) == 1 and chunks[0][1].shape == wanted.size:
            return chunks[0][1]
        dtype, size = wanted.properties.dtype, wanted.size
        nbytes = size.numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(size, dtype=dtype)
        path = scratch / secrets.token_hex(8)
        flat = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        path.unlink()
        whole = typed_view(flat, 0, nbytes, dtype, size)
        for index, chunk in chunks:
            box = tuple(slice(at, at + n) for at, n in zip(index.offset or (), chunk.shape, strict=True))
            whole[box].copy_(chunk)
        return whole

    def _find(self, index: MetadataIndex) -> tuple[ObjectReader, str]:
        place = self.items.get(index)
        if place is None or place.rank not in self._parts:
            raise ObjectNotFoundError(f"the checkpoint has no {index}")
        return self._parts[place.rank].reader(place.rank), place.key


# ---- what is written ------------------------------------------------------------------------------------------------


class _Planner:
    """Gives a DCP writer the data of its items."""

    def __init__(self, version: _Version) -> None:
        self._version = version

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type is WriteItemType.BYTE_IO:
            return self._version.octets(item.index)
        found = self._version.stored(item.index)
        self._version.written(found.numel() * found.element_size())
        return found


def _write_dcp(version: _Version, folder: Path, shard_bytes: int) -> tuple[Path, list[str]]:
    """The version as torch's own writer writes it, with the parts of tensors as ranks have saved them."""
    described = version.metadata.state_dict_metadata
    items = []
    for index in version.items:
        of = described[index.fqn]
        if not isinstance(of, TensorStorageMetadata):
            items.append(WriteItem(index=index, type=WriteItemType.BYTE_IO))
            continue
        if of.properties.layout is not torch.strided:  # torch's writer fails at it
            raise _no_place("dcp", index.fqn, str(of.properties.layout))
        chunk = next((each for each in of.chunks if each.offsets == index.offset), of.chunks[0])
        data = TensorWriteData(chunk=chunk, properties=of.properties, size=of.size)
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    made = folder / "made"
    writer = FileSystemWriter(made)
    writer.reset(made)
    writer.set_up_storage_writer(True)
    [plan] = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    planner: Any = _Planner(version)
    results = writer.write_data(plan, planner).wait()
    writer.finish(version.metadata, [results])
    return made, []


def _write_safetensors(version: _Version, folder: Path, shard_bytes: int) -> tuple[Path, list[str]]:
    """Tensors in files as Hugging Face names them."""
    made, scratch = folder / "made", folder / "scratch"
    made.mkdir(mode=0o755)
    scratch.mkdir()
    shards = list(_shards(version, shard_bytes))
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=False):
        _write_shard(version, made / name, shard, scratch)
    if len(shards) > 1:
        places = {version.short(fqn): name for name, shard in zip(names, shards, strict=True) for fqn in shard}
        index = {"metadata": {"total_size": version.nbytes}, "weight_map": places}
        (made / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return made, [version.short(fqn) for fqn in version.others]


def _shards(version: _Version, shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for fqn, of in version.tensors.items():
        nbytes = of.size.numel() * of.properties.dtype.itemsize
        if shard and size + nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(fqn)
        size += nbytes
    yield shard


def _write_shard(version: _Version, path: Path, fqns: Sequence[str], scratch: Path) -> None:
    described = []
    for fqn in fqns:
        of = version.tensors[fqn]
        dtype = dtype_name(of.properties.dtype)
        if of.properties.layout is not torch.strided or stored_tensor(dtype, tuple(of.size)).true_type is not None:
            kind = f"{of.properties.layout}, {dtype}"
            raise _no_place("safetensors", fqn, kind)
        described.append((version.short(fqn), dtype, tuple(of.size)))
    by_name = {version.short(fqn): fqn for fqn in fqns}
    layout = plan_layout(described, reserve=0)
    with open(path, "wb") as file:
        file.write(encode_header(layout, layout.size))
        for entry in layout.tensors:
            tensor = version.tensor(by_name[entry.key], scratch).contiguous()
            octets: Any = bytes_of(tensor).numpy()
            file.write(octets)
            version.written(entry.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _write_torch(version: _Version, folder: Path, shard_bytes: int) -> tuple[Path, list[str]]:
    """A nested dict, as it was saved."""
    made, scratch = folder / "made", folder / "scratch"
    scratch.mkdir()
    flat = {
        fqn: version.tensor(fqn, scratch) if fqn in version.tensors else version.value(fqn) for fqn in version.names
    }
    nested = unflatten_state_dict(flat, {fqn: version.path_of(fqn) for fqn in flat})
    with open(made, "wb") as file:
        torch.save(nested, file)
        file.flush()
        os.fsync(file.fileno())
    version.written(version.nbytes)
    return made, []


def _no_place(format: str, fqn: str, kind: str) -> LoadError:
    return LoadError(f"{format} has no place for {fqn!r} ({kind})", hint="export to torch")


_WRITERS: Final[Mapping[str, Callable[..., tuple[Path, list[str]]]]] = {
    "dcp": _write_dcp,
    "safetensors": _write_safetensors,
    "torch": _write_torch,
}
