from __future__ import annotations

import json

import pytest

from ml_flashpoint.format.errors import DamagedError
from ml_flashpoint.format.manifest import decode_record, encode_record

CONTENT = {"run": "a", "parent": None, "list": [1, 2, "ü"]}


def test_a_record_comes_back() -> None:
    data = encode_record("kind", CONTENT)
    assert decode_record("kind", data) == CONTENT
    assert json.loads(data)["content"] == CONTENT


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"[" * 100_000, b'{"kind":"kind","content":3}', b"\xff"])
def test_what_is_no_record(data: bytes) -> None:
    with pytest.raises(DamagedError, match="path"):
        decode_record("kind", data, "/path")


def test_a_record_of_another_kind() -> None:
    with pytest.raises(DamagedError, match="wanted"):
        decode_record("wanted", encode_record("kind", CONTENT))
