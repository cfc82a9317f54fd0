"""Whose memory a tensor's is."""

from __future__ import annotations

import torch

from ml_flashpoint.core.owned_memory import OwnedMemory


def test_a_tensor_and_all_that_lies_within_it() -> None:
    owner, other = torch.zeros(4, 6), torch.zeros(5)
    memory = OwnedMemory([owner, other])
    within = (owner, owner[1:3], owner[:, 2:4], owner.view(-1)[5:9], owner.t(), owner.view(torch.uint8), owner[3, 5])
    assert all(memory.owner_of(each) is owner for each in within)
    assert memory.owner_of(other[4:]) is other


def test_what_is_in_part_elsewhere_has_no_owner() -> None:
    whole = torch.zeros(30)
    memory = OwnedMemory([whole[10:20]])
    for each in (
        whole,
        whole[9:12],
        whole[18:21],
        whole[20:],
        whole[:10],
        whole[10:][::2],
        torch.zeros(3),
        whole[12:12],
    ):
        assert memory.owner_of(each) is None
    assert memory.owner_of(whole[12:15]) is not None


def test_a_small_owner_within_a_large_one_hides_nothing() -> None:
    whole = torch.zeros(30)
    for order in (1, -1):
        memory = OwnedMemory([whole, whole[:5], whole[10:12]][::order])
        assert memory.owner_of(whole[11:20]) is whole
        assert memory.owner_of(whole[25:]) is whole


def test_an_owner_with_gaps_owns_what_is_it_alone() -> None:
    whole = torch.zeros(10, 10)
    column = whole[:, 3]
    memory = OwnedMemory([column])
    assert memory.owner_of(whole[:, 3]) is column
    assert memory.owner_of(whole[:2, 3]) is None
    assert memory.owner_of(whole[0, 3:]) is None


def test_nothing_owns_nothing() -> None:
    assert OwnedMemory([]).owner_of(torch.zeros(3)) is None
