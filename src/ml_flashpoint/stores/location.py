"""The stores that paths and URLs lead to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.files import check_unplanted
from ml_flashpoint.stores.base_container import BaseContainer
from ml_flashpoint.stores.durable import DurableVersions, is_run_folder
from ml_flashpoint.stores.files import Directory, UrlFiles
from ml_flashpoint.stores.version_store import VersionStore

_FILE: Final = "file://"


def checked_url(argument: str, value: object) -> str:
    """Return a URL, with an absolute path on this machine. Raise an `InvalidArgumentError` if it is none."""
    url = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(url, str) or not url:
        raise InvalidArgumentError(
            "must be a URL such as file:///lustre/me/job-145 or s3://bucket/job-145", argument=argument, value=value
        )
    if url.startswith(_FILE) and not os.path.isabs(url[len(_FILE) :]):
        raise InvalidArgumentError("the path of a file:// URL must be absolute", argument=argument, value=value)
    return url if is_url(url) else _FILE + os.path.abspath(os.path.expanduser(url))


def is_url(text: str) -> bool:
    """Return True for a URL, False for a path."""
    return "://" in text or "::" in text


def open_durable(url: str) -> DurableVersions:
    """Return the store behind what `checked_url` returned. Reads and writes nothing of it.

    Raises:
        UnsafePathError: it is a folder, and somebody else has planted something on the way.
    """
    if not url.startswith(_FILE):
        return DurableVersions(UrlFiles(url), url)
    path = url[len(_FILE) :]
    check_unplanted(Path(path))
    return DurableVersions(Directory(path), url)


def open_store(source: str | os.PathLike[str]) -> VersionStore:
    """Return the store that a user points at: a URL, a folder of durable versions, or a base container.

    Raises:
        InvalidArgumentError: it is empty, or a file:// URL of a relative path.
        UnsafePathError: it is a folder of durable versions, and somebody else has planted something on the way.
    """
    text = os.fspath(source)
    if not is_url(text):
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(text)
        if not any(map(is_run_folder, names)):
            return BaseContainer(text)
    return open_durable(checked_url("SOURCE", text))
