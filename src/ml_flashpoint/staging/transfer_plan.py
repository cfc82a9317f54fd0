"""How tensors become transfers between host memory and devices.

A large one is cut; small ones that lie side by side in host memory, as in an arena, go together, with CPU tensors
that lie between them copied afterwards. Owns these rules, and the plans that are kept from one copy to the next.
Carrying them out is `device_copy`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ml_flashpoint.staging import cuda
from ml_flashpoint.staging.lane import SLAB

SMALL = 4 << 20
"""Tensors of fewer bytes are packed: a transfer of its own would cost more than it moves."""
GAP = 64 << 10
"""CPU tensors of at most so many bytes do not separate those beside them."""


@dataclass(slots=True)
class Chunk:
    """One transfer: host memory ``begin:end``, counted from where its plan begins.

    Attributes:
        lane: index of the device. is_down: from there to here.
        members: numbers of the pairs in it; if it is one alone, ``at`` is the first byte of it.
        groups: of several, those of one dtype each: their numbers and places in host memory.
        views: the places of the groups' members in each slab, by its address.
    """

    lane: int
    is_down: bool
    begin: int
    end: int
    members: tuple[int, ...]
    at: int = 0
    groups: list[tuple[list[int], list[int]]] = field(default_factory=list)
    views: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """How pairs become transfers.

    Attributes:
        chunks: for the pairs whose bytes can be moved as they are.
        odd: the pairs that cannot. across: those between devices. hosts: those of CPU tensors.
    """

    chunks: list[Chunk] = field(default_factory=list)
    odd: list[int] = field(default_factory=list)
    across: list[int] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)


class Memo:
    """Plans kept for pairs whose targets keep their places, dtypes and shapes, in one arena or another."""

    def __init__(self) -> None:
        self._plans: dict[int, tuple[object, Plan]] = {}

    def plan(self, phase: int, shape: object, make: Callable[[], Plan]) -> Plan:
        """The plan for arenas that begin ``phase`` bytes behind a border, if it was made for the same ``shape``."""
        known = self._plans.get(phase)
        if known is None or known[0] != shape:
            if len(self._plans) >= 4:  # as many arenas as there are, but for those that came and went
                self._plans.clear()
            known = self._plans[phase] = (shape, make())
        return known[1]


class Packer:
    """Makes chunks of pairs in their order, each within one slice of the memory that is counted from ``base``."""

    def __init__(self, chunks: list[Chunk], base: int) -> None:
        self.chunks = chunks
        self._base = base
        self._run: Chunk | None = None
        self._skipped = 0
        self._dtypes: dict[torch.dtype, tuple[list[int], list[int]]] = {}

    def add(self, number: int, lane: int, is_down: bool, begin: int, nbytes: int, dtype: torch.dtype) -> None:
        """One pair, whose host memory begins there."""
        end = begin + nbytes
        if nbytes >= SMALL or next(cuda.slices(self._base + begin, self._base + end))[1] < self._base + end:
            self.flush()
            self.cut(number, lane, is_down, begin, nbytes)
            return
        run = self._run
        if run is None or not self._continues(run, lane, is_down, begin, end):
            self.flush()
            run = self._run = Chunk(lane, is_down, begin, begin, ())
        run.end = self._skipped = end
        numbers, places = self._dtypes.setdefault(dtype, ([], []))
        numbers.append(number)
        places.append(begin)

    def _continues(self, run: Chunk, lane: int, is_down: bool, begin: int, end: int) -> bool:
        return (
            (run.lane, run.is_down, self._skipped) == (lane, is_down, begin)
            and end - run.begin <= SLAB
            and (self._base + run.begin) // cuda.SLICE == (self._base + end - 1) // cuda.SLICE
        )

    def skip(self, begin: int, nbytes: int) -> None:
        """A pair of CPU tensors, whose target begins there."""
        if self._run is not None and self._run.is_down and begin == self._skipped and nbytes <= GAP:
            self._skipped += nbytes
        elif nbytes:
            self.flush()

    def flush(self) -> None:
        """End what is being packed."""
        if self._run is not None:
            self._run.members = tuple(sorted(n for numbers, _ in self._dtypes.values() for n in numbers))
            if len(self._run.members) > 1:
                self._run.groups = list(self._dtypes.values())
            self.chunks.append(self._run)
        self._run, self._dtypes = None, {}

    def cut(self, number: int, lane: int, is_down: bool, begin: int, nbytes: int) -> None:
        """One pair by itself, in transfers that are not too large."""
        for first, last in cuda.slices(self._base + begin, self._base + begin + nbytes):
            for at in range(first - self._base, last - self._base, SLAB):
                end = min(at + SLAB, last - self._base)
                self.chunks.append(Chunk(lane, is_down, at, end, (number,), at - begin))
