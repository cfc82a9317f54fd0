"""A dictionary in a tmpfs that is full: whoever writes is told, nothing that was committed goes, and it goes on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.errors import DDictFullError, DDictWritesLostError
from tests.support.dictionaries import DEADLINE_S, await_that, kill_manager

pytestmark = pytest.mark.slow


def value(number: int) -> torch.Tensor:
    return torch.full((70_000,), float(number))


def test_a_full_tmpfs(small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_DDICT_BASE", str(small_tmpfs))
    with DDict(1, 2, 400 << 20, working_set_size=2, replication="ring", timeout=DEADLINE_S) as d:
        d.update({number: value(number) for number in range(4)})
        d.checkpoint()
        assert d.wait_for_commit() == 0
        ballast = small_tmpfs / "ballast"
        _fill(ballast)

        with pytest.raises(DDictFullError, match="enlarge the tmpfs"):
            d.update({("more", number): value(number) for number in range(20)})  # some may find room that is kept free
        for manager in range(2):
            epoch = d._access.state()["epoch"]
            kill_manager(d, manager)
            await_that(lambda epoch=epoch: d._access.state()["epoch"] > epoch)  # type: ignore[misc]
            for number in range(4):
                assert torch.equal(_read(d, number), value(number))
        ballast.unlink()
        d.sync_to_newest_checkpoint()
        d.checkpoint()
        d["more"] = value(5)
        d.checkpoint()
        d.wait_for_commit()
        assert torch.equal(d["more"], value(5))


def _fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(1 << 12))


def _read(d: DDict, key: int) -> torch.Tensor:
    try:
        return d[key]
    except DDictWritesLostError:
        d.sync_to_newest_checkpoint()
        return d[key]
