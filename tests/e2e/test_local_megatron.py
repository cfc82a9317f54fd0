"""Local checkpoints of megatron-core's states, in its queue and in others': needs megatron-core, and no GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cluster import run_ranks


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_megatrons_state_and_queue(tmpfs: Path) -> None:
    for reports in run_ranks(tmpfs, "local_megatron", 2, nodes=2, timeout_s=110):
        assert [report["iteration"] for report in reports] == [1, 2, 3, 4]
        assert reports[1]["queue"].startswith("megatron.core")
        theirs = "ml_flashpoint" if find_spec("nvidia_resiliency_ext") is None else "nvidia_resiliency_ext"
        assert reports[3]["queue"].startswith(theirs)
