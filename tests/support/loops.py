"""Loops and tracked objects for tests of `Flashpoint`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ml_flashpoint import Flashpoint
from tests.workers.training import Job


class Stored:
    """The simplest thing that can be tracked."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Custom:
    """A type that no allow-list knows."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.number == self.number


def train(base: Path, job: Job, until: int, **options: Any) -> Flashpoint:
    """Trains as any user would, but for steps that would be skipped; the `Flashpoint` is closed."""
    with Flashpoint(base, **options) as fp:
        step = fp.track(**job.tracked).resume()
        while step < until:
            job.step()
            step = fp.step()
            fp.wait()
    return fp


def save_and(then: Callable[[Flashpoint], Any], fp: Flashpoint) -> None:
    """A failure may show in either call."""
    fp.step()
    then(fp)


def save_and_wait(fp: Flashpoint) -> None:
    save_and(Flashpoint.wait, fp)


def versions(base: Path) -> list[int]:
    return sorted(int(path.name[5:-5]) for path in base.glob("step-*_ckpt"))


def saved_twice(base: Path, **tracked: Any) -> None:
    """A base container with versions 1 and 2 of the same objects, both complete."""
    with Flashpoint(base, keep=2) as fp:
        fp.track(**tracked).save(1)
        fp.wait()
        for value in tracked.values():
            if isinstance(value, Stored):
                value.value += 1
        fp.save(2)
        fp.wait()


def damage(base: Path, step: int) -> None:
    """Flips a byte in the middle of every object of a version."""
    for path in (base / f"step-{step}_ckpt").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.unlink()  # not through the link, into a slot
        path.write_bytes(data)


def resumed(base: Path, **tracked: Any) -> int:
    with Flashpoint(base) as fp:
        return fp.track(**tracked).resume()


def save(base: Path, step: int = 1, **tracked: Any) -> None:
    with Flashpoint(base, strict=True) as fp:
        fp.track(**tracked).save(step)


def trained(model: nn.Module, make: Callable[..., torch.optim.Optimizer], *inputs: torch.Tensor) -> Any:
    optimizer = make(model.parameters())
    for x in inputs or (torch.ones(3, 4), torch.arange(12.0).view(3, 4)):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def state_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return dict(optimizer.state_dict()["state"])


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    assert state_of(one).keys() == state_of(other).keys()
    for number, values in state_of(one).items():
        assert values.keys() == state_of(other)[number].keys()
        for key, value in values.items():
            torch.testing.assert_close(value, state_of(other)[number][key], rtol=0, atol=0)
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]


def trained_model() -> dict[str, Any]:
    model = nn.Linear(4, 2)
    return {"model": model, "optimizer": trained(model, torch.optim.AdamW)}
