"""Programs that have set other defaults or modes of torch than a new process has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked import call_team, preload
from tests.workers.settings import round_trips

preload("torch._dynamo")
preload("tests.workers.settings")


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("ddp", 2), ("fsdp2", 2)])
def test_a_job_goes_on_bit_for_bit_under_every_default_and_mode(tmpfs: Path, kind: str, ranks: int) -> None:
    call_team(round_trips, tmpfs, ranks, kind)
