"""Tests of objects as the writer leaves them: whatever was staged, and whatever of it is named, the digests are of the
bytes that are committed, and the file is what `safetensors` opens."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.core.object_stages import BytesItem, TensorItem, WrittenObject
from ml_flashpoint.core.object_writer import ObjectWriter
from ml_flashpoint.format.digest import BLOCK_SIZE, digest_block
from ml_flashpoint.format.knobs import BLOCK_BYTES_VARIABLE
from ml_flashpoint.format.object_format import parse_header
from tests.support.tmpfs import make_folder, remove_folder

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
# Around the boundaries of blocks, and far from them.
SIZES = st.one_of(
    st.sampled_from([0, 1, 4095, 4096, 4097, 8192, 65535, 65536, 65537]), st.integers(0, 20_000), st.just(300_000)
)


@dataclass(frozen=True)
class Save:
    """One save: the tensors staged, which of them are named, and what is added."""

    staged: tuple[tuple[torch.dtype, int], ...]
    named: tuple[int, ...]
    added: tuple[tuple[torch.dtype, int], ...]
    byte_items: tuple[int, ...]
    extra: tuple[int, ...]
    block_size: int


@st.composite
def saves(draw: st.DrawFn) -> Save:
    tensors = st.lists(st.tuples(st.sampled_from(DTYPES), SIZES), max_size=6).map(tuple)
    staged = draw(tensors)
    named = draw(st.sets(st.integers(0, len(staged) - 1)).map(sorted)) if staged else []
    lengths = st.lists(SIZES, max_size=3).map(tuple)
    return Save(
        staged,
        tuple(named),
        draw(st.just(()) | tensors),
        draw(lengths),
        draw(lengths),
        draw(st.sampled_from([4096, 4096, 8192, 65536])),
    )


class Arenas:
    """Arenas in a folder, used again when they are large enough, so that old bytes lie about."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, itertools.count()
        self.free: list[Arena] = []

    def acquire(self, size: int) -> Arena:
        for arena in self.free:
            if arena.size >= size:
                self.free.remove(arena)
                return arena
        return Arena.create(self._folder / f"arena-{next(self._count)}", size)


@contextlib.contextmanager
def arenas() -> Iterator[Arenas]:
    folder = make_folder()
    try:
        yield Arenas(folder)
    finally:
        remove_folder(folder)


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def made(shapes: Sequence[tuple[torch.dtype, int]], prefix: str) -> list[TensorItem]:
    return [(f"{prefix}{i}", noise(size * dtype.itemsize, i).view(dtype)) for i, (dtype, size) in enumerate(shapes)]


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def check(written: WrittenObject, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
    """The digests, recomputed, and every item as `safetensors` sees it."""
    data, size = bytes(written.arena.buffer), written.block_size
    blocks = range(0, written.size, size)
    assert written.digests == tuple(digest_block(data[at : min(at + size, written.size)]) for at in blocks)
    written.record("rank-00000-a1.safetensors")  # checks that there are as many digests as blocks
    found = safetensors.torch.load_file(written.arena.path)
    layout = parse_header(data, len(data)).layout
    assert written.size == layout.size
    for key, tensor in tensors:
        assert torch.equal(octets(found[layout.by_key[key].key]), octets(tensor))
    for key, content in byte_items:
        assert found[key].numpy().tobytes() == content
    assert layout.by_key.keys() == {key for key, _ in (*tensors, *byte_items)}


def run(save: Save, writer: ObjectWriter, arenas: Arenas) -> None:
    staged_from = made(save.staged, "staged")
    byte_items = [(f"byte{i}", noise(n, i).numpy().tobytes()) for i, n in enumerate(save.byte_items)]
    extra = [(f"extra{i}", noise(n, i).numpy().tobytes()) for i, n in enumerate(save.extra)]
    with mock.patch.dict("os.environ", {BLOCK_BYTES_VARIABLE: str(save.block_size)}):
        staged = writer.stage(arenas.acquire, arenas.free.append, staged_from)
        arena, views = staged.arena, staged.views
        tensors = [(staged_from[i][0], views[i]) for i in save.named] + made(save.added, "added")
        filled = writer.fill(arenas.acquire, tensors, byte_items, staged=staged, arena=arena)
        written = writer.finish(filled, extra)
    check(
        written,
        [(key, dict(staged_from).get(key, tensor)) for key, tensor in tensors],
        [*byte_items, *extra],
    )
    arenas.free.append(written.arena)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(saves(), min_size=1, max_size=3))
def test_digests_are_of_the_bytes_that_are_committed(several: list[Save]) -> None:
    writer = ObjectWriter()
    with arenas() as some:
        for save in several:
            run(save, writer, some)


@pytest.mark.slow
@settings(max_examples=60)
@given(saves())
def test_digests_of_what_was_not_staged(save: Save) -> None:
    tensors = made(save.staged, "staged")
    # One of them twice, and a part of one: an alias, and bytes that lie in the object twice.
    tensors += [(f"again{i}", tensors[i][1]) for i in save.named]
    tensors += [(f"half{i}", tensors[i][1][: len(tensors[i][1]) // 2]) for i in save.named[:2]]
    byte_items = [(f"byte{i}", bytes(n)) for i, n in enumerate(save.byte_items)]
    extra = [(f"extra{i}", bytes(n)) for i, n in enumerate(save.extra)]
    with mock.patch.dict("os.environ", {BLOCK_BYTES_VARIABLE: str(save.block_size)}), arenas() as some:
        writer = ObjectWriter()
        for _ in range(2):
            written = writer.finish(writer.fill(some.acquire, tensors, byte_items), extra)
            check(written, tensors, [*byte_items, *extra])
            some.free.append(written.arena)


@pytest.mark.parametrize("named", [[0], [1, 2]])
@pytest.mark.parametrize("byte_items", [(), (2_000_000,)])
def test_blocks_of_16_mib(named: list[int], byte_items: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BLOCK_BYTES_VARIABLE)
    quarter = (torch.uint8, BLOCK_SIZE * 5 // 4)
    save = Save((quarter, quarter, quarter, (torch.uint8, 10)), tuple(named), (), byte_items, (300,), BLOCK_SIZE)
    with arenas() as some:
        run(save, ObjectWriter(), some)


def test_a_view_that_is_read_otherwise_is_another_tensor() -> None:
    """The conjugate and negative bits belong to the view: its memory is that of the tensor that it is a view of."""
    whole = torch.complex(torch.arange(3000.0), torch.arange(3000.0) + 1)
    items = [("x", whole), ("conjugate", whole.conj()), ("imaginary", whole.imag), ("negative", whole.conj().imag)]
    items += [("again", whole.conj()), ("rows", whole.expand(2, 3000)), ("columns", whole.expand(2, 3000).t())]
    with arenas() as some:
        writer = ObjectWriter()
        written = writer.finish(writer.fill(some.acquire, items))
        check(written, items, [])
        staged = writer.stage(some.acquire, some.free.append, [("x", whole)])
        (copy,) = staged.views
        items = [("x", copy), ("conjugate", copy.conj()), ("imaginary", whole.imag)]
        written = writer.finish(writer.fill(some.acquire, items, staged=staged, arena=staged.arena))
        check(written, [("x", whole), ("conjugate", whole.conj()), ("imaginary", whole.imag)], [])
