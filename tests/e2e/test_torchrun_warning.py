"""What a job under torchrun is told about being started again, by its own output.

The first job is started as a user starts it, cold.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ml_flashpoint.checkpointer import STORE_VARIABLE
from tests.support import warm
from tests.support.cluster import free_port
from tests.support.processes import OF_RANKS, child_environment

JOB = """
import os
import torch.distributed as dist
from ml_flashpoint import Flashpoint

dist.init_process_group("gloo")
with Flashpoint(os.environ["FLASHPOINT_TEST_BASE"]):
    pass
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("backend", "restarts", "disabled", "says"),
    [
        ("c10d", 1, False, f"export {STORE_VARIABLE}=1"),
        ("c10d", 1, True, ""),
        ("c10d", 0, False, ""),
        ("static", 1, True, "pass --rdzv-backend=c10d"),
    ],
)
def test_a_job_is_warned_where_it_may_hang(
    tmpfs: Path, tmp_path: Path, backend: str, restarts: int, disabled: bool, says: str
) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    env = {name: value for name, value in child_environment(**OF_RANKS).items() if name != STORE_VARIABLE}
    env |= {"FLASHPOINT_TEST_BASE": str(tmpfs / "job"), **({STORE_VARIABLE: "1"} if disabled else {})}
    place = (
        ["--rdzv-backend=c10d", "--local-addr=127.0.0.1", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        if backend == "c10d"
        else ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    )
    flags = ["--nproc-per-node=2", f"--max-restarts={restarts}", *place]
    argv = [sys.executable, "-m", "torch.distributed.run", *flags, str(script)]
    if says.startswith("export") or warm.ALL_COLD:
        try:
            said = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200)
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"the job hangs; it said: {error.stderr!r}")
    else:
        said = warm.run(argv, env, timeout_s=200)
    assert said.returncode == 0, said.stderr[-3000:]
    assert said.stderr.count("torchrun will start ranks again") == bool(says), said.stderr[-3000:]  # once, by rank 0
    assert says in said.stderr
