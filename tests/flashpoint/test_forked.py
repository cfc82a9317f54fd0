"""A forked child shares the memory that checkpoints are in: whatever it calls, they stay what was saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ml_flashpoint
from ml_flashpoint import Config, Flashpoint
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import JobInUseError, SaveError
from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.flashpoint.test_overlap import Job
from tests.support.loops import Stored
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


def _train(fp: Flashpoint, job: Job, steps: int) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for _ in range(steps):
        job.step()
        state = job.state()
        fp.step()
        assert fp.wait()
    return state


def _refused(call: Callable[[], object]) -> None:
    with pytest.raises(JobInUseError, match="was forked from"):
        call()


def _train_alone(fp: Flashpoint, job: Job) -> None:
    job.optimizer.step()


def _close(fp: Flashpoint, job: Job) -> None:
    fp.close()


def _use(fp: Flashpoint, job: Job) -> None:
    for call in (fp.step, fp.save, fp.wait, fp.resume):
        _refused(call)


@pytest.mark.parametrize("does", [_train_alone, _close, _use])
def test_versions_of_the_parent_stay_as_they_are(tmpfs: Path, does: Callable[[Flashpoint, Job], None]) -> None:
    job = Job()
    with Flashpoint(tmpfs / "job", strict=True, overlap=True) as fp:  # its hooks are called in the child, too
        fp.track(**job.tracked).resume()
        _train(fp, job, 2)
        child = Child(lambda: does(fp, job))
        saved = _train(fp, job, 5)  # into the same memory
        assert fp.wait()
        child.run()
        assert fp.health.failures == 0
    again = Job()
    with Flashpoint(tmpfs / "job") as fp:
        assert fp.track(**again.tracked).resume() == 7
        found = again.state()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.fixture
def manager(tmpfs: Path) -> Iterator[LocalCheckpointManager]:
    manager = LocalCheckpointManager(tmpfs / "local")
    yield manager
    manager.close()


def test_a_local_manager_of_the_parent_is_not_to_be_used(manager: LocalCheckpointManager) -> None:
    state = BasicTensorAwareStateDict({"t": torch.arange(5000.0)})
    manager.save(state, 1)

    def use() -> None:
        _refused(lambda: manager.save(state, 2))
        _refused(manager.find_latest)
        manager.close()

    Child(use).run()
    assert manager.find_latest() == 1
    manager.save(state, 2)
    assert manager.find_latest() == 2


def test_an_engine_of_the_parent_is_not_to_be_used(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job") as engine:

        def use() -> None:
            for call in (engine.latest, engine.begin, engine.wait, lambda: engine.finish(0)):
                _refused(call)
            engine.close()

        Child(use).run()
        assert engine.latest() is None


def test_a_child_removes_nothing_of_its_parents(tmpfs: Path) -> None:
    with Checkpointer(tmpfs / "job") as engine:
        begin_and_commit(engine, 1).verified.result(30)
        Child(engine.remove_versions).run()
        assert engine.latest() == engine.id(1)


def test_a_child_does_not_wait_for_a_save_of_its_parents(base: Path) -> None:
    with ml_flashpoint.Checkpointer(base, Config(deadline_s=1)) as ckpt:
        save = ckpt.begin(1)
        save.stage(state_of(0, 1))
        Child(lambda: _refused(lambda: ckpt.load({"value": Stored(1)}))).run()
        save.fail(SaveError("out of luck"))


@pytest.fixture
def parents_job(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flashpoint]:
    monkeypatch.setenv("FLASHPOINT_LOCK_DEADLINE_S", "1000")
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(value=Stored(1)).resume()
        fp.save(1)
        assert fp.wait()
        yield fp
        fp.save(2)
        assert fp.wait()


def test_a_child_is_another_job(tmpfs: Path, parents_job: Flashpoint) -> None:
    parent = os.getpid()

    def use() -> None:
        with pytest.raises(JobInUseError, match=f"another job has this base container open .process {parent}."):
            Flashpoint(tmpfs / "job")
        with Flashpoint(tmpfs / "of the child", strict=True) as fp:
            fp.track(value=Stored(3)).resume()
            fp.save(3)
            assert fp.wait()

    Child(use).run()
    value = Stored(0)
    with Flashpoint(tmpfs / "of the child") as fp:
        assert fp.track(value=value).resume() == 3
    assert parents_job.last_saved == 1


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_child_has_no_use_of_its_parents_process_group(tmpfs: Path, request: pytest.FixtureRequest) -> None:
    """The threads of a group are not in a child: a collective would wait for them without end."""
    request.getfixturevalue("parents_job")

    def use() -> None:
        for opens in (Flashpoint, Checkpointer, LocalCheckpointManager):
            with pytest.raises(JobInUseError, match="process group it cannot use"):
                opens(tmpfs / "of the child")

    Child(use).run()
