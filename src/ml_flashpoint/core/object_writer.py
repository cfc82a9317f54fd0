"""Turns tensors and bytes into one object in an arena: layout, one copy, header, digests.

Owns what is kept between saves (layouts, the views of each arena, the header's text; all reused while names,
dtypes and shapes stay, and never otherwise) and the two ways to fill an object: all at once, or staged first
and named later, for asynchronous saves whose plan is made after the copy. Committing is the saver's.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ml_flashpoint.checkpoint_object_manager.arena import Arena, round_up
from ml_flashpoint.checkpoint_object_manager.arena_pool import with_headroom
from ml_flashpoint.checkpoint_object_manager.arena_tensor import ArenaTensor, SharedArena
from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import Piece, copy_all, cut, threads_for, view_identity
from ml_flashpoint.copy.dtypes import described, dtype_name, torch_dtype
from ml_flashpoint.copy.late import LateCopy
from ml_flashpoint.core.background import GIVEN_S
from ml_flashpoint.core.object_stages import BytesItem, FilledObject, Interior, StagedObject, TensorItem, WrittenObject
from ml_flashpoint.format import knobs
from ml_flashpoint.format.digest import BlockDigester, digest_workers
from ml_flashpoint.format.errors import CapacityError
from ml_flashpoint.format.object_format import (
    Entry,
    HeaderTemplate,
    Layout,
    header_space,
    layout_from_entries,
    plan_layout,
    with_byte_items,
)
from ml_flashpoint.state.tree import elements

Acquire = Callable[[int], Arena]

_APPEND_ALIGNMENT = 64


_Signature = tuple[list[tuple[str, torch.dtype, torch.Size]], list[str]]


@dataclass(frozen=True)
class _Cached:
    """A layout, and what it was made for.

    ``order[i]`` is the place of entry ``i`` among the caller's tensors; None if it is the same order.
    """

    signature: _Signature | None
    layout: Layout
    order: tuple[int, ...] | None
    pieces: tuple[Piece, ...]

    def in_file_order(self, tensors: Sequence[TensorItem]) -> Sequence[torch.Tensor]:
        """The caller's tensors in the order of the entries."""
        given = [tensor for _, tensor in tensors]
        return given if self.order is None else self._in_file_order(given)

    def in_callers_order(self, views: Sequence[ArenaTensor]) -> Sequence[ArenaTensor]:
        """One view an entry, in the order of the caller's tensors."""
        return views if self.order is None else self._in_callers_order(views)

    @functools.cached_property
    def _in_file_order(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        return elements(self.order or ())

    @functools.cached_property
    def _in_callers_order(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        order = self.order or ()
        return elements(sorted(range(len(order)), key=order.__getitem__))


class ObjectWriter:
    """Writes the objects of one rank. Thread-safe.

    Args:
        cache: keep layouts, views and headers between saves. Off, each save plans anew.
    """

    def __init__(self, *, cache: bool = True) -> None:
        self._cache = cache
        self._staged_plan: _Cached | None = None
        self._staged_kind: object = None
        self._plan: _Cached | None = None
        self._named: tuple[object, Layout] | None = None
        self._extra_bytes = 0
        self._behind_staged = 0
        self._template = HeaderTemplate()
        self._template_lock = threading.Lock()

    # ---- staging ------------------------------------------------------------------------------------------

    def stage(
        self,
        acquire: Acquire,
        release: Callable[[Arena], None],
        tensors: Sequence[TensorItem],
        byte_keys: Sequence[str] = (),
        *,
        kind: object = None,
        late: LateCopy | None = None,
    ) -> StagedObject:
        """Copy tensors into an arena now; :meth:`write` names them later.

        Args:
            acquire: gives an arena of at least so many bytes.
            release: takes it back if the copy fails.
            tensors: plain strided tensors on any device. Names are only used to size the header, and must differ.
            byte_keys: names of byte items, if there will be many: the header gets room for them.
            kind: the same object as for the tensors before only if their keys, dtypes and shapes are the same, in the
                same order: these are not compared then. None: they are.
            late: is started for those of its tensors that it takes: see `StagedObject.late`.
        """
        known = self._staged_plan
        if known is not None and kind is not None and self._staged_kind is kind:
            plan = known
        else:
            plan = self._planned(known, tensors, list(byte_keys))
        if self._cache:
            self._staged_plan, self._staged_kind = plan, kind
        layout = plan.layout
        arena = acquire(layout.size + self._behind_staged)
        try:
            views = self._views(arena, layout)
            # The caller waits for the copy, and digests would take memory bandwidth from it: they come after.
            if late is None:
                interior = self._copy_and_digest(arena, plan, views, tensors, follow=False)
            else:
                interior, late = self._copy_and_start(arena, plan, views, tensors, late)
        except BaseException:
            release(arena)
            raise
        return StagedObject(arena.path, interior, plan.in_callers_order(views), arena, late)

    def _copy_and_start(
        self,
        arena: Arena,
        plan: _Cached,
        views: Sequence[torch.Tensor],
        tensors: Sequence[TensorItem],
        late: LateCopy,
    ) -> tuple[Interior, LateCopy | None]:
        """Copy what cannot be copied late, and start the copy of the rest, if there is a rest."""
        order = plan.order or range(len(views))
        sources = plan.in_file_order(tensors)
        later = [n for n, number in enumerate(order) if number in late.numbers and late.takes(views[n], sources[n])]
        now = sorted(set(range(len(views))).difference(later))
        interior, digester, _ = _digested(arena, plan.layout)
        try:
            copy_all([views[n] for n in now], [sources[n] for n in now])
            if later:
                names = [plan.layout.tensors[n].key for n in later]
                late.start(names, [views[n] for n in later], [sources[n] for n in later])
            else:
                digester.advance(0, digester.size)
        except BaseException:
            digester.abort()
            raise
        interior.digester = digester
        arena.lock_in_background()
        return interior, late if later else None

    def learn(self, staged: StagedObject, size: int) -> None:
        """Take note that what was staged became an object of ``size`` bytes: as much will follow the next time."""
        self._behind_staged = max(0, size - staged.interior.end)

    def _planned(self, cached: _Cached | None, tensors: Sequence[TensorItem], byte_keys: Sequence[str]) -> _Cached:
        if cached is not None and _is_signature_of(cached.signature, tensors, byte_keys):
            return cached
        signature = ([(key, t.dtype, t.shape) for key, t in tensors], list(byte_keys))
        layout = plan_layout(described(tensors), [(key, 0) for key in byte_keys])
        place = {key: index for index, (key, _) in enumerate(tensors)}
        order: tuple[int, ...] | None = tuple(place[e.key] for e in layout.tensors)
        if order == tuple(range(len(tensors))):
            order = None
        return _Cached(signature, layout, order, tuple(cut(e.nbytes for e in layout.tensors)))

    def _views(self, arena: Arena, layout: Layout) -> Sequence[ArenaTensor]:
        """The tensors of a layout in an arena, in the order of its entries."""
        cached = arena.views
        if cached is not None and cached[0] is layout and cached[1] == arena.address:
            return cached[2]
        shared = SharedArena(arena.path, arena.mapping)
        views = tuple(ArenaTensor.wrap(_view(arena, e), shared, e.begin, e.end) for e in layout.tensors)
        if self._cache:
            arena.views = (layout, arena.address, views)
        return views

    def _copy_and_digest(
        self,
        arena: Arena,
        plan: _Cached,
        views: Sequence[torch.Tensor],
        tensors: Sequence[TensorItem],
        *,
        follow: bool = True,
    ) -> Interior:
        """Copy; digesting goes on after this returns, and with ``follow`` begins close behind the copy."""
        interior, digester, begin = _digested(arena, plan.layout)
        start = plan.layout.data_start - begin
        helps = bool(views) and threads_for(plan.layout.tensors[-1].end - plan.layout.data_start) > 1

        def on_copied(first: int, last: int) -> None:
            first, last = max(start + first, 0), min(start + last, digester.size)
            if first < last:
                digester.advance(first, last)
                if helps:
                    digester.help()

        try:
            copy_all(views, plan.in_file_order(tensors), on_copied if follow else None, plan.pieces)
            if not follow:
                digester.advance_soon(GIVEN_S)
        except BaseException:
            digester.abort()
            raise
        interior.digester = digester
        if cuda.are_on_devices(tensor for _, tensor in tensors):
            arena.lock_in_background()
        return interior

    # ---- writing ------------------------------------------------------------------------------------------

    def fill(
        self,
        acquire: Acquire,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
        *,
        staged: StagedObject | None = None,
        arena: Arena | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> FilledObject:
        """Bring these items into one object.

        Args:
            acquire: gives an arena of at least so many bytes.
            tensors: plain strided tensors on any device, with distinct names.
            staged: tensors that lie in it are taken as they are, others are copied in behind them.
            arena: this process's mapping of ``staged``.

        Raises:
            CapacityError: no room.
        """
        if staged is not None and arena is not None:
            try:
                return self._fill_staged(arena, staged, tensors, byte_items, metadata)
            except _CannotNameError:
                pass  # names much longer than those staged under: copy once more, under a header that fits
        return self._fill_new(acquire, tensors, byte_items, metadata)

    def finish(self, filled: FilledObject, extra: Sequence[BytesItem] = ()) -> WrittenObject:
        """Add further byte items, write the header and complete the digests.

        Raises:
            CapacityError: no room for them.
        """
        byte_items = [*filled.byte_items, *extra]
        layout = filled.layout
        if extra:
            layout = _with_byte_items(layout, byte_items, filled.interior)
        arena = filled.arena
        if layout.size > arena.size:
            arena.grow(with_headroom(layout.size))
        # What is added at the end of a save is about as long the next time.
        self._extra_bytes = layout.size - filled.layout.size
        for entry, (_, data) in zip(layout.byte_items, byte_items, strict=True):
            arena.buffer[entry.begin : entry.end] = data
        with self._template_lock:
            arena.buffer[: layout.data_start] = self._template.encode(layout, arena.size, filled.metadata)
        digests = _complete_digests(arena, layout.size, filled.interior)
        return WrittenObject(arena, layout.size, digests, filled.interior.block_size)

    def _fill_new(
        self,
        acquire: Acquire,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem],
        metadata: Mapping[str, str] | None,
    ) -> FilledObject:
        tensors, aliases = _without_aliases(tensors)
        plan = self._planned(self._plan, tensors, [key for key, _ in byte_items])
        if self._cache:
            self._plan = plan
        layout = plan.layout
        if aliases:
            space = header_space(
                described(tensors),
                [key for key, _ in byte_items],
                aliases,
            )
            layout = layout_from_entries(_moved(plan.layout.tensors, space - plan.layout.data_start), space, aliases)
            plan = _Cached(None, layout, plan.order, plan.pieces)
        layout = with_byte_items(layout, [(key, len(data)) for key, data in byte_items])
        arena = acquire(layout.size + self._extra_bytes)
        views = self._views(arena, plan.layout)
        interior = self._copy_and_digest(arena, plan, views, tensors)
        return FilledObject(arena, layout, list(byte_items), metadata, interior)

    def _fill_staged(
        self,
        arena: Arena,
        staged: StagedObject,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem],
        metadata: Mapping[str, str] | None,
    ) -> FilledObject:
        places: list[tuple[str, int, torch.dtype, torch.Size]] = []
        appended: list[TensorItem] = []
        interior = staged.interior
        end = interior.end
        base = arena.address
        for key, tensor in tensors:
            offset = tensor.data_ptr() - base
            if not (interior.begin <= offset < interior.end and _is_its_memory(tensor)):
                offset = end = round_up(end, _APPEND_ALIGNMENT)
                end += tensor.numel() * tensor.dtype.itemsize
                appended.append((key, tensor))
            places.append((key, offset, tensor.dtype, tensor.shape))
        signature = (interior.begin, places, [key for key, _ in byte_items])
        named = self._named  # read once: another thread may be naming a state of its own
        if named is not None and named[0] == signature:
            layout = named[1]
        else:
            found = _layout_of(places, interior.begin)
            if found is None:
                raise _CannotNameError  # overlapping views: an object cannot hold them where they are
            layout = found
        layout = _with_byte_items(layout, byte_items, interior)
        if self._cache:
            self._named = (signature, layout)
        # Before anything is written: a header that does not fit must leave the staged bytes as they are.
        with self._template_lock:
            try:
                self._template.encode(layout, max(arena.size, round_up(layout.size)), metadata)
            except CapacityError as error:
                raise _CannotNameError from error
        if layout.size > arena.size:
            arena.grow(with_headroom(layout.size))
        if appended:
            by_key = layout.by_key
            copy_all([_view(arena, by_key[key]) for key, _ in appended], [tensor for _, tensor in appended])
        return FilledObject(arena, layout, list(byte_items), metadata, interior)


class _CannotNameError(Exception):
    """What was staged cannot become the object as it lies: no room for the header, or views overlap."""


def _with_byte_items(layout: Layout, byte_items: Sequence[BytesItem], interior: Interior) -> Layout:
    return with_byte_items(layout, [(key, len(data)) for key, data in byte_items], interior.end)


def _digested(arena: Arena, layout: Layout) -> tuple[Interior, BlockDigester, int]:
    """The interior of an object to be, what digests its blocks, and where the first of them begins."""
    data_end = layout.tensors[-1].end if layout.tensors else layout.data_start
    interior = Interior(layout.data_start, data_end, knobs.block_bytes())
    blocks, size = interior.blocks, interior.block_size
    begin, end = blocks.start * size, blocks.stop * size
    return interior, BlockDigester(arena.buffer[begin:end], end - begin, digest_workers(), block_size=size), begin


def _complete_digests(arena: Arena, size: int, interior: Interior) -> tuple[str, ...]:
    """Digests of all blocks: those of the interior are known, the ones around it are computed now."""
    blocks, block_size = interior.blocks, interior.block_size
    # What was staged and is not named may reach beyond the object, whose last block then ends earlier.
    known = interior.digests()[: max(0, size // block_size - blocks.start)]
    begin, end = (min(block * block_size, size) for block in (blocks.start, blocks.start + len(known)))
    around = []
    for part in (arena.buffer[:begin], arena.buffer[end:size]):
        with BlockDigester(part, part.nbytes, block_size=block_size) as digester:
            around.append(digester.finish())
    return (*around[0], *known, *around[1])


def _is_its_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _view(arena: Arena, entry: Entry) -> torch.Tensor:
    return arena.view(entry.begin, entry.end, torch_dtype(entry.dtype), entry.shape)


def _moved(entries: Iterable[Entry], by: int) -> list[Entry]:
    return [Entry(e.key, e.dtype, e.shape, e.begin + by, e.end + by, e.kind) for e in entries]


def _is_signature_of(signature: _Signature | None, tensors: Sequence[TensorItem], byte_keys: Sequence[str]) -> bool:
    # Compared one by one: a second list of many small tuples would set off the garbage collector.
    return (
        signature is not None
        and len(signature[0]) == len(tensors)
        and signature[1] == byte_keys
        and all(
            known == key and dtype is tensor.dtype and shape == tensor.shape
            for (known, dtype, shape), (key, tensor) in zip(signature[0], tensors, strict=True)
        )
    )


def _without_aliases(tensors: Sequence[TensorItem]) -> tuple[Sequence[TensorItem], dict[str, str]]:
    """Tensors that are one and the same memory are stored once, under the first name."""
    if len({tensor.data_ptr() for _, tensor in tensors}) == len(tensors):
        return tensors, {}
    kept: dict[tuple[object, ...], str] = {}
    unique: list[TensorItem] = []
    aliases: dict[str, str] = {}
    for key, tensor in tensors:
        first = kept.setdefault(view_identity(tensor), key) if tensor.numel() else key
        if first == key:
            unique.append((key, tensor))
        else:
            aliases[key] = first
    return unique, aliases


def _layout_of(places: Sequence[tuple[str, int, torch.dtype, torch.Size]], data_start: int) -> Layout | None:
    """Layout of tensors that are in their places already; None if two of them overlap without being the same."""
    kept: dict[tuple[int, torch.dtype, torch.Size], str] = {}
    entries: list[Entry] = []
    aliases: dict[str, str] = {}
    for key, offset, dtype, shape in places:
        nbytes = shape.numel() * dtype.itemsize
        first = kept.setdefault((offset, dtype, shape), key) if nbytes else key
        if first == key:
            entries.append(Entry(key, dtype_name(dtype), tuple(shape), offset, offset + nbytes))
        else:
            aliases[key] = first
    entries.sort(key=lambda e: (e.begin, e.end))
    if any(one.end > other.begin for one, other in itertools.pairwise(entries)):
        return None
    return layout_from_entries(entries, data_start, aliases)
