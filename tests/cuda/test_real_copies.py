"""Copies to and from a real device: any dtype and strides, locked memory or not, in order with the caller's stream."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ml_flashpoint.copy import cuda, transfers
from ml_flashpoint.copy.cpu import copy_all, cpu_clones
from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.memory.slot import Slot
from tests.support.tensors import PLAIN_DTYPES, dtype_name, raw, tensor_of

pytestmark = pytest.mark.cuda
SLEEP = 200_000_000  # clock cycles: a tenth of a second


@pytest.fixture(autouse=True)
def _small_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.init()
    monkeypatch.setattr(cuda, "SLICE", 1 << 20)
    monkeypatch.setattr(transfers, "TRANSFER", 1 << 18)
    monkeypatch.setattr(transfers, "SMALL", 1 << 16)


@pytest.fixture(params=["locked", "not locked"])
def slot(request: pytest.FixtureRequest, tmpfs: Path) -> Iterator[Slot]:
    made = Slot.make(tmpfs / "slot", 16 << 20)
    if request.param == "locked":
        cuda.note_device(torch.cuda.current_device())
        made.prepare()
        assert made.is_pinned
    yield made
    made.close()


def views_of(slot: Slot, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    views, at = {}, 4096
    for number in sorted(range(len(tensors)), key=lambda n: -tensors[n].dtype.itemsize):
        tensor = tensors[number]
        end = at + tensor.numel() * tensor.dtype.itemsize
        views[number] = slot.view(at, end, tensor.dtype, tuple(tensor.shape))
        at = end
    return [views[number] for number in range(len(tensors))]


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("pick", [lambda t: t, lambda t: t.t(), lambda t: t[1:5:2, 3:]], ids=["plain", "turned", "cut"])
def test_any_dtype_and_strides(slot: Slot, dtype: torch.dtype, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
    octets = tensor_of(dtype, (64, 80)).view(-1).view(torch.uint8)
    there = [pick(octets.cuda().view(dtype).view(64, 80)) for _ in range(3)]
    expected = raw(pick(octets.view(dtype).view(64, 80)))
    views = views_of(slot, there)
    copy_all(views, there)
    assert [raw(view) for view in views] == [expected] * 3
    back = [pick(torch.zeros_like(octets).cuda().view(dtype).view(64, 80)) for _ in range(3)]
    copy_all(back, views)
    copied = [torch.empty(each.shape, dtype=dtype) for each in back]
    copy_all(copied, back)
    assert [raw(each) for each in copied] == [expected] * 3


def test_saves_of_many_tensors_in_turn(slot: Slot) -> None:
    rng = random.Random(5)
    shapes = [(rng.randrange(1, 9000),) for _ in range(300)] + [()] * 100 + [(300, 700), (1000, 1000)]
    rng.shuffle(shapes)
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    for save in range(3):
        there = [tensor_of(dtypes[n % 3], shape, seed=save * 1000 + n) for n, shape in enumerate(shapes)]
        expected = [raw(each) for each in there]
        there = [each if each.dim() == 0 and n % 2 else each.cuda() for n, each in enumerate(there)]
        order = sorted(range(len(there)), key=lambda n: -there[n].dtype.itemsize)
        views = views_of(slot, there)
        copy_all([views[n] for n in order], [there[n] for n in order])
        assert [raw(view) for view in views] == expected
        back = [torch.zeros_like(each) for each in there]
        copy_all(back, views)
        assert [raw(each.cpu()) for each in back] == expected


@pytest.mark.parametrize("shape", [(64,), (1 << 19,)], ids=["small", "large"])
def test_copies_come_after_what_the_caller_has_enqueued(slot: Slot, shape: tuple[int, ...]) -> None:
    there = [torch.zeros(shape, device="cuda") for _ in range(3)]
    views = views_of(slot, there)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for number, each in enumerate(there):
            each.fill_(number + 1)
        copy_all(views, there)
    assert [float(view.sum()) for view in views] == [float((n + 1) * shape[0]) for n in range(3)]
    with torch.cuda.stream(stream):
        read = torch.zeros_like(there[0])
        torch.cuda._sleep(SLEEP)
        read.copy_(there[0])
        copy_all(there, [view * 0 for view in views])  # not before that was read
        assert bool((read == 1).all())
    assert not any(bool(each.any()) for each in there)


def test_copies_are_refused_while_a_graph_is_captured(slot: Slot) -> None:
    there = torch.ones(64, device="cuda")
    view = views_of(slot, [there])
    copy_all(view, [there])
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        static += 1
        with pytest.raises(SaveError, match="graph is being captured"):
            copy_all(view, [there])
    graph.replay()
    assert bool((static == 1).all())


def test_an_error_leaves_nothing_under_way(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [torch.ones(1 << 19, device="cuda") for _ in range(4)]
    views = views_of(slot, there)
    stream = cuda.stream(torch.cuda.current_device(), "now")
    calls = iter([stream.do] * 3)
    monkeypatch.setattr(stream, "do", lambda work: next(calls)(work))
    with pytest.raises((StopIteration, RuntimeError)):
        copy_all(views, there)
    assert stream.event().wait(0)
    monkeypatch.undo()
    copy_all(views, there)
    assert all(bool((view == 1).all()) for view in views)


def test_without_room_to_pack_each_goes_by_itself(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cuda.stream(torch.cuda.current_device(), "now"), "empty", full)
    there = [torch.full((64,), float(n), device="cuda") for n in range(9)]
    views = views_of(slot, there)
    copy_all(views, there)
    assert [float(view[0]) for view in views] == [float(n) for n in range(9)]


def test_clones_on_the_cpu() -> None:
    there = [torch.arange(1000.0, device="cuda"), torch.ones((), device="cuda"), torch.ones(1 << 20, device="cuda").t()]
    clones = cpu_clones(there)
    assert all(torch.equal(clone, each.cpu()) for clone, each in zip(clones, there, strict=True))
