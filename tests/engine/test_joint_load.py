"""What is tried next where a version cannot be loaded. Real ranks vote in the tests of the adapters."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.joint_load import JointLoad
from ml_flashpoint.format.errors import (
    Blame,
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
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.ranks.rank_group import rank_group

BASE = CheckpointContainerId("/dev/shm/none")
VERSIONS = [CheckpointContainerId.create_child(BASE, f"step-{step}_ckpt") for step in (3, 2, 1)]


class Finder:
    """The side of a checkpointer that finds versions: three, that nothing reads."""

    def __init__(self) -> None:
        self.ranks = rank_group()
        self.discarded: list[CheckpointContainerId] = []

    def newest(self) -> CheckpointContainerId | None:
        return next((each for each in VERSIONS if each not in self.discarded), None)

    def discard(self, version: CheckpointContainerId) -> None:
        self.discarded.append(version)

    def reconsider(self) -> None:
        self.discarded.clear()


def load(*errors: BaseException | None) -> tuple[Any, JointLoad, Finder]:
    """Load where each try, in turn, fails with one of these; those after them succeed."""
    finder, left = Finder(), list(errors)
    joint = JointLoad(cast(Checkpointer, finder))

    def work() -> str:
        if left and (error := left.pop(0)) is not None:
            raise error
        return "state"

    return joint.newest(finder.newest, lambda version: joint.step(version, work)), joint, finder


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
    loaded, joint, finder = load(error)
    assert loaded == (VERSIONS[1], "state")
    assert finder.discarded == VERSIONS[:1]
    assert [each.version for each in joint.failures] == ["step-3_ckpt"]
    assert joint.failures[0].is_misfit == isinstance(error, ValueError)


@pytest.mark.parametrize(
    "error",
    [UnsafeContentError("x"), LoadError("it has no state of 'model'"), ReshardError("x"), TopologyError("x")],
    ids=lambda error: type(error).__name__,
)
def test_no_other_version_would_help(error: Exception) -> None:
    loaded, joint, finder = load(error)
    assert loaded is None
    assert joint.cause is error
    assert not finder.discarded
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
