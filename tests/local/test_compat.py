"""The import paths of `nvidia_resiliency_ext`, each time in a process that has imported nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_PATHS = """
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy, LazyCliqueReplicationStrategy, NoReplicasAvailableError)
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import parse_group_sequence
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
import nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager as base_manager
import ml_flashpoint.local as ours
"""


def _run(code: str, *, more_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(more_path or ""), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module", autouse=True)
def _not_installed() -> None:
    from importlib.util import find_spec

    if find_spec("nvidia_resiliency_ext") is not None:
        pytest.skip("nvidia_resiliency_ext is installed here")


def test_the_paths_lead_here_and_nothing_else_does() -> None:
    done = _run(
        "from ml_flashpoint.local import compat; compat.install(); compat.install()\n"
        + _PATHS
        + "for name in ours.__all__:\n"
        "    if name in globals(): assert globals()[name] is getattr(ours, name), name\n"
        "assert base_manager.CheckpointingException is ours.CheckpointingException\n"
        "try: import nvidia_resiliency_ext.inprocess\n"
        "except ModuleNotFoundError: print('missing, as it should be')\n"
    )
    assert done.returncode == 0, done.stderr
    assert "as it should be" in done.stdout


@pytest.mark.parametrize("first", ["", "import nvidia_resiliency_ext\n"], ids=["installed", "imported"])
def test_an_installed_package_is_left_alone(tmp_path: Path, first: str) -> None:
    package = tmp_path / "nvidia_resiliency_ext"
    package.mkdir()
    (package / "__init__.py").write_text("here = True\n")
    done = _run(
        "from ml_flashpoint.local import compat, CompatibilityError\n" + first + "try: compat.install()\n"
        "except CompatibilityError as error: print('REFUSED', error)\n"
        "import nvidia_resiliency_ext; assert nvidia_resiliency_ext.here\n",
        more_path=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "REFUSED" in done.stdout
    assert str(package) in done.stdout, "the reason names the place"
