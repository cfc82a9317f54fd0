"""Objects as the writer leaves them: whatever was staged, and whatever of that is named, digests are of the bytes that
are committed, and `safetensors` opens the file."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.copy import cuda, transfers
from ml_flashpoint.copy.overlap import LateCopy
from ml_flashpoint.engine.committing import BytesItem, Part, PartWriter, TensorItem
from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.format.knobs import BLOCK_BYTES_VARIABLE
from ml_flashpoint.format.object_format import parse_header
from ml_flashpoint.memory.slot import Slot, round_up
from tests.support.played_cuda import PlayedStreams
from tests.support.tmpfs import make_folder, remove_folder

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
# Around the boundaries of blocks, and far from them.
SIZES = st.one_of(
    st.sampled_from([0, 1, 4095, 4096, 4097, 8192, 65535, 65536, 65537]), st.integers(0, 20_000), st.just(300_000)
)


@dataclass(frozen=True)
class Case:
    """One save: the tensors staged, which of them are named, and what is added."""

    staged: tuple[tuple[torch.dtype, int], ...]
    named: tuple[int, ...]
    added: tuple[tuple[torch.dtype, int], ...]
    byte_items: tuple[int, ...]
    extra: tuple[int, ...]
    block_size: int = 4096
    prefix: str = ""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensors = st.lists(st.tuples(st.sampled_from(DTYPES), SIZES), max_size=6).map(tuple)
    staged = draw(tensors)
    named = draw(st.sets(st.integers(0, len(staged) - 1)).map(sorted)) if staged else []
    lengths = st.lists(SIZES, max_size=3).map(tuple)
    return Case(
        staged,
        tuple(named),
        draw(st.just(()) | tensors),
        draw(lengths),
        draw(lengths),
        draw(st.sampled_from([4096, 4096, 8192, 65536])),
        draw(st.sampled_from(["", "", "long" * 6000])),
    )


class Slots:
    """Slots in a folder, used again when they are large enough, so that old bytes lie about."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, itertools.count()
        self.free: list[Slot] = []

    def take(self, size: int, old: Slot | None, exact: bool) -> Slot:
        """Give a slot that is just large enough."""
        self.free += [] if old is None or exact else [old]
        for slot in self.free:
            if size <= slot.size and not exact:
                self.free.remove(slot)
                return slot
        return Slot.make(self._folder / str(next(self._count)), round_up(size, 4096))


@contextlib.contextmanager
def slots() -> Iterator[Slots]:
    folder = make_folder()
    try:
        yield Slots(folder)
    finally:
        remove_folder(folder)


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def made(shapes: Sequence[tuple[torch.dtype, int]], prefix: str) -> list[TensorItem]:
    return [(f"{prefix}{i}", noise(size * dtype.itemsize, i).view(dtype)) for i, (dtype, size) in enumerate(shapes)]


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def seal_and_check(
    writer: PartWriter,
    some: Slots,
    part: Part,
    tensors: Sequence[TensorItem],
    byte_items: Sequence[BytesItem],
    extra: Sequence[BytesItem] = (),
) -> dict[str, torch.Tensor]:
    """Recompute the digests, and compare every item with what `safetensors` finds. Return that."""
    slot, record = writer.seal(part, some.take, extra)
    data, size = bytes(slot.buffer), record.block_size
    blocks = range(0, record.size, size)
    assert record.digests == tuple(digest_block(data[at : min(at + size, record.size)]) for at in blocks)
    found = safetensors.torch.load_file(slot.path)
    layout = parse_header(data, len(data)).layout
    assert record.size == layout.size
    for key, tensor in tensors:
        assert torch.equal(octets(found[layout.by_key[key].key]), octets(tensor))
    for key, content in (*byte_items, *extra):
        assert found[key].numpy().tobytes() == content
    assert layout.by_key.keys() == {key for key, _ in (*tensors, *byte_items, *extra)}
    some.free.append(slot)
    return found


def run(case: Case, writer: PartWriter, some: Slots) -> None:
    originals = made(case.staged, "staged")
    byte_items = [(f"byte{i}", noise(n, i).numpy().tobytes()) for i, n in enumerate(case.byte_items)]
    extra = [(f"extra{i}", noise(n, i).numpy().tobytes()) for i, n in enumerate(case.extra)]
    with mock.patch.dict("os.environ", {BLOCK_BYTES_VARIABLE: str(case.block_size)}):
        sources = [(key, tensor.clone()) for key, tensor in originals]
        part = Part(math.inf)
        copies = writer.stage(part, some.take, sources)
        for _, source in sources:
            source.zero_()  # the program goes on
        tensors = [(case.prefix + originals[i][0], copies[i]) for i in case.named] + made(case.added, "added")
        writer.fill(part, some.take, tensors, byte_items)
        expected = [(case.prefix + originals[i][0], originals[i][1]) for i in case.named] + made(case.added, "added")
        seal_and_check(writer, some, part, expected, byte_items, extra)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(cases(), min_size=1, max_size=3))
def test_digests_are_of_the_bytes_that_are_committed(several: list[Case]) -> None:
    writer = PartWriter()
    with slots() as some:
        for case in several:
            run(case, writer, some)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases())
def test_what_was_not_staged_is_stored_once_under_all_its_names(case: Case) -> None:
    tensors = made(case.staged, "staged")
    tensors += [(f"again{i}", tensors[i][1]) for i in case.named]
    tensors += [(f"half{i}", tensors[i][1][: len(tensors[i][1]) // 2]) for i in case.named[:2]]
    byte_items = [(f"byte{i}", bytes(n)) for i, n in enumerate(case.byte_items)]
    extra = [(f"extra{i}", bytes(n)) for i, n in enumerate(case.extra)]
    with mock.patch.dict("os.environ", {BLOCK_BYTES_VARIABLE: str(case.block_size)}), slots() as some:
        writer = PartWriter()
        for _ in range(2):
            part = Part(math.inf)
            writer.fill(part, some.take, tensors, byte_items)
            seal_and_check(writer, some, part, tensors, byte_items, extra)
            assert part.layout is not None
            assert len(part.layout.tensors) == len(tensors) - sum(1 for i in case.named if tensors[i][1].numel())


def test_of_tensors_that_change_their_dtype_alone_the_new_one_is_stored() -> None:
    with slots() as some:
        writer = PartWriter()
        for dtype in (torch.float32, torch.int32, torch.float64):
            tensors = [("x", torch.arange(3000).to(dtype))]
            part = Part(math.inf)
            writer.fill(part, some.take, tensors)
            assert seal_and_check(writer, some, part, tensors, [])["x"].dtype == dtype
            part = Part(math.inf)
            writer.fill(part, some.take, [("x", writer.stage(part, some.take, tensors)[0])])
            assert seal_and_check(writer, some, part, tensors, [])["x"].dtype == dtype


@pytest.mark.parametrize(
    "change", [lambda copies: [copies[0], copies[0][5:]], lambda copies: [copies[0], copies[1].t()]]
)
def test_views_that_cannot_be_named_as_they_lie_are_copied_once_more(
    change: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
) -> None:
    sources = [("a", torch.arange(3000.0)), ("b", torch.arange(6000.0).view(2, 3000))]
    expected = list(zip("xy", change([tensor for _, tensor in sources]), strict=True))
    with slots() as some:
        writer = PartWriter()
        part = Part(math.inf)
        tensors = list(zip("xy", change(writer.stage(part, some.take, sources)), strict=True))
        writer.fill(part, some.take, tensors)
        seal_and_check(writer, some, part, expected, [])


def test_a_view_that_is_read_otherwise_is_another_tensor() -> None:
    """The conjugate and negative bits belong to the view: its memory is that of the tensor that it is a view of."""
    whole = torch.complex(torch.arange(3000.0), torch.arange(3000.0) + 1)
    items = [("x", whole), ("conjugate", whole.conj()), ("imaginary", whole.imag), ("negative", whole.conj().imag)]
    items += [("again", whole.conj()), ("rows", whole.expand(2, 3000)), ("columns", whole.expand(2, 3000).t())]
    with slots() as some:
        writer = PartWriter()
        part = Part(math.inf)
        writer.fill(part, some.take, items)
        seal_and_check(writer, some, part, items, [])
        part = Part(math.inf)
        (copy,) = writer.stage(part, some.take, [("x", whole)])
        items = [("x", copy), ("conjugate", copy.conj()), ("imaginary", whole.imag)]
        writer.fill(part, some.take, items)
        expected = [("x", whole), ("conjugate", whole.conj()), ("imaginary", whole.imag)]
        seal_and_check(writer, some, part, expected, [])


def test_what_is_staged_in_vain_takes_no_room_for_long() -> None:
    tensors = made([(torch.uint8, 40_000)] * 4, "t")
    with slots() as some:
        writer = PartWriter()
        part = Part(math.inf)
        copies = writer.stage(part, some.take, tensors)
        staged = part.slot
        mine = [(key, view) for (key, _), view in zip(tensors, copies, strict=True)][1:3]
        writer.fill(part, some.take, mine)
        assert part.slot is not None
        assert staged is not None
        assert part.slot.size < 160_000 < staged.size
        seal_and_check(writer, some, part, tensors[1:3], [])


@pytest.mark.parametrize("changes", [False, True])
def test_a_late_copy_is_awaited_and_checked_before_the_object_is_sealed(
    monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    monkeypatch.setattr(cuda, "_process", cuda._Process())
    monkeypatch.setattr(transfers, "SMALL", 1)
    played = PlayedStreams(0.0)
    sources = [("late", played.on(0, torch.arange(70_000.0))), ("now", torch.arange(3000.0))]
    expected = [(key, tensor.clone()) for key, tensor in sources]
    with slots() as some, played.played():

        def take(size: int, old: Slot | None, exact: bool) -> Slot:
            slot = some.take(size, old, exact)
            cuda._process.locked[slot.address] = slot.address + slot.size
            return slot

        part, writer, late = Part(time.monotonic() + 10), PartWriter(), LateCopy([0], lambda: None)
        copies = writer.stage(part, take, sources, late=late)
        named = [(key, view) for (key, _), view in zip(sources, copies, strict=True)]
        writer.fill(part, take, named)
        assert not late.over
        if changes:
            sources[0][1].zero_()
            with pytest.raises(SaveError, match="'late' was changed"):
                part.wait()
        else:
            part.wait()
            seal_and_check(writer, some, part, expected, [])
