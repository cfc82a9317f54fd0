"""Objects are valid safetensors files, and nothing else is taken for an object."""

from __future__ import annotations

import json
import math
import pickle
import random
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.copy.dtypes import STORABLE_DTYPES, dtype_name, torch_dtype
from ml_flashpoint.format.dtypes import ITEMSIZES
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError, ObjectFormatError
from ml_flashpoint.format.object_format import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    Entry,
    Layout,
    encode_header,
    header_length,
    layout_from_entries,
    parse_header,
    plan_layout,
    with_byte_items,
)

STORABLE = sorted(map(dtype_name, STORABLE_DTYPES))
WRITTEN_AS_BYTES = {
    dtype
    for dtype in STORABLE
    if any(part in dtype for part in ("complex", "fnuz", "e8m0", "float4", "bits"))
    or dtype in {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
}

Tensors = list[tuple[str, str, tuple[int, ...]]]

keys = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12).filter(lambda key: key[:2] != "__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def contents(draw: st.DrawFn) -> tuple[Tensors, list[tuple[str, int]], dict[str, str]]:
    """Tensors, byte items and aliases."""
    names = draw(st.lists(keys, unique=True, max_size=12))
    tensors: Tensors = []
    byte_items = []
    aliases = {}
    for name in names:
        kind = draw(st.sampled_from(["tensor", "tensor", "bytes", "alias"]))
        if kind == "tensor":
            tensors.append((name, draw(st.sampled_from(STORABLE)), draw(shapes)))
        elif kind == "bytes":
            byte_items.append((name, draw(st.integers(0, 200))))
        elif tensors:
            aliases[name] = draw(st.sampled_from(tensors))[0]
    return tensors, byte_items, aliases


def filled(layout: Layout, file_size: int, metadata: Mapping[str, str] | None = None) -> bytes:
    """A file of this layout, with noise for data."""
    header = encode_header(layout, file_size, metadata)
    assert len(header) == layout.data_start
    return header + random.Random(file_size).randbytes(file_size - len(header))


def check_consistent(layout: Layout, file_size: int) -> None:
    """Entries and gaps follow each other without overlap from the data's start to the layout's size."""
    entries = sorted((*layout.tensors, *layout.byte_items), key=lambda entry: (entry.begin, entry.end))
    spans = sorted([(entry.begin, entry.end) for entry in entries] + list(layout.gaps))
    assert [begin for begin, _ in spans] == [layout.data_start, *(end for _, end in spans)][: len(spans)]
    assert layout.size == (entries[-1].end if entries else layout.data_start) <= file_size
    for entry in entries:
        assert entry.nbytes == math.prod(entry.shape) * ITEMSIZES[entry.dtype]
    assert len({entry.key for entry in entries} | layout.aliases.keys()) == len(entries) + len(layout.aliases)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


class TestPlan:
    @given(contents(), st.integers(0, 9000), st.sampled_from([{}, {"step": "5", "\u00e4": '"\n', "format": "mine"}]))
    def test_any_mix_round_trips_and_safetensors_reads_it(
        self,
        content: tuple[Tensors, list[tuple[str, int]], dict[str, str]],
        unused: int,
        said: dict[str, str],
    ) -> None:
        tensors, byte_items, aliases = content
        layout = plan_layout(tensors, byte_items, aliases)
        check_consistent(layout, layout.size)
        assert not layout.gaps
        assert layout.data_start % ALIGNMENT == 0
        items = (*layout.tensors, *layout.byte_items)
        assert all(entry.begin % ITEMSIZES[entry.dtype] == 0 for entry in items)
        assert {(e.key, e.dtype, e.shape) for e in layout.tensors} == set(tensors)
        assert [(entry.key, entry.nbytes) for entry in layout.byte_items] == byte_items
        assert all(layout.by_key[name] is layout.by_key[kept] for name, kept in aliases.items())
        file = filled(layout, layout.size + unused, said)
        parsed = parse_header(file, len(file))
        assert parsed.layout == layout == pickle.loads(pickle.dumps(layout))
        assert parsed.metadata == {"format": "pt", **said}
        loaded = dict(safetensors.deserialize(file))
        assert loaded.keys() - {"__flashpoint__.tail"} == {entry.key for entry in items}
        assert all(bytes(loaded[entry.key]["data"]) == file[entry.begin : entry.end] for entry in items)

    @given(contents())
    def test_without_reserve_the_header_still_fits(
        self, content: tuple[Tensors, list[tuple[str, int]], dict[str, str]]
    ) -> None:
        tensors, byte_items, aliases = content
        # Enough names that the bound, not the rounding up to a page, decides.
        tensors = tensors + [(f'{number}\U0001f600"', "complex128", (10**6, 9)) for number in range(300)]
        byte_items = byte_items + [(f"bytes\\{number}", 2**50) for number in range(300)]
        aliases = aliases | {f"alias\n{number}": '0\U0001f600"' for number in range(300)}
        layout = plan_layout(tensors, byte_items, aliases, reserve=0)
        encode_header(layout, layout.size + 2**60)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (([("a", "int8", ()), ("a", "int8", ())],), "twice"),
            (([("a", "int8", ())], [("a", 1)]), "twice"),
            (([("a", "int8", ())], [], {"a": "a"}), "twice"),
            (([("__flashpoint__.tail", "int8", ())],), "reserved"),
            (([("a", "int8", ())], [], {"__flashpoint__.x": "a"}), "reserved"),
            (([("\ud800", "int8", ())],), "text"),
            (([("a", "int8", (2, -1))],), "shape"),
            (([("a", "int8", (2**62, 2))],), "shape"),
            (([("a", "int8", (2**63, 0))],), "shape"),
            (([("a", "int8", (1,) * 2000)],), "shape"),
            (([("a", "int8", (2**62,)), ("b", "int8", (2**62,))],), "exceed"),
            (([], [], None, MAX_HEADER_BYTES), "header"),
        ],
    )
    def test_refuses(self, arguments: tuple[Any, ...], named: str) -> None:
        with pytest.raises(InvalidArgumentError, match=named):
            plan_layout(*arguments)


class TestWithByteItems:
    @given(contents(), st.lists(st.tuples(keys, st.integers(0, 100)), unique_by=lambda item: item[0], max_size=5))
    def test_is_a_plan_with_other_byte_items(
        self, content: tuple[Tensors, list[tuple[str, int]], dict[str, str]], others: list[tuple[str, int]]
    ) -> None:
        tensors, byte_items, aliases = content
        others = [(key, size) for key, size in others if key not in {t[0] for t in tensors} | aliases.keys()]
        layout = plan_layout(tensors, byte_items, aliases)
        changed = with_byte_items(layout, others)
        fresh = plan_layout(tensors, others, aliases)
        assert [(e.key, e.nbytes) for e in changed.byte_items] == [(e.key, e.nbytes) for e in fresh.byte_items]
        check_consistent(changed, changed.size)
        assert all(one is other for one, other in zip(changed.tensors, layout.tensors, strict=True))

    def test_refuses(self) -> None:
        layout = plan_layout([("a", "int8", (1,))], [("b", 1)], {"c": "b"})
        for items in (
            [("a", 1)],
            [("b", 1), ("b", 1)],
            [("c", 1), ("b", 1)],
            [("b", 2**63)],
        ):
            with pytest.raises(InvalidArgumentError):
                with_byte_items(layout, items)


class TestLayoutFromEntries:
    @given(contents(), st.randoms(use_true_random=False))
    def test_gaps_are_covered(
        self, content: tuple[Tensors, list[tuple[str, int]], dict[str, str]], chance: random.Random
    ) -> None:
        tensors, byte_items, _ = content
        planned = plan_layout(tensors, reserve=2**16)
        offset = data_start = planned.data_start
        entries = []
        for entry in planned.tensors:
            offset += chance.choice([0, 0, 16, 4096, 2**40])
            begin = -(-offset // ITEMSIZES[entry.dtype]) * ITEMSIZES[entry.dtype]
            offset = begin + entry.nbytes
            entries.append(Entry(entry.key, entry.dtype, entry.shape, begin, offset))
        placed = list(entries)
        chance.shuffle(entries)
        layout = layout_from_entries(entries, data_start)
        check_consistent(layout, offset)
        assert sorted(layout.tensors, key=lambda entry: entry.key) == sorted(placed, key=lambda entry: entry.key)
        layout = with_byte_items(layout, byte_items, offset + 7)
        check_consistent(layout, layout.size)
        header = encode_header(layout, layout.size + 10)
        assert parse_header(header, layout.size + 10).layout == layout


class TestHeader:
    def test_is_readable_by_eye(self) -> None:
        layout = plan_layout([("b", "bfloat16", ()), ("a", "complex64", (2, 3))], [("c", 3)], {"d": "b"})
        file_size = layout.size + 5
        header = encode_header(layout, file_size, {"step": "5"})
        assert struct.unpack("<Q", header[:8]) == (layout.data_start - 8,)
        assert json.loads(header[8:]) == {
            "__metadata__": {
                "format": "pt",
                "step": "5",
                "__flashpoint__": '{"format":"2","bytes":["c"],"aliases":{"d":"b"},"dtypes":{"a":"complex64 2,3"}}',
            },
            "a": {"dtype": "U8", "shape": [48], "data_offsets": [0, 48]},
            "b": {"dtype": "BF16", "shape": [], "data_offsets": [48, 50]},
            "c": {"dtype": "U8", "shape": [3], "data_offsets": [50, 53]},
            "__flashpoint__.tail": {"dtype": "U8", "shape": [5], "data_offsets": [53, 58]},
        }

    def test_a_header_without_room_says_how_much_it_needs(self) -> None:
        layout = plan_layout([("a", "int8", (100,))], reserve=0)
        with pytest.raises(CapacityError) as raised:
            encode_header(layout, layout.size, {"long": "x" * 5000})
        assert raised.value.available_bytes == layout.data_start
        assert raised.value.needed_bytes is not None
        reserve = raised.value.needed_bytes - layout.data_start + 5000
        layout = plan_layout([("a", "int8", (100,))], reserve=reserve)
        encode_header(layout, layout.size, {"long": "x" * 5000})


class TestSafetensors:
    """What other tools see."""

    @pytest.mark.parametrize("dtype", STORABLE)
    def test_reads_every_dtype(self, dtype: str, tmpfs: Path) -> None:
        layout = plan_layout([("a", dtype, (2, 3)), ("scalar", dtype, ()), ("empty", dtype, (0, 3))], [("b", 5)])
        file = filled(layout, layout.size + 11)
        path = tmpfs / "object.safetensors"
        path.write_bytes(file)
        loaded = safetensors.torch.load_file(path)
        assert loaded.keys() == {"a", "scalar", "empty", "b", "__flashpoint__.tail"}
        for entry in (*layout.tensors, *layout.byte_items):
            assert raw_bytes(loaded[entry.key]) == file[entry.begin : entry.end]
            if dtype not in WRITTEN_AS_BYTES and entry.kind == "tensor":
                assert (loaded[entry.key].dtype, loaded[entry.key].shape) == (torch_dtype(dtype), entry.shape)
            else:
                assert (loaded[entry.key].dtype, loaded[entry.key].shape) == (torch.uint8, (entry.nbytes,))
        assert parse_header(file, len(file)).layout == layout

    def test_opens_an_object_with_gaps_lazily(self, tmpfs: Path) -> None:
        entries = [
            Entry("a", "float32", (2,), 8192, 8200),
            Entry("b", "uint8", (3,), 8202, 8205, "bytes"),
        ]
        layout = layout_from_entries(entries, 4096)
        file = filled(layout, 10_000, {"step": "5"})
        path = tmpfs / "object.safetensors"
        path.write_bytes(file)
        with safetensors.safe_open(path, "pt") as opened:
            assert opened.metadata()["step"] == "5"
            assert raw_bytes(opened.get_tensor("a")) == file[8192:8200]
            assert set(opened.keys()) == {
                "a",
                "b",
                "__flashpoint__.gap.0",
                "__flashpoint__.gap.1",
                "__flashpoint__.tail",
            }

    @pytest.mark.parametrize("name", ["mixed", *sorted(set(STORABLE) - WRITTEN_AS_BYTES)])
    def test_its_own_files_are_objects(self, name: str) -> None:
        if name == "mixed":
            tensors = {"b": torch.ones(3, dtype=torch.int8), "a": torch.ones(5), "c": torch.tensor(1).bfloat16()}
        else:
            octets = torch.arange(48, dtype=torch.uint8).view(torch_dtype(name))
            tensors = {"a": octets.reshape(2, -1), "empty": octets[:0].reshape(3, 0), "scalar": octets[0].clone()}
        file = safetensors.torch.save(tensors, {"epoch": "3"})
        parsed = parse_header(file, len(file))
        check_consistent(parsed.layout, len(file))
        assert parsed.metadata == {"epoch": "3"}
        assert parsed.layout.by_key.keys() == tensors.keys()
        for key, tensor in tensors.items():
            entry = parsed.layout.by_key[key]
            assert (torch_dtype(entry.dtype), entry.shape, entry.kind) == (tensor.dtype, tensor.shape, "tensor")
            assert file[entry.begin : entry.end] == raw_bytes(tensor)


# ---- distrust --------------------------------------------------------------------------------------------------------


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
            b"\xff",
            b'{"\xff":1}',
            json.dumps({"a": described()}).encode("utf-16-le"),
            b"{" * 1000,
            b'{"a":' * 100_000 + b"}" * 100_000,
            b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"a":NaN}',
            b'{"a":' + b"1" * 10_000 + b"}",
            json.dumps({"a": described()})[:-1].encode() + b',"a":' + json.dumps(described()).encode() + b"}",
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"data_offsets":[0,4]}}',
            b'{"__metadata__":{"a":"b","a":"b"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            {"a": described() | {"more": 1}},
            {"a": described("U9")},
            {"a": described("F6_E2M3", (4,), (0, 3))},
            {"a": described("F4", (), (0, 4))},
            {"a": described("F32", {}, (0, 4))},
            {"a": described("F4", (9,), (0, 4))},
            {"a": described(shape=[True, 4])},
            {"a": described(shape=[-2, -2])},
            {"a": described(shape=[2**32, 2**32], offsets=(0, 0))},
            {"a": described(shape=[2**63, 2**63, 0], offsets=(0, 0))},
            {"a": described("F64", [2**61 + 1])},
            {"a": described(shape=[1] * 5000)},
            {"a": described(offsets=[False, 4])},
            {"a": described(offsets=[0, 2**64 + 4])},
            {"a": described(shape=[2], offsets=[0, 2]), "b": described(shape=[3], offsets=[1, 4])},
            {"a": described(shape=[1], offsets=[0, 1]), "b": described(shape=[2], offsets=[2, 4])},
            {"a": described(), "b": described(shape=[0], offsets=[2, 2])},
            {"\ud800": described()},
            {"__metadata__": described(), "a": described()},
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
            ({"bytes": ["a"]}, {"a": described("I8")}),
            ({"bytes": ["a"]}, {"a": described(shape=(2, 2))}),
            ({"bytes": {"a": ""}}, {"a": described()}),
            ({"dtypes": {"b": "int8 4"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 +4"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 \u0664"}}, {"a": described()}),
            ({"aliases": {"a": "a"}}, {"a": described()}),
            ({"aliases": {"__metadata__": "a"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 4"}}, {"a": described("I8")}),
            ({"dtypes": {"a": "int8"}}, {"a": described()}),
            ({"dtypes": {"a": "int16 4"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 " + "1," * 2000 + "4"}}, {"a": described()}),
            ({"dtypes": {"a": "int8 " + "0" * 5000 + "4"}}, {"a": described()}),
            ({"dtypes": {"a": "qint8 4"}}, {"a": described()}),
            ({"dtypes": {"a": "load 4"}}, {"a": described()}),
            ({"dtypes": {"a": "complex32 1"}, "bytes": ["a"]}, {"a": described()}),
            ({"aliases": {"\ud800": "a"}}, {"a": described()}),
            ({"aliases": {"b": "__flashpoint__.tail"}}, {"__flashpoint__.tail": described()}),
            ({"aliases": {"b": "c", "c": "a"}}, {"a": described()}),
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
        with pytest.raises(ObjectFormatError):
            header_length(struct.pack("<Q", max(length, MAX_HEADER_BYTES + 1)), 2**62)

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
