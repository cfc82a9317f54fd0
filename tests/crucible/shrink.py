"""Makes a failing scenario smaller: whatever can be left out while the round still fails is left out.

Greedy: the first smaller scenario that fails takes the place of the larger one, until none does or the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.crucible.scenarios import Life, Scenario


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], seconds: float) -> Scenario:
    """The smallest scenario found that still fails.

    Args:
        fails: plays one. Where that depends on luck, it should try more than once.
        seconds: no candidate is begun later than this.
    """
    give_up = time.monotonic() + seconds
    smallest, again = scenario, True
    while again:
        again = False
        for candidate in smaller(smallest):
            if time.monotonic() > give_up:
                return smallest
            if fails(candidate):
                smallest, again = candidate, True
                break
    return smallest


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with one thing less, what takes most time first."""
    lives, spec = scenario.lives, scenario.spec
    for index, life in enumerate(lives):
        if len(lives) > 1:
            yield replace(scenario, lives=(*lives[:index], *lives[index + 1 :]))
        for less in _less_of(life):
            yield replace(scenario, lives=(*lives[:index], less, *lives[index + 1 :]))
    targets = {leaf.of for leaf in spec.leaves if leaf.role == "tied"}
    for leaf in spec.leaves if len(spec.leaves) > 1 else ():
        if leaf.name not in targets:
            yield replace(scenario, spec=replace(spec, leaves=tuple(each for each in spec.leaves if each != leaf)))
    for name, value in (("sharding", "none"), ("optimizer", "none"), ("payload", 3)):
        if getattr(spec, name) != value:
            yield replace(scenario, spec=replace(spec, **{name: value}))


def _less_of(life: Life) -> Iterator[Life]:
    for fault in life.faults:
        yield replace(life, faults=tuple(each for each in life.faults if each != fault))
    plain = Life(())
    for name in ("strike", "loses", "clock_s", "interrupted", "looks_back"):
        if getattr(life, name) != getattr(plain, name):
            yield replace(life, **{name: getattr(plain, name)})
    if life.saves:
        yield replace(life, saves=life.saves[:-1])
