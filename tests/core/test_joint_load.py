"""What is tried next where a version cannot be loaded, whatever the door. Real ranks vote in the tests of the doors."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import pytest

from ml_flashpoint.core.joint_load import JointLoad
from ml_flashpoint.core.loader import MLFlashpointCheckpointLoader
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    DeadlineError,
    DigestMismatchError,
    LoadError,
    ObjectNotFoundError,
    PrunedError,
    RanksLostError,
    ReshardError,
    TopologyError,
    UnreadableError,
    UnsafeContentError,
)
from ml_flashpoint.format.failure_kinds import Blame
from ml_flashpoint.ranks.rank_group import rank_group

BASE = CheckpointContainerId("/dev/shm/none")
VERSIONS = [CheckpointContainerId.create_child(BASE, f"step-{step}_ckpt") for step in (3, 2, 1)]


class Loader(MLFlashpointCheckpointLoader):
    """Has three versions that nothing reads."""

    def __init__(self) -> None:
        self.discarded: list[CheckpointContainerId] = []
        self.released = 0

    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str]
    ) -> CheckpointContainerId | None:
        return next((each for each in VERSIONS if each not in self.discarded), None)

    def discard(self, version: CheckpointContainerId) -> None:
        self.discarded.append(version)

    def reconsider(self) -> None:
        self.discarded.clear()

    def read_manifest(self, version: CheckpointContainerId, rank: int) -> NoReturn:
        raise NotImplementedError

    def open_object(self, version: CheckpointContainerId, manifest: Any, record: Any) -> NoReturn:
        raise NotImplementedError

    def release(self) -> None:
        self.released += 1


def load(*errors: BaseException | None) -> tuple[Any, JointLoad, Loader]:
    """Load where each try, in turn, fails with one of these; those after them succeed."""
    loader, left = Loader(), list(errors)
    joint = JointLoad(loader, rank_group())

    def work() -> str:
        if left and (error := left.pop(0)) is not None:
            raise error
        return "state"

    loaded = joint.newest(
        lambda: loader.get_latest_complete_checkpoint(BASE), lambda version: joint.step(version, work)
    )
    assert loader.released == len(errors) - len(left) + (loaded is not None)
    return loaded, joint, loader


@pytest.mark.parametrize(
    "error",
    [
        DigestMismatchError("x"),
        ObjectNotFoundError("x"),
        PrunedError("x"),
        UnreadableError("x"),
        DeadlineError("a holder does not answer"),
        OSError(24, "Too many open files"),
        ValueError("an object does not take what is in it"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_older_version_may_be_loadable(error: Exception) -> None:
    loaded, joint, loader = load(error)
    assert loaded == (VERSIONS[1], "state")
    assert loader.discarded == VERSIONS[:1]
    assert [each.version for each in joint.failures] == ["step-3_ckpt"]
    assert joint.failures[0].is_misfit == isinstance(error, ValueError)


@pytest.mark.parametrize(
    "error",
    [UnsafeContentError("x"), LoadError("it has no state of 'model'"), ReshardError("x"), TopologyError("x")],
    ids=lambda error: type(error).__name__,
)
def test_no_other_version_would_help(error: Exception) -> None:
    loaded, joint, loader = load(error)
    assert loaded is None
    assert joint.cause is error
    assert not loader.discarded
    assert joint.failures[0].blame is (Blame.CHOICE if isinstance(error, ReshardError) else Blame.PROGRAM)


def test_ranks_that_lost_each_other_try_the_same_version_again() -> None:
    lost = RanksLostError("rank 1 did not come")
    assert load(lost, lost)[0] == (VERSIONS[0], "state")
    with pytest.raises(RanksLostError, match=r"step-3_ckpt .*rank 1 did not come.*try again"):
        load(lost, lost, lost)


def test_nothing_is_left_to_try() -> None:
    loaded, joint, _ = load(*[DigestMismatchError(f"try {number}") for number in range(3)])
    assert loaded is None
    assert [(each.version, each.text) for each in joint.failures] == [
        ("step-3_ckpt", "try 0"),
        ("step-2_ckpt", "try 1"),
        ("step-1_ckpt", "try 2"),
    ]
