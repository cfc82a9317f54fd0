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
    """Flips a byte in the middle of every object of a version, in a base container or a durable store."""
    for path in base.rglob(f"step-{step}_ckpt/*.safetensors"):
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


def trained_model() -> dict[str, Any]:
    """A model, and an optimizer that has state."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(12.0).view(3, 4)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}
