"""Copies of any dtype, stride and order arrive bit for bit, and nothing beside them is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ml_flashpoint.copy.cpu import copy_all, cpu_clone, cut, typed_view
from ml_flashpoint.copy.dtypes import bytes_of
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError
from tests.support.tensors import OVERLAPPING, PLAIN_DTYPES, dtype_name, raw, tensor_of

every_dtype = pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=dtype_name)


def _arena(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


@every_dtype
def test_sources_may_have_any_strides(dtype: torch.dtype) -> None:
    whole = tensor_of(dtype, (6, 8))
    sources = [
        whole.t(),
        whole[1:5:2, 3:],
        whole[:, 2],
        whole[0:1].expand(4, 8),
        whole[3, 3].expand(5),
        whole.as_strided((4, 3), (1, 1), 5),
    ]
    targets = [torch.empty(source.shape, dtype=dtype) for source in sources]
    copy_all(targets, sources)
    assert [raw(target) for target in targets] == [raw(source) for source in sources]


@every_dtype
@pytest.mark.parametrize("view", OVERLAPPING.values(), ids=OVERLAPPING)
def test_elements_of_targets_may_share_memory(dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    source = view(tensor_of(dtype, (6, 8)))
    target = view(torch.zeros(48 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(6, 8))
    beside = torch.zeros(3)
    copy_all([target, beside], [cpu_clone(source), torch.ones(3)])
    assert raw(target) == raw(source)
    assert beside.tolist() == [1, 1, 1]
    plain = view(torch.zeros(6, 8))
    with pytest.raises(LoadError, match="share memory"):  # and so cannot have different values
        copy_all([plain], [torch.arange(float(plain.numel())).view(plain.shape)])


@every_dtype
def test_targets_may_have_any_strides(dtype: torch.dtype) -> None:
    for pick in (lambda t: t.t(), lambda t: t[1:5:2, 3:], lambda t: t[:, 2]):
        octets = torch.zeros(48 * dtype.itemsize, dtype=torch.uint8)
        target = pick(octets.view(dtype).view(6, 8))
        source = tensor_of(dtype, tuple(target.shape))
        copy_all([target], [source])
        assert raw(target) == raw(source)
        mask = torch.zeros(6, 8, dtype=torch.bool)
        pick(mask).fill_(True)
        untouched = octets.view(48, dtype.itemsize)[~mask.view(-1)]
        assert not untouched.any()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=dtype_name)
def test_sources_arrive_as_they_read(dtype: torch.dtype) -> None:
    source = torch.view_as_complex(torch.arange(12.0, dtype=torch.float64).view(6, 2)).to(dtype)
    conjugated = source.conj()
    negated = conjugated.imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    weight = torch.nn.Parameter(torch.tensor([1.5, -2.0]))
    targets = [torch.empty_like(source), torch.empty(6, dtype=negated.dtype), torch.empty(2).bfloat16()]
    copy_all(targets, [conjugated, negated, weight * 2])
    assert torch.equal(torch.view_as_real(targets[0])[:, 1], -source.imag)
    assert torch.equal(targets[1], -source.imag)
    assert targets[2].tolist() == [3.0, -4.0], "converted, and without a graph"
    assert targets[2].grad_fn is None


@pytest.mark.parametrize("elements", [6, 2 << 20])
@pytest.mark.parametrize("given", [torch.complex64, torch.uint8], ids=dtype_name)
def test_lazily_conjugated_and_negated_targets_read_as_their_sources(elements: int, given: torch.dtype) -> None:
    conjugated = torch.zeros(elements, dtype=torch.complex64).conj()
    negated = torch.zeros(elements, dtype=torch.complex64).conj().imag
    beside = torch.zeros(3)
    source = torch.arange(elements).remainder(100).to(given)
    if given.is_complex:
        source = source + 2j
    real = source.real if given.is_complex else source
    copy_all([conjugated, beside, negated], [source, torch.ones(3), real])
    assert conjugated.is_conj()
    assert negated.is_neg()
    assert torch.equal(conjugated.resolve_conj(), source.to(torch.complex64))
    assert torch.equal(negated.resolve_neg(), real.float())
    assert beside.tolist() == [1, 1, 1]


@pytest.mark.skipif(not hasattr(torch, "uint4"), reason="this torch has no dtype without kernels")
def test_a_conversion_that_torch_does_not_have_is_refused_and_copies_no_bytes() -> None:
    target = torch.zeros(4)
    with pytest.raises(RuntimeError):
        copy_all([target], [tensor_of(torch.uint4, (4,))])
    assert not target.any()
    octets = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        copy_all([octets.view(torch.uint4)], [torch.ones(4)])
    assert not octets.any()


@given(st.lists(st.integers(0, 80 << 20), max_size=30))
def test_pieces_cover_all_tensors_once_in_order(sizes: list[int]) -> None:
    pieces = cut(sizes)
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(len(sizes)))
    assert [piece.done for piece in pieces] == [sum(sizes[: piece.stop]) for piece in pieces]
    assert all(piece.start < piece.stop for piece in pieces)


@every_dtype
def test_a_clone_has_memory_of_its_own(dtype: torch.dtype) -> None:
    whole = tensor_of(dtype, (6, 8))
    for source in (whole, whole.t(), whole[2:, ::3], whole[0, 0], whole[:0]):
        clone = cpu_clone(source)
        assert clone.is_contiguous()
        assert bytes_of(clone).numpy().tobytes() == raw(clone) == raw(source)
        assert not clone.numel() or clone.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
        assert clone.untyped_storage().nbytes() == clone.numel() * dtype.itemsize


@st.composite
def _placed(draw: st.DrawFn) -> list[tuple[torch.dtype, tuple[int, ...], bool]]:
    dtypes = st.sampled_from(PLAIN_DTYPES)
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    return draw(st.lists(st.tuples(dtypes, shapes, st.booleans()), max_size=8))


@given(_placed())
@example([(dtype, shape, False) for dtype in PLAIN_DTYPES for shape in ((), (0,), (5,))])
@settings(max_examples=60)
def test_any_mix_lands_in_one_buffer_and_nothing_beside_it_is_touched(
    items: list[tuple[torch.dtype, tuple[int, ...], bool]],
) -> None:
    targets, sources, spans, offset = [], [], [], 64
    arena = _arena(1 << 16)
    for seed, (dtype, shape, transposed) in enumerate(items):
        source = tensor_of(dtype, shape[::-1] if transposed else shape, seed)
        if transposed:
            source = source.permute(tuple(range(source.dim() - 1, -1, -1)))
        end = offset + source.numel() * dtype.itemsize
        targets.append(typed_view(arena, offset, end, dtype, tuple(source.shape)))
        sources.append(source)
        spans.append((offset, end))
        offset = -(-end // 16) * 16 + 16
    copy_all(targets, sources)
    for source, (begin, end) in zip(sources, spans, strict=True):
        assert arena[begin:end].numpy().tobytes() == raw(source)
        arena[begin:end] = 0xA5
    assert torch.equal(arena, _arena(1 << 16))


@pytest.mark.parametrize("freed", ["targets", "sources"])
def test_memory_that_was_let_go_of_is_not_touched(freed: str) -> None:
    pair = {"targets": torch.ones(4), "sources": torch.ones(4)}
    pair[freed].untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match="no memory"):
        copy_all([torch.ones(0), pair["targets"]], [torch.ones(0), pair["sources"]])
