"""Random saves under a loop that changes all it may: each version is what a clone of that step is, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ml_flashpoint import Flashpoint
from ml_flashpoint.tools.items import OpenVersion, open_version
from tests.state.test_changes import CHANGES, Job

_PACKED = "_flashpoint.rank-00000"
_LEFT_OUT = {"hook", "post hook", "class's method", "tensors as an option"}
"""Each call of ``state_dict()`` gives something else, or versions have other names for it."""
_WITHOUT_ANOTHER_STRUCTURE = ("nothing", "step", "buffer in place", "lr")
_SAVES = 12


def _clone(job: Job) -> dict[str, Any]:
    """All that is to be saved, by the names that versions have for it; of parameters with several, by each."""
    model, optimizer = copy.deepcopy(dict(job.model.state_dict())), copy.deepcopy(job.optimizer.state_dict())
    names: dict[int, list[str]] = {}
    for name, parameter in job.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = [parameter for group in job.optimizer.param_groups for parameter in group["params"]]
    clone = {f"model.{name}": value for name, value in model.items()}
    for number, values in optimizer["state"].items():
        for name in names.get(id(parameters[number]), []):
            clone |= {f"optimizer.state.{name}.{key}": value for key, value in values.items()}
    for number, group in enumerate(optimizer["param_groups"]):
        clone |= {f"optimizer.param_groups.{number}.{key}": value for key, value in group.items() if key != "params"}
    clone[f"{_PACKED}.optimizer"] = optimizer
    clone[f"{_PACKED}.scheduler"] = copy.deepcopy(job.scheduler.state_dict())
    clone[f"{_PACKED}._rng"] = {"torch": torch.get_rng_state().numpy(), "python": random.getstate()}
    return clone


def _is_same(saved: Any, cloned: Any) -> bool:
    if isinstance(cloned, torch.Tensor):
        if not isinstance(saved, torch.Tensor) or (saved.dtype, saved.shape) != (cloned.dtype, cloned.shape):
            return False
        return saved.to_dense().resolve_conj().resolve_neg().numpy().tobytes() == (
            cloned.detach().to_dense().resolve_conj().resolve_neg().numpy().tobytes()
        )
    if isinstance(cloned, np.ndarray):
        return np.array_equal(saved, cloned)
    if isinstance(cloned, dict):
        return cloned.keys() <= saved.keys() and all(_is_same(saved[key], value) for key, value in cloned.items())
    if isinstance(cloned, (list, tuple)):
        return len(saved) == len(cloned) and all(map(_is_same, saved, cloned))
    return bool(type(saved) is type(cloned) and saved == cloned)


def _check(version: OpenVersion, clone: dict[str, Any]) -> None:
    reader = version.object(0)
    checked = set[str]()
    for key, entry in reader.layout.by_key.items():
        if key in clone:
            is_bytes = entry.kind != "tensor" or not isinstance(clone[key], torch.Tensor)
            found = version.bytes(0, key) if is_bytes else version.tensor(0, key)
            if isinstance(found, bytes):
                found = torch.load(io.BytesIO(found), weights_only=False)
            assert _is_same(found, clone[key]), key
            checked.add(key)
    whole = f"{_PACKED}.optimizer" in checked
    lacking = {key for key in clone.keys() - checked if not (key.startswith("optimizer.") and whole)}
    states = {key for key in lacking if key.startswith("optimizer.state.")}  # by another name of the same parameter
    assert lacking - states <= {f"{_PACKED}.optimizer"}
    assert len(states) < max(1, sum(key.startswith("optimizer.state.") for key in clone))


class Campaign:
    """Jobs in a folder, each with a few saves."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._rng = folder, random.Random(seed)
        self._names = sorted(CHANGES.keys() - _LEFT_OUT)
        self.saves = 0
        self.errors: list[str | None] = []

    def play(self) -> None:
        """One job."""
        rng, job = self._rng, Job()
        with Flashpoint(self._folder, discard_existing=True) as fp:
            fp.track(model=job.model, optimizer=job.optimizer, scheduler=job.scheduler).resume()
            wild = rng.random() < 0.5
            for _ in range(_SAVES):
                self._change(job, self._names if wild and rng.random() < 0.5 else ["step"])
                clone = _clone(job)
                failures = fp.health.failures
                step = fp.step()
                for _ in range(rng.randint(0, 2)):
                    self._change(job, self._names if rng.random() < 0.1 else _WITHOUT_ANOTHER_STRUCTURE)
                assert fp.wait(60)
                if fp.health.failures > failures:
                    self.errors.append(fp.health.last_error)
                    continue
                self.saves += 1
                with open_version(self._folder, step) as version:
                    _check(version, clone)

    def _change(self, job: Job, names: Sequence[str]) -> None:
        with contextlib.suppress(Exception):  # of torch, where one change stands in the way of another
            CHANGES[self._rng.choice(names)](job)


def _play(base: Path, seed: int, saves: int) -> None:
    campaign = Campaign(base, seed)
    while campaign.saves < saves:
        campaign.play()
    assert len(campaign.errors) < campaign.saves / 10, campaign.errors


@pytest.mark.slow
def test_random_saves_are_clones_of_their_steps(base: Path) -> None:
    _play(base, 1, 60)


@pytest.mark.slow
@pytest.mark.soak
def test_a_thousand_random_saves_are_clones_of_their_steps(base: Path) -> None:
    _play(base, 2, 1000)
