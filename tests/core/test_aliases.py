"""Aliases keep the memory that tensors had, and serve again only where the tensors stay what they are."""

from __future__ import annotations

import gc
import weakref

import torch

from ml_flashpoint.core.aliases import Aliases
from ml_flashpoint.core.picking import Joined, NamedTensors


def _items(count: int = 4) -> NamedTensors:
    return NamedTensors(list(map(str, range(count))), tuple(torch.full((3,), float(n)) for n in range(count)))


def test_they_have_the_memory_that_the_tensors_had() -> None:
    items, aliases = _items(), Aliases()
    given, late = aliases.of(items, 1)
    items.tensors[2].data = torch.zeros(3)
    assert given.tensors[0] is items.tensors[0]
    assert [each.tolist() for each in late.tensors] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert [name for name, _ in given] == ["0", "1", "2", "3"]
    assert [name for name, _ in late] == ["1", "2", "3"]
    assert list(given.tensors[1:]) == list(late.tensors)


def test_they_are_kept_from_the_second_time_on_that_the_same_object_is_given() -> None:
    items, aliases = _items(), Aliases()
    first, second, third = (aliases.of(items, 1)[1].tensors for _ in range(3))
    assert first[0] is not second[0]
    assert second[0] is third[0]
    assert aliases.of(items, 2)[1].tensors[0] is not third[1], "others are copied late"
    assert aliases.of(_items(), 2)[1].tensors[0] is not third[1]
    pairs = list(items)
    assert aliases.of(pairs, 1)[1].tensors[0] is not aliases.of(pairs, 1)[1].tensors[0]


def test_nothing_is_kept_of_what_is_given_once_or_forgotten() -> None:
    aliases, items = Aliases(), _items()
    for times in (1, 3):
        memory = [weakref.ref(aliases.of(items, 0)[1].tensors[0]) for _ in range(times)][-1]
        if times > 1:
            assert memory() is not None
            aliases.forget()
        gc.collect()
        assert memory() is None


def test_memory_that_has_moved_is_noticed() -> None:
    items, aliases = _items(), Aliases()
    for _ in range(2):
        aliases.of(items, 1)
        assert aliases.moved() is None
    items.tensors[3].data = torch.zeros(3)
    assert aliases.moved() is None, "the alias has what it had"
    storage = items.tensors[2].untyped_storage()
    storage.resize_(0)
    assert aliases.moved() is None, "the copy says so"
    storage.resize_(1 << 20)
    assert aliases.moved() == 1


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
