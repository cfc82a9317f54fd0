"""Which store a URL is. Owns what URLs mean here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.private_folders import check_unplanted
from ml_flashpoint.persist.directory_store import DirectoryStore
from ml_flashpoint.persist.fsspec_store import FsspecStore
from ml_flashpoint.persist.store import DurableStore
from ml_flashpoint.persist.versions import is_run_folder

_FILE: Final = "file://"


def checked_url(argument: str, value: object) -> str:
    """Returns a URL, with an absolute path if it is one of this machine.

    Raises:
        InvalidArgumentError: it is none.
    """
    url = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(url, str) or not url:
        raise InvalidArgumentError(
            "must be a URL such as file:///lustre/me/job-145 or s3://bucket/job-145", argument=argument, value=value
        )
    if url.startswith(_FILE):
        if not os.path.isabs(url[len(_FILE) :]):
            raise InvalidArgumentError("the path of a file:// URL must be absolute", argument=argument, value=value)
        return url
    return url if is_url(url) else _FILE + os.path.abspath(os.path.expanduser(url))


def is_url(text: str) -> bool:
    """Whether this is a URL, and not a path."""
    return "://" in text or "::" in text


def persisted_url(source: str | os.PathLike[str]) -> str | None:
    """Returns the URL of what a user points at if that is persisted versions: a URL, or a folder that holds some, whose
    name is as good as its URL. None: it is to be taken for a base container.

    Raises:
        InvalidArgumentError: it is empty, or a file:// URL of a relative path.
    """
    text = os.fspath(source)
    if is_url(text):
        return checked_url("SOURCE", text)
    try:
        names = os.listdir(text)
    except OSError:
        return None
    return checked_url("SOURCE", text) if any(map(is_run_folder, names)) else None


def open_store(url: str) -> DurableStore:
    """Returns the store behind what `checked_url` returned. Reads and writes nothing of it.

    A folder is one that all nodes see under this path. It has names that are durable and locks, for which reason it is
    not left to fsspec.

    Raises:
        UnsafePathError: it is a folder, and somebody else has planted something on the way.
    """
    if url.startswith(_FILE):
        path = url[len(_FILE) :]
        check_unplanted(Path(path))
        return DirectoryStore(path)
    return FsspecStore(url)
