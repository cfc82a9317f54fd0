"""A forked child shares the memory that checkpoints are in: whatever it calls, they stay what was saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ml_flashpoint
from ml_flashpoint import Config, Flashpoint
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import JobInUseError, SaveError
from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.flashpoint.test_overlap import Job, assert_loaded
from tests.support.loops import Stored, resumed
from tests.workers.checkpointer_jobs import begin_and_commit, state_of

_DEADLINE_S = 60


class Child:
    """A forked child, which calls a function once it is told to, and must end with it."""

    def __init__(self, function: Callable[[], None]) -> None:
        told, self._tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(_DEADLINE_S)
                os.read(told, 1)
                function()
                code = 0
            finally:
                os._exit(code)

    def run(self) -> None:
        os.write(self._tell, b"!")
        _, status = os.waitpid(self._pid, 0)
        assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"


def _refused(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(JobInUseError, match="was forked from"):
            call()


def test_versions_of_the_parent_stay_as_they_are(base: Path) -> None:
    job = Job()
    with Flashpoint(base, strict=True, overlap=True) as fp:  # its hooks are called in the child, too

        def use() -> None:
            job.optimizer.step()
            _refused(fp.step, fp.save, fp.wait, fp.resume)
            fp.close()

        fp.track(**job.tracked).resume()
        for number in range(7):
            if number == 2:
                child = Child(use)
            job.step()
            saved = job.state()
            fp.step()  # into the same memory
            assert fp.wait()
        child.run()
        assert fp.health.failures == 0
    assert_loaded(base, saved, 7)


def test_a_local_manager_of_the_parent_is_not_to_be_used(base: Path) -> None:
    manager, state = LocalCheckpointManager(base), BasicTensorAwareStateDict({"t": torch.arange(5000.0)})
    manager.save(state, 1)

    def use() -> None:
        _refused(lambda: manager.save(state, 2), manager.find_latest)
        manager.close()

    Child(use).run()
    assert manager.find_latest() == 1
    manager.save(state, 2)
    assert manager.find_latest() == 2
    manager.close()


def test_an_engine_of_the_parent_is_not_to_be_used_and_nothing_is_removed(base: Path) -> None:
    with Checkpointer(base) as engine:

        def use() -> None:
            _refused(engine.latest, engine.begin, engine.wait, lambda: engine.finish(0))
            engine.remove_versions()
            engine.close()

        begin_and_commit(engine, 1).verified.result(30)
        Child(use).run()
        assert engine.latest() == engine.id(1)


def test_a_child_does_not_wait_for_a_save_of_its_parents(base: Path) -> None:
    with ml_flashpoint.Checkpointer(base, Config(deadline_s=1)) as ckpt:
        save = ckpt.begin(1)
        save.stage(state_of(0, 1))
        Child(lambda: _refused(lambda: ckpt.load({"value": Stored(1)}))).run()
        save.fail(SaveError("out of luck"))


@pytest.fixture
def parents_job(base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHPOINT_LOCK_DEADLINE_S", "1000")
    with Flashpoint(base, strict=True) as fp:
        fp.track(value=Stored(1)).resume()
        for step in (1, 2):
            fp.save(step)
            assert fp.wait()
            assert fp.last_saved == step
            if step == 1:
                yield


@pytest.mark.usefixtures("parents_job")
def test_a_child_is_another_job(base: Path) -> None:
    parent, childs = os.getpid(), base.with_name("of the child")

    def use() -> None:
        with pytest.raises(JobInUseError, match=f"another job has this base container open .process {parent}."):
            Flashpoint(base)
        with Flashpoint(childs, strict=True) as fp:
            fp.track(value=Stored(3)).resume()
            fp.save(3)
            assert fp.wait()

    Child(use).run()
    assert resumed(childs, value=Stored(0)) == 3


@pytest.mark.usefixtures("process_group", "parents_job")
def test_a_child_has_no_use_of_its_parents_process_group(base: Path) -> None:
    """The threads of a group are not in a child: a collective would wait for them without end."""

    def use() -> None:
        for opens in (Flashpoint, Checkpointer, LocalCheckpointManager):
            with pytest.raises(JobInUseError, match="process group it cannot use"):
                opens(base.with_name("of the child"))

    Child(use).run()
