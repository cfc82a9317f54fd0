"""Who alone may persist at a URL: by a lock, or by a record where there are none."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from ml_flashpoint.format.errors import JobInUseError
from ml_flashpoint.stores.durable import Ownership
from ml_flashpoint.stores.files import Directory, UrlFiles


def test_with_locks_one_at_a_time_has_it(tmpfs: Path) -> None:
    store = Directory(tmpfs / "store")
    first, second = Ownership(store), Ownership(store)
    first.take()
    with pytest.raises(JobInUseError, match="somebody persists there"):
        second.take()
    first.check()
    first.release()
    first.release()
    second.take()
    second.check()
    second.release()


def test_without_locks_the_last_has_it_and_the_one_before_takes_nothing_back() -> None:
    store = UrlFiles(f"memory://{secrets.token_hex(4)}")
    first, second = Ownership(store), Ownership(store)
    first.take()
    second.take()
    assert first.taken, "it has not looked yet"
    for call in (first.check, first.take, first.take):
        with pytest.raises(JobInUseError, match="taken this over"):
            call()
        assert not first.taken
    first.check()
    first.release()
    second.check()
    second.release()
    assert store.list() == []
    first.take()
    first.check()
    first.release()


def test_a_record_that_is_damaged_keeps_nobody_out() -> None:
    store = UrlFiles(f"memory://{secrets.token_hex(4)}")
    store.write("owner.json", [b"{}"])
    owner = Ownership(store)
    owner.take()
    owner.release()
    assert store.list() == []
