"""Copies between host memory and CUDA devices, in transfers that are neither too many nor too large.

Owns the order of what is done. Transfers go straight to and from host memory that is page-locked; anything else goes
through slots that are, which several threads fill and empty. Small tensors that `transfer_plan` has put together are
packed on the device. The calls of CUDA are `lane`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ml_flashpoint.staging import cuda
from ml_flashpoint.staging.lane import PADDING, Lanes
from ml_flashpoint.staging.torch_dtypes import bytes_of
from ml_flashpoint.staging.transfer_plan import GAP, Chunk, Memo, Packer, Plan

_WORKERS = 8

# These are copied on a device bit for bit. Half floats take the way through floats, which changes those that are NaN.
_EXACT = frozenset(
    getattr(torch, f"{kind}{bits}")
    for kind, sizes in {"float": (32, 64), "complex": (64, 128), "int": (8, 16, 32, 64), "uint": (8,)}.items()
    for bits in sizes
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_process_lanes = Lanes()


def _begin_anew() -> None:
    global _process_lanes
    _process_lanes = Lanes()


os.register_at_fork(after_in_child=_begin_anew)


class _ThisThread(threading.local):
    queued_s = 0.0


_this_thread = _ThisThread()


def take_queued_s() -> float:
    """Seconds that copies of this thread have waited, since this was last asked, for work that their devices had to do
    before: the thread was ahead of its device, which was not kept from anything meanwhile."""
    queued, _this_thread.queued_s = _this_thread.queued_s, 0.0
    return queued


def copy_through_lanes(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    copy_on_host: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
    memo: Memo | None = None,
    lanes: Any = None,
) -> None:
    """Copy every source into its target, some of which are on devices. Returns when the bytes are there.

    Args:
        copy_on_host: copies between CPU tensors.
        memo: plans of earlier copies to CPU tensors of these dtypes and shapes, in the same places, counted from the
            first that is not empty.

    Raises:
        SaveError: a CUDA graph is being captured.
    """
    transfer = Transfer(targets, sources, copy_on_host, memo, lanes)
    try:
        transfer.start()
    finally:
        transfer.settle()
    transfer.finish()


class Transfer:
    """One copy: :meth:`start` returns when all is under way that can be, :meth:`settle` when it is over, whatever has
    happened, and :meth:`finish` adds what must not come before that. Targets and sources must be kept till then."""

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        copy_on_host: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
        memo: Memo | None = None,
        lanes: Any = None,
    ) -> None:
        self._targets, self._sources = targets, sources
        self._copy_on_host = copy_on_host
        self._lanes = lanes if lanes is not None else _process_lanes
        self._to = self._lanes.indices(targets) if memo is None else [-1] * len(targets)
        self._of = self._lanes.indices(sources)
        # By number, the tensors whose bytes are moved in the place of one that cannot be.
        self._plain: dict[int, torch.Tensor] = {}
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._begun: list[tuple[Any, Any]] = []
        self._holds: list[tuple[Any, Any]] = []
        self._asked_at = 0.0
        self._slots: list[torch.Tensor] = []
        self._kept: dict[int, torch.Tensor] = {}
        self._base = 0
        self._plan = self._planned(memo)

    # ---- planning -----------------------------------------------------------------------------------------

    def _planned(self, memo: Memo | None) -> Plan:
        sources = self._sources
        if memo is None or any(map(torch.Tensor.is_conj, sources)) or any(map(torch.Tensor.is_neg, sources)):
            return self._make_plan()
        self._base = next((target.data_ptr() for target in self._targets if target.numel()), 0)
        contiguous = list(map(torch.Tensor.is_contiguous, sources))
        return memo.plan(self._base % cuda.SLICE, (self._of, contiguous), self._make_plan)

    def _host(self, number: int) -> torch.Tensor:
        return self._targets[number] if self._to[number] < 0 else self._sources[number]

    def _make_plan(self) -> Plan:
        plan = Plan()
        packer = Packer(plan.chunks, self._base)
        for number, (to, of) in enumerate(zip(self._to, self._of, strict=True)):
            target, source = self._targets[number], self._sources[number]
            address, nbytes = self._host(number).data_ptr() - self._base, target.nbytes
            if to < 0 and of < 0:
                plan.hosts.append(number)
                packer.skip(address, nbytes)
            elif to >= 0 and of >= 0:
                plan.across.append(number)
            elif not (_is_plain(target) and _is_plain(source) and target.dtype == source.dtype):
                plan.odd.append(number)
            elif nbytes:
                packer.add(number, max(to, of), to < 0, address, nbytes, target.dtype)
        packer.flush()
        return plan

    # ---- enqueuing ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Give all transfers to the devices; those through slots are waited for."""
        plan = self._plan
        self._asked_at = time.perf_counter()
        for index in sorted({*self._to, *self._of} - {-1}):
            lane = self._lanes.lane(index)
            self._begun.append((lane, lane.begin()))
        for number in plan.across:
            lane = self._lanes.lane(self._of[number])
            lane.copy(lane.move, self._targets[number], self._sources[number])
        chunks = [(self._base, chunk) for chunk in self._with_slabs(plan.chunks)]
        for number in plan.odd:
            chunks += [(0, chunk) for chunk in self._made_plain(number)]
        through_slots: list[tuple[int, Chunk]] = []
        for base, chunk in chunks:
            if cuda.is_locked(base + chunk.begin, chunk.end - chunk.begin):
                self._enqueue(base, chunk, _bytes_at(base + chunk.begin, chunk.end - chunk.begin))
            else:
                through_slots.append((base, chunk))
        large = [number for number in plan.hosts if self._targets[number].nbytes > GAP]
        self._copy_hosts(large)
        self._through_slots(through_slots)
        for number in plan.odd:  # on the device, behind the bytes that they are made of
            if self._to[number] >= 0 and (made := self._plain.get(number)) is not None:
                lane, target = self._lanes.lane(self._to[number]), self._targets[number]
                if not (target.is_conj() or target.is_neg()):
                    target, made = _bits(target), _bits(made)
                lane.copy(lane.move, target, made)

    @property
    def is_direct(self) -> bool:
        """Whether nothing goes through slots: :meth:`start` then returns before anything is copied, but for CPU tensors
        that are not small."""
        odd = (self._targets[number] for number in self._plan.odd)
        places = [(self._base + chunk.begin, self._base + chunk.end) for chunk in self._plan.chunks]
        places += [part for target in odd for part in cuda.slices(target.data_ptr(), target.data_ptr() + target.nbytes)]
        is_down = all(index < 0 for index in self._to) and all(_is_plain(self._targets[n]) for n in self._plan.odd)
        return is_down and all(cuda.is_locked(begin, end - begin) for begin, end in places)

    def hold(self) -> None:
        """Have what this thread gives to the devices from now on wait for the transfers; not the thread."""
        self._holds += [(lane, lane.hold()) for lane, _ in self._begun]

    def held_s(self) -> float:
        """Seconds for which a device was kept from that. To be asked once the transfers are over."""
        return max((lane.held(events) for lane, events in self._holds), default=0.0)

    def keep_small(self) -> None:
        """Keep the CPU tensors as they are that :meth:`finish` will copy."""
        numbers = [number for number in self._plan.hosts if self._targets[number].nbytes <= GAP]
        kept = [torch.empty_like(self._sources[number]) for number in numbers]
        self._copy_on_host(kept, [self._sources[number] for number in numbers])
        self._kept = dict(zip(numbers, kept, strict=True))

    def _with_slabs(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks; without room for slabs, each tensor by itself."""
        largest: dict[int, int] = {}
        for chunk in chunks:
            if chunk.groups:
                largest[chunk.lane] = max(largest.get(chunk.lane, 0), chunk.end - chunk.begin)
        without = set()
        for index, nbytes in largest.items():
            lane = self._lanes.lane(index)
            with lane.lock:
                if not lane.ensure_slabs(nbytes):
                    without.add(index)
        if not without:
            return chunks
        return [part for each in chunks for part in (self._apart(each) if each.lane in without else (each,))]

    def _apart(self, chunk: Chunk) -> Iterator[Chunk]:
        if not chunk.groups:
            yield chunk
        for numbers, places in chunk.groups:
            for number, place in zip(numbers, places, strict=True):
                yield Chunk(chunk.lane, chunk.is_down, place, place + self._targets[number].nbytes, (number,))

    def _made_plain(self, number: int) -> Iterator[Chunk]:
        """Transfers for a pair of which one is not contiguous, or whose dtypes differ."""
        target, source = self._targets[number], self._sources[number]
        if not target.numel():
            return
        is_down = self._to[number] < 0
        index = self._of[number] if is_down else self._to[number]
        lane = self._lanes.lane(index)
        if is_down:
            if source.dtype == target.dtype and not (source.is_conj() or source.is_neg()):
                source = _bits(source)  # torch has no kernels for some dtypes
            dtype = target.dtype if source.dtype != _bits(target).dtype else source.dtype
            self._plain[number] = lane.plain(lane.move, source, dtype)
            host = target
            if not _is_plain(target):
                host = torch.empty(target.shape, dtype=target.dtype, device="cpu")
                self._after.append((target, host))
        else:
            host = torch.empty(source.shape, dtype=target.dtype, device="cpu")
            self._copy_on_host([host], [source])
            self._slots.append(host)
            if not _is_plain(target):
                self._plain[number] = lane.empty(lane.move, target, target.dtype)
        packer = Packer([], 0)
        packer.cut(number, index, is_down, host.data_ptr(), host.nbytes)
        yield from packer.chunks

    def _device_bytes(self, number: int, at: int, nbytes: int) -> torch.Tensor:
        tensor = self._plain.get(number)
        if tensor is None:
            tensor = self._targets[number] if self._to[number] >= 0 else self._sources[number]
        return bytes_of(tensor)[at : at + nbytes]

    def _enqueue(self, base: int, chunk: Chunk, host: torch.Tensor) -> Any:
        """Give one transfer to its lane. Returns the event after which ``host`` was read or written."""
        lane = self._lanes.lane(chunk.lane)
        with lane.lock, torch.no_grad():
            if not chunk.groups:
                device = self._device_bytes(chunk.members[0], chunk.at, chunk.end - chunk.begin)
                lane.copy(lane.move, *((host, device) if chunk.is_down else (device, host)))
                return lane.record(lane.move)
            turn, slab = lane.next_slab()
            begin = (base + chunk.begin) % PADDING
            packed = slab[begin : begin + chunk.end - chunk.begin]
            filler, emptier = (lane.pack, lane.move) if chunk.is_down else (lane.move, lane.pack)
            if lane.freed[turn] is not None:
                lane.wait(filler, lane.freed[turn])
            if chunk.is_down:
                self._pack(lane, chunk, slab, begin)
            else:
                lane.copy(filler, packed, host)
            moved = lane.record(filler)
            lane.wait(emptier, moved)
            if chunk.is_down:
                lane.copy(emptier, host, packed)
            else:
                self._pack(lane, chunk, slab, begin)
            lane.freed[turn] = lane.record(emptier)
            return lane.freed[turn] if chunk.is_down else moved

    def _pack(self, lane: Any, chunk: Chunk, slab: torch.Tensor, begin: int) -> None:
        """Copy the members of a chunk into a slab, where the chunk begins, or out of it."""
        views = chunk.views.get(slab.data_ptr())
        tensors = self._sources if chunk.is_down else self._targets
        if views is None:
            if len(chunk.views) >= 2:
                chunk.views.clear()  # of slabs that are no more
            views = chunk.views[slab.data_ptr()] = [
                [_view(slab, begin + place - chunk.begin, tensors[n]) for n, place in zip(*group, strict=True)]
                for group in chunk.groups
            ]
        for (numbers, _), places in zip(chunk.groups, views, strict=True):
            members = [tensors[number] for number in numbers]
            if members[0].dtype not in _EXACT:
                members = [_bits(member) for member in members]
            lane.copy_many(lane.pack, *((places, members) if chunk.is_down else (members, places)))

    # ---- through slots ------------------------------------------------------------------------------------

    def _through_slots(self, chunks: list[tuple[int, Chunk]]) -> None:
        """Move these by threads, this one and as many as help, each with a slot of its own."""
        if not chunks:
            return
        size = max(chunk.end - chunk.begin for _, chunk in chunks)
        left, lock = iter(chunks), threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                slot: torch.Tensor | None = None
                before: tuple[Any, Any] | None = None
                while not errors:
                    with lock:
                        base, chunk = next(left, (0, None))
                    if chunk is None:
                        return
                    if slot is None:
                        slot = self._lanes.lane(chunk.lane).slot(size)
                        with lock:
                            self._slots.append(slot)
                    if before is not None:
                        before[0].sync(before[1])
                    before = self._through_slot(base, chunk, slot[: chunk.end - chunk.begin])
            except BaseException as error:
                errors.append(error)

        helpers = [threading.Thread(target=work, name="flashpoint-transfer", daemon=True) for _ in range(_helpers())]
        helpers = helpers[: len(chunks) - 1]
        started: list[threading.Thread] = []
        try:
            for helper in helpers:
                helper.start()
                started.append(helper)
        except RuntimeError:  # there can be no more threads
            pass
        try:
            work()
        finally:
            for helper in started:
                helper.join()
        if errors:
            raise errors[0]

    def _through_slot(self, base: int, chunk: Chunk, slot: torch.Tensor) -> tuple[Any, Any] | None:
        """Move one chunk. Returns the event, and its lane, after which the slot may be used again."""
        lane = self._lanes.lane(chunk.lane)
        host = _bytes_at(base + chunk.begin, chunk.end - chunk.begin)
        if not chunk.is_down:
            slot.copy_(host)
            return lane, self._enqueue(base, chunk, slot)
        lane.sync(self._enqueue(base, chunk, slot))
        host.copy_(slot)
        return None

    # ---- ending -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until nothing is under way any more, on any device."""
        came_to_it = self._asked_at
        try:
            with contextlib.ExitStack() as stack:
                for lane, began in self._begun:

                    def end(lane: Any = lane, began: Any = began) -> None:
                        nonlocal came_to_it
                        came_to_it = max(came_to_it, -lane.end(began) + time.perf_counter())

                    stack.callback(end)
        finally:
            self._begun.clear()
            self._plain.clear()
            self._slots.clear()
        _this_thread.queued_s += came_to_it - self._asked_at

    def finish(self) -> None:
        """Copy what lies between others in host memory, and was overwritten with them."""
        self._copy_hosts([number for number in self._plan.hosts if self._targets[number].nbytes <= GAP])
        if self._after:
            self._copy_on_host([target for target, _ in self._after], [host for _, host in self._after])

    def _copy_hosts(self, numbers: list[int]) -> None:
        if numbers:
            sources = [self._kept.get(n, self._sources[n]) for n in numbers]
            self._copy_on_host([self._targets[n] for n in numbers], sources)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _EXACT else tensor.view(_INTEGERS[tensor.dtype.itemsize])


def _view(slab: torch.Tensor, begin: int, tensor: torch.Tensor) -> torch.Tensor:
    bits = _bits(tensor)
    return slab[begin : begin + tensor.nbytes].view(bits.dtype).view(tensor.shape)


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """Host memory as a tensor; it is kept by whoever passed the tensors that lie there."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def _helpers() -> int:
    return max(0, min(_WORKERS, len(os.sched_getaffinity(0))) - 1)
