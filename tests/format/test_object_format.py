"""Objects are valid safetensors files."""

from __future__ import annotations

import json
import pickle
import random
import struct
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
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError
from ml_flashpoint.format.object_format import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    Entry,
    encode_header,
    layout_from_entries,
    parse_header,
    plan_layout,
    with_byte_items,
)
from tests.support.object_files import check_consistent, filled

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

    def test_by_falling_element_size_and_then_as_given(self) -> None:
        given = [
            ("b", "int8", (3,)),
            ("a", "float32", (1,)),
            ("d", "bool", ()),
            ("c", "int32", (2,)),
        ]
        layout = plan_layout(given, [("z", 5), ("y", 0)])
        start = layout.data_start
        assert [
            (entry.key, entry.begin - start, entry.end - start) for entry in (*layout.tensors, *layout.byte_items)
        ] == [
            ("a", 0, 4),
            ("c", 4, 12),
            ("b", 12, 15),
            ("d", 15, 16),
            ("z", 16, 21),
            ("y", 21, 21),
        ]
        assert layout.size == start + 21

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

    @pytest.mark.parametrize(
        ("entries", "data_start"),
        [
            ([Entry("a", "int32", (1,), 4098, 4102)], 4096),
            ([Entry("a", "int8", (4,), 4096, 4100), Entry("a", "int8", (4,), 4100, 4104)], 4096),
            ([Entry("a", "uint8", (2**63 - 1,), 4096, 4095 + 2**63)], 4096),
        ],
    )
    def test_refuses(self, entries: list[Entry], data_start: int) -> None:
        with pytest.raises(InvalidArgumentError):
            layout_from_entries(entries, data_start)


class TestHeader:
    def test_is_readable_by_eye(self) -> None:
        layout = plan_layout([("a", "complex64", (2, 3)), ("b", "bfloat16", ())], [("c", 3)], {"d": "b"})
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

    def test_many_tensors(self) -> None:
        tensors = [(f"layer.{number}.weight", STORABLE[0], (number % 7, 3)) for number in range(20_000)]
        layout = plan_layout(tensors, [("state", 100)])
        for length in (100, 5000):
            layout = with_byte_items(layout, [("state", length)])
            header = encode_header(layout, layout.size + 1)
            assert parse_header(header, layout.size + 1).layout == layout


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
