"""Megatron-Bridge's non-persistent checkpoints through our manager, as far as a CPU can: see `make test-bridge`."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.cluster import Cluster, run_ranks
from tests.support.processes import REPOSITORY

GUIDE = REPOSITORY / "docs" / "megatron-bridge.md"

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        find_spec("megatron") is None or find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge"
    ),
]


def test_a_lost_node_costs_no_saved_step(tmpfs: Path) -> None:
    undisturbed = run_ranks(tmpfs / "undisturbed", "megatron_bridge", 2, nodes=2, args=["0"], timeout_s=110)
    ends = [reports[-1]["ended"] for reports in undisturbed]
    with Cluster(tmpfs, "megatron_bridge", nodes=2, args=["7"]) as cluster:
        for rank in range(2):
            cluster.wait_for_report(rank=rank, reached=7, timeout_s=110)
        cluster.kill_node(1)
        cluster.kill_node(0, delete_folder=False)
    for reports in run_ranks(tmpfs, "megatron_bridge", 2, nodes=2, args=["0"], timeout_s=110):
        assert reports[0] == {"resumed": 6, "samples": 18}
        assert reports[-1]["ended"] == ends[reports[-1]["rank"]]


def test_the_guide() -> None:
    from tests.workers.megatron_bridge import stand_in_for_gpus

    stand_in_for_gpus()
    (block,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    config = SimpleNamespace(checkpoint=SimpleNamespace(save="/durable"))
    exec(compile(block, GUIDE.name, "exec"), {"config": config})
    assert config.checkpoint.non_persistent_ckpt_type == "local"


@pytest.mark.parametrize(
    ("named", "argument"),
    [
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"replication_factor": 0}, "replication_factor"),
        ({"replication_jump": 0}, "replication_jump"),
        ({"base": "relative"}, "base"),
        ({"save": None}, "config.checkpoint.save"),
    ],
)
def test_arguments(named: dict[str, Any], argument: str) -> None:
    from tests.workers.megatron_bridge import stand_in_for_gpus

    stand_in_for_gpus()
    from ml_flashpoint.adapter.megatron_bridge import attach
    from ml_flashpoint.format.errors import InvalidArgumentError

    save = named.pop("save", "/durable")
    options = {"base": "/dev/shm/mlf-jobs/job", "every_n_steps": 1, **named}
    with pytest.raises(InvalidArgumentError) as raised:
        attach(SimpleNamespace(checkpoint=SimpleNamespace(save=save)), **options)  # type: ignore[arg-type]
    assert raised.value.argument == argument
