"""What is missing is named, with what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ml_flashpoint.extras import DISTRIBUTION, require

CASES = [
    ("from ml_flashpoint import Flashpoint", "torch", "pytorch"),
    ("import ml_flashpoint.local", "torch", "pytorch"),
    ("import ml_flashpoint.adapter.pytorch.memory_storage_writer", "torch", "pytorch"),
    ("import ml_flashpoint.adapter.megatron.save_strategies", "megatron", "megatron"),
    ("import ml_flashpoint.adapter.lightning", "lightning", "lightning"),
    ("import ml_flashpoint.adapter.accelerate", "accelerate", "accelerate"),
    ("import ml_flashpoint.adapter.ray_train", "pyarrow", "ray-train"),
    ("import ml_flashpoint.adapter.deepspeed", "deepspeed", "deepspeed"),
    ("import ml_flashpoint.adapter.torchtitan", "torchtitan", "torchtitan"),
    ("import ml_flashpoint.adapter.transformers", "transformers", "transformers"),
    ("import ml_flashpoint.ddict", "cloudpickle", "ddict"),
    ("import ml_flashpoint.ddict", "torch", "ddict"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "missing", "extra"), CASES)
def test_a_missing_package_is_named_with_its_extra(line: str, missing: str, extra: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None\n{line}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: this part of ml_flashpoint needs {missing}, which is not installed.")
    assert f'pip install "{DISTRIBUTION}[{extra}]"' in last


def test_what_is_there_is_not_imported() -> None:
    require("pytorch", "this", "torch")
    assert "this" not in sys.modules
