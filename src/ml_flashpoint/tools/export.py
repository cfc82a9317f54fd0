"""Versions as files that other tools read: a plain DCP directory, safetensors, a file of ``torch.save``.

An export is the whole version, or is not there. Items are read, compared with their digests and written one by one.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_leaves, tree_map_only

from ml_flashpoint.copy.dtypes import bytes_of, dtype_name
from ml_flashpoint.format.arguments import checked_choice
from ml_flashpoint.format.dtypes import FILE_DTYPES
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError
from ml_flashpoint.format.object_format import encode_header, plan_layout
from ml_flashpoint.tools.copy import make_whole
from ml_flashpoint.tools.items import OpenVersion, VersionItems, nbytes_of
from ml_flashpoint.tools.sources import FoundVersion, Progress, Source, no_progress, stores_of, with_newest

FORMATS: Final = ("dcp", "safetensors", "torch", "hf")
SHARD_BYTES: Final = 4 << 30
"""Bytes of a safetensors file, about."""
_DCP_FILE_BYTES: Final = 1 << 30
_READ: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Exported:
    """The result of an export: the folder or file, the step, the number of tensors and their bytes, and the names of
    what the format has no place for, or its readers would refuse."""

    path: Path
    step: int
    tensors: int
    nbytes: int
    left_out: tuple[str, ...] = ()


def export_version(
    sources: Source | Sequence[Source],
    destination: str | os.PathLike[str],
    step: int | None = None,
    *,
    format: str = "dcp",
    prefix: str = "",
    names: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = no_progress,
) -> Exported:
    """Write a version that was saved through DCP, `Flashpoint` or Lightning as files that other tools read.

    Args:
        sources: see `copy_version`. Together they must have the parts of all ranks.
        destination: what to make: a folder, or for ``"torch"`` a file. It must not be there.
        step: which version; by default the newest that is whole and sound.
        format: ``"dcp"`` (``dcp.load`` with a ``FileSystemReader`` reads it), ``"safetensors"`` (tensors only, in files
            named as Hugging Face does, with an index), ``"hf"`` (the same, of a model only: what `prefix` or
            `names` select) or ``"torch"`` (a nested dict, by ``torch.save``, which ``torch.load`` reads with
            ``weights_only=True``: NumPy's arrays become tensors, and what it would refuse is left out).
        prefix: only names that start so, without it: ``"model."``, for a model's own names. Not for ``"dcp"``.
        names: only these names, each by another one: a model's, by those of another library. Instead of a prefix.
        shard_bytes: for ``"safetensors"``, bytes of a file, about; a larger tensor has a file of its own.
        progress: called with how many bytes of tensors are written, of how many.

    Raises:
        InvalidArgumentError: an argument is unusable, no name has the prefix, or one of `names` is not there.
        ObjectNotFoundError: there is no such version, or not all of it.
        LoadError: it was not saved through DCP, or holds what the format cannot.
        UnsafeContentError: for ``"torch"``, it holds types that are not loaded without trusting them.
        PrunedError, DamagedError: it went while it was read, or is not what was saved.
        SaveError: the files cannot be written, or there are some already.
    """
    checked_choice("format", format, *FORMATS)
    _check_names(format, prefix, names)
    target = Path(os.path.abspath(destination))

    def export(found: FoundVersion) -> Exported:
        with OpenVersion(found) as version:
            items, left_out = VersionItems(version, prefix, names, progress), list[str]()

            def make(hidden: Path) -> Path:
                made, omitted = _WRITERS[format](items, hidden, shard_bytes=shard_bytes)
                left_out.extend(omitted)
                return made

            make_whole(target, "the export", make)
        return Exported(target, items.step, len(items.tensors), items.nbytes, tuple(left_out))

    return with_newest(stores_of(sources), step, export)


def _check_names(format: str, prefix: str, names: Mapping[str, str] | None) -> None:
    given, value = ("names", dict(names)) if names is not None else ("prefix", prefix)
    if value and format == "dcp":
        raise InvalidArgumentError("names cannot be changed in a DCP directory", argument=given, value=value)
    if names is None:
        if format == "hf" and not prefix:
            raise InvalidArgumentError(
                "must select the names of the model, such as model. if it was tracked as model",
                argument="prefix",
                value=prefix,
            )
        return
    if prefix:
        raise InvalidArgumentError("give a prefix or names, not both", argument="prefix", value=prefix)
    if not names or not all(isinstance(each, str) and each for pair in names.items() for each in pair):
        raise InvalidArgumentError("must be a dict of new names by name, and not empty", argument="names", value=names)
    if len(set(names.values())) < len(names):
        raise InvalidArgumentError("two would get the same name", argument="names", value=names)


class _Planner:
    """Gives a DCP writer the data of its items."""

    def __init__(self, version: VersionItems) -> None:
        self._version = version

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type is WriteItemType.BYTE_IO:
            return self._version.octets(item.index)
        found = self._version.stored(item.index)
        self._version.written(found.numel() * found.element_size())
        return found


def _write_dcp(version: VersionItems, folder: Path, shard_bytes: int) -> tuple[Path, list[str]]:
    """Write what torch's own writer writes, with the parts of tensors as ranks have saved them."""
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
    # Several files, as if of several ranks: torch's writer keeps the tensors of a file until that is written.
    plans = [writer.prepare_local_plan(SavePlan(some)) for some in _grouped(items, _bytes_of_item, _DCP_FILE_BYTES)]
    planner: Any = _Planner(version)
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    writer.finish(version.metadata, results)
    return made, []


def _grouped(items: Iterable[_T], nbytes: Callable[[_T], int], limit: int) -> Iterator[list[_T]]:
    """Yield consecutive items together, of about so many bytes; one empty list of no items."""
    group: list[_T] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    yield group


def _bytes_of_item(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _write_safetensors(version: VersionItems, folder: Path, shard_bytes: int) -> tuple[Path, list[str]]:
    """Write tensors, in files as Hugging Face names them."""
    made, scratch = folder / "made", folder / "scratch"
    made.mkdir(mode=0o755)
    scratch.mkdir()

    shards = list(_grouped(version.tensors, lambda fqn: nbytes_of(version.tensors[fqn]), shard_bytes))
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


def _write_shard(version: VersionItems, path: Path, fqns: Sequence[str], scratch: Path) -> None:
    described = []
    for fqn in fqns:
        of = version.tensors[fqn]
        dtype = dtype_name(of.properties.dtype)
        if of.properties.layout is not torch.strided or dtype not in FILE_DTYPES:
            raise _no_place("safetensors", fqn, f"{of.properties.layout}, {dtype}")
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


def _write_torch(version: VersionItems, folder: Path, shard_bytes: int) -> tuple[Path, list[str]]:
    """Write a nested dict, as it was saved."""
    made, scratch = folder / "made", folder / "scratch"
    scratch.mkdir()
    flat: dict[str, Any] = {}
    left_out = []
    for fqn in version.names:
        if fqn in version.tensors:
            flat[fqn] = version.tensor(fqn, scratch, on_disk=True)
            continue
        value = version.value(fqn)
        try:
            flat[fqn] = _as_torch_reads(value)
        except Exception as error:  # of whatever kind torch, NumPy or a type raises
            _log.warning("%r is left out, since torch.load(weights_only=True) would refuse it: %s", fqn, error)
            left_out.append(version.short(fqn))
    nested = unflatten_state_dict(flat, {fqn: version.path_of(fqn) for fqn in flat})
    with open(made, "wb") as file:
        torch.save(nested, file)
        file.flush()
        os.fsync(file.fileno())
    version.written(version.nbytes)
    return made, left_out


def _as_torch_reads(value: Any) -> Any:
    """Return a value without NumPy's types. Raise what ``torch.load(weights_only=True)`` would raise for it."""
    if type(value) in _READ:
        return value
    if any(isinstance(leaf, (np.ndarray, np.generic)) for leaf in tree_leaves(value)):
        value = tree_map_only(np.ndarray, lambda array: torch.from_numpy(array.copy()), value)
        value = tree_map_only(np.generic, lambda number: number.item(), value)
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    torch.load(stream, weights_only=True)
    return value


def _no_place(format: str, fqn: str, kind: str) -> LoadError:
    return LoadError(f"{format} has no place for {fqn!r} ({kind})", hint="export to torch")


_WRITERS: Final[Mapping[str, Callable[..., tuple[Path, list[str]]]]] = {
    "dcp": _write_dcp,
    "safetensors": _write_safetensors,
    "hf": _write_safetensors,
    "torch": _write_torch,
}
