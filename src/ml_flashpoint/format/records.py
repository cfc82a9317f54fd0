"""Small JSON files that show any flipped byte and any truncation: manifests, markers, leases.

A record is one JSON object with the fields `kind`, `digest` and `content`. The digest is the xxh3_128 of the content
with sorted keys and no blanks. It finds accidents, and is no defence against forgery: for that, peers authenticate.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

import xxhash

from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError

MAX_RECORD_BYTES: Final = 64 * 2**20
"""Largest record. As a manifest: the digests of some 50 TiB."""


def encode_record(kind: str, content: dict[str, Any]) -> bytes:
    """Return the file of a record, whose content is plain JSON. Equal contents give equal bytes.

    Raises:
        InvalidArgumentError: it would be larger than `MAX_RECORD_BYTES`.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    data = f'{{"kind":"{kind}","digest":"{xxhash.xxh3_128_hexdigest(text.encode())}","content":{text}}}'.encode()
    if len(data) > MAX_RECORD_BYTES:
        what = f"a record must not exceed {MAX_RECORD_BYTES} bytes"
        raise InvalidArgumentError(what, argument="content", value=len(data))
    return data


def decode_record(
    kind: str, data: bytes, path: str | os.PathLike[str] | None = None, *, error: type[DamagedError] = DamagedError
) -> dict[str, Any]:
    """Return the content of a record. What is in it remains to be checked.

    Raises:
        DamagedError: `data` is no record of this kind. It is an ``error``.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise error(f"a record must not exceed {MAX_RECORD_BYTES} bytes", path=path)
    try:
        record = json.loads(data.decode("ascii"))
        content = record["content"]
        if record["kind"] != kind or not isinstance(content, dict):
            raise ValueError("of another kind")
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        is_right = record["digest"] == xxhash.xxh3_128_hexdigest(canonical)
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as caught:
        raise error(f"this is no record of kind {kind}", path=path) from caught
    if not is_right:
        raise error("the record was altered: its digest does not match", path=path)
    return content
