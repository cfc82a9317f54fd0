"""The user guide's code on DCP in one process: quick, and without the saving process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dcp import AsyncCheckpointerType
from tests.support.seed_snippets import (
    IMPORTS,
    INITIALIZATION,
    MEGATRON_IMPORT,
    SAVING,
    runnable_imports,
    runnable_recovery,
)


@pytest.mark.skipif(AsyncCheckpointerType is None, reason="this torch has no saving process to import the type for")
def test_imports_initialization_a_save_and_recovery(process_group: None, tmpfs: Path) -> None:
    names: dict[str, Any] = {"checkpoint_dir": str(tmpfs / "job" / "step-5_ckpt")}
    exec(runnable_imports(), names)
    exec(INITIALIZATION, names)
    names |= {"state_dict": {"w": torch.arange(9.0)}, "base_container": str(tmpfs / "job"), "current_step": 5}
    exec(SAVING.partition("# Async save")[0], names)
    assert "w" in names["metadata"].state_dict_metadata
    names |= {"state_dict": {"w": torch.zeros(9)}, "checkpoint_base_container": str(tmpfs / "job")}
    exec(runnable_recovery(), names)
    assert torch.equal(names["state_dict"]["w"], torch.arange(9.0))
    names["memory_storage_writer"].close()
    names["checkpoint_object_manager"].close()


def test_the_import_that_needs_megatron() -> None:
    assert MEGATRON_IMPORT in IMPORTS
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-LM is not installed")
    exec(MEGATRON_IMPORT, {})
