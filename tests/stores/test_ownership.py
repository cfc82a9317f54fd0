"""Who alone may persist at a URL: by a lock, or by a lease where there are none."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ml_flashpoint.format.errors import JobInUseError
from ml_flashpoint.stores.files import Directory, Files, UrlFiles
from ml_flashpoint.stores.ownership import Ownership
from tests.support.forked import wait_until

PERIOD_S = 0.05


@pytest.fixture(params=["lock", "lease"])
def store(request: pytest.FixtureRequest, tmpfs: Path) -> Iterator[Files]:
    if request.param == "lock":
        yield Directory(tmpfs / "store")
        return
    yield UrlFiles(f"memory://{secrets.token_hex(4)}")


def take(owner: Ownership) -> None:
    def taken() -> bool:
        try:
            owner.take()
        except JobInUseError:
            return False
        return True

    wait_until(taken, "it is taken", 10)


def test_one_at_a_time_has_it(store: Files) -> None:
    # Renewed twenty times for each time that it could be taken over, so that a busy machine does not matter.
    first, second = Ownership(store, period_s=PERIOD_S), Ownership(store, period_s=5 * PERIOD_S)
    first.take()
    until = time.monotonic() + 30 * PERIOD_S
    while time.monotonic() < until:
        with pytest.raises(JobInUseError):
            second.take()
        time.sleep(PERIOD_S)  # as those do that try again
    first.check()
    first.release()
    first.release()
    take(second)
    second.check()
    second.release()


def test_a_lease_that_is_not_renewed_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    store = UrlFiles(f"memory://{secrets.token_hex(4)}")
    first, second = (Ownership(store, period_s=PERIOD_S) for _ in range(2))
    monkeypatch.setattr(first, "_keep", lambda ended: None)  # as one that was killed
    first.take()
    began = time.monotonic()
    take(second)
    assert time.monotonic() - began >= 4 * PERIOD_S
    with pytest.raises(JobInUseError):
        first.check()
    assert not first.taken
    first.release()
    second.check()
    second.release()


def test_a_lease_that_is_damaged_keeps_nobody_out() -> None:
    store = UrlFiles(f"memory://{secrets.token_hex(4)}")
    store.write("lease.json", [b"{}"])
    owner = Ownership(store, period_s=PERIOD_S)
    owner.take()
    owner.release()
    assert store.list() == []
