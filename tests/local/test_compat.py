"""The import paths of `nvidia_resiliency_ext`, each time in a process that has imported nothing of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import call

_PATHS = """
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy, LazyCliqueReplicationStrategy, NoReplicasAvailableError)
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper, parse_group_sequence
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
import nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager as base_manager
import ml_flashpoint.local as ours
import importlib.util
for name in ("local.basic_state_dict", "local.replication"):
    name = f"nvidia_resiliency_ext.checkpointing.{name}"
    assert importlib.util.find_spec(name).name == name
"""
_DOTTED = """
import nvidia_resiliency_ext.checkpointing.local.basic_state_dict
nvidia_resiliency_ext.checkpointing.local.basic_state_dict.BasicTensorAwareStateDict
nvidia_resiliency_ext.checkpointing.local.replication.strategies.CliqueReplicationStrategy
"""


def _run(report: Any, code: str, more_path: Path | None = None) -> None:
    sys.path[:0] = [] if more_path is None else [str(more_path)]
    exec(code, {})


installed = importlib.util.find_spec("nvidia_resiliency_ext") is not None


@pytest.mark.skipif(installed, reason="nvidia_resiliency_ext is installed here")
def test_the_paths_lead_here_and_nothing_else_does() -> None:
    call(
        _run,
        "from ml_flashpoint.local import compat; compat.install(); compat.install()\n"
        + _DOTTED
        + _PATHS
        + "for name in dir(ours):\n"
        "    if name[0] != '_' and name in globals(): assert globals()[name] is getattr(ours, name), name\n"
        "assert base_manager.CheckpointingException is ours.CheckpointingException\n"
        "try: import nvidia_resiliency_ext.inprocess\n"
        "except ModuleNotFoundError: pass\n"
        "else: raise AssertionError('it is there')\n",
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed `nvidia_resiliency_ext`, with something of its own at each kind of path; or the one there is."""
    root = tmp_path / "nvidia_resiliency_ext"
    for path in ("checkpointing/local/replication", "checkpointing/async_ckpt"):
        (root / path).mkdir(parents=True)
    (root / "checkpointing/local/base_state_dict.py").write_text("theirs = True\n")
    (root / "checkpointing/local/replication/group_utils.py").write_text("theirs = True\n")
    (root / "checkpointing/async_ckpt/core.py").write_text("class AsyncRequest: pass\nclass AsyncCallsQueue: pass\n")
    (root / "checkpointing/async_ckpt/filesystem_async.py").write_text("theirs = True\n")
    return tmp_path


@pytest.mark.parametrize("first", ["", "import nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async\n"])
def test_of_an_installed_package_local_checkpointing_alone_is_replaced(package: Path, first: str) -> None:
    call(
        _run,
        first + "from ml_flashpoint.local import compat; compat.install()\n"
        "import nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async\n"
        + _DOTTED
        + _PATHS
        + "assert LocalCheckpointManager is ours.LocalCheckpointManager\n"
        "assert TensorAwareStateDict is ours.TensorAwareStateDict\n"
        "assert parse_group_sequence is ours.parse_group_sequence\n"
        "assert GroupWrapper.__module__.startswith('ml_flashpoint.')\n"
        "core = 'nvidia_resiliency_ext.checkpointing.async_ckpt.core'\n"
        "assert AsyncRequest.__module__ == AsyncCallsQueue.__module__ == core\n",
        package,
    )


def test_paths_that_are_imported_already_are_not_taken_over(package: Path) -> None:
    call(
        _run,
        "import nvidia_resiliency_ext.checkpointing.local.base_state_dict as theirs\n"
        "from ml_flashpoint.local import compat, CompatibilityError\n"
        "try: compat.install()\n"
        "except CompatibilityError as error: assert 'local' in str(error)\n"
        "else: raise AssertionError('it was not refused')\n"
        "import nvidia_resiliency_ext.checkpointing.local.base_state_dict as still\n"
        "assert still is theirs\n",
        package,
    )
