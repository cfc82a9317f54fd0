"""The register of the cases of the Megatron-LM door, and what they share. A case is given a door, and `torch_dist`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.megatron import Door, TorchDist
from tests.support.megatron_states import Layout, assert_same_state, plain, sharded_state
from tests.support.worker import world_size

CASES: dict[str, Callable[[Door, TorchDist], None]] = {}


def case(function: Callable[[Door, TorchDist], None]) -> Callable[[Door, TorchDist], None]:
    CASES[function.__name__] = function
    return function


def some_layout() -> Layout:
    """One in which there is something of everything."""
    return {1: Layout(), 2: Layout(tp=2), 4: Layout(tp=2, dp=2)}[world_size()]


def expected(layout: Layout, step: int, **options: Any) -> Any:
    return plain(sharded_state(layout, step, **options))


def check_load(door: Door, layout: Layout, step: int, saved_by: Layout | None = None, **options: Any) -> None:
    """What is recovered is what was saved, bit for bit."""
    same = saved_by is None or saved_by == layout
    template = sharded_state(layout, 0, blank=True, own_objects=same)
    assert_same_state(door.load_megatron(template, step, **options), expected(layout, step, own_objects=same))
