"""Data loaders of torch that are tracked: where they stand, and how they get there again, bit for bit.

Owns the position of a `DataLoader`, the generators that its order came from, and those of its workers. A plain loader
has no state, and one with a state (torchdata's `StatefulDataLoader`) draws from torch's global generator when it is
iterated over again, which the undisturbed run does not do there. So a tracked loader is made one of a subclass, as
`fully_shard` does with modules, whose `__iter__` asks here: the loop of the user stays as it is.

A plain loader is brought back by drawing its indices again, from the generators as they were at the begin of the epoch.
No sample is fetched for that. A checksum of the indices tells whether they were the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ml_flashpoint.facade.loader_workers import GoingOn, Reporting, Tagged
from ml_flashpoint.facade.rest_of_epoch import deal, dealing_of
from ml_flashpoint.facade.rng_state import capture_rng_state, restore_rng_state
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError

_log = logging.getLogger(__name__)

_STATEFUL = "use torchdata's StatefulDataLoader, which has a state of its own (pip install torchdata)"
_HANDLE = "_flashpoint_state"


@dataclass(slots=True)
class _Epoch:
    """One pass over a loader.

    Attributes:
        number: from 1 on, over all lives of the job; 0 while there was none.
        start: generators and samplers when it began.
        position: batches given to the loop.
        ended: whether the loop was told that there are no more.
        checksum: of the indices of these batches.
        workers: generators of each worker after its latest of these batches; empty without workers.
    """

    number: int = 0
    start: dict[str, Any] = field(default_factory=dict)
    position: int = 0
    ended: bool = False
    checksum: int | None = 0
    workers: list[bytes] = field(default_factory=list)
    drawn: deque[int] = field(default_factory=deque)  # checksums after batches that are being fetched

    @property
    def under_way(self) -> bool:
        return self.number > 0 and not self.ended


def loader_state(name: str, loader: DataLoader[Any]) -> LoaderState:
    """The state of a loader to track; makes the loader one of a subclass of its class.

    Args:
        name: under which it is tracked, for messages.
        loader: the same one has the same state, however often it is tracked.

    Raises:
        InvalidArgumentError: such a loader cannot be brought back to where it was.
    """
    known = loader.__dict__.get(_HANDLE)
    if isinstance(known, LoaderState):
        return known
    if not _has_state(loader):
        _check_plain(name, loader)
    state = LoaderState(name, loader)
    setattr(loader, _HANDLE, state)
    kind: Any = type(loader)
    loader.__class__ = _subclass(kind)
    return state


class LoaderState:
    """The state of a tracked loader, see :func:`loader_state`. Belongs to the training thread."""

    def __init__(self, name: str, loader: DataLoader[Any]) -> None:
        self._name = name
        self.loader = loader
        self._stateful = _has_state(loader)
        self._epoch = _Epoch()
        self._resumed = False  # whether the next pass stands in for one that another process began, or would have
        self._loaded_set_epoch: int | None = None
        self._workers_shifted = False  # whether persistent workers have each other's numbers
        self._indices: _Indices | None = None

    # ---- saving and loading -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        epoch = self._epoch
        state: dict[str, Any] = {
            "number": epoch.number,
            "ended": epoch.ended,
            "position": epoch.position,
            "set_epoch": self._set_epoch(),
            "dealing": dealing_of(self.loader),
        }
        if self._stateful:
            return state | {"own": self.loader.state_dict()}  # type: ignore[attr-defined]
        return state | {
            "start": epoch.start,
            "checksum": epoch.checksum,
            "generators": [each.get_state() for each in self._generators()],
            "workers": [_as_tensor(each) for each in epoch.workers],
            "replicas": self._replicas(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect with the next pass over the loader."""
        if self._stateful:
            self._epoch = _Epoch(state["number"], position=state["position"], ended=state["ended"])
            self.loader.load_state_dict(state["own"])  # type: ignore[attr-defined]
        else:
            position, checksum = state["position"], state["checksum"]
            before, now = state["replicas"], self._replicas()
            if before not in (
                now,
                None,
            ):  # ranks take turns in the samples: go on after as many as all of them have had
                position, checksum = position * before // now, None
            workers = [each.numpy().tobytes() for each in state["workers"]]
            self._epoch = _Epoch(state["number"], state["start"], position, state["ended"], checksum, workers)
            self._put_back(state["generators"])
        epoch = self._loaded_set_epoch = state.get("set_epoch")
        for sampler in self._samplers():
            if epoch is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        deal(self.loader, state.get("dealing") if self._epoch.under_way else None)
        self._resumed = True

    def forget(self) -> None:
        """Undo a `load_state_dict` that was part of a load that failed elsewhere."""
        if self._resumed:
            self._epoch, self._resumed = _Epoch(), False
            deal(self.loader)

    def _samplers(self) -> list[Any]:
        loader = self.loader
        return [each for each in (loader.sampler, loader.batch_sampler) if each is not None]

    def _generators(self) -> list[torch.Generator]:
        found = (getattr(each, "generator", None) for each in (self.loader, *self._samplers()))
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _put_back(self, generators: list[torch.Tensor]) -> None:
        for generator, saved in zip(self._generators(), generators, strict=False):
            generator.set_state(saved)

    def capture(self) -> dict[str, Any]:
        """All generators that indices may be drawn from."""
        return {"rng": capture_rng_state(), "own": [each.get_state() for each in self._generators()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`capture` took."""
        restore_rng_state({**state["rng"], "cuda": []})
        self._put_back(state["own"])

    def to_start(self, epoch: _Epoch) -> None:
        """Put back what there was at the begin of an epoch."""
        self.restore(epoch.start)
        for sampler, saved in zip(self._samplers(), epoch.start["samplers"], strict=False):
            if saved is not None and _has_state(sampler):
                sampler.load_state_dict(saved)

    def _set_epoch(self) -> int | None:
        """The epoch that ``set_epoch`` has set, as of a `DistributedSampler`."""
        epochs = (getattr(each, "epoch", None) for each in self._samplers() if hasattr(each, "set_epoch"))
        return next((each for each in epochs if isinstance(each, int)), None)

    def _replicas(self) -> int:
        replicas = getattr(self.loader.sampler, "num_replicas", None)
        return replicas if isinstance(replicas, int) and replicas > 0 else 1

    # ---- a pass over the loader ---------------------------------------------------------------------------

    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The iterator for a new ``for`` loop.

        Args:
            make: makes the one of the loader itself.

        Raises:
            LoadError: the loader does not give what it gave to the run that was saved.
        """
        resumed = self._resumed
        if self._stateful:
            self._resumed = False
            return self._begin_stateful(make, resumed)
        loader, before, now = self.loader, self._epoch, self.capture()
        goes_on = resumed and before.under_way and not self._is_next_epoch(before)
        dealt_anew = goes_on and not before.start  # by other ranks, whose generators and workers mean nothing here
        if not goes_on:
            deal(self.loader)
        goes_on = goes_on and not dealt_anew
        if goes_on:
            epoch = self._epoch = dataclasses.replace(before, drawn=deque())
        else:
            samplers = [each.state_dict() if _has_state(each) else None for each in self._samplers()]
            epoch = self._epoch = _Epoch(before.number + (not dealt_anew), {**now, "samplers": samplers})
        # Persistent workers are not seeded again for their second epoch: whoever takes their place leaves the seed out.
        persistent = loader.num_workers > 0 and loader.persistent_workers
        anew = persistent and (resumed or self._workers_shifted)
        if anew:
            loader._iterator = None  # workers of a resumed epoch were numbered otherwise
        if persistent:
            epoch.workers = list(before.workers)
        self._workers_shifted = persistent and goes_on
        late = anew and epoch.number > 1 and not dealt_anew
        pass_ = _Pass(self, epoch, epoch.position, late=late, goes_on=goes_on)
        with self._in_place(pass_, resumed=goes_on or anew):
            if goes_on:
                self.to_start(epoch)
            try:
                inner = make()
            finally:
                pass_.after = self.capture()
                pass_.made = True
                if goes_on:
                    self.restore(now)
        self._resumed = False
        return _Batches(inner, epoch, loader.num_workers)

    def _begin_stateful(self, make: Callable[[], Iterator[Any]], resumed: bool) -> Iterator[Any]:
        goes_on = resumed and self._epoch.under_way
        if not goes_on:
            deal(self.loader)
            self._epoch = _Epoch(self._epoch.number + 1)
        now = capture_rng_state() if goes_on else None
        inner = make()
        if now is not None:
            restore_rng_state({**now, "cuda": []})
        return _Batches(inner, self._epoch, 0)

    def check(self, epoch: _Epoch, given: int, checksum: int) -> None:
        """Compare what was skipped with what was given before.

        Raises:
            LoadError: it was something else.
        """
        if epoch.checksum is None:
            epoch.checksum = checksum
        if (given, checksum) != (epoch.position, epoch.checksum):
            raise LoadError(
                f"{self._name!r} does not give the {epoch.position} batches again that it gave before: its data, the "
                "size of a batch or the sampler's seed are others, or the sampler has a state that nobody saves",
                hint=f"make the loader as it was, {_STATEFUL}, or begin the epoch anew by not tracking {self._name!r}",
            )

    def _is_next_epoch(self, epoch: _Epoch) -> bool:
        """Whether the program has gone on to the next epoch by itself, after the last batch of the one before."""
        begun, loaded = self._set_epoch(), self._loaded_set_epoch
        if begun == loaded:
            return False
        with contextlib.suppress(TypeError):
            if epoch.position >= len(self.loader):
                return True
        raise LoadError(
            f"the sampler of {self._name!r} was set to epoch {begun}, and its state is of the midst of epoch {loaded}",
            hint=f"begin the loop over epochs with {loaded}, which is step // len({self._name})",
        )

    @contextlib.contextmanager
    def _in_place(self, pass_: _Pass, *, resumed: bool) -> Iterator[None]:
        """While an iterator is made, which takes these over: indices that are counted, workers that go on."""
        loader, old = self.loader, (self.loader.collate_fn, self.loader.worker_init_fn)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, name)
        indices = self._indices = self._indices or _Indices(sampler)
        indices.pass_ = pass_
        object.__setattr__(loader, name, indices)  # torch lets nobody change it, since iterators keep the old one
        try:
            if loader.num_workers:
                loader.collate_fn = Reporting(loader.collate_fn)
                if resumed:
                    loader.worker_init_fn = GoingOn(old[1], pass_.epoch.workers, pass_.skip)
            yield
        finally:
            object.__setattr__(loader, name, sampler)
            loader.collate_fn, loader.worker_init_fn = old


def _check_plain(name: str, loader: DataLoader[Any]) -> None:
    batches = loader.batch_sampler
    problem = ""
    if isinstance(loader.dataset, IterableDataset):
        problem = "its dataset is iterable, so that only reading it again would lead to where it was"
    elif batches is not None and type(batches) is not BatchSampler and not _has_state(batches):
        problem = f"its batch sampler ({type(batches).__name__}) has no state_dict() and load_state_dict()"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        problem = f"its class ({type(loader).__name__}) has an __iter__ of its own, but no state_dict()"
    elif loader.num_workers and not getattr(loader, "in_order", True):
        problem = "its batches come in any order (in_order=False)"
    if problem:
        raise InvalidArgumentError(
            f"this DataLoader cannot be brought back to where it was: {problem}",
            argument=name,
            value=loader,
            hint=_STATEFUL,
        )


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _has_state(value: object) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


class _Indices:
    """In place of a loader's sampler: the same indices, counted, after those of batches that were given already."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.pass_: _Pass | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        assert self.pass_ is not None
        return self.pass_.draw(self._sampler)


class _Pass:
    """One pass over the indices.

    Args:
        state: whose.
        epoch: keeps count.
        skip: so many batches were given before.
        late: whether to leave out what is drawn before the first index.
        goes_on: whether the epoch was begun by another process.

    Attributes:
        made: whether the loader's iterator is made: what is drawn later is drawn in the midst of the loop.
        after: generators as they were then.
    """

    def __init__(self, state: LoaderState, epoch: _Epoch, skip: int, *, late: bool, goes_on: bool) -> None:
        self._state = state
        self.epoch = epoch
        self.skip = skip
        self._late = late
        self._goes_on = goes_on
        self.made = False
        self.after: dict[str, Any] = {}

    def draw(self, sampler: Any) -> Iterator[Any]:
        """The indices of the batches to fetch."""
        return self._rest(sampler, None if self._late else iter(sampler))

    def _rest(self, sampler: Any, drawn: Iterator[Any] | None) -> Iterator[Any]:
        state, epoch = self._state, self.epoch
        epoch.drawn.clear()
        now = state.capture() if self._goes_on and self.made else None
        if drawn is None:
            state.to_start(epoch)
            drawn = iter(sampler)
        elif now is not None:
            state.restore(self.after)
        checksum = 0
        given = 0
        for batch in itertools.islice(drawn, self.skip):
            given += 1
            checksum = _checksum(batch, checksum)
        if self._goes_on:
            state.check(epoch, given, checksum)
        if now is not None:
            state.restore(now)
        for batch in drawn:
            checksum = _checksum(batch, checksum)
            epoch.drawn.append(checksum)
            yield batch


class _Batches:
    """What a ``for`` loop over a tracked loader iterates over: the loader's own iterator, counted."""

    def __init__(self, inner: Iterator[Any], epoch: _Epoch, workers: int) -> None:
        self._inner = inner
        self._epoch = epoch
        self._workers = workers

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        epoch = self._epoch
        try:
            batch = next(self._inner)
        except StopIteration:
            epoch.ended = True
            raise
        if isinstance(batch, Tagged):
            if len(epoch.workers) != self._workers:
                epoch.workers = [b""] * self._workers
            if batch.generators:
                epoch.workers[epoch.position % self._workers] = batch.generators
            batch = batch.batch
        epoch.position += 1
        if epoch.drawn:
            epoch.checksum = epoch.drawn.popleft()
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _checksum(batch: object, before: int) -> int:
    return zlib.crc32(repr(batch).encode(), before)


@functools.cache
def _subclass(kind: Any) -> Any:
    def begin(self: Any) -> Iterator[Any]:
        state: LoaderState = self.__dict__[_HANDLE]
        return state.begin(lambda: kind.__iter__(self))

    return type(kind.__name__, (kind,), {"__iter__": begin, "__module__": kind.__module__, "__doc__": kind.__doc__})
