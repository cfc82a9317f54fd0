"""Which tensors of a save are copied late: those whose memory is that of a tensor that an optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ml_flashpoint.copy.overlap import Overlap
from tests.support.played_streams import PlayedStreams


@pytest.fixture
def played() -> Iterator[PlayedStreams]:
    with PlayedStreams().played() as played:
        yield played


def numbers(overlap: Overlap, tensors: list[torch.Tensor], *, promised: bool = False) -> set[int]:
    late = overlap.begin(tensors, promised=promised)
    return set() if late is None else set(late.numbers)


def test_only_what_lies_within_the_memory_of_an_updated_tensor_is_copied_late(played: PlayedStreams) -> None:
    buffer = torch.zeros(100)
    weight, frozen = nn.Parameter(buffer[10:50].view(8, 5)), nn.Parameter(buffer[60:70], requires_grad=False)
    optimizer = torch.optim.SGD([weight, frozen], lr=0.1)
    overlap = Overlap()
    overlap.watch(optimizer, updates=lambda: [buffer[80:90]])
    tensors = [weight, weight[2:4], weight.t(), buffer[9:12], buffer[45:55], frozen, buffer, buffer[82:84], buffer[0:0]]
    tensors = [*map(torch.Tensor.detach, tensors), torch.zeros(3)]
    for tensor in tensors:
        played.on(0, tensor)
    assert numbers(overlap, tensors) == {0, 1, 2, 7}
    assert numbers(overlap, [weight.detach().clone()]) == set(), "it is on the CPU"
    assert numbers(overlap, tensors, promised=True) == {0, 1, 2, 7}
    overlap.close()
    assert numbers(overlap, tensors) == set()
    assert numbers(overlap, tensors, promised=True) == set(range(len(tensors)))


def test_nothing_is_copied_late_where_nobody_wants_it_or_a_step_was_captured(
    played: PlayedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(torch.zeros(8))
    weight.grad = torch.ones(8)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    unwanted, overlap = Overlap(wanted=False), Overlap()
    for each in (unwanted, overlap):
        each.watch(optimizer)
    tensor = played.on(0, weight.detach())
    assert numbers(unwanted, [tensor]) == set()
    assert numbers(overlap, [tensor]) == {0}
    monkeypatch.setattr("ml_flashpoint.copy.cuda.is_capturing", lambda: True)
    optimizer.step()
    monkeypatch.setattr("ml_flashpoint.copy.cuda.is_capturing", lambda: False)
    assert numbers(overlap, [tensor]) == set()
