"""Local checkpoints in a durable store, and iterations that are kept, in one process."""

from __future__ import annotations

import contextlib
import enum
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, UnsafeContentError
from ml_flashpoint.local import (
    BasicTensorAwareStateDict,
    CheckpointingException,
    LocalCheckpointManager,
    NoReplicasAvailableError,
    StaleIterationError,
)
from tests.support.forked import wait_until
from tests.support.persisting import persisted_steps


@contextlib.contextmanager
def manager(tmpfs: Path, **options: Any) -> Iterator[LocalCheckpointManager]:
    made = LocalCheckpointManager(tmpfs / "jobs", "job", **options)
    try:
        yield made
    finally:
        made.close()


def save(made: LocalCheckpointManager, *iterations: int) -> None:
    for iteration in iterations:
        made.save(BasicTensorAwareStateDict({"w": torch.full((300_000,), float(iteration))}), iteration)


def loaded(made: LocalCheckpointManager) -> tuple[int, float, str]:
    state, checkpoint = made.load()
    values: torch.Tensor = state.state_dict["w"]  # type: ignore[attr-defined]
    assert made._engine.last_recovery is not None
    return checkpoint.iteration, float(values.mean()), made._engine.last_recovery.tier


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_an_older_iteration_is_gone_back_to(tmpfs: Path) -> None:
    with manager(tmpfs, keep=3) as made:
        save(made, 1, 2, 3)
        with pytest.raises(LoadError, match="no version of step 7 is held by this job; there are 3, 2, 1"):
            made.load(7)
        assert loaded(made) == (3, 3.0, "memory"), "nothing has changed"
        for wrong in (-1, True, "2"):
            with pytest.raises(InvalidArgumentError, match="iteration"):
                made.load(wrong)  # type: ignore[arg-type]
        state, checkpoint = made.load(iteration=2)
        assert (checkpoint.iteration, made.latest_iteration, made.find_latest()) == (2, 2, 2)
        assert float(state.state_dict["w"].mean()) == 2.0  # type: ignore[attr-defined]
        save(made, 2)  # on from there, over what was left behind
        assert loaded(made) == (2, 2.0, "memory")
    with manager(tmpfs, keep=3) as made:
        made.load(1)
    with manager(tmpfs, keep=3) as made:
        assert loaded(made) == (1, 1.0, "memory"), "what was gone back from is not found again"


class OnlyAtFirst(enum.Enum):
    """A type that a program may not find again."""

    ONE = 1


def test_an_iteration_that_cannot_be_loaded_changes_nothing(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with manager(tmpfs, keep=3) as made:
        for iteration in (1, 2, 3):
            made.save(BasicTensorAwareStateDict({"w": torch.ones(9), "own": OnlyAtFirst.ONE}), iteration)
        with monkeypatch.context() as patched:
            patched.delattr("tests.local.test_tiers.OnlyAtFirst")
            for iteration in (1, 3):
                with pytest.raises(UnsafeContentError):
                    made.load(iteration)
                assert (made.latest_iteration, made.find_latest()) == (3, 3)
        with pytest.raises(StaleIterationError, match="older than iteration 3"):
            made.save(BasicTensorAwareStateDict({}), 2)
        assert made.load()[1].iteration == 3


class Stuck(BasicTensorAwareStateDict):
    """A state whose tensors may not go back to their device."""

    is_stuck = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        if self.is_stuck:
            raise ValueError("there is no such device")
        super().restore_tensor_device(non_blocking)


def test_an_iteration_that_was_asked_for_and_refused_is_still_the_newest(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmpfs, keep=2) as made:
        for iteration in (1, 2):
            made.save(Stuck({"w": torch.ones(9)}), iteration)
        with monkeypatch.context() as patched:
            patched.setattr(Stuck, "is_stuck", True)
            with pytest.raises(CheckpointingException, match="no such device"):
                made.load(2)
        assert (made.latest_iteration, made.find_latest()) == (2, 2)


@pytest.mark.damages_on_purpose
def test_iterations_are_persisted_and_found_where_memory_has_none(tmpfs: Path) -> None:
    store = tmpfs / "store"
    options: dict[str, Any] = {"persist": str(store), "persist_every": 2}
    with manager(tmpfs, **options) as made:
        assert made.find_latest() == -1
        save(made, 1, 2)
        wait_until(lambda: made.status.persisted == 2, "it is persisted")
        save(made, 3)
        wait_until(lambda: made.status.persist_lag == 1, "the next one is verified")
    assert persisted_steps(store) == [3, 2], "the end persists the last one"
    with manager(tmpfs, **options) as made:
        assert loaded(made) == (3, 3.0, "memory")
    shutil.rmtree(tmpfs / "jobs")
    with manager(tmpfs, **options) as made:
        assert made.find_latest() == 3
        assert loaded(made) == (3, 3.0, "persisted")
        save(made, 4)
        assert loaded(made) == (4, 4.0, "memory")
    shutil.rmtree(tmpfs / "jobs")
    for path in store.rglob("*.safetensors"):
        if "step-2_ckpt" not in str(path):
            damage(path)
    with manager(tmpfs, **options) as made:
        assert loaded(made) == (2, 2.0, "persisted")
    for path in store.rglob("*.safetensors"):
        damage(path) if "step-2_ckpt" in str(path) else None
    with manager(tmpfs, **options) as made, pytest.raises(NoReplicasAvailableError):
        made.load()
