"""One pass over a tracked `DataLoader`: its indices, drawn once more where that is needed, and its batches, counted.

Owns `Epoch`, the record of a pass, and what counts it: `Indices` takes the place of the loader's sampler while an
iterator is made, and `Batches` is that iterator. When a pass begins, and from where, is `loader_state`'s.
"""

from __future__ import annotations

import copy
import itertools
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ml_flashpoint.facade.loader_workers import Tagged

Through = Callable[[Iterable[Any]], Iterable[Any]]
"""Gives the batches of an iterable, one for each and in their order; may take some ahead."""


@dataclass(slots=True)
class Epoch:
    """The record of one pass over a loader.

    Attributes:
        number: from 1 on, over all lives of the job; 0 while there was none.
        start: generators and samplers when it began.
        position: batches given to the loop.
        ended: whether the loop was told that there are no more.
        checksum: of the indices of these batches; None if unknown.
        workers: generators of each worker after its latest of these batches; empty without workers.
        own: the state of a loader that has one, after these batches; None if the loader itself is to be asked.
        generators: states of the loader's generators after these batches; None if the generators are to be asked.
        drawn: checksums after batches that are being fetched.
    """

    number: int = 0
    start: dict[str, Any] = field(default_factory=dict)
    position: int = 0
    ended: bool = False
    checksum: int | None = 0
    workers: list[bytes] = field(default_factory=list)
    own: dict[str, Any] | None = None
    generators: list[torch.Tensor] | None = None
    drawn: deque[int] = field(default_factory=deque)

    @property
    def under_way(self) -> bool:
        """Whether it has begun and not ended."""
        return self.number > 0 and not self.ended

    def again(self) -> Epoch:
        """The record of a pass that goes on from here."""
        return Epoch(self.number, self.start, self.position, self.ended, self.checksum, list(self.workers))


class Indices:
    """In place of a loader's sampler: the same indices, counted, after those of batches that were given already.

    Args:
        sampler: the loader's.

    Attributes:
        draw: gives the indices of a new iterator.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.draw: Callable[[Any], Iterator[Any]] = iter

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.draw(self._sampler)


class Draw:
    """Draws the indices of one pass.

    Args:
        epoch: keeps count.
        check: called with the number and the checksum of the indices that were left out.
        to_start: puts the generators back to where they were when the epoch began.
        late: leave out what is drawn before the first index.
    """

    def __init__(
        self, epoch: Epoch, check: Callable[[int, int], None], to_start: Callable[[], None], *, late: bool
    ) -> None:
        self._epoch = epoch
        self._check, self._to_start = check, to_start
        self._late = late
        self._skip = epoch.position
        self._drawn: Iterator[Any] | None = None
        self._sampler: Any = None
        self._skipped = True
        self._checksum = 0

    def begin(self, sampler: Any) -> Iterator[Any]:
        """The indices of the batches to fetch. Called more than once where torch makes its iterator so."""
        self._sampler, self._skipped, self._checksum = sampler, False, 0
        self._drawn = None if self._late else iter(sampler)
        return self._rest()

    def skip(self) -> None:
        """Leave out the indices of batches that were given, if that was not done yet.

        Raises:
            LoadError: they are others than those of the run that was saved.
        """
        if self._skipped:
            return
        self._epoch.drawn.clear()
        if self._drawn is None:
            self._to_start()
            self._drawn = iter(self._sampler)
        given = 0
        for batch in itertools.islice(self._drawn, self._skip):
            given += 1
            self._checksum = _checksum(batch, self._checksum)
        self._check(given, self._checksum)
        self._skipped = True

    def _rest(self) -> Iterator[Any]:
        self.skip()
        assert self._drawn is not None
        for batch in self._drawn:
            self._checksum = _checksum(batch, self._checksum)
            self._epoch.drawn.append(self._checksum)
            yield batch


def _checksum(batch: object, before: int) -> int:
    return zlib.crc32(repr(batch).encode(), before)


class _Fetched(NamedTuple):
    """What is to be kept of a batch once the loop has it; see `Epoch`."""

    checksum: int | None
    worker: bytes
    ahead: tuple[dict[str, Any] | None, list[torch.Tensor]] | None


class Batches:
    """An iterator over the batches of a tracked loader, which counts those that the loop was given.

    Args:
        inner: the loader's own iterator.
        epoch: where they are counted.
        workers: their number, of a loader whose workers report; 0 if they do not.
        through: takes them before the loop does.
        ahead: gives the state of the loader, if it has one, and of its generators; called where ``through`` may fetch
            batches before the loop has them.
        is_current: says whether no other pass over the loader was begun since.
        warn: called with what is wrong.
    """

    def __init__(
        self,
        inner: Iterator[Any],
        epoch: Epoch,
        workers: int,
        *,
        through: Through | None,
        ahead: Callable[[], tuple[dict[str, Any] | None, list[torch.Tensor]]],
        is_current: Callable[[Batches], bool],
        warn: Callable[[str], None],
    ) -> None:
        self._epoch = epoch
        self._workers = workers
        self._is_current, self._warn = is_current, warn
        self._fetched: deque[_Fetched] = deque()
        if through is not None:
            epoch.own, epoch.generators = copy.deepcopy(ahead())
        self._given = iter((through or iter)(_fetch(inner, epoch, None if through is None else ahead, self._fetched)))
        self.thread = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.thread = threading.get_ident()
        try:
            batch = next(self._given)
        except StopIteration:
            self._epoch.ended, self._epoch.own, self._epoch.generators = True, None, None
            if self._fetched:
                self._warn(_NOT_ONE_FOR_EACH)
            raise
        if not self._is_current(self):
            self._warn(_TWO_ITERATORS)
        if self._fetched:
            self._count(self._fetched.popleft())
        else:
            self._warn(_NOT_ONE_FOR_EACH)
        return batch

    def _count(self, batch: _Fetched) -> None:
        epoch = self._epoch
        if self._workers:
            if len(epoch.workers) != self._workers:
                epoch.workers = [b""] * self._workers
            if batch.worker:
                epoch.workers[epoch.position % self._workers] = batch.worker
        epoch.position += 1
        if batch.checksum is not None:
            epoch.checksum = batch.checksum
        if batch.ahead is not None:
            epoch.own, epoch.generators = batch.ahead


def _fetch(
    inner: Iterator[Any], epoch: Epoch, ahead: Callable[[], Any] | None, fetched: deque[_Fetched]
) -> Iterator[Any]:
    """The batches, and what is to be kept of them. Has no reference to `Batches`: a loop that is left ends at once."""
    for batch in inner:
        worker = b""
        if isinstance(batch, Tagged):
            batch, worker = batch
        checksum = epoch.drawn.popleft() if epoch.drawn else None
        fetched.append(_Fetched(checksum, worker, None if ahead is None else copy.deepcopy(ahead())))
        yield batch


_NOT_ONE_FOR_EACH = (
    "through= has not given one batch for each that it took, in their order, so that a restart goes on with other data"
)
_TWO_ITERATORS = (
    "an iterator gives batches that was begun before another one, or before resume(): only the newest one counts where"
    " a restart goes on. Loop over one at a time, and over a new one after resume()"
)
