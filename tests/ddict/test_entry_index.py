"""The bytes of indices and snapshots: what goes in comes out, and nothing that is read is trusted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.ddict.manager.index import (
    GONE,
    INLINE,
    LONGEST_CHAIN,
    STORED,
    Index,
    IndexEntry,
    decode_index,
    encode_index,
    fold,
    gather,
    plan_object,
    split_object,
)
from ml_flashpoint.ddict.manager.part_ref import PartRef, part_ref
from ml_flashpoint.ddict.manager.shard import Entry, InlineValue
from ml_flashpoint.ddict.persister import MAX_CHECKPOINT_ID
from ml_flashpoint.format.errors import DamagedError, FlashpointError
from ml_flashpoint.format.object_format import encode_header

NAMES = st.from_regex(r"[0-9A-Za-z][0-9A-Za-z_-]{0,20}", fullmatch=True)
NUMBERS = st.integers(0, 2**63 - 1)
CHECKPOINTS = st.integers(0, MAX_CHECKPOINT_ID)
PARTS = st.builds(PartRef, NAMES, CHECKPOINTS)
OWN = PartRef("s-1", 3)
FIELDS = (st.binary(max_size=20), CHECKPOINTS, st.text(max_size=10), st.integers(0, 7))
ENTRIES = st.builds(IndexEntry, *FIELDS, st.sampled_from([GONE, INLINE]), st.just(OWN), NUMBERS, NUMBERS) | st.builds(
    IndexEntry, *FIELDS, st.just(STORED), PARTS, NUMBERS, NUMBERS
)


@st.composite
def indices(draw: st.DrawFn) -> Index:
    managers = draw(st.integers(1, 2**24))
    chain = tuple(draw(st.lists(PARTS, max_size=LONGEST_CHAIN)))
    return Index(OWN, draw(st.integers(0, managers - 1)), managers, chain, draw(st.lists(ENTRIES, max_size=5)))


def decoded(data: bytes | bytearray, index: Index) -> Index:
    return decode_index(memoryview(data), OWN, index.manager, index.managers, "here")


@given(indices())
def test_an_index_comes_back(index: Index) -> None:
    assert decoded(encode_index(index), index) == index


@pytest.mark.slow
@settings(max_examples=300)
@given(indices(), st.data())
def test_an_altered_index_is_damaged_or_another_one(index: Index, data: st.DataObject) -> None:
    encoded = bytearray(encode_index(index))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(encoded)) | st.integers(0, len(encoded)))
    try:
        found = decoded(encoded[:end], index)
    except DamagedError:
        return
    # What is taken for an index is one.
    assert decoded(encode_index(found), found) == found


def test_an_index_of_another_part_or_version_is_refused() -> None:
    encoded = encode_index(Index(OWN, 0, 2, (), []))
    for own, manager, managers in ((PartRef("s-1", 4), 0, 2), (OWN, 1, 2), (OWN, 0, 3)):
        with pytest.raises(DamagedError):
            decode_index(memoryview(encoded), own, manager, managers, "here")
    with pytest.raises(DamagedError, match="another version"):
        decode_index(memoryview(b'{"format":1,"entries":[]}'), OWN, 0, 2, "here")


def index_of(number: int, chain: list[int], *entries: IndexEntry) -> Index:
    return Index(PartRef(f"s-{number}", number), 0, 1, tuple(PartRef(f"s-{each}", each) for each in chain), entries)


def told(number: int, **content: bytes) -> list[IndexEntry]:
    entries = [Entry(key.encode(), number, "w", InlineValue(data)) for key, data in content.items()]
    return gather(PartRef(f"s-{number}", number), entries, lambda _: OWN)[0]


def test_a_chain_says_what_is_left_of_it() -> None:
    full = index_of(0, [], *told(0, a=b"1", b=b"22", c=b"333"))
    changed = index_of(1, [0], *told(1, d=b"4", a=b"55"), IndexEntry(b"b", 0, "", 0, GONE, PartRef("s-1", 1), 0, 0))
    last = index_of(2, [0, 1], *told(2, b=b"6"))
    found = {entry.key: (entry.part.step, entry.offset, entry.length) for entry in fold([full, changed, last])}
    assert found == {b"a": (1, 1, 2), b"c": (0, 3, 3), b"d": (1, 0, 1), b"b": (2, 0, 1)}


@pytest.mark.parametrize(
    "chain",
    [[index_of(1, [0])], [index_of(1, [0]), index_of(2, [1])], [index_of(0, []), index_of(2, [0, 1])]],
    ids=["no base", "base is not full", "one is missing"],
)
def test_what_is_no_chain_is_damaged(chain: list[Index]) -> None:
    with pytest.raises(DamagedError):
        fold(chain)


def test_deleted_keys_are_in_no_index() -> None:
    assert gather(OWN, [Entry(b"k", 0, "w", None)], lambda _: OWN) == ([], [])


def test_a_value_outside_of_its_segment_is_damaged() -> None:
    (entry,) = told(0, a=b"123")
    assert entry.inline_value(memoryview(b"1234")).data == b"123"
    with pytest.raises(DamagedError):
        entry.inline_value(memoryview(b"12"))


def test_the_object_is_split_where_it_was_planned() -> None:
    layout = plan_object(5, 7)
    data = bytearray(layout.size)
    data[: layout.data_start] = encode_header(layout, 2**16)
    data[layout.data_start :] = b"index" + b"segment"
    index, segment = split_object(memoryview(data), 2**16, "here")
    assert (bytes(index), bytes(segment)) == (b"index", b"segment")
    with pytest.raises(DamagedError):
        split_object(memoryview(data)[:-1], 2**16, "here")
    with pytest.raises(DamagedError):
        split_object(memoryview(data), 2**16 + 1, "here")


@pytest.mark.parametrize("fields", [(None, 1), (1, 1), ("s-1", True), ("s-1", -1), ("../../x", 1), ("s-1", 2**64)])
def test_what_names_no_part_is_refused(fields: tuple[Any, Any]) -> None:
    with pytest.raises(FlashpointError):
        part_ref(*fields)
