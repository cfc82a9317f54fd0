"""Turns tensors and bytes into the object of a part, in a slot: layout, one copy, names, header, digests.

There are two ways: all at once (`PartWriter.fill`), or copied first and named later (`PartWriter.stage`, then `fill`).
What depends on names, dtypes and shapes alone is kept between saves: layouts, the views of each slot, the text of the
header. Where only content changes, no step of Python is made for each tensor.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import torch

from ml_flashpoint.copy.cpu import Piece, copy_all, cpu_clones, cut, view_identity
from ml_flashpoint.copy.dtypes import described, dtype_name, torch_dtype
from ml_flashpoint.copy.late import LateCopy
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError, SaveError
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.format.object_format import (
    Entry,
    Layout,
    layout_from_entries,
    plan_layout,
    with_byte_items,
)
from ml_flashpoint.memory.pool import slot_size
from ml_flashpoint.memory.slot import Slot, round_up
from ml_flashpoint.state.tree import elements

_log = logging.getLogger(__name__)

TensorItem = tuple[str, torch.Tensor]
BytesItem = tuple[str, bytes]

_APPEND_ALIGNMENT = 64
_IDLE_S = 0.25
"""Seconds after which the committing thread looks for saves past their deadlines."""
_END_S = 2.0
"""Seconds that its end is waited for."""
_first, _second = itemgetter(0), itemgetter(1)
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_data_ptr, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_is_neg, _is_conj = torch.Tensor.is_neg, torch.Tensor.is_conj


class Take(Protocol):
    """Gives a slot of at least so many bytes, in place of another one, whose bytes are of no use any more. An exact one
    is not much larger, and the other one is removed."""

    def __call__(self, size: int, old: Slot | None = None, *, exact: bool = False) -> Slot:
        """Return the slot."""
        ...


@dataclass(slots=True, eq=False)
class Staged:
    """Bytes ``begin:end`` of a slot that stay as they are until they are committed.

    Attributes:
        slot: the slot. begin, end: before is room for the header, and behind for what is added later.
        views: the copies, in the caller's order.
        late: the part that CUDA devices still copy; None if there is none.
    """

    slot: Slot
    begin: int
    end: int
    views: Sequence[torch.Tensor] = field(default=(), repr=False)
    late: LateCopy | None = None

    def wait(self, deadline_s: float) -> None:
        """Wait until all is copied.

        Raises:
            SaveError: a source has changed, or the copy was not over in time. The bytes are of no use.
        """
        if self.late is not None:
            self.late.wait(deadline_s)
            self.late = None

    def discard(self) -> None:
        """Wait until nothing is copied any more: the bytes are of no use. Safe to repeat."""
        if self.late is not None:
            self.late.settle()


@dataclass(slots=True, eq=False)
class Filled:
    """An object whose tensors are in place. Its byte items and its header are written by `PartWriter.seal`."""

    staged: Staged
    layout: Layout
    byte_items: list[BytesItem]


@dataclass(frozen=True, eq=False)
class _Plan:
    """A layout, and the tensors that it was made for: their names, dtypes, shapes and aliases, the keys of the byte
    items, and what brings the caller's tensors in the order of the entries, and back. For ``kind`` see `stage`."""

    kind: object
    signature: tuple[object, ...]
    layout: Layout
    pieces: Sequence[Piece]
    to_file: Callable[[Sequence[Any]], Sequence[Any]]
    to_caller: Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, eq=False)
class _Named:
    """The layout of staged tensors with their final names, and which tensors lie behind what was staged."""

    signature: tuple[object, ...]
    layout: Layout
    appended: Sequence[int]
    nbytes: int


class PartWriter:
    """Writes the objects of one rank. Thread-safe."""

    def __init__(self) -> None:
        self._staged: _Plan | None = None
        self._filled: _Plan | None = None
        self._named: _Named | None = None
        self._behind = self._extra = 0  # bytes that followed what was staged, and filled, the last time
        self._views: weakref.WeakKeyDictionary[Slot, tuple[Layout, Sequence[torch.Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    # ---- staging -------------------------------------------------------------------------------------------

    def stage(
        self,
        take: Take,
        tensors: Sequence[TensorItem],
        byte_keys: Sequence[str] = (),
        *,
        kind: object = None,
        late: LateCopy | None = None,
    ) -> Staged:
        """Copy tensors into a slot, to be named by `fill`.

        Args:
            take: gives the slot. If the copy fails the slot is still the caller's.
            tensors: plain strided tensors on any device. Names only size the header, and must differ.
            byte_keys: names of byte items, if they are many: the header gets room for them.
            kind: the same object as before only if keys, dtypes and shapes are the same, in the same order; None: they
                are compared.
            late: is started for those of the tensors that it takes: see `Staged.late`.
        """
        values = list(map(_second, tensors))
        plan = self._staged
        if plan is None or kind is None or plan.kind is not kind:
            plan = self._staged = _planned(plan, list(map(_first, tensors)), values, list(byte_keys), kind=kind)
        slot = take(plan.layout.size + self._behind)
        views, sources = self._views_of(slot, plan.layout), plan.to_file(values)
        staged = _body(slot, plan.layout)
        try:
            if late is not None:
                self._start(staged, plan, views, sources, late)
            else:
                copy_all(views, sources, plan.pieces)
        except BaseException:
            staged.discard()
            raise
        staged.views = plan.to_caller(views)
        return staged

    def _start(
        self,
        staged: Staged,
        plan: _Plan,
        views: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        late: LateCopy,
    ) -> None:
        """Copy what cannot be copied late, and start the copy of the rest."""
        numbers = plan.to_file(range(len(views)))
        later = [n for n, number in enumerate(numbers) if number in late.numbers and late.takes(views[n], sources[n])]
        now = sorted(set(range(len(views))).difference(later))
        copy_all([views[n] for n in now], [sources[n] for n in now])
        if later:
            staged.late = late
            names = [plan.layout.tensors[n].key for n in later]
            late.start(names, [views[n] for n in later], [sources[n] for n in later])

    def _views_of(self, slot: Slot, layout: Layout) -> Sequence[torch.Tensor]:
        """Return the tensors of a layout in a slot, in the order of its entries."""
        with self._lock:
            known = self._views.get(slot)
        if known is not None and known[0] is layout:
            return known[1]
        views = [_view(slot, entry) for entry in layout.tensors]
        with self._lock:
            self._views[slot] = layout, views
        return views

    # ---- filling -------------------------------------------------------------------------------------------

    def fill(
        self,
        take: Take,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
        *,
        staged: Staged | None = None,
        deadline_s: float,
    ) -> Filled:
        """Bring items into one object.

        Args:
            take: gives a slot.
            tensors: plain strided tensors on any device, with names that differ.
            byte_items: keys and contents.
            staged: tensors that lie in it are taken as they are, others are copied in behind them.
            deadline_s: seconds at most to wait for a late copy, where what was staged must be copied once more.
        """
        filled = None if staged is None else self._name(staged, tensors, byte_items)
        return filled or self._place(take, tensors, byte_items, staged, deadline_s)

    def _name(self, staged: Staged, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> Filled | None:
        """Name what was staged; None if an object cannot hold it as it lies: views overlap, or there is no room."""
        slot, begin, end = staged.slot, staged.begin, staged.end
        values = list(map(_second, tensors))
        offsets = [at if begin <= at < end else -1 for at in map((-slot.address).__add__, map(_data_ptr, values))]
        if not (all(map(_is_contiguous, values)) and not any(map(_is_neg, values)) and not any(map(_is_conj, values))):
            lies = [value.is_contiguous() and not value.is_neg() and not value.is_conj() for value in values]
            offsets = [at if is_there else -1 for at, is_there in zip(offsets, lies, strict=True)]
        names, dtypes, shapes = list(map(_first, tensors)), list(map(_dtype, values)), list(map(_shape, values))
        signature = begin, end, offsets, names, dtypes, shapes
        named = self._named
        if named is None or named.signature != signature:
            named = _named(signature, zip(names, offsets, dtypes, shapes, strict=True), begin, end)
            if named is None:
                return None
            self._named = named
        layout = with_byte_items(named.layout, _sizes(byte_items), end)
        if layout.size > slot.size or _wastes(named.nbytes, staged):
            return None
        if named.appended:
            targets = [_view(slot, layout.by_key[names[n]]) for n in named.appended]
            copy_all(targets, [values[n] for n in named.appended])
        return Filled(staged, layout, list(byte_items))

    def _place(
        self,
        take: Take,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem],
        old: Staged | None,
        deadline_s: float,
    ) -> Filled:
        """Copy all tensors into a slot, under a header that fits."""
        tensors, aliases = _without_aliases(tensors)
        names, values = list(map(_first, tensors)), list(map(_second, tensors))
        if old is not None:  # some of them lie in the slot, which may be taken again
            old.wait(deadline_s)
            values = cpu_clones(values)
        plan = self._filled = _planned(self._filled, names, values, list(map(_first, byte_items)), aliases)
        layout = with_byte_items(plan.layout, _sizes(byte_items))
        size, exact = layout.size + self._extra, old is not None and _wastes(layout.size, old)
        slot = take(slot_size(size) if exact else size, None if old is None else old.slot, exact=exact)
        copy_all(self._views_of(slot, plan.layout), plan.to_file(values), plan.pieces)
        return Filled(_body(slot, plan.layout), layout, list(byte_items))

    # ---- sealing -------------------------------------------------------------------------------------------

    def seal(
        self, take: Take, filled: Filled, extra: Sequence[BytesItem], *, deadline_s: float
    ) -> tuple[Slot, ObjectRecord]:
        """Add further byte items, write the header and complete the digests of an object. Return its slot, which is
        another one if these items did not fit, and its entry for the manifest. For ``deadline_s`` see `fill`."""
        size, items = filled.layout.size, [*filled.byte_items, *extra]
        layout, staged, contents = filled.layout, filled.staged, list(map(_second, items))
        if extra:
            layout = with_byte_items(layout, _sizes(items), staged.end)
        try:
            record = staged.slot.seal(layout, contents)
        except CapacityError:
            lying = [(entry.key, _view(staged.slot, entry)) for entry in layout.tensors]
            lying += [(alias, _view(staged.slot, layout.by_key[kept])) for alias, kept in layout.aliases.items()]
            filled = self._place(take, lying, items, staged, deadline_s)
            layout, staged = filled.layout, filled.staged
            record = staged.slot.seal(layout, contents)
        # What is added is about as long the next time.
        self._behind, self._extra = max(0, layout.size - staged.end), max(0, layout.size - size)
        return staged.slot, record


def _wastes(nbytes: int, staged: Staged) -> bool:
    """Return True if an object is much smaller than what was staged for it, as it is where DCP copies all of a
    replicated state before it divides the state: copies would be as large as the slot."""
    return nbytes * 3 < staged.end * 2


def _sizes(byte_items: Iterable[BytesItem]) -> list[tuple[str, int]]:
    return [(key, len(data)) for key, data in byte_items]


def _view(slot: Slot, entry: Entry) -> torch.Tensor:
    return slot.view(entry.begin, entry.end, torch_dtype(entry.dtype), entry.shape)


def _body(slot: Slot, layout: Layout) -> Staged:
    end = layout.tensors[-1].end if layout.tensors else layout.data_start
    return Staged(slot, layout.data_start, end)


def _planned(
    known: _Plan | None,
    names: list[str],
    values: Sequence[torch.Tensor],
    byte_keys: list[str],
    aliases: Mapping[str, str] | None = None,
    *,
    kind: object = None,
) -> _Plan:
    """Return the plan for these tensors: the known one, or a new one."""
    signature = names, list(map(_dtype, values)), list(map(_shape, values)), byte_keys, aliases
    if known is not None and known.signature == signature:
        if known.kind is kind:
            return known
        return replace(known, kind=kind)
    tensors = list(zip(names, values, strict=True))
    layout = plan_layout(described(tensors), [(key, 0) for key in byte_keys], aliases)
    place = {name: number for number, name in enumerate(names)}
    order = [place[entry.key] for entry in layout.tensors]
    back = sorted(range(len(order)), key=order.__getitem__)
    pieces = tuple(cut(entry.nbytes for entry in layout.tensors))
    return _Plan(kind, signature, layout, pieces, elements(order), elements(back))


def _named(
    signature: tuple[object, ...],
    places: Iterable[tuple[str, int, torch.dtype, torch.Size]],
    begin: int,
    end: int,
) -> _Named | None:
    """Return the layout of tensors that have their places, with the others behind; None if two of them overlap."""
    kept: dict[tuple[int, torch.dtype, torch.Size], str] = {}
    entries: list[Entry] = []
    aliases: dict[str, str] = {}
    appended: list[int] = []
    for number, (name, offset, dtype, shape) in enumerate(places):
        nbytes = shape.numel() * dtype.itemsize
        if offset < 0:
            appended.append(number)
            offset = round_up(end, _APPEND_ALIGNMENT)
            end = offset + nbytes
        first = kept.setdefault((offset, dtype, shape), name) if nbytes else name
        if first == name:
            entries.append(Entry(name, dtype_name(dtype), tuple(shape), offset, offset + nbytes))
        else:
            aliases[name] = first
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    if any(one.end > other.begin for one, other in itertools.pairwise(entries)):
        return None
    try:
        nbytes = begin + sum(entry.nbytes for entry in entries)
        return _Named(signature, layout_from_entries(entries, begin, aliases), appended, nbytes)
    except InvalidArgumentError:  # a view is not aligned to its elements
        return None


def _without_aliases(tensors: Sequence[TensorItem]) -> tuple[Sequence[TensorItem], dict[str, str]]:
    """Return the tensors without those that are the same memory as another one, and the name of that other one."""
    if len(set(map(_data_ptr, map(_second, tensors)))) == len(tensors):
        return tensors, {}
    kept: dict[tuple[object, ...], str] = {}
    unique: list[TensorItem] = []
    aliases: dict[str, str] = {}
    for name, tensor in tensors:
        first = kept.setdefault(view_identity(tensor), name) if tensor.numel() else name
        if first == name:
            unique.append((name, tensor))
        else:
            aliases[name] = first
    return unique, aliases


class CommittingThread:
    """The committing executor: one thread that does what it is given, in turn.

    Args:
        idle: called when there is nothing to do. True if it is to be called again at once.

    Raises:
        SaveError: no thread can be started.
    """

    def __init__(self, idle: Callable[[], bool]) -> None:
        self._given: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = idle
        self._thread = threading.Thread(target=self._run, name="flashpoint-commit", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise SaveError(f"cannot start the thread that commits: {error}", hint="look at ulimit -u") from error

    @property
    def is_current(self) -> bool:
        """True if the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], object]) -> None:
        """Have something done, after everything that was given before."""
        self._given.put(work)

    def drain(self, deadline_s: float) -> None:
        """Wait until everything that was given is done."""
        done = threading.Event()
        self.submit(done.set)
        done.wait(deadline_s)

    def close(self) -> None:
        """End the thread after what it was given, and wait a moment for that: it may be making a slot, and whoever
        opens the base container next removes what is half made."""
        self._given.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def _run(self) -> None:
        has_more = False
        while True:
            try:
                work = self._given.get(timeout=0 if has_more else _IDLE_S)
                if work is None:
                    return
            except queue.Empty:
                work = self._idle
            try:
                has_more = work() is not False
            except Exception:  # of whatever kind: a thread that ended would commit nothing any more
                _log.exception("the committing thread goes on after an error")
                has_more = False
            del work  # it holds thousands of entries
