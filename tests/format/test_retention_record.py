"""The record of pins: what is read is what was written, or nothing."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import DamagedError, FlashpointError, InvalidArgumentError, UnsafePathError
from ml_flashpoint.format.retention_record import (
    RECORD,
    Pin,
    RetentionRecord,
    newest_record,
    read_record,
    write_record,
)

PIN = Pin("before lr drop", "step-7_ckpt", "1700-ab-7")
FULL = RetentionRecord(3, (PIN, Pin("other", "step-7_ckpt", "1700-ab-9")), (("1700-ab-7", "1800-cd"),))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_record(tmp_path) == RetentionRecord()
    for record in (FULL, RetentionRecord(4)):
        write_record(tmp_path, record)
        assert read_record(tmp_path) == record
    assert os.stat(tmp_path / RECORD).st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [RECORD]


def test_any_other_byte_shows(tmp_path: Path) -> None:
    write_record(tmp_path, FULL)
    good = (tmp_path / RECORD).read_bytes()
    chance = random.Random(1)
    for at in [*range(0, len(good), 7), len(good) - 1]:
        bad = bytearray(good)
        bad[at] ^= 1 << chance.randrange(8)
        (tmp_path / RECORD).write_bytes(bad)
        with pytest.raises(DamagedError):
            read_record(tmp_path)
    for cut in (0, 5, len(good) // 2, len(good) - 1):
        (tmp_path / RECORD).write_bytes(good[:cut])
        with pytest.raises(DamagedError):
            read_record(tmp_path)


def test_no_link_is_followed_and_no_fifo_waited_for(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_record(elsewhere, FULL)
    (tmp_path / RECORD).symlink_to(elsewhere / RECORD)
    with pytest.raises(UnsafePathError):
        read_record(tmp_path)
    (tmp_path / RECORD).unlink()
    os.mkfifo(tmp_path / RECORD)
    with pytest.raises(UnsafePathError):
        read_record(tmp_path)


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / f".{RECORD}.0badcafe.tmp").write_bytes(b"half")
    assert read_record(tmp_path) == RetentionRecord()
    write_record(tmp_path, FULL)
    assert os.listdir(tmp_path) == [RECORD]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "nonsense",
        '{"revision": -1, "pins": [], "gone_back": []}',
        '{"revision": true, "pins": [], "gone_back": []}',
        '{"revision": 1, "pins": [["a", "step-1_ckpt", "../../x"]], "gone_back": []}',
        '{"revision": 1, "pins": [["a", "../step-1_ckpt", "a1"]], "gone_back": []}',
        '{"revision": 1, "pins": [["", "step-1_ckpt", "a1"]], "gone_back": []}',
        '{"revision": 1, "pins": [["a\\u001b[2J", "step-1_ckpt", "a1"]], "gone_back": []}',
        '{"revision": 1, "pins": [["a", "step-1_ckpt", "a1"], ["a", "step-2_ckpt", "a2"]], "gone_back": []}',
        '{"revision": 1, "pins": [], "gone_back": [["a1"]]}',
        '{"revision": 1, "pins": [], "gone_back": [["a1", "a/2"]]}',
        '{"revision": 1, "pins": ' + "[" * 5000 + "]" * 5000 + ', "gone_back": []}',
    ],
)
def test_nothing_else_is_a_record(text: str) -> None:
    with pytest.raises(DamagedError):
        RetentionRecord.from_json(text)


@pytest.mark.parametrize("label", ["", "a\nb", "x" * 201, 3])
def test_no_label(label: str) -> None:
    with pytest.raises(InvalidArgumentError, match="label"):
        Pin(label, "step-1_ckpt", "a1")


def test_the_highest_revision_counts_in_any_order() -> None:
    records = [RetentionRecord(), FULL, RetentionRecord(3), RetentionRecord(2, (PIN,))]
    found = {newest_record(random.Random(seed).sample(records, len(records))) for seed in range(20)}
    assert len(found) == 1
    assert found.pop().revision == 3
    assert newest_record([]) == RetentionRecord()


def test_of_several_with_one_revision_no_pin_is_lost() -> None:
    """A node was lost while a pin was written there, and comes back after the others have pinned something else."""
    other = Pin("zz", "step-9_ckpt", "1700-ab-9")
    here, there = RetentionRecord(2, (PIN,)), RetentionRecord(2, (other,))
    assert newest_record([here, there]) == newest_record([there, here])
    assert newest_record([here, there]).pinned == {PIN.save_id, other.save_id}
    back = RetentionRecord(2, (), (("1700-ab-7", "1800-cd"),))
    assert newest_record([here, back, there]).gone_back == back.gone_back
    assert newest_record([here, back, there]).pinned == {PIN.save_id, other.save_id}
    alike = RetentionRecord(2, (Pin(PIN.label, other.version, other.save_id),))
    assert len(newest_record([here, alike]).pins) == 1


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.data())
def test_gone_back_from_is_exactly_what_came_after_the_last_target(ends: list[int], data: st.DataObject) -> None:
    """A job saves a while, goes back to any save that there was, and so on: the newest save that was not gone back from
    is the target, or what was saved after it."""
    record, made, newest = RetentionRecord(), ["s000"], "s000"
    for count in ends:
        for _ in range(count % 4):
            newest = f"s{len(made):03d}"
            made.append(newest)
        newest = data.draw(st.sampled_from(made))
        record = record.gone_back_to(newest, f"s{len(made):03d}")
        left = [save_id for save_id in made if not record.is_abandoned(save_id)]
        assert max(left) == newest
        ranges = [each for pair in record.gone_back for each in pair]
        assert ranges == sorted(ranges)


def test_too_much_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlashpointError):
        RetentionRecord(1, tuple(Pin(str(n), "step-1_ckpt", "a1") for n in range(2000)))
