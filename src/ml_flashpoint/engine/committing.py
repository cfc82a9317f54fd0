"""Turns tensors and bytes into the object of a part, in a slot: layout, one copy, names, header, digests.

Tensors are copied under their names (`PartWriter.fill`), or first copied and later named (`PartWriter.stage`, then
`fill`). What depends on names, dtypes and shapes alone is kept between saves: the layout, the views of each slot, the
text of the header. Where only content changes, no step of Python is made for each tensor.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Any

import torch

from ml_flashpoint.copy.cpu import Piece, copy_all, cpu_clones, cut, view_identity
from ml_flashpoint.copy.dtypes import DTYPES, described, dtype_name
from ml_flashpoint.copy.overlap import LateCopy
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError, SaveError
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.format.object_format import Entry, Layout, layout_from_entries, plan_layout, with_byte_items
from ml_flashpoint.memory.pool import slot_size
from ml_flashpoint.memory.slot import Slot, round_up
from ml_flashpoint.state.plan import elements

_log = logging.getLogger(__name__)

TensorItem = tuple[str, torch.Tensor]
BytesItem = tuple[str, bytes]
Take = Callable[[int, "Slot | None", bool], Slot]
"""Gives a slot of at least so many bytes, in place of another one, whose bytes are of no use any more. If the last
argument is true, the other one is removed, and the slot is not much larger than that."""

_APPEND_ALIGNMENT = 64
_IDLE_S = 0.25
"""Seconds after which the committing thread looks for saves past their deadlines."""
_END_S = 2.0
"""Seconds that its end is waited for."""
_first, _second = itemgetter(0), itemgetter(1)
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_data_ptr, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_is_neg, _is_conj = torch.Tensor.is_neg, torch.Tensor.is_conj


@dataclass(slots=True, eq=False)
class Part:
    """The object of one save, on its way.

    Attributes:
        until: deadline of the save (`time.monotonic`).
        slot: the slot that it is written to; None before, and while another one is taken.
        begin, end: where the copied tensors lie. Before is room for the header, behind for what is added later.
        layout: places of the tensors under their final names; None before `PartWriter.fill`.
        byte_items: are written by `PartWriter.seal`.
        late: the copy that CUDA devices are still at; None if there is none.
    """

    until: float
    slot: Slot | None = None
    begin: int = 0
    end: int = 0
    layout: Layout | None = None
    byte_items: Sequence[BytesItem] = ()
    late: LateCopy | None = None

    def wait(self) -> None:
        """Wait until all is copied. Raise a `SaveError` if a source has changed, or the copy was not over in time."""
        if self.late is not None:
            self.late.wait(max(self.until - time.monotonic(), 0.0))
            self.late = None


@dataclass(frozen=True, eq=False)
class _Plan:
    """A layout, and the names, dtypes, shapes, byte keys and aliases that it was made for: the signature."""

    kind: object  # see `Save.stage`
    signature: tuple[object, ...]
    layout: Layout
    pieces: Sequence[Piece]
    to_file: Callable[[Sequence[Any]], Sequence[Any]]  # from the caller's order to that of the entries
    to_caller: Callable[[Sequence[Any]], Sequence[Any]]  # and back
    views: weakref.WeakKeyDictionary[Slot, Sequence[torch.Tensor]] = field(default_factory=weakref.WeakKeyDictionary)


@dataclass(frozen=True, eq=False)
class _Named:
    """The layout of tensors that were copied before they had their final names, and which lie behind those."""

    signature: tuple[object, ...]
    layout: Layout
    appended: Sequence[int]
    nbytes: int


class PartWriter:
    """Writes the parts of one rank. Thread-safe; a part belongs to one thread at a time."""

    def __init__(self) -> None:
        self._staged: _Plan | None = None
        self._placed: _Plan | None = None
        self._named: _Named | None = None
        self._behind = 0  # bytes that followed the tensors the last time

    def stage(
        self,
        part: Part,
        take: Take,
        tensors: Sequence[TensorItem],
        byte_keys: Sequence[str] = (),
        *,
        kind: object = None,
        late: LateCopy | None = None,
    ) -> Sequence[torch.Tensor]:
        """Copy tensors into a slot, to be named by `fill`. Return the copies, in order. See `Save.stage`."""
        values = list(map(_second, tensors))
        plan = self._staged
        if plan is None or kind is None or plan.kind is not kind:
            plan = self._staged = _planned(plan, list(map(_first, tensors)), values, list(byte_keys), kind=kind)
        return plan.to_caller(self._copy(part, take, plan, values, plan.layout.size + self._behind, late=late))

    def _copy(
        self,
        part: Part,
        take: Take,
        plan: _Plan,
        values: Sequence[torch.Tensor],
        size: int,
        *,
        exact: bool = False,
        late: LateCopy | None = None,
    ) -> Sequence[torch.Tensor]:
        """Take a slot of a size and copy tensors there as planned. Return the copies in the order of the entries."""
        layout, sources = plan.layout, plan.to_file(values)
        old, part.slot, part.layout = part.slot, None, None
        slot = part.slot = take(size, old, exact)
        part.begin, part.end = layout.data_start, layout.size
        views = plan.views.get(slot)
        if views is None:
            entries = zip(layout.tensors, sources, strict=True)
            views = plan.views[slot] = [slot.view(to.begin, to.end, of.dtype, to.shape) for to, of in entries]
        if late is None:
            copy_all(views, sources, plan.pieces)
            return views
        numbers = plan.to_file(range(len(views)))
        later = [n for n, number in enumerate(numbers) if number in late.numbers and late.takes(views[n], sources[n])]
        now = sorted(set(range(len(views))).difference(later))
        copy_all([views[n] for n in now], [sources[n] for n in now])
        if later:
            part.late = late
            names = [layout.tensors[n].key for n in later]
            late.start(names, [views[n] for n in later], [sources[n] for n in later])
        return views

    def fill(self, part: Part, take: Take, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem] = ()) -> None:
        """Bring items into one object. Tensors that were staged stay as they lie, others are copied behind them."""
        if not self._name(part, tensors, byte_items):
            self._place(part, take, tensors, byte_items)
        part.byte_items = list(byte_items)

    def _name(self, part: Part, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> bool:
        """Name what was staged. Return False if there is nothing, or an object cannot hold it as it lies."""
        slot, begin, end = part.slot, part.begin, part.end
        if slot is None:
            return False
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
                return False
            self._named = named
        size = max(named.layout.size, end) + sum(map(len, map(_second, byte_items)))
        if size > slot.size or _wastes(named.nbytes, part):
            return False
        if named.appended:
            targets = [_view(slot, named.layout.by_key[names[n]]) for n in named.appended]
            copy_all(targets, [values[n] for n in named.appended])
        part.layout = named.layout
        return True

    def _place(self, part: Part, take: Take, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Copy all tensors into a slot, under a header that fits."""
        tensors, aliases = _without_aliases(tensors)
        names, values = list(map(_first, tensors)), list(map(_second, tensors))
        was_staged = part.slot is not None
        if was_staged:  # some of them lie in the slot, which may be taken again
            part.wait()
            values = cpu_clones(values)
        plan = self._placed = _planned(self._placed, names, values, list(map(_first, byte_items)), aliases)
        size = plan.layout.size + max(self._behind, sum(map(len, map(_second, byte_items))))
        exact = was_staged and _wastes(size, part)
        self._copy(part, take, plan, values, slot_size(size) if exact else size, exact=exact)
        part.layout = plan.layout

    def seal(self, part: Part, take: Take, extra: Sequence[BytesItem]) -> tuple[Slot, ObjectRecord]:
        """Add further byte items, write the header and complete the digests. Return the slot, which is another one if
        these items did not fit, and the object's entry for the manifest."""
        items = [*part.byte_items, *extra]
        was_placed = False
        while True:
            slot, layout = part.slot, part.layout
            assert slot is not None
            assert layout is not None
            whole = with_byte_items(layout, [(key, len(data)) for key, data in items], part.end)
            self._behind = max(0, whole.size - part.end)  # about as long the next time
            try:
                return slot, slot.seal(whole, list(map(_second, items)))
            except CapacityError:
                if was_placed:
                    raise
            lying = [(key, _view(slot, entry)) for key, entry in layout.by_key.items() if entry.kind == "tensor"]
            self._place(part, take, lying, items)
            was_placed = True


def _wastes(nbytes: int, part: Part) -> bool:
    """Return True if an object is much smaller than what was staged, since DCP stages all of a replicated state."""
    return nbytes * 3 < part.end * 2


def _view(slot: Slot, entry: Entry) -> torch.Tensor:
    return slot.view(entry.begin, entry.end, DTYPES[entry.dtype], entry.shape)


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
    signature = names, list(map(_dtype, values)), list(map(_shape, values)), byte_keys, aliases or {}
    if known is not None and known.signature == signature:
        return known if known.kind is kind else replace(known, kind=kind)
    tensors = list(zip(names, values, strict=True))
    layout = plan_layout(described(tensors), [(key, 0) for key in byte_keys], aliases)
    place = {name: number for number, name in enumerate(names)}
    order = [place[entry.key] for entry in layout.tensors]
    back = sorted(range(len(order)), key=order.__getitem__)
    pieces = tuple(cut(entry.nbytes for entry in layout.tensors))
    return _Plan(kind, signature, layout, pieces, elements(order), elements(back))


def _named(
    signature: tuple[object, ...], places: Iterable[tuple[str, int, torch.dtype, torch.Size]], begin: int, end: int
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

    ``idle`` is called when there is nothing to do, and again at once if it returns True. Raises a `SaveError` if no
    thread can be started.
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
        """End the thread after what it was given. Wait a moment: it may be making a slot, and whoever opens the base
        container next removes what is half made."""
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
