"""What is said where NeMo is not as it is needed, and the recipe's signatures."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from typing import Any

import pytest

HAS_NEMO = importlib.util.find_spec("nemo") is not None


@pytest.mark.skipif(HAS_NEMO, reason="NeMo is installed")
def test_without_nemo_the_error_says_what_is_needed() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import ml_flashpoint.adapter.nemo"], capture_output=True, text=True, timeout=100
    )
    assert said.returncode == 1
    assert "ImportError: ml_flashpoint.adapter.nemo cannot import nemo.lightning" in said.stderr
    assert "from 2.4 on and below 3, the first version without nemo.lightning.resume" in said.stderr


@pytest.mark.skipif(not HAS_NEMO, reason="NeMo is not installed")
def test_signatures_of_the_recipe() -> None:
    from ml_flashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from ml_flashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    parameters = inspect.signature(wrap).parameters
    assert [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD] == [
        "trainer",
        "flashpoint_base_container",
        "async_save",
        "default_auto_resume",
        "always_save_context",
        "write_thread_count",
        "initial_write_buffer_size_bytes",
    ]
    assert parameters["initial_write_buffer_size_bytes"].default == 16 * 2**30
    parameters = inspect.signature(MLFlashpointCheckpointCallback).parameters
    assert [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD] == [
        "checkpoint_base_container",
        "every_n_steps",
        "skip_every_n_steps",
        "enabled",
        "keep_mlf_checkpoint_on_train_end",
    ]


@pytest.mark.skipif(not HAS_NEMO, reason="NeMo is not installed")
def test_bad_arguments_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import nemo.lightning as nl

    from ml_flashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from ml_flashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap
    from ml_flashpoint.format.errors import InvalidArgumentError

    usual = {"checkpoint_base_container": "/dev/shm/never", "every_n_steps": 1}
    bad = {"every_n_steps": 0, "skip_every_n_steps": -1, "enabled": "yes", "keep_mlf_checkpoint_on_train_end": None}
    for name, value in {**bad, "overlap": 1, "checkpoint_base_container": "relative"}.items():
        with pytest.raises(InvalidArgumentError, match=name):
            MLFlashpointCheckpointCallback(**{**usual, name: value})  # type: ignore[arg-type]
    for name, value in {"persist_every": 0, "keep": 0, "grace_s": 0}.items():
        options: dict[str, Any] = {"persist": "memory://any", name: value}
        with pytest.raises(InvalidArgumentError, match=name):
            wrap(None, "/dev/shm/never", True, **options)
    trainer = nl.Trainer(accelerator="cpu", devices=1, strategy=nl.MegatronStrategy(), logger=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgumentError, match=r"call trainer\.strategy\.setup_environment\(\) first"):
        wrap(trainer, "/dev/shm/never", async_save=True)
