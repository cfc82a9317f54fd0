"""The random number generators that a training loop draws from: their state, taken and put back.

Owns Python's `random`, NumPy's global generator, torch's CPU generator and those of all CUDA devices. Generators
that a program makes for itself are tracked by name, a `torch.Generator` by `GeneratorState`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture_rng_state() -> dict[str, Any]:
    """The state of all global generators, made of plain values, arrays and CPU tensors.

    CUDA generators are left out while CUDA is not in use by this process: nothing was drawn from them.
    """
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if in_use else [],
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`capture_rng_state` took. States of CUDA devices that this machine lacks are left out."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, saved in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(saved, device)


class GeneratorState:
    """A generator of the program's own, as something to track.

    Args:
        generator: stays the program's.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the state back."""
        self._generator.set_state(state["state"].cpu())
