"""What is left of a scenario once all is left out that its failure does not need."""

from __future__ import annotations

from tests.crucible.ranks import Save
from tests.crucible.scenarios import Life, Scenario, draw
from tests.crucible.shrink import shrink
from tests.support.injector import Fault


def test_only_what_the_failure_needs_is_left() -> None:
    needed = Fault(1, 2, "copied", "reset")

    def fails(scenario: Scenario) -> bool:
        return any(needed in life.faults and len(life.saves) >= 2 for life in scenario.lives)

    lives = draw(3).lives
    faults = (Fault(3, 1, "open", "emfile"), needed)
    guilty = Life(tuple(Save(nth, nth == 2) for nth in range(1, 6)), faults, None, 1, 3600.0, True, (0, 0, 1, 1))
    scenario = Scenario("facade", draw(3).spec, (*lives, guilty))
    small = shrink(scenario, fails, 60)
    (life,) = small.lives
    assert (life.faults, len(life.saves), len(life.placement)) == ((needed,), 2, 2)
    assert (life.loses, life.clock_s, life.interrupted) == (None, 0.0, False)
    assert not any(save.grows for save in life.saves)
    assert (len(small.spec.leaves), small.spec.sharding, small.spec.optimizer) == (1, "none", "none")


def test_without_time_nothing_is_tried() -> None:
    assert shrink(draw(5), lambda scenario: True, -1.0) == draw(5)
