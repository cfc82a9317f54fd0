"""What a save may take: decided without files, so any state of a pool can be tried."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.pool import New, SlotRequest, choose, slot_limit, slot_size
from ml_flashpoint.memory.slot import PAGE, State

SAVES = [SaveId(run, step) for run in (1, 2) for step in range(4)]
NEXT = SaveId(2, 9)


@dataclass(eq=False)
class Fake:
    state: State
    save: SaveId | None


@st.composite
def pools(draw: st.DrawFn) -> list[Fake]:
    held = draw(st.lists(st.sampled_from(SAVES), unique=True, max_size=6))
    slots = [Fake(draw(st.sampled_from([State.WRITING, State.COMMITTED])), save) for save in held]
    return draw(st.permutations(slots + [Fake(State.EMPTY, None) for _ in range(draw(st.integers(0, 2)))]))


requests = st.builds(
    SlotRequest,
    save=st.just(NEXT),
    retained=st.frozensets(st.sampled_from(SAVES), max_size=4),
    of_round=st.booleans(),
    spare=st.integers(0, 1),
)


@given(pools(), requests, st.booleans(), st.data())
def test_nothing_that_is_needed_is_taken(
    slots: list[Fake], request: SlotRequest, may_make: bool, data: st.DataObject
) -> None:
    locked = [slot for slot in slots if data.draw(st.booleans())]
    chosen = choose(slots, request, locked, may_make=may_make)
    newest = max((slot.save for slot in slots if slot.state is State.COMMITTED and slot.save), default=None)
    if isinstance(chosen, Fake):
        assert chosen not in locked
        assert chosen.state is not State.WRITING
        assert chosen.state is State.EMPTY or chosen.save not in request.retained
        if not request.of_round:
            assert chosen.state is State.EMPTY or chosen.save != newest
    elif isinstance(chosen, New):
        assert may_make


@given(pools(), requests, st.booleans())
def test_a_slot_is_left_for_the_round(slots: list[Fake], request: SlotRequest, may_make: bool) -> None:
    chosen = choose(slots, request, [], may_make=may_make)
    if request.spare == 0 or chosen is None:
        return
    if isinstance(chosen, New):
        may_make = False
    else:
        chosen.state, chosen.save = State.WRITING, NEXT
    of_round = SlotRequest(SaveId(2, 10), request.retained)
    assert choose(slots, of_round, [], may_make=may_make) is not None


@given(pools(), requests)
def test_the_rounds_save_gets_any_free_slot_and_the_one_unused_longest(slots: list[Fake], request: SlotRequest) -> None:
    request = SlotRequest(request.save, request.retained)
    free = [
        s for s in slots if s.state is State.EMPTY or (s.state is State.COMMITTED and s.save not in request.retained)
    ]
    chosen = choose(slots, request, [], may_make=False)
    if not free:
        assert chosen is None
    else:
        assert chosen is ([s for s in free if s.state is State.EMPTY] or free)[0]


def test_one_more_is_made_before_a_version_goes() -> None:
    old, empty = Fake(State.COMMITTED, SAVES[0]), Fake(State.EMPTY, None)
    request = SlotRequest(NEXT, [])
    assert isinstance(choose([old], request, [], may_make=True), New)
    assert choose([old, empty], request, [], may_make=True) is empty
    assert choose([old], request, [], may_make=False) is old
    of_a_loop, newest = SlotRequest(NEXT, [], of_round=False), Fake(State.COMMITTED, SAVES[1])
    assert choose([old, newest], of_a_loop, [], may_make=False) is old
    assert choose([newest], of_a_loop, [], may_make=False) is None


def test_slots_are_a_little_larger_than_what_they_were_made_for() -> None:
    for needed in (0, 1, PAGE, 100_000, 10 << 20, (10 << 30) + 7):
        size = slot_size(needed)
        assert size % PAGE == 0
        assert needed <= size <= needed + needed // 64 + (64 << 10)
    assert slot_size(64 << 30) == (64 << 30) + (64 << 20)
    assert [slot_limit(2, may_grow=grown, extra=3) for grown in (False, True)] == [3, 6]
