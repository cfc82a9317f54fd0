"""The bytes of snapshots: what goes in comes out, and nothing that is read is trusted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.ddict.snapshot_format import (
    PartRef,
    SnapshotRecord,
    format_stamp,
    object_header,
    plan_object,
    snapshot_attempt,
    split_object,
)
from ml_flashpoint.ddict.snapshot_index import (
    DELETED,
    INLINE,
    NOWHERE,
    STORED,
    Index,
    IndexEntry,
    Place,
    decode_index,
    encode_index,
    resolve,
)
from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError, ProtocolError

NAMES = st.from_regex(r"[0-9A-Za-z][0-9A-Za-z_-]{0,20}", fullmatch=True)
NUMBERS = st.integers(0, 2**63 - 1)
PARTS = st.builds(PartRef, NAMES, NUMBERS)
PLACES = st.just(NOWHERE) | st.builds(Place, st.sampled_from([INLINE, STORED]), PARTS, NUMBERS, NUMBERS)
ENTRIES = st.builds(
    IndexEntry, st.binary(max_size=20), NUMBERS, st.text(max_size=10), st.booleans(), st.booleans(), PLACES
)


@st.composite
def indices(draw: st.DrawFn) -> Index:
    base = draw(st.none() | PARTS)
    removed = sorted(draw(st.sets(st.integers(0, 2**32 - 1), max_size=5))) if base is not None else []
    managers = draw(st.integers(1, 2**24))
    return Index(
        draw(NUMBERS), draw(st.integers(0, managers - 1)), managers, base, removed, draw(st.lists(ENTRIES, max_size=5))
    )


def plain(index: Index) -> Index:
    return Index(index.checkpoint_id, index.manager, index.managers, index.base, list(index.removed), list(index.added))


@given(indices())
def test_an_index_comes_back(index: Index) -> None:
    assert plain(decode_index(memoryview(encode_index(index)), "here")) == index


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
        found = decode_index(memoryview(encoded)[:end], "here")
    except DamagedError:
        return
    # What is taken for an index is one.
    assert plain(decode_index(memoryview(encode_index(found)), "here")) == plain(found)


def entry(key: bytes) -> IndexEntry:
    return IndexEntry(key, 0, "w", False, False, NOWHERE)


def test_an_index_builds_on_a_full_one() -> None:
    base = Index(0, 0, 1, None, (), [entry(b"a"), entry(b"b"), entry(b"c")])
    index = Index(1, 0, 1, PartRef("s-1", 0), [1], [entry(b"d")])
    assert [e.key for e in resolve(index, base, "here")] == [b"a", b"c", b"d"]


@pytest.mark.parametrize(
    ("index", "base"),
    [
        (Index(1, 0, 1, PartRef("s-1", 0), [], []), None),
        (Index(1, 0, 1, PartRef("s-1", 0), [], []), Index(0, 0, 1, PartRef("s-0", 0), [], [])),
        (Index(1, 0, 1, PartRef("s-1", 0), [1], []), Index(0, 0, 1, None, [], [entry(b"a")])),
    ],
    ids=["no base", "base is not full", "removed is not there"],
)
def test_an_index_on_the_wrong_base_is_damaged(index: Index, base: Index | None) -> None:
    with pytest.raises(DamagedError):
        resolve(index, base, "here")


@pytest.mark.parametrize("place", [Place(INLINE, PartRef("s-1", 0), 2**64, 1), Place(7000, None, 0, 0)])
def test_what_does_not_fit_is_refused(place: Place) -> None:
    with pytest.raises(InvalidArgumentError):
        encode_index(Index(0, 0, 1, None, (), [IndexEntry(b"k", 0, "w", False, False, place)]))


def test_the_object_is_split_where_it_was_planned() -> None:
    layout = plan_object(5, 7)
    data = bytearray(layout.size)
    data[: layout.data_start] = object_header(layout, 2**16)
    data[layout.data_start :] = b"index" + b"segment"
    index, segment = split_object(memoryview(data), 2**16, "here")
    assert (bytes(index), bytes(segment)) == (b"index", b"segment")
    with pytest.raises(DamagedError):
        split_object(memoryview(data)[:-1], 2**16, "here")
    with pytest.raises(DamagedError):
        split_object(memoryview(data), 2**16 + 1, "here")


@given(NUMBERS, st.integers(0, 10**20 - 1))
def test_a_record_comes_back(checkpoint_id: int, stamp: int) -> None:
    record = SnapshotRecord(checkpoint_id, snapshot_attempt(format_stamp(stamp), "abc"))
    assert SnapshotRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    "fields",
    [None, [], [1], {"a": 1}, [True, "s-" + "0" * 20 + "-a"], [-1, "s-" + "0" * 20 + "-a"], [1, "../../x"], [1, 2]],
)
def test_what_is_no_record_is_refused(fields: object) -> None:
    with pytest.raises(ProtocolError):
        SnapshotRecord.from_json(fields)


def test_deleted_entries_lie_nowhere() -> None:
    assert NOWHERE.kind == DELETED
