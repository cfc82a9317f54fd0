"""Random number generators: their state, put back, and made for ranks that are new."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ml_flashpoint.state.random_numbers import (
    GeneratorState,
    capture_rng_state,
    new_seed,
    restore_rng_state,
    seed_of,
    seeded_rng_state,
)


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(()).item()]


def test_seeds_are_the_same_again_and_differ_in_everything_else() -> None:
    made = [(5, 2, 10, "torch"), (6, 2, 10, "torch"), (5, 3, 10, "torch"), (5, 2, 11, "torch"), (5, 2, 10, "numpy")]
    seeds = [new_seed(*each) for each in made]
    assert seeds == [new_seed(*each) for each in made]
    assert len(set(seeds)) == len(made)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_state_that_is_seeded_anew() -> None:
    before = capture_rng_state()
    try:
        torch.manual_seed(77)
        assert seed_of(capture_rng_state()) == 77
        torch.rand(1000)
        assert seed_of(capture_rng_state()) == 77
        numbers = []
        for rank in (2, 3, 2):
            restore_rng_state(seeded_rng_state(77, rank, 10))
            numbers.append(drawn())
        assert numbers[0] == numbers[2]
        assert not set(numbers[0]) & set(numbers[1])
    finally:
        restore_rng_state(before)


def test_generator_that_is_seeded_anew() -> None:
    generator = torch.Generator().manual_seed(4)
    torch.rand(3, generator=generator)
    kept = GeneratorState(generator)
    assert kept.seed_of(kept.state_dict()) == 4
    kept.load_state_dict(kept.seeded(8))
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(8)))


def test_rank_on_another_device_goes_on_with_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back: dict[int, str] = {}
    for name, value in {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "set_rng_state": lambda state, device: put_back.__setitem__(device, state),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    state = {**capture_rng_state_without_cuda(), "cuda": ["used", "unused"]}
    for device, expected in ((0, {1: "used"}), (1, {0: "used", 1: "unused"}), (None, {0: "used", 1: "unused"})):
        put_back.clear()
        restore_rng_state({**state, "device": device})
        assert put_back == expected


def test_states_wait_for_a_process_that_does_not_use_cuda_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left to torch, which puts them back when CUDA is first used: on whichever device is current then."""
    put_back: list[tuple[str, object]] = []
    for name, value in {
        "is_initialized": lambda: False,
        "device_count": lambda: 2,
        "current_device": lambda: pytest.fail("CUDA was initialised"),
        "set_rng_state": lambda state, device: put_back.append((state, device)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    state = {**capture_rng_state_without_cuda(), "cuda": ["unused", "used"], "device": 1}
    restore_rng_state(state)
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
