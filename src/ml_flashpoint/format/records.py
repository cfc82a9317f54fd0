"""Small JSON files that show any flipped byte and any truncation.

A record is one JSON object with the fields `kind`, `content` and `digest`, the xxh3_128 of the content written
canonically. The digest finds accidents; it is no defence against forgery.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

import xxhash

from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError

MAX_RECORD_BYTES: Final = 64 * 2**20
"""Largest record."""


def encode_record(kind: str, content: dict[str, Any]) -> bytes:
    """Return the file of a record, whose content is plain JSON.

    Raises:
        InvalidArgumentError: it would be larger than `MAX_RECORD_BYTES`.
    """
    data = json.dumps({"kind": kind, "content": content, "digest": _digest(content)}, indent=1).encode("ascii")
    if len(data) > MAX_RECORD_BYTES:
        text = f"a record must not exceed {MAX_RECORD_BYTES} bytes"
        raise InvalidArgumentError(text, argument="content", value=len(data))
    return data


def decode_record(kind: str, data: bytes, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Return the content of a record. What is in it remains to be checked.

    Raises:
        DamagedError: `data` is no record of this kind.
    """
    try:
        record = json.loads(data.decode("ascii"))
        content = record["content"]
        if record["kind"] != kind or not isinstance(content, dict):
            raise ValueError("of another kind")
        is_right = record["digest"] == _digest(content)
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise DamagedError(f"this is no record of kind {kind}", path=path) from error
    if not is_right:
        raise DamagedError("the record was altered: its digest does not match", path=path)
    return content


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(canonical.encode("ascii")).hexdigest()
