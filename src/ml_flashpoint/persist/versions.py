"""Versions of a training job in a durable store: the same files as those of a persisted dictionary.

Owns the folders below, the marker that makes a version complete, and which versions go. A part is an object of the
engine, as it is in memory, with the very manifest that it has there, which is its receipt. No collective is needed:
whoever finds the receipts of all ranks may write the marker::

    run-<run id>/step-<n>_ckpt/rank-00003-<save id>.safetensors     the object of a rank
    run-<run id>/step-<n>_ckpt/rank-00003-<save id>.manifest        written after it
    run-<run id>/step-<n>_ckpt/complete.json                        the receipts of all ranks of one save; written last

Later save ids compare greater, so the newest version is the one with the greatest. Only what a marker names counts.
Which rank does what, and when, is `core.persisting`'s.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import xxhash

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    ManifestError,
    ObjectNotFoundError,
    SaveError,
)
from ml_flashpoint.format.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_WORLD_SIZE,
    Manifest,
    ObjectRecord,
    manifest_name,
    parse_manifest_name,
    parse_object_name,
)
from ml_flashpoint.persist.packs import PackReceipt, check_pack, only_object, receipt_of
from ml_flashpoint.persist.records import MAX_RECORD_BYTES, decode_record, encode_record
from ml_flashpoint.persist.store import DurableStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

MARKER: Final = "complete.json"
MARKER_KIND: Final = "mlflashpoint-checkpoint-1"
RUN_PREFIX: Final = "run-"
# Of a training job; dictionaries, which have other ones, are let alone by whoever points both at one folder.
_RUN_ID: Final = re.compile(r"[0-9]{13}-[0-9a-f]{8}")


def run_of(save_id: str) -> str:
    """Returns the id of the run that a save id is of.

    Raises:
        InvalidArgumentError: it is of none.
    """
    run = save_id.rpartition("-")[0] if isinstance(save_id, str) else ""
    if not _RUN_ID.fullmatch(run):
        raise InvalidArgumentError("not the save id of a training job", argument="save_id", value=save_id)
    return run


def is_run_folder(name: str) -> bool:
    """Whether a folder of this name holds the versions of a run of a training job."""
    return name.startswith(RUN_PREFIX) and _RUN_ID.fullmatch(name[len(RUN_PREFIX) :]) is not None


def folder_of(version: str, save_id: str) -> str:
    """Returns the folder of a save of a version."""
    return f"{RUN_PREFIX}{run_of(save_id)}/{version}"


@dataclass(frozen=True, slots=True)
class PersistedVersion:
    """A complete version in a store: all that one has to know to read it.

    Attributes:
        step: training step.
        run: id of the run that saved it.
        parts: the receipt of each rank's part, by rank; all of one save.

    Raises:
        InvalidArgumentError: these do not fit together.
    """

    step: int
    run: str
    parts: tuple[PackReceipt, ...]

    def __post_init__(self) -> None:
        CheckpointContainerId.format_version_container(self.step)
        if not 1 <= len(self.parts) <= MAX_WORLD_SIZE:
            raise InvalidArgumentError("there must be a part of each rank", argument="parts", value=self.parts)
        save_id = self.save_id
        for rank, part in enumerate(self.parts):
            if part.manifest != manifest_name(rank, save_id):
                raise InvalidArgumentError(
                    f"the parts are not those of one save: {rank} is not of {save_id}",
                    argument="parts",
                    value=part.manifest,
                )
        if run_of(save_id) != self.run:
            raise InvalidArgumentError("the parts are of another run", argument="run", value=self.run)

    @property
    def save_id(self) -> str:
        """The save that all parts are of."""
        parsed = parse_manifest_name(self.parts[0].manifest)
        assert parsed is not None  # a receipt checks it
        return parsed[1]

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return len(self.parts)

    @property
    def name(self) -> str:
        """Of the version, as in memory."""
        return CheckpointContainerId.format_version_container(self.step)

    @property
    def folder(self) -> str:
        """Where it is in the store."""
        return folder_of(self.name, self.save_id)

    def to_fields(self) -> dict[str, Any]:
        """Returns it as plain JSON, with the names that markers of dictionaries have."""
        parts = [str(part) for part in self.parts]
        return {"checkpoint_id": self.step, "run": self.run, "managers": len(parts), "parts": parts}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PersistedVersion:
        """Returns what `to_fields` was called on. Trusts nothing.

        Raises:
            InvalidArgumentError: these are not such fields.
        """
        try:
            step, run, count, parts = (fields[each] for each in ("checkpoint_id", "run", "managers", "parts"))
        except (KeyError, TypeError) as error:
            raise InvalidArgumentError("no persisted version", argument="fields", value=fields) from error
        if type(step) is not int or not isinstance(run, str) or not isinstance(parts, list) or count != len(parts):
            raise InvalidArgumentError("no persisted version", argument="fields", value=fields)
        return cls(step, run, tuple(PackReceipt.parse(part) for part in parts))


# ---- writing ----------------------------------------------------------------------------------------------------


def write_part(
    store: DurableStore, manifest: Manifest, content: Callable[[ObjectRecord], Iterable[Buffer]]
) -> PackReceipt:
    """Writes the part of a rank, its object and then its receipt; durable on return.

    Nothing is written if it is there already, whole.

    Args:
        store: where to.
        manifest: of the part, as it is in memory.
        content: the bytes of an object, as many as its file has, in pieces.

    Raises:
        FlashpointError: see `DurableStore.write`; or what the content raises.
    """
    record = only_object(manifest)
    folder = folder_of(manifest.version, manifest.save_id)
    receipt, data = receipt_of(manifest)
    try:
        check_pack(store, folder, receipt)
        return receipt
    except (DamagedError, ObjectNotFoundError):
        pass  # the usual case
    written = store.write(f"{folder}/{record.name}", content(record))
    if written != record.file_size:
        raise SaveError(
            f"{written} bytes were written, and not {record.file_size}",
            step=manifest.step,
            rank=manifest.rank,
            path=store.path_of(f"{folder}/{record.name}"),
        )
    store.write(f"{folder}/{receipt.manifest}", [data])
    return receipt


def ranks_there(store: DurableStore, version: str, save_id: str) -> set[int]:
    """Returns the ranks whose receipts of a save are there."""
    found = map(parse_manifest_name, store.list(folder_of(version, save_id)))
    return {each[0] for each in found if each is not None and each[1] == save_id}


def complete(store: DurableStore, version: str, save_id: str, world_size: int) -> PersistedVersion:
    """Makes a version exist, after checking that the parts of all ranks are there, whole. An earlier save of the step
    in the same run, if it was complete, is replaced at once.

    Raises:
        ObjectNotFoundError: a part is not there.
        DamagedError: one is not what its receipt says.
        FlashpointError: the store failed; then the version may exist all the same.
    """
    folder = folder_of(version, save_id)
    parts = []
    for rank in range(world_size):
        name = manifest_name(rank, save_id)
        data = store.read(f"{folder}/{name}", limit=MAX_MANIFEST_BYTES)
        parts.append(PackReceipt(name, xxhash.xxh3_128(data).hexdigest()))
    step = CheckpointContainerId.parse_version_container(version)
    if step is None:
        raise InvalidArgumentError("not the name of a version", argument="version", value=version)
    found = PersistedVersion(step, run_of(save_id), tuple(parts))
    check_parts(store, found)
    store.write(f"{folder}/{MARKER}", [encode_record(MARKER_KIND, found.to_fields())])
    for name in store.list(folder):
        other = parse_manifest_name(name) or parse_object_name(name)
        if other is not None and other[1] < save_id:
            try_to_remove(store.remove, f"{folder}/{name}")
    return found


# ---- reading ----------------------------------------------------------------------------------------------------


def read_part_manifest(store: DurableStore, version: PersistedVersion, rank: int) -> Manifest:
    """Returns the manifest of a rank's part, after checking it and the size of its object.

    Raises:
        ObjectNotFoundError: there is no such part.
        DamagedError: it is not what the marker says.
        LoadError: the store cannot be read.
    """
    if not 0 <= rank < version.world_size:
        raise ObjectNotFoundError(f"it was saved by {version.world_size} ranks", step=version.step, rank=rank)
    manifest = check_pack(store, version.folder, version.parts[rank])
    found = (manifest.version, manifest.rank, manifest.world_size, manifest.save_id)
    if found != (version.name, rank, version.world_size, version.save_id):
        raise ManifestError(
            f"this is the manifest of another part: {found}", rank=rank, path=store.path_of(version.folder)
        )
    return manifest


def check_parts(store: DurableStore, version: PersistedVersion) -> None:
    """Checks that all parts are there, with the sizes and receipts that they should have. Content is not read.

    Raises:
        FlashpointError: see `read_part_manifest`.
    """
    for rank in range(version.world_size):
        read_part_manifest(store, version, rank)


@dataclass(frozen=True, slots=True)
class Unusable:
    """A folder of a version that does not count.

    Attributes:
        folder: its name, or that of its run if that cannot be looked into.
        marked: whether there is a marker in it, or may be.
        names: what is in it.
        why: what is wrong with it.
    """

    folder: str
    marked: bool
    names: tuple[str, ...]
    why: str

    @property
    def newest_save(self) -> str:
        """The greatest save id of a file in it; "" if there is none."""
        parsed = (parse_manifest_name(name) or parse_object_name(name) for name in self.names)
        return max((each[1] for each in parsed if each is not None), default="")


def list_persisted(store: DurableStore) -> tuple[list[PersistedVersion], list[Unusable]]:
    """Returns the versions that have a valid marker, newest first, and what else is there. Parts are not looked at.

    Raises:
        LoadError: the store cannot be read.
    """
    found: list[PersistedVersion] = []
    unusable: list[Unusable] = []
    for run in store.list():
        if not is_run_folder(run):
            continue
        try:
            names = [
                each for each in store.list(run) if CheckpointContainerId.parse_version_container(each) is not None
            ]
        except DamagedError as error:
            unusable.append(Unusable(run, True, (), str(error)))
            continue
        for folder in [f"{run}/{each}" for each in names]:
            inside: tuple[str, ...] = ()
            try:
                inside = tuple(store.list(folder))
                if MARKER in inside:
                    found.append(_read_marker(store, folder))
                else:
                    unusable.append(Unusable(folder, False, inside, "it is not complete"))
            except ObjectNotFoundError:
                continue  # removed meanwhile
            except DamagedError as error:
                unusable.append(Unusable(folder, True, inside, str(error)))
    found.sort(key=lambda version: version.save_id, reverse=True)
    return found, unusable


def _read_marker(store: DurableStore, folder: str) -> PersistedVersion:
    name = f"{folder}/{MARKER}"
    path = store.path_of(name)
    content = decode_record(MARKER_KIND, store.read(name, limit=MAX_RECORD_BYTES), path)
    try:
        version = PersistedVersion.from_fields(content)
    except InvalidArgumentError as error:
        raise DamagedError(f"the marker is not valid: {error}", path=path) from error
    if version.folder != folder:
        raise DamagedError("the marker is of another version", path=path)
    return version


# ---- removing ---------------------------------------------------------------------------------------------------


def keep_newest(store: DurableStore, count: int, current_run: str) -> list[PersistedVersion]:
    """Removes all complete versions but the newest ones, and what writers have left that are gone.

    To be called by who alone persists here. Of the current run nothing goes that its ranks may still be writing: only
    what is older than the newest complete version. Of a version, the marker goes first.

    Args:
        count: how many complete versions stay, at least 1.
        current_run: id of the run that persists here.

    Returns:
        Those that stay, newest first.

    Raises:
        LoadError: the store cannot be read.
    """
    found, unusable = list_persisted(store)
    for version in found[count:]:
        if try_to_remove(store.remove, f"{version.folder}/{MARKER}"):
            try_to_remove(store.remove_folder, version.folder)
    kept = found[:count]
    for each in unusable:
        run = each.folder.partition("/")[0][len(RUN_PREFIX) :]
        # A folder with nothing but a temporary file may be what a rank of this run has just begun.
        limit = (kept[-1] if each.marked else kept[0]).save_id if kept else ""
        if "" < each.newest_save < limit or (not each.marked and run < current_run):
            try_to_remove(store.remove_folder, each.folder)
    for run in store.list():
        if is_run_folder(run):
            with contextlib.suppress(DamagedError):
                if run != RUN_PREFIX + current_run and not store.list(run):
                    try_to_remove(store.remove_folder, run)
    return kept


def remove_failed(store: DurableStore, version: str, save_id: str) -> None:
    """Removes what was begun before this save and not completed: what is left of saves that failed must not take the
    room of this one. To be called by who alone persists here, when no rank writes anything older any more.

    Raises:
        LoadError: the store cannot be read.
    """
    for each in list_persisted(store)[1]:
        # In its own folder, ranks may be writing already.
        if not each.marked and "" < each.newest_save < save_id and each.folder != folder_of(version, save_id):
            try_to_remove(store.remove_folder, each.folder)


def try_to_remove(remove: Callable[[str], None], name: str) -> bool:
    """Removes what is not wanted any more, by a method of its store; returns whether that worked, and warns if not."""
    try:
        remove(name)
    except FlashpointError as error:
        _log.warning("what is not wanted any more cannot be removed: %s", error)
        return False
    return True
