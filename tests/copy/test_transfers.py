"""Copies to and from devices that are played: what arrives, in how many transfers, and what waits for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.copy import cuda, transfers
from ml_flashpoint.copy.cpu import copy_all, typed_view
from tests.support.played_cuda import PlayedStreams
from tests.support.tensors import PLAIN_DTYPES, raw, tensor_of

SLICE, TRANSFER, SMALL = 4096, 1024, 512
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64]


@pytest.fixture(autouse=True)
def _small_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SLICE", SLICE)
    monkeypatch.setattr(transfers, "TRANSFER", TRANSFER)
    monkeypatch.setattr(transfers, "SMALL", SMALL)
    monkeypatch.setattr(cuda, "_process", cuda._Process())


def lock(begin: int, end: int) -> None:
    cuda._process.locked[begin] = end


class Arena:
    """Host memory in which tensors lie side by side, with what must stay as it is around them."""

    def __init__(self, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]], lead: int = 0) -> None:
        sizes = [torch.empty(shape, dtype=dtype).nbytes for dtype, shape in kinds]
        self.memory = torch.full((lead + 64 + sum(sizes) + 16 * len(sizes) + 64,), 0xA5, dtype=torch.uint8)
        at = 64 + lead - self.memory.data_ptr() % 64
        self.spans: list[tuple[int, int]] = []
        self.views: list[torch.Tensor] = []
        for (dtype, shape), size in sorted(zip(kinds, sizes, strict=True), key=lambda k: -k[0][0].itemsize):
            self.views.append(typed_view(self.memory, at, at + size, dtype, shape))
            self.spans.append((at, at + size))
            at += size
        self.kinds = [(view.dtype, tuple(view.shape)) for view in self.views]

    @property
    def begin(self) -> int:
        return self.memory.data_ptr() + self.spans[0][0]

    @property
    def end(self) -> int:
        return self.memory.data_ptr() + self.spans[-1][1]

    def untouched_around(self) -> bool:
        outside = torch.ones(self.memory.numel(), dtype=torch.bool)
        for begin, end in self.spans:
            outside[begin:end] = False
        return bool((self.memory[outside] == 0xA5).all())


Kinds = list[tuple[torch.dtype, tuple[int, ...]]]
some_kinds = st.lists(
    st.tuples(
        st.sampled_from(FLOATS), st.sampled_from([(), (1,), (5,), (3, 4), (0,), (100,), (31, 7), (900,), (2500,)])
    ),
    min_size=1,
    max_size=25,
)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


@given(some_kinds, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from(["all", "none", "some"]))
@settings(max_examples=100)
def test_whatever_is_saved_arrives(kinds: Kinds, seed: int, eagerness: float, locked: str) -> None:
    rng = random.Random(seed)
    arena = Arena(kinds, lead=64 * rng.randrange(100))
    with PlayedStreams(eagerness, seed).played() as played:
        played.streams[0, "now"].has_room = rng.random() < 0.8
        if locked != "none":
            lock(arena.begin, arena.end if locked == "all" else (arena.begin + arena.end) // 2 // SLICE * SLICE)
        for save in range(2):
            sources = []
            for number, (dtype, shape) in enumerate(arena.kinds):
                source = tensor_of(dtype, shape, seed=save * 100 + number)
                source = turned(source) if rng.random() < 0.1 and played.streams[0, "now"].has_room else source
                where = rng.choice([0, 0, 0, 1, -1])
                sources.append(source if where < 0 else played.on(where, source))
            copy_all(arena.views, sources)
            assert [raw(view) for view in arena.views] == [raw(source) for source in sources]
            assert arena.untouched_around()
            assert played.is_idle


@given(some_kinds, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 1.0]), st.booleans())
@settings(max_examples=100)
def test_whatever_is_loaded_arrives(kinds: Kinds, seed: int, eagerness: float, locked: bool) -> None:
    rng = random.Random(seed)
    arena = Arena(kinds, lead=64 * rng.randrange(100))
    for number, (view, (dtype, shape)) in enumerate(zip(arena.views, arena.kinds, strict=True)):
        view.copy_(tensor_of(dtype, shape, seed=number))
    if locked:
        lock(arena.begin, arena.end)
    with PlayedStreams(eagerness, seed).played() as played:
        targets = []
        for dtype, shape in arena.kinds:
            target = torch.empty(shape, dtype=dtype)
            target = turned(target) if rng.random() < 0.1 else target
            targets.append(played.on(rng.choice([0, 0, 1]), target) if rng.random() < 0.8 else target)
        order = list(range(len(targets)))
        rng.shuffle(order)
        copy_all([targets[i] for i in order], [arena.views[i] for i in order])
        assert [raw(target) for target in targets] == [raw(view) for view in arena.views]
        assert played.is_idle


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("pick", [lambda t: t, lambda t: t.t(), lambda t: t[1:5:2, 3:]], ids=["plain", "turned", "cut"])
@pytest.mark.parametrize("size", [(6, 8), (60, 80)])
def test_any_dtype_and_strides_both_ways(
    dtype: torch.dtype, pick: Callable[[torch.Tensor], torch.Tensor], size: tuple[int, int]
) -> None:
    with PlayedStreams(eagerness=0.0).played() as played:
        there = played.on(0, pick(tensor_of(dtype, size)))
        here = torch.empty(there.shape, dtype=dtype)
        copy_all([here], [there])
        assert raw(here) == raw(there)
        back = played.on(1, pick(tensor_of(dtype, size, seed=5)))
        copy_all([back], [here])
        assert raw(back) == raw(here)


@pytest.mark.parametrize("repeats", [1, 200])
def test_dtypes_are_converted_and_lazy_bits_resolved(repeats: int) -> None:
    with PlayedStreams(eagerness=0.0).played() as played:
        numbers = torch.view_as_complex(torch.arange(8.0).repeat(repeats).view(-1, 2))
        halves = torch.tensor([1.5, -2.0] * repeats)
        there = [halves, numbers.conj(), numbers.conj().imag]
        here = [torch.empty(2 * repeats, dtype=torch.bfloat16), torch.empty_like(numbers), torch.empty(4 * repeats)]
        copy_all(here, [played.on(0, each) for each in there])
        assert [t.tolist() for t in here] == [halves.tolist(), numbers.conj().tolist(), (-numbers.imag).tolist()]
        up = [torch.zeros_like(halves), torch.zeros_like(numbers).conj(), torch.zeros_like(numbers).conj().imag]
        copy_all([played.on(0, each) for each in up], here)
        assert [t.tolist() for t in up] == [halves.tolist(), numbers.conj().tolist(), (-numbers.imag).tolist()]


def test_small_tensors_go_together() -> None:
    arena = Arena([(torch.float32, (16,)), (torch.int64, ()), (torch.float32, (16,))] * 200)
    with PlayedStreams().played() as played:
        sources = [played.on(0, tensor_of(dtype, shape, seed=n)) for n, (dtype, shape) in enumerate(arena.kinds)]
        copy_all(arena.views, sources)
        assert [raw(view) for view in arena.views] == [raw(source) for source in sources]
        assert played.streams[0, "now"].given <= 2 * ((arena.end - arena.begin) // TRANSFER + 2)


def test_no_transfer_is_large_or_spans_two_slices_and_all_go_to_locked_memory() -> None:
    arena = Arena([(torch.float32, (5000,))], lead=64 * 7)
    source = tensor_of(torch.float32, (5000,))
    assert transfers.transfers(arena.views[0], source) is None, "the memory is not locked"
    lock(arena.begin, arena.end)
    pairs = transfers.transfers(arena.views[0], source)
    assert pairs is not None
    spans = [(here.data_ptr(), here.data_ptr() + here.nbytes) for here, _ in pairs]
    assert [begin for begin, _ in spans] == [arena.begin, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == arena.end
    assert all(end - begin <= TRANSFER and begin // SLICE == (end - 1) // SLICE for begin, end in spans)
    assert b"".join(raw(there) for _, there in pairs) == raw(source)


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_after_an_error_nothing_is_under_way(locked: bool, at: int) -> None:
    arena = Arena([(torch.float32, (700,))] * 9)
    if locked:
        lock(arena.begin, arena.end)
    with PlayedStreams(eagerness=0.0).played() as played:
        played.streams[0, "now"].fails_at = at
        sources = [played.on(0, tensor_of(dtype, shape)) for dtype, shape in arena.kinds]
        with pytest.raises(RuntimeError, match="enough"):
            copy_all(arena.views, sources)
        assert played.is_idle
    assert arena.untouched_around()


def test_every_device_is_waited_for_also_if_another_is_lost() -> None:
    arena = Arena([(torch.float32, (700,))] * 4)
    lock(arena.begin, arena.end)
    with PlayedStreams(eagerness=0.0).played() as played:
        one, other = played.on(0, tensor_of(torch.float32, (9,))), played.on(1, torch.zeros(9))
        copy_all([other], [one])
        assert torch.equal(one, other)
        sources = [played.on(n % 2, tensor_of(dtype, shape)) for n, (dtype, shape) in enumerate(arena.kinds)]
        played.streams[1, "now"].is_lost = True
        with pytest.raises(RuntimeError, match="lost"):
            copy_all(arena.views, sources)
        assert played.streams[0, "now"].is_idle
