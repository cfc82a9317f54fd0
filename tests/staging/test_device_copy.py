"""Copies to and from devices that are played: what moves, in how many transfers, and what waits for it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.staging import cuda, device_copy, transfer_plan
from ml_flashpoint.staging.copy import _copy, typed_view
from ml_flashpoint.staging.device_copy import Transfer, copy_through_lanes
from ml_flashpoint.staging.transfer_plan import Memo
from tests.support.played_lane import PlayedLanes
from tests.support.tensors import PLAIN_DTYPES, raw, tensor_of

SLICE, SLAB, SMALL, GAP = 4096, 1024, 512, 64
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64]


@pytest.fixture(autouse=True)
def _small_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SLICE", SLICE)
    monkeypatch.setattr(transfer_plan, "SLAB", SLAB)
    monkeypatch.setattr(transfer_plan, "SMALL", SMALL)
    for module in (device_copy, transfer_plan):
        monkeypatch.setattr(module, "GAP", GAP)
    monkeypatch.setattr(device_copy, "_helpers", lambda: 2)
    monkeypatch.setattr(cuda, "_process", cuda._Process())


def lock(begin: int, end: int) -> None:
    for first, last in cuda.slices(begin, end):
        cuda._process.locked.setdefault(first // SLICE, {})[first] = last


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


@given(some_kinds, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from(["all", "none", "some"]))
@settings(max_examples=120)
def test_whatever_is_saved_arrives(kinds: Kinds, seed: int, eagerness: float, locked: str) -> None:
    rng = random.Random(seed)
    lanes, memo = PlayedLanes(seed, eagerness, room=rng.random() < 0.8), Memo()
    arenas = [Arena(kinds, lead=64 * rng.randrange(100)) for _ in range(2)]
    where = [rng.choice([0, 0, 0, 1, -1]) for _ in kinds]
    strided = [rng.random() < 0.1 for _ in kinds]
    for save in range(4):
        arena = arenas[save % 2]
        if locked != "none":
            lock(arena.begin, arena.end if locked == "all" else (arena.begin + arena.end) // 2 // SLICE * SLICE)
        if save == 2:
            where[rng.randrange(len(where))] = 0  # a tensor has moved; its place and dtype are what they were
        sources = []
        for number, (dtype, shape) in enumerate(arena.kinds):
            source = tensor_of(dtype, shape, seed=save * 100 + number)
            if strided[number] and len(shape) == 2:
                source = source.t().contiguous().t()
            sources.append(lanes.on(where[number], source) if where[number] >= 0 else source)
        copy_through_lanes(arena.views, sources, _copy, memo, lanes)
        assert [raw(view) for view in arena.views] == [raw(source) for source in sources]
        assert arena.untouched_around()
        assert all(lanes.lane(index).is_idle for index in (0, 1))


@given(some_kinds, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 1.0]), st.booleans())
@settings(max_examples=100)
def test_whatever_is_loaded_arrives(kinds: Kinds, seed: int, eagerness: float, locked: bool) -> None:
    rng = random.Random(seed)
    lanes = PlayedLanes(seed, eagerness, room=rng.random() < 0.8)
    arena = Arena(kinds, lead=64 * rng.randrange(100))
    for number, (view, (dtype, shape)) in enumerate(zip(arena.views, arena.kinds, strict=True)):
        view.copy_(tensor_of(dtype, shape, seed=number))
    if locked:
        lock(arena.begin, arena.end)
    targets = []
    for dtype, shape in arena.kinds:
        target = torch.empty(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))
        target = target if rng.random() < 0.1 else torch.empty(shape, dtype=dtype)
        targets.append(lanes.on(rng.choice([0, 0, 1]), target) if rng.random() < 0.8 else target)
    order = list(range(len(targets)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    copy_through_lanes([targets[i] for i in order], [arena.views[i] for i in order], _copy, None, lanes)
    assert [raw(target) for target in targets] == [raw(view) for view in arena.views]
    assert all(lanes.lane(index).is_idle for index in (0, 1))


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("pick", [lambda t: t, lambda t: t.t(), lambda t: t[1:5:2, 3:]], ids=["plain", "turned", "cut"])
def test_any_dtype_and_strides_both_ways(dtype: torch.dtype, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
    lanes = PlayedLanes(eagerness=0.0)
    there = lanes.on(0, pick(tensor_of(dtype, (6, 8))))
    here = torch.empty(there.shape, dtype=dtype)
    copy_through_lanes([here], [there], _copy, None, lanes)
    assert raw(here) == raw(there)
    back = lanes.on(1, pick(tensor_of(dtype, (6, 8), seed=5)))
    copy_through_lanes([back], [here], _copy, None, lanes)
    assert raw(back) == raw(here)


def test_dtypes_are_converted_and_lazy_bits_resolved() -> None:
    lanes = PlayedLanes(eagerness=0.0)
    numbers = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    there = [torch.tensor([1.5, -2.0]), numbers.conj(), numbers.conj().imag]
    here = [torch.empty(2, dtype=torch.bfloat16), torch.empty(4, dtype=torch.complex64), torch.empty(4)]
    memo = Memo()
    copy_through_lanes(
        here[1:], [lanes.on(0, torch.zeros_like(numbers)), lanes.on(0, torch.zeros(4))], _copy, memo, lanes
    )
    copy_through_lanes(here, [lanes.on(0, each) for each in there], _copy, None, lanes)
    copy_through_lanes(here[1:], there[1:], _copy, memo, lanes)  # in the same places, and not to be moved as they are
    assert [t.tolist() for t in here] == [[1.5, -2.0], numbers.conj().tolist(), (-numbers.imag).tolist()]
    up = [lanes.on(0, torch.zeros(2)), lanes.on(0, torch.zeros(4, dtype=torch.complex64).conj())]
    copy_through_lanes(up, here[:2], _copy, None, lanes)
    assert [t.tolist() for t in up] == [[1.5, -2.0], numbers.conj().tolist()]


def test_half_floats_that_are_no_numbers_keep_their_bits() -> None:
    lanes = PlayedLanes(eagerness=0.0)
    bits = torch.tensor([0x7C01, -1, 0x7F81, 0x7E55], dtype=torch.int16)
    arena = Arena([(torch.float16, (4,)), (torch.bfloat16, (4,))])
    sources = [lanes.on(0, bits.view(dtype)) for dtype, _ in arena.kinds]
    copy_through_lanes(arena.views, sources, _copy, None, lanes)
    assert all(torch.equal(view.view(torch.int16), bits) for view in arena.views)


def test_small_tensors_go_together_with_scalars_of_the_cpu_between_them() -> None:
    lanes = PlayedLanes()
    kinds: Kinds = [(torch.float32, (16,)), (torch.float32, ()), (torch.float32, (16,))] * 200
    arena = Arena(kinds)
    lock(arena.begin, arena.end)
    sources = [tensor_of(dtype, shape, seed=n) for n, (dtype, shape) in enumerate(arena.kinds)]
    for source in sources:
        if source.dim():
            lanes.on(0, source)
    copy_through_lanes(arena.views, sources, _copy, None, lanes)
    assert [raw(view) for view in arena.views] == [raw(source) for source in sources]
    transfers = lanes.lane(0).transfers
    size = arena.end - arena.begin
    assert len(transfers) <= size // SLAB + 4 * (size // SLICE + 1), "some lie across a border"
    assert lanes.lane(0).kernels <= len(transfers)


@pytest.mark.parametrize("is_locked", [True, False])
def test_no_transfer_is_large_or_spans_two_slices(is_locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = PlayedLanes()
    arena = Arena([(torch.float32, (5000,)), *[(torch.float32, (3,))] * 900], lead=64 * 7)
    if is_locked:
        lock(arena.begin, arena.end)
    asked: list[tuple[int, int]] = []
    known = cuda.is_locked
    monkeypatch.setattr(cuda, "is_locked", lambda a, n: asked.append((a, n)) or known(a, n))
    sources = [lanes.on(0, tensor_of(dtype, shape)) for dtype, shape in arena.kinds]
    copy_through_lanes(arena.views, sources, _copy, None, lanes)
    assert [raw(view) for view in arena.views] == [raw(source) for source in sources]
    assert max(lanes.lane(0).transfers) <= SLAB
    assert all(a // SLICE == (a + n - 1) // SLICE for a, n in asked)
    assert sum(n for _, n in asked) == arena.end - arena.begin


def test_what_was_planned_is_kept_while_it_fits() -> None:
    lanes, memo = PlayedLanes(), Memo()
    kinds: Kinds = [(torch.float32, (16,))] * 30
    arena = Arena(kinds)
    plans = []
    for turn in range(4):
        tensors = [tensor_of(dtype, shape, seed=turn) for dtype, shape in arena.kinds]
        sources = [lanes.on(0, each) for each in tensors]
        if turn == 3:
            sources[4] = tensor_of(torch.float32, (16,))
        transfer = Transfer(arena.views, sources, _copy, memo, lanes)
        plans.append(transfer._plan)
        transfer.start()
        transfer.settle()
        transfer.finish()
        assert [raw(view) for view in arena.views] == [raw(source) for source in sources]
    assert plans[0] is plans[1] is plans[2]
    assert plans[3] is not plans[0]


@pytest.mark.parametrize(("locked", "at"), list(itertools.product([True, False], [0, 1, 5])))
def test_after_an_error_nothing_is_under_way(locked: bool, at: int) -> None:
    lanes = PlayedLanes(eagerness=0.0)
    arena = Arena([(torch.float32, (700,))] * 9)
    if locked:
        lock(arena.begin, arena.end)
    lanes.lane(0).fails_at = at
    sources = [lanes.on(0, tensor_of(dtype, shape)) for dtype, shape in arena.kinds]
    with pytest.raises(RuntimeError, match="enough"):
        copy_through_lanes(arena.views, sources, _copy, None, lanes)
    assert lanes.lane(0).is_idle
    assert arena.untouched_around()


def test_without_threads_one_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    lanes = PlayedLanes(eagerness=0.0)
    arena = Arena([(torch.float32, (700,))] * 9)
    sources = [lanes.on(0, tensor_of(dtype, shape)) for dtype, shape in arena.kinds]
    copy_through_lanes(arena.views, sources, _copy, None, lanes)
    assert [raw(view) for view in arena.views] == [raw(source) for source in sources]


def test_every_device_is_waited_for_also_if_another_is_lost() -> None:
    lanes = PlayedLanes(eagerness=0.0)
    arena = Arena([(torch.float32, (700,))] * 4)
    sources = [lanes.on(n % 2, tensor_of(dtype, shape)) for n, (dtype, shape) in enumerate(arena.kinds)]
    lock(arena.begin, arena.end)
    lanes.lane(1).fails_to_end = True
    with pytest.raises(RuntimeError, match="lost"):
        copy_through_lanes(arena.views, sources, _copy, None, lanes)
    assert lanes.lane(0).is_idle


def test_time_that_the_device_was_busy_before_is_told() -> None:
    lanes = PlayedLanes()
    there, here = lanes.on(0, torch.ones(9)), torch.zeros(9)
    copy_through_lanes([here], [there], _copy, None, lanes)
    device_copy.take_queued_s()
    lanes.lane(0).behind_s = 0.05
    began = time.perf_counter()
    for _ in range(2):
        copy_through_lanes([here], [there], _copy, None, lanes)
    taken = time.perf_counter() - began
    assert 0.09 <= device_copy.take_queued_s() <= taken
    assert device_copy.take_queued_s() == 0.0


def test_between_devices() -> None:
    lanes = PlayedLanes(eagerness=0.0)
    one, other = lanes.on(0, tensor_of(torch.float32, (9,))), lanes.on(1, torch.zeros(9))
    copy_through_lanes([other], [one], _copy, None, lanes)
    assert torch.equal(one, other)
