"""Random number generators: their state, put back, and made for ranks that are new."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ml_flashpoint.state.random_numbers import (
    GeneratorState,
    capture_rng_state,
    restore_rng_state,
    seed_of,
    seeded_rng_state,
)


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(()).item()]


def test_state_that_is_seeded_anew() -> None:
    before = capture_rng_state()
    try:
        torch.manual_seed(77)
        torch.rand(1000)
        assert seed_of(capture_rng_state()) == 77
        numbers: list[list[float]] = []
        for seed, rank, step in ((77, 2, 10), (77, 3, 10), (77, 2, 11), (78, 2, 10), (77, 2, 10)):
            restore_rng_state(seeded_rng_state(seed, rank, step))
            numbers.append(drawn())
        assert numbers[0] == numbers.pop()
        assert len({each for some in numbers for each in some}) == 4 * 3, "by seed, rank, step and kind of generator"
    finally:
        restore_rng_state(before)


def test_generator_that_is_seeded_anew() -> None:
    generator = torch.Generator().manual_seed(4)
    torch.rand(3, generator=generator)
    kept = GeneratorState(generator)
    assert kept.seed_of(kept.state_dict()) == 4
    kept.load_state_dict(kept.seeded(8))
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(8)))


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    """What is given to a CUDA of two devices that is played, the second of them current."""
    given: list[tuple[object, object]] = []
    played: dict[str, Any] = {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "set_rng_state": lambda state, device: given.append((state, device)),
    }
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return given


def test_rank_on_another_device_goes_on_with_its_own_numbers(put_back: list[tuple[object, object]]) -> None:
    state = {**capture_rng_state_without_cuda(), "cuda": ["used", "unused"]}
    for device, expected in ((0, {1: "used"}), (1, {0: "used", 1: "unused"}), (None, {0: "used", 1: "unused"})):
        put_back.clear()
        restore_rng_state({**state, "device": device})
        assert {on: each for each, on in put_back} == expected


def test_states_wait_for_a_process_that_does_not_use_cuda_yet(
    put_back: list[tuple[object, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are left to torch, which puts them back when CUDA is first used: on whichever device is current then."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("CUDA was initialised"))
    restore_rng_state({**capture_rng_state_without_cuda(), "cuda": ["unused", "used"], "device": 1})
    assert put_back == [("unused", 0), ("used", 1), ("used", "cuda")]


def test_a_job_without_cuda_does_not_initialise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "init", "current_device", "set_rng_state", "get_rng_state_all"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} was called"))
    state = capture_rng_state()
    assert state["cuda"] == []
    restore_rng_state(state)
    seeded_rng_state(1, 2, 3)


def capture_rng_state_without_cuda() -> dict[str, object]:
    numbers = torch.get_rng_state().numpy()
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": numbers}
