"""Sequences of thousands, handed on without a step of Python for each."""

from __future__ import annotations

from ml_flashpoint.core.picking import Joined


def test_several_sequences_are_as_one() -> None:
    joined = Joined([[0, 1], (), [2], (3, 4)])
    assert list(joined) == [0, 1, 2, 3, 4] == [joined[number] for number in range(5)] == joined[:]
    assert len(joined) == 5
    assert joined[-1] == 4
    assert joined[1:4] == [1, 2, 3]
    for wrong in (5, -6):
        try:
            joined[wrong]
        except IndexError:
            continue
        raise AssertionError(wrong)
    assert len(Joined([])) == 0
