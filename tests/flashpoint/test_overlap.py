"""Training goes on as soon as a save returns, with overlap and without: what is saved is what it was then."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError

WIDTH = 192


class Net(nn.Module):
    """With parameters, statistics that change in forward, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.last(self.norm(self.first(x))))
        return out


class Job:
    """A loop with everything that changes: parameters, optimizer state, statistics, and an average of the weights."""

    def __init__(self) -> None:
        self.model, self.average = Net(), Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.tracked: dict[str, Any] = {
            "model": self.model, "average": self.average, "optimizer": self.optimizer
        }  # fmt: skip

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors."""
        found = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        found |= {f"average.{name}": t for name, t in self.average.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{key}": value for key, value in values.items()}
        return {name: tensor.clone() for name, tensor in found.items()}


def _loaded(base: Path) -> tuple[int, dict[str, torch.Tensor]]:
    again = Job()
    with Flashpoint(base) as fp:
        step = fp.track(**again.tracked).resume()
        return step, again.state()


def _is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _check_random_saves(base: Path, rounds: int, **options: Any) -> None:
    rng = random.Random(7)
    job, step = Job(), 0
    for _ in range(rounds):
        with Flashpoint(base, strict=True, **options) as fp:
            assert fp.track(**job.tracked).resume() == step
            saved: dict[str, torch.Tensor] = {}
            for _ in range(rng.randint(1, 4)):
                assert fp.wait(60)
                job.step()
                saved, step = job.state(), fp.step()
            for _ in range(rng.randint(0, 2)):  # steps that nobody counts
                job.step()
            # What the last version holds is known only once it is copied, whoever does that.
            fp.before_update()
            job.step()
        found, state = _loaded(base)
        assert found == step
        assert _is_same(state, saved)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_version_is_the_state_of_its_step(base: Path, overlap: bool) -> None:
    _check_random_saves(base, 6, overlap=overlap)


@pytest.mark.slow
@pytest.mark.soak
def test_a_thousand_versions_are_the_states_of_their_steps(base: Path) -> None:
    _check_random_saves(base, 400)


def test_hooks_go_with_the_flashpoint(base: Path) -> None:
    job = Job()
    with Flashpoint(base, overlap=True) as fp:
        fp.track(**job.tracked)
        assert len(job.optimizer._optimizer_step_pre_hooks) == 1
    assert not job.optimizer._optimizer_step_pre_hooks


def test_bad_arguments(base: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="overlap must be True or False, got 1"):
        Flashpoint(base, overlap=1)  # type: ignore[arg-type]


def test_a_save_that_cannot_begin_fails_and_training_goes_on(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()

    def fail(*_: Any, **__: Any) -> None:
        raise SaveError("the checkpointer is closed")

    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        with monkeypatch.context() as patched:
            patched.setattr(Checkpointer, "begin", fail)
            fp.save(1)
        assert "the checkpointer is closed" in str(fp.health.last_error)
        fp.save(2)
        assert fp.wait(30)
        assert (fp.health.saves, fp.health.failures) == (1, 1)


def test_an_interrupt_in_the_midst_of_a_save_holds_up_no_later_one(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    with Flashpoint(base, strict=True) as fp:
        fp.track(**job.tracked).resume()
        fp.save(1)
        with monkeypatch.context() as patched:

            def interrupted(*_: Any, **__: Any) -> None:
                raise KeyboardInterrupt

            patched.setattr(Save, "stage", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fp.save(2)
        fp.save(3)
        assert fp.wait(30)
        assert fp.last_saved == 3


def test_without_overlap_optimizers_are_left_alone(base: Path) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked)
        assert not job.optimizer._optimizer_step_pre_hooks
