"""The record of what a job has gone back from."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError, UnsafePathError
from ml_flashpoint.format.lineage import (
    RECORD,
    Lineage,
    lineage_from_json,
    merged,
    read_lineage,
    write_lineage,
)

BACK = Lineage((("1700-ab-7", "1800-cd"),))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) == Lineage()
    (tmp_path / f".{RECORD}.0badcafe.tmp").write_bytes(b"what a killed writer left")
    for lineage in (BACK, Lineage()):
        write_lineage(tmp_path, lineage)
        assert read_lineage(tmp_path) == lineage
    assert os.stat(tmp_path / RECORD).st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [RECORD]


def test_no_link_is_followed_and_no_fifo_waited_for(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_lineage(elsewhere, BACK)
    (tmp_path / RECORD).symlink_to(elsewhere / RECORD)
    with pytest.raises(UnsafePathError):
        read_lineage(tmp_path)
    (tmp_path / RECORD).unlink()
    os.mkfifo(tmp_path / RECORD)
    with pytest.raises(UnsafePathError):
        read_lineage(tmp_path)


@pytest.mark.parametrize(
    "text", ["nonsense", "7", '[["a1"]]', '[["a1", "a/2"]]', '[["a1", 2]]', "[" * 5000 + "]" * 5000]
)
def test_nothing_else_is_a_lineage(tmp_path: Path, text: str) -> None:
    with pytest.raises(DamagedError):
        lineage_from_json(text)
    (tmp_path / RECORD).write_text(f"{text}[")
    with pytest.raises(DamagedError):
        read_lineage(tmp_path)


def test_there_is_an_end_to_it() -> None:
    with pytest.raises(InvalidArgumentError):
        Lineage((("a1", "a2"),) * 2000)
    many = [Lineage(((f"a{n:05d}-1", f"a{n:05d}-2"),)) for n in range(2000)]
    assert merged(many).newest == "a01999-2"


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.randoms(use_true_random=False), st.data())
def test_what_counts_is_exactly_what_was_not_gone_back_from(
    ends: list[int], chance: random.Random, data: st.DataObject
) -> None:
    """A job saves a while, goes back to a save that counts, and so on, while some node is always away."""
    nodes, made, newest = [Lineage()] * 3, ["s000"], "s000"
    left = ["s000"]
    for count in ends:
        for _ in range(count % 4):
            newest = f"s{len(made):03d}"
            made.append(newest)
            left.append(newest)
        newest = data.draw(st.sampled_from(left))
        left = [each for each in left if each <= newest]
        made.append(f"s{len(made):03d}")  # where the run begins that goes on
        lineage = merged(nodes).gone_back_to(newest, made[-1])
        away = data.draw(st.integers(0, 2))
        nodes = [each if number == away else lineage for number, each in enumerate(nodes)]
        chance.shuffle(nodes)
        known = merged(nodes)
        assert known == merged(reversed(nodes))
        saves = [each for each in made[:-1] if known.counts(each)]
        assert set(left) <= set(saves)
        assert max(saves) == newest
        assert known.newest == made[-1]
