"""What an earlier process of a rank left behind: parts to keep, and what a crash cut short, which goes.

Owns setting the two apart, on the files alone. A crash can leave, of a part that was coming or going: links
without a manifest, the temporary file of a manifest, a directory without parts; and from damage: a manifest without
objects, or an object whose arena is gone. Other processes of the node may be at work in the same directories,
so only what certainly is nobody's, or this rank's, is touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions, remove_part, remove_version_folder
from ml_flashpoint.format.errors import FlashpointError, ObjectNotFoundError
from ml_flashpoint.format.failure_kinds import is_shortage
from ml_flashpoint.format.manifest import (
    Manifest,
    manifest_name,
    parse_manifest_name,
    parse_object_name,
    read_manifest,
)

_log = logging.getLogger(__name__)

_Owner = tuple[int, str]
"""Rank and save id of a part."""


@dataclass(slots=True)
class _Files:
    """Files of one part in a version's directory."""

    objects: dict[str, Arena] = field(default_factory=dict)
    stranded: list[str] = field(default_factory=list)  # objects that no arena shares its file with any more
    others: int = 0  # objects in the arenas of other ranks of this node


def inherit_parts(base: Path, arenas: Mapping[int, Arena]) -> Iterator[HeldPart]:
    """Sweep what is of no use to anyone, and find the parts that a store has to answer for.

    Args:
        base: base container.
        arenas: the store's arenas by inode.

    Raises:
        UnreadableError, OSError: the system is short of something just now.
    """
    began = psutil.Process().create_time()
    for version in list_versions(base):
        # Other ranks of this node sweep at the same time, so the directory may vanish.
        with contextlib.suppress(FileNotFoundError):
            changed = os.stat(base / version).st_mtime
            yield from _parts_of_version(base, version, arenas)
            # Sidecar files come before the first part, and the directory before them. What a rank of this run has begun
            # there stays, even if it is empty: all ranks were started before the first save.
            if changed < began:
                remove_version_folder(base / version)


def _parts_of_version(base: Path, version: str, arenas: Mapping[int, Arena]) -> Iterator[HeldPart]:
    directory = base / version
    # In this order: a manifest that is there before the second look has all its links there, too.
    names = os.listdir(directory)
    parts: dict[_Owner, _Files] = {}
    for entry in os.scandir(directory):
        owner = parse_object_name(entry.name)
        if owner is None:
            continue
        files = parts.setdefault(owner, _Files())
        with contextlib.suppress(FileNotFoundError):
            if (arena := arenas.get(entry.inode())) is not None:
                files.objects[entry.name] = arena
            elif entry.stat(follow_symlinks=False).st_nlink == 1:
                files.stranded.append(entry.name)
            else:
                files.others += 1
    for name in names:
        _sweep(directory, name, parts)
    for (rank, save_id), files in parts.items():
        if files.objects or files.stranded:
            part = _inherited_part(base, version, rank, save_id, files)
            if part is not None:
                yield part


def _sweep(directory: Path, name: str, parts: Mapping[_Owner, _Files]) -> None:
    """Remove a manifest without objects, and temporary files of parts that are this store's or nobody's."""
    owner = parse_manifest_name(name)
    if owner is not None:
        if owner not in parts:
            _log.warning("removing a manifest whose objects are gone: %s", directory / name)
            (directory / name).unlink(missing_ok=True)
        return
    if name.startswith(".") and name.endswith(".tmp"):
        stem = name[1:].rsplit(".", 2)[0]
        owner = parse_manifest_name(stem) or parse_object_name(stem)
        if owner is not None and not (owner in parts and parts[owner].others):
            (directory / name).unlink(missing_ok=True)


def _inherited_part(base: Path, version: str, rank: int, save_id: str, files: _Files) -> HeldPart | None:
    path = base / version / manifest_name(rank, save_id)
    found = [*files.objects, *files.stranded]
    manifest: Manifest | None
    try:
        manifest = read_manifest(path)
    except ObjectNotFoundError:
        remove_part(base, version, rank, save_id, found)
        return None
    except FlashpointError as error:
        if error.__cause__ is not None and is_shortage(error.__cause__):
            raise
        _log.warning("this part cannot be recovered from: %s", error)
        manifest = None
    if manifest is None or {o.name for o in manifest.objects} != set(files.objects):
        # Not whole, or not in arenas of ours: to be pruned like any other, whatever is there of it.
        return HeldPart(version, rank, save_id, list(files.objects.values()), None, names=found)
    names = [o.name for o in manifest.objects]
    return HeldPart(version, rank, save_id, [files.objects[name] for name in names], manifest, names=names)
