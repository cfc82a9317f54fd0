"""The store that the ranks of a job share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ml_flashpoint.engine.store import open_store
from tests.support.forked import call_team, preload
from tests.workers import checkpointer_jobs as jobs

preload("tests.workers.checkpointer_jobs")


def test_ranks_read_what_others_have_written_and_nothing_that_strangers_have(tmpfs: Path) -> None:
    results = call_team(jobs.share, tmpfs, 3)
    assert [found for found, _, _ in results] == [[b"of 0", b"of 1", b"of 2"]] * 3
    assert sorted(count for _, count, _ in results) == [1, 2, 3]
    assert not any(planted for _, _, planted in results)


def test_a_store_that_cannot_be_reached_is_an_error_on_all_ranks(tmpfs: Path) -> None:
    errors = call_team(jobs.cannot_reach, tmpfs, 2)
    assert all("192.0.2.1" in error and "FLASHPOINT_HOST" in error for error in errors)


def test_a_job_of_one_process_needs_no_server() -> None:
    ranks: Any = SimpleNamespace(world_size=1, rank=0, secret=b"secret", node="node-0")
    store = open_store(ranks)
    assert store.address is None
    first, second = store.connect("a"), store.connect("a")
    first.set("key", b"\x00\xff")
    assert second.get("key") == b"\x00\xff"
    second.reserve("key")
    second.reserve("none")
    assert second.multi_get(["key", "none"]) == [b"\x00\xff", b""]
    assert store.connect("b").get("key") == b""
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.connect("a")
