"""The random number generators that a training loop draws from: their state, taken and put back.

The global ones are Python's `random`, NumPy's, torch's on the CPU and on all CUDA devices. A generator that a program
makes for itself is tracked by name: a `torch.Generator` by `GeneratorState`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ml_flashpoint.copy import cuda


def capture_rng_state() -> dict[str, Any]:
    """Return the state of all global generators: new plain values and arrays, tensors of CUDA devices.

    CUDA generators are left out while CUDA is not in use by this process: nothing was drawn from them.
    """
    in_use = cuda.in_use()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy(),
        "cuda": torch.cuda.get_rng_state_all() if in_use else [],
        "device": torch.cuda.current_device() if in_use else None,
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`capture_rng_state` took. States of CUDA devices that this machine lacks are left out.

    A rank that has moved to another device goes on there with the numbers of the one that it had.
    """
    if "anew" in state:
        saved_seed, rank, step = state["anew"]
        random.seed(new_seed(saved_seed, rank, step, "python"))
        np.random.seed(new_seed(saved_seed, rank, step, "numpy") % (1 << 32))
        torch.manual_seed(new_seed(saved_seed, rank, step, "torch"))  # of CUDA devices, too
        return
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    saved = state["cuda"]
    if not saved:  # nor is CUDA asked about anything, in a job without
        return
    before = state.get("device")
    if cuda.in_use() and before is not None and before != (now := torch.cuda.current_device()):
        torch.cuda.set_rng_state(saved[before], now)
        return
    # Where CUDA is not in use yet, torch keeps them until it is.
    for device, each in zip(range(cuda.device_count()), saved, strict=False):
        torch.cuda.set_rng_state(each, device)
    if not cuda.in_use() and before is not None and cuda.device_count():
        torch.cuda.set_rng_state(saved[before], "cuda")  # whichever is the current one then


class RestoredRng:
    """A state of all global generators, to be restored once more at the place where a program goes on."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._by: object = None

    def put_back(self, by: object) -> None:
        """Restore the generators, whatever was drawn since. Only the first caller does, as often as it calls."""
        if self._by is None or self._by is by:
            self._by = by
            restore_rng_state(self._state)


def new_seed(saved: int, rank: int, step: int, what: str) -> int:
    """Return a seed for a generator of a new rank, the same whenever it is made, from the seed that rank 0 had."""
    digest = hashlib.sha256(f"{saved}/{rank}/{step}/{what}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_of(state: Mapping[str, Any]) -> int:
    """Return the seed of torch's CPU generator, by a state that :func:`capture_rng_state` took."""
    generator = torch.Generator("cpu")
    generator.set_state(torch.from_numpy(state["torch"]))
    return generator.initial_seed()


def seeded_rng_state(saved: int, rank: int, step: int) -> dict[str, Any]:
    """Return a state for :func:`restore_rng_state`: of all global generators, seeded anew. See :func:`new_seed`."""
    return {"anew": [saved, rank, step]}


class GeneratorState:
    """A generator of the program, as something to track."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the state back."""
        self._generator.set_state(state["state"].cpu())

    def seed_of(self, state: Mapping[str, Any]) -> int:
        """Return the seed of the generator that had this state."""
        generator = torch.Generator(self._generator.device)
        generator.set_state(state["state"].cpu())
        return generator.initial_seed()

    def seeded(self, seed: int) -> dict[str, Any]:
        """Return the state of such a generator that is seeded anew."""
        return {"state": torch.Generator(self._generator.device).manual_seed(seed).get_state()}
