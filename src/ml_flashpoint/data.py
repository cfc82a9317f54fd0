"""The place of a tracked `DataLoader` in its data, and the way back to it, bit for bit.

A program loops over ``fp.batches(loader)``. The loader itself stays as it is.

* A plain loader has no state. A pass that goes on draws the same indices again, from the generators as they were at the
  begin of the pass, and leaves out those of the batches that were given. A checksum tells if they are others. No sample
  is fetched for that.
* A loader with a state (torchdata's `StatefulDataLoader`) goes on by itself. It draws from torch's global generator
  then, which the undisturbed run does not do there, so the generators are put back.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils import data

from ml_flashpoint.format.arguments import checked_callable
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError
from ml_flashpoint.state.archive import load_archive, save_archive
from ml_flashpoint.state.private import generate_state
from ml_flashpoint.state.random_numbers import capture_rng_state, restore_rng_state
from ml_flashpoint.state.tracked import PlaceInData

_log = logging.getLogger(__name__)

Through = Callable[[Iterable[Any]], Iterable[Any]]
"""Gives the batches of an iterable, one for each and in their order; may take some ahead."""

_STATEFUL = "use torchdata's StatefulDataLoader, which has a state of its own (pip install torchdata)"


@dataclass
class Loop:
    """The loop of a program. Refers to no loader: one in a cycle waits for the collector, and that for its workers.

    Attributes:
        steps: of training that were done.
        loaders: names of those that are tracked. uses_any: False until the program loops over one of them.
    """

    steps: int = 0
    loaders: list[str] = field(default_factory=list)
    uses_any: bool = False


class Loaders:
    """The loaders that a program has tracked."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._places: dict[str, LoaderState] = {}

    def tracked(self, name: str, value: object) -> object:
        """Return what is tracked of a value: its place, if it is a `DataLoader`."""
        if not isinstance(value, data.DataLoader):
            return value
        self._places[name] = LoaderState(name, value, self._loop)
        return self._places[name]

    def batches(self, loader: object, through: Through | None) -> LoaderBatches:
        """Return the batches of a tracked loader; see `Flashpoint.batches`."""
        checked_callable("through", through, "that gives the batches of what it is given")
        for place in self._places.values():
            if place.loader is loader:
                return LoaderBatches(place, through)
        hint = "call track(loader=loader); what has a state and is no DataLoader is looped over as it is"
        raise InvalidArgumentError("must be a DataLoader that is tracked", argument="loader", value=loader, hint=hint)


class LoaderBatches:
    """The batches of a tracked loader, whose ``place`` begins each pass. Each ``for`` loop over this is one."""

    def __init__(self, place: Any, through: Through | None = None, *, skips_finished: bool = False) -> None:
        self._place, self._through, self._skips_finished = place, through, skips_finished

    def skipping_finished(self) -> LoaderBatches:
        """Return these batches for a program whose loop over epochs begins with ``range(step // len(loader), ...)``: if
        the loaded epoch has no batch left, the first loop after `resume` is the next epoch, and not empty."""
        return LoaderBatches(self._place, self._through, skips_finished=True)

    def __iter__(self) -> Iterator[Any]:
        if self._skips_finished:
            self._place.skip_finished()
        return cast("Iterator[Any]", self._place.begin(self._through))

    def __len__(self) -> int:
        return len(self._place.loader)


@dataclass
class Epoch:
    """One pass over a loader; all of it is saved.

    Attributes:
        number: from 1 on, over all lives of the job; 0 while there was none.
        position: batches given to the loop. ended: True once the loop was told that there are no more.
        start: generators and samplers when it began, and generators before the first index was drawn (``drawing``): a
            loop may draw other numbers between the two. Empty if other ranks began it.
        checksum: of the indices of the batches given.
        workers: generators of each worker after its latest of these batches.
        own, generators: states of the loader and of its generators after these batches; None while these can be asked.
        set_epoch: the epoch that the program has set at the sampler.
        given: samples that were given before other ranks went on. dealing: see `_dealing_of`.
    """

    number: int = 0
    position: int = 0
    ended: bool = False
    start: dict[str, Any] = field(default_factory=dict)
    checksum: int = 0
    workers: list[bytes] = field(default_factory=list)
    own: dict[str, Any] | None = None
    generators: list[torch.Tensor] | None = None
    set_epoch: int | None = None
    given: int = 0
    dealing: Mapping[str, int] | None = None

    @property
    def under_way(self) -> bool:
        """True if the pass has begun and not ended."""
        return self.number > 0 and not self.ended

    def again(self) -> Epoch:
        """Return the record of a pass that goes on from here."""
        return replace(self, workers=list(self.workers), own=None, generators=None)


class LoaderState(PlaceInData):
    """The place of a tracked loader. Belongs to the training thread.

    Raises:
        InvalidArgumentError: such a loader cannot be brought back to where it was.
    """

    def __init__(self, name: str, loader: data.DataLoader[Any], loop: Loop) -> None:
        self._name, self.loader, self._loop = name, cast(Any, loader), loop
        # Accelerate's wrappers always have the methods; their ``__class__`` is that of the loader within.
        self._stateful = _has_state(loader) and _has_state(loader.__class__)
        _check(name, loader, stateful=self._stateful)
        loop.loaders.append(name)
        loop.uses_any |= self._stateful  # which need not be looped over
        self.epoch = Epoch()  # the newest
        # The epoch that was loaded, until there is a step, or a save, after a pass that went on from there.
        self._pending: Epoch | None = None
        self._begun_at: int | None = None  # steps done as the newest pass began; None since an epoch was loaded
        self._saves = 0
        self._is_told = False  # that a pass goes on beside a newer one
        self._iterator: Any = None  # of the newest pass, where it has the loader's state

    # ---- saving and loading -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        self._saves += 1
        if self._saves == 2 and not self._loop.uses_any:  # the first one may be before the loop
            text = "nobody loops over fp.batches(...) of what is tracked as %s: a restart begins an epoch anew"
            _log.warning(text, ", ".join(self._loop.loaders))
        if self._begun_at is not None:
            self._pending = None
        epoch = self.epoch
        own, generators = (epoch.own, epoch.generators) if epoch.generators is not None else self._own_state()
        more = {"set_epoch": self._set_epoch(), "dealing": _dealing_of(self.loader), "workers": list(epoch.workers)}
        return {**vars(epoch), **more, "own": own, "generators": generators}

    def _own_state(self) -> tuple[dict[str, Any] | None, list[torch.Tensor]]:
        # Torchdata's loader has that of the iterator which was made last, by whomever.
        has_state = self.loader if self._iterator is None else self._iterator
        return has_state.state_dict() if self._stateful else None, [each.get_state() for each in self._generators()]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state with the next pass over the loader."""
        pending = Epoch(**state_dict)
        pending.ended = pending.ended or _is_finished(pending.own)
        if pending.under_way and pending.given:
            _check_dealing(self.loader, pending.dealing or {})
        if self._stateful:
            self.loader.load_state_dict(pending.own)
        self._put_back(pending.generators)
        for sampler in self._samplers():
            if pending.set_epoch is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(pending.set_epoch)
        self._pending, self.epoch, self._begun_at, self._iterator = pending, pending.again(), None, None

    def forget(self) -> None:
        """Undo a `load_state_dict` that was part of a load that failed elsewhere."""
        if self._pending is not None and self._begun_at is None:
            self.epoch, self._pending, self.restored = Epoch(), None, None

    def _samplers(self) -> list[Any]:
        return [each for each in (self.loader.sampler, self.loader.batch_sampler) if each is not None]

    def _generators(self) -> list[torch.Generator]:
        found = (getattr(each, "generator", None) for each in (self.loader, *self._samplers()))
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _put_back(self, generators: list[torch.Tensor] | None) -> None:
        for generator, saved in zip(self._generators(), generators or (), strict=False):
            generator.set_state(saved)

    def capture(self) -> dict[str, Any]:
        """Return the state of all generators that indices may be drawn from."""
        return {"rng": capture_rng_state(), "own": [each.get_state() for each in self._generators()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `capture` returned."""
        restore_rng_state({**state["rng"], "cuda": []})
        self._put_back(state["own"])

    def _set_epoch(self) -> int | None:
        """Return the epoch that ``set_epoch`` has set, as of a `DistributedSampler`."""
        epochs = (getattr(each, "epoch", None) for each in self._samplers() if hasattr(each, "set_epoch"))
        return next((each for each in epochs if isinstance(each, int)), None)

    # ---- a pass over the loader ---------------------------------------------------------------------------

    def begin(self, through: Through | None) -> Iterator[Any]:
        """Return the iterator for a new loop, or raise a `LoadError` if that would not give again what was given."""
        done = self._loop.steps
        nothing_left = self.epoch.ended or (self._pending is not None and self._is_through(self._pending))
        if self._begun_at is not None and (done != self._begun_at or nothing_left):
            self._pending = None  # training has gone on, or nothing was left of what was loaded
        resumed, before = self._pending is not None, self._pending or self.epoch
        is_next = resumed and before.under_way and self._is_next_epoch(before)
        goes_on = resumed and before.under_way and not is_next
        if goes_on:
            if self.restored is not None:
                self.restored.put_back(self)
            self._put_back(before.generators)
        else:
            self._pending = None
        drawn: deque[int] = deque()
        if not self._stateful:
            epoch, inner, drawn = self._begin_plain(before, goes_on=goes_on)
        else:
            epoch = before.again() if goes_on else Epoch(before.number + 1)
            if goes_on or is_next or (resumed and _is_finished(before.own)):
                self.loader.load_state_dict(before.own)  # somebody may have iterated over it since
                self._make_quietly()
            inner = iter(self.loader)
            if is_next:  # the epoch before has nothing left
                for _ in inner:
                    pass
                inner = iter(self.loader)
            is_torchdatas = type(self.loader).state_dict.__module__.startswith("torchdata.")
            self._iterator = inner if is_torchdatas and hasattr(inner, "state_dict") else None
        self.epoch, self._begun_at, self._loop.uses_any = epoch, done, True
        if through is not None:
            epoch.own, epoch.generators = copy.deepcopy(self._own_state())
        return self._counted(epoch, inner, drawn, through)

    def skip_finished(self) -> None:
        """Pass over the loaded epoch if it has no batch left, unless the program tells its epochs to the sampler."""
        pending = self._pending if self._begun_at is None else None
        if pending is None or not pending.under_way or not self._is_through(pending):
            return
        if not pending.set_epoch and pending.set_epoch == self._set_epoch():
            for _ in self.begin(None):
                pass

    def _is_next_epoch(self, epoch: Epoch) -> bool:
        """Return True if the program has gone on to the next epoch after the last batch of the one before."""
        begun = self._set_epoch()
        if begun == epoch.set_epoch:
            return False
        if self._is_through(epoch):
            return True
        if self._stateful or not epoch.position:  # no checksum would tell: a state of its own, or other ranks began it
            raise LoadError(
                f"the sampler of {self._name!r} was set to epoch {begun}, and its state is of the midst of epoch"
                f" {epoch.set_epoch}",
                hint=f"begin the loop over epochs with {epoch.set_epoch}, which the sampler has after the load",
            )
        return False

    def _is_through(self, epoch: Epoch) -> bool:
        """Return True if all batches of a pass were given, whether or not its loop was told so; ``zip`` may not ask."""
        with contextlib.suppress(TypeError):  # it has no length
            return epoch.position >= len(_source(self.loader, epoch.given))
        return False

    def _begin_plain(self, before: Epoch, *, goes_on: bool) -> tuple[Epoch, Iterator[Any], deque[int]]:
        """Return the iterator of a loader like this one, whose indices are counted, and whose workers go on."""
        loader, now = self.loader, self.capture()
        # The rest of an epoch that other ranks have begun has nothing of their generators and workers.
        again = goes_on and bool(before.start)
        if again:
            epoch = before.again()
        else:
            samplers = [each.state_dict() if _has_state(each) else None for each in self._samplers()]
            given = before.given if goes_on else 0
            epoch = Epoch(before.number + (not goes_on), start={**now, "samplers": samplers}, given=given)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        indices = _Indices(_source(loader, epoch.given), epoch, self._name, self)
        counted: Any = object.__new__(type(loader))
        vars(counted).update({**vars(loader), name: indices, "persistent_workers": False})
        if loader.num_workers:
            vars(counted)["collate_fn"] = _Reporting(loader.collate_fn)
        if loader.num_workers and epoch.position:
            vars(counted)["worker_init_fn"] = _GoingOn(loader.worker_init_fn, epoch.workers, epoch.position)
        if not again:
            return epoch, iter(counted), indices.drawn
        self.restore(epoch.start)
        for sampler, saved in zip(self._samplers(), epoch.start["samplers"], strict=False):
            if saved is not None and _has_state(sampler):
                sampler.load_state_dict(saved)
        try:
            inner = iter(counted)
            indices.skip()
        finally:
            self.restore(now)
        return epoch, inner, indices.drawn

    def _make_quietly(self) -> None:
        """Have what torchdata draws for the next iterator put back: an undisturbed run makes none there."""
        loader: Any = getattr(self.loader, "base_dataloader", self.loader)  # which Accelerate's wrap

        def make_quietly() -> Any:
            del loader._get_iterator
            now = self.capture()
            try:
                return loader._get_iterator()
            finally:
                self.restore(now)

        loader._get_iterator = make_quietly  # an ``__iter__`` that is a generator calls it at the first batch

    def _counted(self, epoch: Epoch, inner: Iterator[Any], drawn: deque[int], through: Through | None) -> Iterator[Any]:
        """Give the batches of a pass, and note what counts of each once the loop has it."""
        fetched: deque[tuple[int, bytes, Any]] = deque()

        def fetch() -> Iterator[Any]:
            for batch in inner:
                worker = b""
                if isinstance(batch, _Tagged):
                    batch, generators = batch
                    worker = generators.numpy().tobytes()
                own = (None, None) if through is None else copy.deepcopy(self._own_state())
                fetched.append((drawn.popleft() if drawn else 0, worker, own))
                yield batch

        one_for_each, workers = True, self.loader.num_workers
        for batch in (through or iter)(fetch()):
            one_for_each &= bool(fetched)
            if fetched:
                epoch.checksum, worker, (epoch.own, epoch.generators) = fetched.popleft()
                if workers:
                    epoch.workers = epoch.workers or [b""] * workers
                    epoch.workers[epoch.position % workers] = worker
                epoch.position += 1
            if self.epoch is not epoch and not self._is_told:
                self._is_told = True
                text = (
                    "a loop over %r goes on beside a newer one, or from before a resume(): a restart goes on with the"
                )
                _log.warning(text + " newer one, and the batches of this one are others then", self._name)
            yield batch
        epoch.ended, epoch.own, epoch.generators = True, None, None
        if fetched or not one_for_each:
            text = (
                "%r: through= has not given one batch for each that it took, so that a restart goes on with other data"
            )
            _log.warning(text, self._name)


def _check(name: str, loader: data.DataLoader[Any], *, stateful: bool) -> None:
    """Refuse loaders that cannot be brought back to where they were."""
    batches, problem, hint = loader.batch_sampler, "", _STATEFUL
    if stateful:
        # torchdata draws the order again from wherever the generator is, and leaves out as many as the loop has had.
        sampler = getattr(batches, "sampler", loader.sampler)
        if type(sampler) in (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler):
            problem = f"its {type(sampler).__name__} has no state_dict()"
            hint = "track torch's DataLoader with it, or StatefulDataLoader(shuffle=True)"
    elif isinstance(loader.dataset, data.IterableDataset):
        problem = "its dataset is iterable, so that only reading it again would lead to where it was"
    elif batches is not None and type(batches) is not data.BatchSampler and not _has_state(batches):
        problem = f"its batch sampler ({type(batches).__name__}) has no state_dict() and load_state_dict()"
    elif type(loader).__iter__ is not data.DataLoader.__iter__:
        problem = f"its class ({type(loader).__name__}) has an __iter__ of its own, but no state_dict()"
    elif loader.num_workers and not getattr(loader, "in_order", True):
        problem = "its batches come in any order (in_order=False)"
    if problem:
        text = f"this DataLoader cannot be brought back to where it was: {problem}"
        raise InvalidArgumentError(text, argument=name, value=loader, hint=hint)


def _has_state(value: object) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


def _is_finished(own: dict[str, Any] | None) -> bool:
    """Return True if a loader of torchdata has given its last batch, by its state."""
    return bool(own and own.get("_iterator_finished"))


class _Indices:
    """The stand-in for a loader's sampler: the same indices, counted, after those of batches already given."""

    def __init__(self, sampler: Any, epoch: Epoch, name: str, generators: LoaderState) -> None:
        self._sampler, self._epoch, self._name, self._generators = sampler, epoch, name, generators
        self._to_skip, self._checksum = 0, 0
        self._indices: Iterator[Any] = iter(())
        self.drawn: deque[int] = deque()  # checksums after batches that are being fetched

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # Called more than once where torch makes its iterator so.
        self._indices, self._to_skip, self._checksum = iter(self._sampler), self._epoch.position, 0
        return self._rest()

    def skip(self) -> None:
        """Leave out the indices of batches that were given, if that was not done yet, and compare them."""
        expected, self._to_skip = self._to_skip, 0
        if not expected:
            return
        if "drawing" in self._epoch.start:
            self._generators.restore(self._epoch.start["drawing"])
        given = sum(1 for _ in map(self._count, itertools.islice(self._indices, expected)))
        if (given, self._checksum) != (expected, self._epoch.checksum):
            raise LoadError(
                f"{self._name!r} does not give the {expected} batches again that it gave before: its data, the size of"
                " a batch, the sampler's seed or its set_epoch() are others, or it has a state that nobody saves",
                hint=f"make the loader as it was, {_STATEFUL}, or begin the epoch anew by not tracking {self._name!r}",
            )

    def _rest(self) -> Iterator[Any]:
        self.skip()
        if not self._epoch.position:
            self._epoch.start = {**self._epoch.start, "drawing": self._generators.capture()}
        for batch in self._indices:
            self._count(batch)
            self.drawn.append(self._checksum)
            yield batch

    def _count(self, batch: object) -> None:
        self._checksum = zlib.crc32(repr(batch).encode(), self._checksum)


class _Tagged(NamedTuple):
    """A batch, and its worker's generators after it. Torch's pinning passes through named tuples."""

    batch: Any
    generators: torch.Tensor  # in shared memory: bytes would fill the pipe, and workers of a killed rank wait for ever


class _Reporting:
    """The stand-in for a ``collate_fn`` in workers: the same, and tells of the generators."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> _Tagged:
        batch = self._collate(samples)
        archive = save_archive(capture_rng_state(), "", allowed=None)
        return _Tagged(batch, torch.frombuffer(bytearray(archive), dtype=torch.uint8))


class _GoingOn:
    """The stand-in for a ``worker_init_fn``: the same, in workers that take others' places, since the next batch is
    always that of torch's worker 0. ``generators`` are of each worker so far, ``given`` the batches of this epoch."""

    def __init__(self, init: Callable[[int], Any] | None, generators: Sequence[bytes], given: int) -> None:
        self._init, self._generators, self._given = init, tuple(generators), given

    def __call__(self, worker: int) -> None:
        info: Any = data.get_worker_info()
        place = (worker + self._given) % info.num_workers
        if place != worker:
            base = info.seed - info.id
            for name, value in (("id", place), ("seed", base + place)):
                object.__setattr__(info, name, value)  # which torch lets nobody set
            random.seed(info.seed)
            torch.manual_seed(info.seed)
            np.random.seed(generate_state(base, place))
        if self._init is not None:
            self._init(place)
        if place < len(self._generators) and self._generators[place]:
            restore_rng_state(load_archive(self._generators[place], "a worker's generators", path="a loader"))


def rest_of_epoch(states: list[Any], rank: int, world_size: int) -> dict[str, Any]:
    """Distribute the rest of an epoch over another number of ranks: ``track(loader=loader, reshard=rest_of_epoch)``.

    For a plain `DataLoader` whose sampler is a `DistributedSampler` (not a subclass) for the current ranks. Every
    sample of the epoch is used once. As always with this sampler, some samples are repeated at the end of an epoch, or
    dropped (``drop_last``), so that all ranks have the same number.

    Args:
        states: the state of the loader on each rank that saved, in the order of ranks.
        rank, world_size: this rank, and the number of ranks now.

    Returns:
        The state of the loader on this rank.

    Raises:
        LoadError: the saved loader was another one, or ranks were at different positions.
    """
    reported = [state if isinstance(state, Mapping) else {} for state in states]
    first = reported[0]
    if not all(isinstance(state.get("dealing"), Mapping) for state in reported):
        text = "the loader that was saved was no plain one with a DistributedSampler, so nothing tells which samples"
        hint = "write a function of your own, or make a plain DataLoader with torch's DistributedSampler"
        raise LoadError(f"{text} other ranks had", hint=hint)
    for name in ("number", "ended", "position", "set_epoch", "given", "dealing"):
        if any(state[name] != first[name] for state in reported):
            raise LoadError(f"ranks were at different places in the data: {name} differs")
    dealing = first["dealing"]
    given = first["given"] + first["position"] * dealing["batch_size"] * dealing["replicas"]
    return vars(
        Epoch(
            number=first["number"],
            ended=first["ended"],
            generators=reported[rank]["generators"] if rank < len(reported) else [],
            set_epoch=first["set_epoch"],
            given=min(given, dealing["samples"]),
            dealing=dealing,
        )
    )


def _dealing_of(loader: data.DataLoader[Any]) -> dict[str, int] | None:
    """Return how a plain loader's sampler deals out the samples; None if it is another sampler."""
    sampler: Any = loader.sampler
    if type(sampler) is not data.DistributedSampler or _has_state(loader):
        return None
    samples: Any = sampler.dataset
    return {"replicas": sampler.num_replicas, "batch_size": loader.batch_size or 1, "samples": len(samples)}


def _check_dealing(loader: data.DataLoader[Any], dealing: Mapping[str, int]) -> None:
    """Raise a `LoadError` if a loader cannot deal what is left of an epoch."""
    now = _dealing_of(loader)
    if now is None:
        text = "the rest of an epoch was to be dealt, and the loader is no plain one with a DistributedSampler"
        raise LoadError(text, hint="make a DataLoader with torch's DistributedSampler, on one rank too")
    if now["samples"] != dealing["samples"]:
        raise LoadError(f"the epoch that was begun has {dealing['samples']} samples, not {now['samples']}")


def _source(loader: data.DataLoader[Any], given: int) -> Any:
    """Return what gives the indices of a pass, or of the rest of one of which so many samples were given."""
    if not given:
        return loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler: Any = loader.sampler
    alone = copy.copy(sampler)  # one rank alone gets the order of the whole epoch
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(sampler.dataset)
    order = list(alone)
    rest, missing = order[given:], -(len(order) - given) % sampler.num_replicas
    if sampler.drop_last and missing:
        rest = rest[: missing - sampler.num_replicas]
    elif missing:
        rest += (order * missing)[:missing]
    own = rest[sampler.rank :: sampler.num_replicas]
    return own if loader.batch_size is None else data.BatchSampler(own, loader.batch_size, loader.drop_last)
