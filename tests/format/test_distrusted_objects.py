"""Nothing but a valid safetensors file is taken for an object."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import pytest
import safetensors
import safetensors.torch
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import ObjectFormatError
from ml_flashpoint.format.object_format import (
    MAX_HEADER_BYTES,
    header_length,
    parse_header,
    plan_layout,
)
from tests.support.object_files import check_consistent, filled


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A file with any header: bytes as they are, or anything that JSON can say."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


SMALL_LAYOUT = plan_layout([("a", "float32", (2, 3)), ("b", "complex128", (1,))], [("c", 3)], {"d": "a"}, reserve=0)
SMALL_FILE = filled(SMALL_LAYOUT, SMALL_LAYOUT.size + 4)


def is_safetensors(file: bytes) -> bool:
    try:
        safetensors.deserialize(file)
    except safetensors.SafetensorError:
        return False
    return True


def check_distrusted(file: bytes) -> None:
    """Refused with the right error, or consistent and a valid file to safetensors, too."""
    try:
        parsed = parse_header(file, len(file))
    except ObjectFormatError:
        return
    check_consistent(parsed.layout, len(file))
    assert is_safetensors(file)


def described(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


_ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


class TestDistrust:
    def test_every_flipped_bit_of_the_header(self) -> None:
        # A flip may turn one name into another; that is for the digests to find.
        used = len(SMALL_FILE[: SMALL_LAYOUT.data_start].rstrip(b" ")) + 3
        for position in range(used):
            for bit in range(8):
                damaged = bytearray(SMALL_FILE)
                damaged[position] ^= 1 << bit
                check_distrusted(bytes(damaged))

    def test_every_truncation(self) -> None:
        for length in range(len(SMALL_FILE)):
            with pytest.raises(ObjectFormatError, match="path /base/object"):
                parse_header(SMALL_FILE[:length], length, "/base/object")
        for length in range(SMALL_LAYOUT.data_start):
            with pytest.raises(ObjectFormatError):
                parse_header(SMALL_FILE[:length], len(SMALL_FILE))
        with pytest.raises(ObjectFormatError):
            parse_header(SMALL_FILE + b"\0", len(SMALL_FILE) + 1)

    @given(st.binary(max_size=100))
    def test_any_bytes(self, data: bytes) -> None:
        check_distrusted(data)
        check_distrusted(file_of(data))
        check_distrusted(file_of(b"{" + data))

    @given(_ANY_JSON)
    def test_any_json(self, value: object) -> None:
        check_distrusted(file_of(value))
        check_distrusted(file_of({"__metadata__": value}))
        check_distrusted(file_of({"a": value}))
        for field in ("dtype", "shape", "data_offsets"):
            check_distrusted(file_of({"a": described() | {field: value}}, b"data"))

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["U8", "F32", "BF16", "BOOL"]),
                st.lists(st.integers(0, 4), max_size=3),
                st.tuples(st.integers(0, 16), st.integers(0, 16)),
            ),
            max_size=4,
        ),
        st.integers(0, 16),
    )
    def test_any_places(self, descriptions: Iterable[tuple[str, list[int], tuple[int, int]]], size: int) -> None:
        header = {str(number): described(*each) for number, each in enumerate(descriptions)}
        check_distrusted(file_of(header, bytes(size)))

    def test_entries_may_come_in_any_order(self) -> None:
        header = {
            "b": described(offsets=(4, 8)),
            "e": described(shape=(2, 0), offsets=(4, 4)),
            "a": described(),
        }
        layout = parse_header(file_of(header, bytes(8)), len(file_of(header)) + 8).layout
        assert [entry.key for entry in layout.tensors] == ["a", "e", "b"]

    @pytest.mark.parametrize(
        "header",
        [
            b"",
            b"{}{}",
            b"\xff",
            b'{"\xff":1}',
            json.dumps({"a": described()}).encode("utf-16-le"),
            b"{" * 1000,
            b'{"a":' * 100_000 + b"}" * 100_000,
            b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"a":[[[[[[[[[[[[]]]]]]]]]]]]}',
            b'{"a":NaN}',
            b'{"a":' + b"1" * 10_000 + b"}",
            json.dumps({"a": described()})[:-1].encode() + b',"a":' + json.dumps(described()).encode() + b"}",
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"data_offsets":[0,4]}}',
            b'{"__metadata__":{"a":"b","a":"b"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            {"a": described() | {"more": 1}},
            {"a": {"dtype": "U8", "shape": [4]}},
            {"a": described("U9")},
            {"a": described("F6_E2M3", (4,), (0, 3))},
            {"a": described("F4", (), (0, 4))},
            {"a": described("F4", (9,), (0, 4))},
            {"a": described(shape=["4"])},
            {"a": described(shape=[4.0])},
            {"a": described(shape=[True, 4])},
            {"a": described(shape=[-2, -2])},
            {"a": described(shape=[5])},
            {"a": described(shape=[2**32, 2**32], offsets=(0, 0))},
            {"a": described(shape=[2**63, 2**63, 0], offsets=(0, 0))},
            {"a": described("F64", [2**61 + 1])},
            {"a": described(shape=[1] * 5000)},
            {"a": described(offsets=[0, 4, 4])},
            {"a": described(offsets=[0, "4"])},
            {"a": described(offsets=[False, 4])},
            {"a": described(offsets=[0.0, 4.0])},
            {"a": described(offsets=[4, 0])},
            {"a": described(offsets=[-4, 0])},
            {"a": described(offsets=[0, 2**64 + 4])},
            {"a": described(shape=[3], offsets=[1, 4])},
            {"a": described(shape=[2], offsets=[0, 2]), "b": described(shape=[3], offsets=[1, 4])},
            {"a": described(shape=[1], offsets=[0, 1]), "b": described(shape=[2], offsets=[2, 4])},
            {"a": described(), "b": described(shape=[0], offsets=[2, 2])},
            {"\ud800": described()},
            {"__metadata__": described(), "a": described()},
            {"__metadata__": {"a": 1}, "a": described()},
            {"__metadata__": {"\ud800": "1"}, "a": described()},
            {"__metadata__": {"a": "\ud800"}, "a": described()},
        ],
    )
    def test_attacks(self, header: Any) -> None:
        file = file_of(header, b"data")
        with pytest.raises(ObjectFormatError, match="path /base/object"):
            parse_header(file, len(file), "/base/object")

    @pytest.mark.parametrize(
        ("marks", "entries"),
        [
            ({"format": "1"}, {"a": described()}),
            ({"more": ""}, {"a": described()}),
            ({"bytes": ["b"]}, {"a": described()}),
            ({"bytes": {"a": ""}}, {"a": described()}),
            ({"bytes": ["a"]}, {"a": described("I8")}),
            ({"bytes": ["a"]}, {"a": described(shape=(2, 2))}),
            ({"dtypes": {"a": {"int8": "4"}}}, {"a": described()}),
            ({"dtypes": {"b": "int8 4"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 4"}}, {"a": described("I8")}),
            ({"dtypes": {"a": "int8"}}, {"a": described()}),
            ({"dtypes": {"a": "int16 4"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 -4"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 4, 1"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 \u0664"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 " + "1," * 2000 + "4"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 " + "0" * 5000 + "4"}}, {"a": described()}),
            ({"dtypes": {"a": "qint8 4"}}, {"a": described()}),
            ({"dtypes": {"a": "load 4"}}, {"a": described()}),
            ({"dtypes": {"a": "complex32 1"}, "bytes": ["a"]}, {"a": described()}),
            ({"aliases": {"\ud800": "a"}}, {"a": described()}),
            ({"aliases": {"b": "c"}}, {"a": described()}),
            ({"aliases": {"a": "a"}}, {"a": described()}),
            ({"aliases": {"b": "__flashpoint__.tail"}}, {"__flashpoint__.tail": described()}),
            ({"aliases": {"b": "c", "c": "a"}}, {"a": described()}),
            ({"aliases": {"__metadata__": "a"}}, {"a": described()}),
            ({"aliases": {"__flashpoint__.x": "a"}}, {"a": described()}),
            ({"bytes": ["__flashpoint__.tail"]}, {"__flashpoint__.tail": described()}),
            ({}, {"__flashpoint__.more": described()}),
            ({}, {"__flashpoint__.tail": described("I8")}),
        ],
    )
    def test_marks_are_not_trusted(self, marks: dict[str, object], entries: dict[str, object]) -> None:
        marks = {"format": "2", "bytes": [], "aliases": {}, "dtypes": {}} | marks
        file = file_of({"__metadata__": {"__flashpoint__": json.dumps(marks)}, **entries}, b"data")
        assert is_safetensors(file)
        with pytest.raises(ObjectFormatError):
            parse_header(file, len(file))

    @pytest.mark.parametrize("marks", ["", "[]", "[" * 100_000, '{"format":"2"}', '{"format":"2","format":"2"}'])
    def test_marks_are_a_whole_object(self, marks: str) -> None:
        file = file_of({"__metadata__": {"__flashpoint__": marks}, "a": described()}, b"data")
        with pytest.raises(ObjectFormatError):
            parse_header(file, len(file))

    @given(_ANY_JSON)
    def test_any_marks(self, value: object) -> None:
        for mark in ("format", "bytes", "aliases", "dtypes"):
            marks = {"format": "2", "bytes": [], "aliases": {}, "dtypes": {}, mark: value}
            check_distrusted(
                file_of({"__metadata__": {"__flashpoint__": json.dumps(marks)}, "a": described()}, b"data")
            )

    @pytest.mark.parametrize("length", [101, MAX_HEADER_BYTES + 1, 2**40, 2**63, 2**64 - 1])
    def test_lengths_of_headers_are_not_trusted(self, length: int) -> None:
        file = struct.pack("<Q", length) + b"{}".ljust(100)
        with pytest.raises(ObjectFormatError):
            parse_header(file, len(file))
        with pytest.raises(ObjectFormatError):
            header_length(file[:8], len(file))

    @pytest.mark.slow
    def test_deep_brackets_do_not_end_the_process(self) -> None:
        # Whoever raised the recursion limit must not have to trust every file.
        script = """
            import struct, sys
            from ml_flashpoint.format.errors import ObjectFormatError
            from ml_flashpoint.format.object_format import parse_header
            sys.setrecursionlimit(2**30)
            brackets = [(b'{"":', b"}"), (b"[", b"]"), (b'{"\\\\"":[', b"]}"), (b'[{"[":', b"}]")]
            for opening, closing in brackets:
                deep = b'{"a":' + opening * 1_000_000 + b"1" + closing * 1_000_000 + b"}"
                for header in (deep, deep[:1_000_000]):
                    try:
                        parse_header(struct.pack("<Q", len(header)) + header, 8 + len(header))
                    except ObjectFormatError:
                        print("refused")
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["refused"] * 8)
