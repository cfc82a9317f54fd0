"""Jobs of several ranks that go on from what is persisted, on as many ranks or on others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.persist.directory_store import DirectoryStore
from ml_flashpoint.persist.versions import list_persisted
from tests.support.forked import Team
from tests.workers import persisting


def train(root: Path, world_size: int, until: int, kind: str, **options: Any) -> list[dict[str, Any]]:
    with Team(persisting.train_ranks, root, world_size, str(root / "store"), until, kind, options) as team:
        return team.results(120)


def lose_all_nodes(root: Path) -> None:
    for node in root.glob("node-*"):
        shutil.rmtree(node)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_both_nodes_of_a_pair_are_lost(tmpfs: Path, kind: str) -> None:
    before = train(tmpfs, 2, 7, kind)
    assert {each["source"] for each in before} == {"nothing"}
    assert before[0]["health"].persisted == 7
    lose_all_nodes(tmpfs)
    after = train(tmpfs, 2, 11, kind)
    assert [(each["source"], each["began"]) for each in after] == [("persisted", 7)] * 2
    assert [each["then"] for each in after] == [before[0]["now"]] * 2  # of buffers under DDP, rank 0's are saved
    lose_all_nodes(tmpfs)
    whole = train(tmpfs / "whole", 2, 11, kind)
    assert [each["all"] for each in after] == [each["all"] for each in whole]


@pytest.mark.parametrize("world_size", [2, 3])
def test_four_ranks_go_on_as_others(tmpfs: Path, world_size: int) -> None:
    before = train(tmpfs, 4, 6, "fsdp2")
    lose_all_nodes(tmpfs)
    after = train(tmpfs, world_size, 8, "fsdp2")
    assert [(each["source"], each["began"]) for each in after] == [("persisted", 6)] * world_size
    assert [each["then"] for each in after] == [before[0]["now"]] * world_size
    lose_all_nodes(tmpfs)
    again = train(tmpfs, 4, 8, "fsdp2")
    assert [(each["source"], each["began"]) for each in again] == [("persisted", 8)] * 4


@pytest.mark.damages_on_purpose
def test_a_part_that_is_damaged_makes_all_ranks_go_back(tmpfs: Path) -> None:
    before = train(tmpfs, 2, 3, "fsdp2")
    train(tmpfs, 2, 6, "fsdp2")
    lose_all_nodes(tmpfs)
    store = tmpfs / "store"
    newest = list_persisted(DirectoryStore(store))[0][0]
    assert newest.step == 6
    path = store / newest.folder / newest.parts[1].files[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)
    after = train(tmpfs, 2, 3, "fsdp2")
    assert [(each["source"], each["began"]) for each in after] == [("persisted", 3)] * 2
    assert [each["then"] for each in after] == [each["now"] for each in before]
