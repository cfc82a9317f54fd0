"""Copies from devices that are played, beside a training that changes the sources as soon as it may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ml_flashpoint.copy import cuda, transfers
from ml_flashpoint.copy.overlap import LateCopy, Overlap
from ml_flashpoint.format.errors import SaveError
from tests.support.played_cuda import PlayedStreams
from tests.support.tensors import raw, tensor_of

SIZES = [(70,), (700_000,), (50, 8), (31, 2)]
NAMES = [f"tensor{n}" for n in range(len(SIZES))]


class Job:
    """A state on two devices, and the memory of its saves."""

    def __init__(self, eagerness: float = 0.0, seed: int = 0, *, locked: bool = True) -> None:
        self.played = PlayedStreams(eagerness, seed)
        self.sources = [
            self.played.on(n % 2, tensor_of(torch.float32, shape, seed=seed + n)) for n, shape in enumerate(SIZES)
        ]
        memory = torch.full((sum(source.nbytes for source in self.sources),), 0x55, dtype=torch.uint8)
        self.views, at = list[torch.Tensor](), 0
        for source in self.sources:
            self.views.append(memory[at : at + source.nbytes].view(torch.float32).view(source.shape))
            at += source.nbytes
        begin = memory.data_ptr()
        if locked:
            cuda._process.locked[begin] = begin + memory.nbytes
        self.changes: list[bool] = []

    def save(self) -> LateCopy:
        late = LateCopy(range(len(SIZES)), lambda: self.changes.append(True))
        assert all(map(late.takes, self.views, self.sources))
        late.start(NAMES, self.views, self.sources)
        return late

    def update(self) -> None:
        for source in self.sources:
            source.zero_()


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_process", cuda._Process())
    monkeypatch.setattr(transfers, "SMALL", 1)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    with made.played.played():
        yield made


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
@settings(max_examples=40)
def test_what_is_saved_is_the_state_before_the_update(seed: int, eagerness: float, update_first: bool) -> None:
    job = Job(eagerness, seed)
    with job.played.played():
        for _ in range(2):
            expected = [raw(source) for source in job.sources]
            late = job.save()
            if update_first:
                late.hold()
                job.update()
                late.wait(5)
            else:
                late.wait(5)
                job.update()
                assert late.over
            assert [raw(view) for view in job.views] == expected
            assert not job.changes
            assert job.played.is_idle


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_a_source_that_changed_fails_the_save_by_name(job: Job, number: int) -> None:
    late = job.save()
    job.sources[number].view(-1)[-1:].view(torch.int32).add_(1)
    for _ in range(2):
        with pytest.raises(SaveError, match=f"'tensor{number}' was changed while it was copied"):
            late.wait(5)
    assert job.changes == [True]


def test_small_odd_and_unlocked_tensors_are_not_taken(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    source, view = job.sources[2], job.views[2]
    assert LateCopy.takes(view, source)
    assert not LateCopy.takes(view.t(), source.t())
    assert not LateCopy.takes(view[:, 0], source[:, 0])
    assert not LateCopy.takes(view.view(-1)[:7], source.view(-1)[:7]), "no whole words"
    assert not LateCopy.takes(view.view(-1)[:6], source.view(-1)[1:7]), "it begins in the middle of a word"
    assert not LateCopy.takes(torch.empty_like(view), source)
    assert not LateCopy.takes(view, source.double())
    monkeypatch.setattr(transfers, "SMALL", view.nbytes + 1)
    assert not LateCopy.takes(view, source)


def test_a_device_that_fails_leaves_nothing_under_way(job: Job) -> None:
    job.played.streams[1, "late"].fails_at = 1
    with pytest.raises(RuntimeError, match="enough"):
        job.save()
    assert job.played.is_idle


def test_a_copy_that_is_given_up_is_waited_for_all_the_same(job: Job) -> None:
    late = job.save()
    assert not job.played.is_idle
    late.settle()
    assert job.played.is_idle


# ---- tensors that are copied late: those whose memory an optimizer updates -------------------------------------------


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
