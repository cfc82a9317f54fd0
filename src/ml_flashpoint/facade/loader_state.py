"""Data loaders of torch that are tracked: where they stand, and how they get there again, bit for bit.

Owns the position of a `DataLoader`, the generators that its order came from, and those of its workers. A plain loader
has no state, and one with a state (torchdata's `StatefulDataLoader`) draws from torch's global generator when it is
iterated over again, which the undisturbed run does not do there. So a program loops over `LoaderBatches`, which begin
each pass here. The loader itself is left as it is: whoever iterates over it (to look at one batch) changes nothing.

A plain loader is brought back by drawing its indices again, from the generators as they were at the begin of the epoch.
No sample is fetched for that. A checksum of the indices tells whether they were the same ones.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ml_flashpoint.facade.loader_pass import Batches, Draw, Epoch, Indices, Through
from ml_flashpoint.facade.loader_workers import GoingOn, Reporting
from ml_flashpoint.facade.rest_of_epoch import deal, dealing_of
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError
from ml_flashpoint.state.random_numbers import RestoredRng, capture_rng_state, restore_rng_state
from ml_flashpoint.state.tracked import PlaceInData

_log = logging.getLogger(__name__)

_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_STATEFUL = "use torchdata's StatefulDataLoader, which has a state of its own (pip install torchdata)"


class Loaders:
    """The loaders that a program has tracked."""

    def __init__(self) -> None:
        self._states: dict[str, LoaderState] = {}
        self._steps = 0

    def tracked(self, name: str, value: object) -> object:
        """Return what is tracked of a value: its place, if it is a `DataLoader`.

        Raises:
            InvalidArgumentError: such a loader cannot be brought back to where it was.
        """
        if not isinstance(value, DataLoader):
            return value
        self._states[name] = LoaderState(name, value)
        return self._states[name]

    def batches(self, loader: object, through: Through | None) -> LoaderBatches:
        """Return the batches of a tracked loader; see `Flashpoint.batches`."""
        if through is not None and not callable(through):
            raise InvalidArgumentError(
                "must be a function that gives the batches of what it is given", argument="through", value=through
            )
        for state in self._states.values():
            if state.loader is loader:
                return LoaderBatches(state, through)
        raise InvalidArgumentError(
            "must be a DataLoader that is tracked",
            argument="loader",
            value=loader,
            hint="call track(loader=loader); what has a state and is no DataLoader is looped over as it is",
        )

    def stepped(self) -> None:
        """Take note that the program has done a step of training, or saves."""
        self._steps += 1
        for state in self._states.values():
            state.stepped()
        if self._steps == 2 and self._states and not any(each.is_looped_over for each in self._states.values()):
            _log.warning(
                "nobody loops over fp.batches(...) of what is tracked as %s: a restart begins an epoch anew",
                ", ".join(self._states),
            )


class LoaderBatches:
    """The batches of a tracked loader. Each ``for`` loop over this is one pass; ``len()`` is the loader's.

    Args:
        state: of the loader.
        through: takes the batches before the loop does.
    """

    def __init__(self, state: LoaderState, through: Through | None) -> None:
        self._state = state
        self._through = through

    def __iter__(self) -> Iterator[Any]:
        return self._state.begin(self._through)

    def __len__(self) -> int:
        return len(self._state.loader)


class LoaderState(PlaceInData):
    """The state of a tracked loader. Belongs to the training thread.

    Args:
        name: under which it is tracked, for messages.
        loader: stays as it is.

    Attributes:
        loader: the same.
        restored: the generators as the latest load has restored them; None if there was none.
        is_looped_over: whether a pass was begun, or need not be: the loader has a state of its own.

    Raises:
        InvalidArgumentError: such a loader cannot be brought back to where it was.
    """

    def __init__(self, name: str, loader: DataLoader[Any]) -> None:
        self._name = name
        self.loader = loader
        self._stateful = _is_stateful(loader)
        if self._stateful:
            _check_stateful(name, loader)
        else:
            _check_plain(name, loader)
        self.restored: RestoredRng | None = None
        self.is_looped_over = self._stateful
        self._epoch = Epoch()
        # What was loaded, until a step is done after a pass that went on from there: passes before that step do, too.
        self._pending: Epoch | None = None
        self._loaded_generators: list[torch.Tensor] = []
        self._loaded_set_epoch: int | None = None
        self._batches: weakref.ref[Batches] | None = None  # the newest iterator
        self._pace: list[int] = []  # positions at the begin of its pass, and at each of its first steps
        self._warned: set[str] = set()
        self._workers_shifted = False  # whether persistent workers have each other's numbers
        self._iterator: Any = None  # the one that has persistent workers
        self._indices: Indices | None = None

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
            "generators": self._states() if epoch.generators is None else epoch.generators,
        }
        if self._stateful:
            own = self._own() if epoch.own is None else epoch.own
            if epoch.under_way and self._pace and _given_by(own) not in (epoch.position, None):
                self._warn(_AHEAD_WITHIN)
            return state | {"own": own}
        return state | {
            "start": epoch.start,
            "checksum": epoch.checksum,
            "workers": [_as_tensor(each) for each in epoch.workers],
            "replicas": self._replicas(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect with the next pass over the loader."""
        if self._stateful:
            own, ended = state["own"], state["ended"] or _is_finished(state["own"])
            pending = Epoch(state["number"], position=state["position"], ended=ended, own=own)
            self.loader.load_state_dict(own)
        else:
            position, checksum = state["position"], state["checksum"]
            before, now = state["replicas"], self._replicas()
            if before not in (
                now,
                None,
            ):  # ranks take turns in the samples: go on after as many as all of them have had
                position, checksum = position * before // now, None
            workers = [each.numpy().tobytes() for each in state["workers"]]
            pending = Epoch(state["number"], state["start"], position, state["ended"], checksum, workers)
        self._loaded_generators = state.get("generators", [])
        self._put_back(self._loaded_generators)
        epoch = self._loaded_set_epoch = state.get("set_epoch")
        for sampler in self._samplers():
            if epoch is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        deal(self.loader, state.get("dealing") if pending.under_way else None)
        self._pending, self._epoch = pending, pending.again()
        self._batches, self._pace = None, []

    def forget(self) -> None:
        """Undo a `load_state_dict` that was part of a load that failed elsewhere."""
        if self._pending is not None:
            self._epoch, self._pending, self.restored = Epoch(), None, None
            deal(self.loader)

    def _samplers(self) -> list[Any]:
        loader = self.loader
        return [each for each in (loader.sampler, loader.batch_sampler) if each is not None]

    def _generators(self) -> list[torch.Generator]:
        found = (getattr(each, "generator", None) for each in (self.loader, *self._samplers()))
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _states(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self._generators()]

    def _own(self) -> dict[str, Any]:
        own: dict[str, Any] = self.loader.state_dict()
        return own

    def _put_back(self, generators: list[torch.Tensor]) -> None:
        for generator, saved in zip(self._generators(), generators, strict=False):
            generator.set_state(saved)

    def capture(self) -> dict[str, Any]:
        """All generators that indices may be drawn from."""
        return {"rng": capture_rng_state(), "own": self._states()}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`capture` took."""
        restore_rng_state({**state["rng"], "cuda": []})
        self._put_back(state["own"])

    def to_start(self, epoch: Epoch) -> None:
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

    def begin(self, through: Through | None) -> Batches:
        """The iterator for a new ``for`` loop.

        Args:
            through: see `LoaderBatches`.

        Raises:
            LoadError: the loader does not give what it gave to the run that was saved.
        """
        if self._pace and self._epoch.ended:  # nothing was left of what was loaded
            self._pending = None
        resumed, before = self._pending is not None, self._pending or self._epoch
        goes_on = resumed and before.under_way and (self._stateful or not self._is_next_epoch(before))
        if goes_on:
            if self.restored is not None:
                self.restored.put_back(self)
            self._put_back(self._loaded_generators)
        else:
            deal(self.loader)
        if self._stateful:
            epoch, inner = self._begin_stateful(before, goes_on, resumed)
        else:
            epoch, inner = self._begin_plain(before, goes_on, resumed)
        if not goes_on:
            self._pending = None
        self._epoch, self._pace, self.is_looped_over = epoch, [epoch.position], True
        batches = Batches(
            inner,
            epoch,
            0 if self._stateful else self.loader.num_workers,
            through=through,
            ahead=lambda: (self._own() if self._stateful else None, self._states()),
            is_current=lambda batches: self._batches is not None and self._batches() is batches,
            warn=self._warn,
        )
        self._batches = weakref.ref(batches)
        return batches

    def _begin_plain(self, before: Epoch, goes_on: bool, resumed: bool) -> tuple[Epoch, Iterator[Any]]:
        loader, now = self.loader, self.capture()
        dealt_anew = goes_on and not before.start  # by other ranks, whose generators and workers mean nothing here
        goes_on = goes_on and not dealt_anew
        if goes_on:
            epoch = before.again()
        else:
            samplers = [each.state_dict() if _has_state(each) else None for each in self._samplers()]
            epoch = Epoch(before.number + (not dealt_anew), {**now, "samplers": samplers})
        # Persistent workers are not seeded again for their second epoch: whoever takes their place leaves the seed out.
        persistent = loader.num_workers > 0 and loader.persistent_workers
        anew = persistent and (resumed or self._workers_shifted)
        if anew:
            self._iterator = None  # workers of a resumed epoch were numbered otherwise
        if persistent:
            epoch.workers = list(before.workers)
        self._workers_shifted = persistent and goes_on
        draw = Draw(
            epoch,
            lambda given, checksum: self._check(epoch, given, checksum),
            lambda: self.to_start(epoch),
            late=anew and epoch.number > 1 and not dealt_anew,
        )
        with self._in_place(draw, epoch, resumed=goes_on or anew):
            if not goes_on:
                return epoch, iter(loader)
            self.to_start(epoch)
            try:
                inner = iter(loader)
                draw.skip()
            finally:
                self.restore(now)
        return epoch, inner

    def _begin_stateful(self, before: Epoch, goes_on: bool, resumed: bool) -> tuple[Epoch, Iterator[Any]]:
        loader: Any = self.loader
        if not resumed or not (goes_on or _is_finished(before.own)):
            return Epoch(before.number + 1), iter(loader)
        loader.load_state_dict(before.own)  # somebody may have iterated over it since
        now = self.capture()
        with self._made_quietly():
            inner = iter(loader)
        if goes_on:
            self.restore(now)
        return before.again() if goes_on else Epoch(before.number + 1), self._first_quietly(inner)

    def _first_quietly(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches. An ``__iter__`` that is a generator makes torch's iterator at the first one."""
        with self._made_quietly():
            first = next(batches, self)
        if first is not self:
            yield first
            yield from batches

    @contextlib.contextmanager
    def _made_quietly(self) -> Iterator[None]:
        """Put back what torchdata draws when it makes an iterator of a state: an undisturbed run makes none there."""
        loader: Any = getattr(self.loader, "base_dataloader", self.loader)  # which Accelerate's wrap
        make = loader._get_iterator

        def make_quietly() -> Iterator[Any]:
            del loader._get_iterator
            now = self.capture()
            try:
                return make()  # type: ignore[no-any-return]
            finally:
                self.restore(now)

        loader._get_iterator = make_quietly
        try:
            yield
        finally:
            vars(loader).pop("_get_iterator", None)

    def stepped(self) -> None:
        """Take note that the program has done a step of training, or saves."""
        if not self._pace:
            return
        self._pending = None
        batches = None if self._batches is None else self._batches()
        if batches is not None and batches.thread not in (0, threading.get_ident()):
            self._warn(_ANOTHER_THREAD)
        elif len(self._pace) < 4:
            self._pace.append(self._epoch.position)
            if len(self._pace) == 4:
                start, first, second, third = self._pace
                if first - start > second - first == third - second > 0:
                    self._warn(_AHEAD)

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%r: %s", self._name, what)

    def _check(self, epoch: Epoch, given: int, checksum: int) -> None:
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

    def _is_next_epoch(self, epoch: Epoch) -> bool:
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
    def _in_place(self, draw: Draw, epoch: Epoch, *, resumed: bool) -> Iterator[None]:
        """While an iterator is made, which takes these over: indices that are counted, workers that go on."""
        loader, old = self.loader, (self.loader.collate_fn, self.loader.worker_init_fn)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, name)
        indices = self._indices = self._indices or Indices(sampler)
        indices.draw = draw.begin
        theirs, loader._iterator = loader._iterator, self._iterator
        object.__setattr__(loader, name, indices)  # torch lets nobody change it, since iterators keep the old one
        try:
            if loader.num_workers:
                loader.collate_fn = Reporting(loader.collate_fn)
                if resumed:
                    loader.worker_init_fn = GoingOn(old[1], epoch.workers, epoch.position)
            yield
        finally:
            object.__setattr__(loader, name, sampler)
            loader.collate_fn, loader.worker_init_fn = old
            self._iterator, loader._iterator = loader._iterator, theirs


def _check_stateful(name: str, loader: DataLoader[Any]) -> None:
    # torchdata draws the order again from wherever the generator is, and leaves out as many as the loop has had.
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if type(sampler) in _DRAWING:
        raise InvalidArgumentError(
            f"this DataLoader cannot be brought back to where it was: its {type(sampler).__name__} has no state_dict()",
            argument=name,
            value=loader,
            hint="track torch's DataLoader with it, or StatefulDataLoader(shuffle=True)",
        )


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
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _has_state(value: object) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


def _is_stateful(loader: DataLoader[Any]) -> bool:
    """Whether a loader has a state. A wrapper, as of Accelerate, always has the methods; the class which it says that
    it has (``__class__``) is that of the loader within."""
    return _has_state(loader) and _has_state(loader.__class__)


def _is_finished(own: dict[str, Any] | None) -> bool:
    """Whether a loader of torchdata has told its loop that there are no more batches, by its state."""
    return bool(own and own.get("_iterator_finished"))


def _given_by(own: dict[str, Any]) -> int | None:
    """Batches that a loader of torchdata has given in this epoch, by its state; None if it is of another one."""
    if isinstance(given := own.get("_num_yielded"), int):
        return given
    snapshot, since = own.get("_snapshot"), own.get("_steps_since_snapshot")
    step = snapshot.get("_snapshot_step") if isinstance(snapshot, dict) else None
    return step + since if isinstance(step, int) and isinstance(since, int) else None


_ANOTHER_THREAD = (
    "another thread takes the batches, ahead of training, and a restart leaves out those that were not trained on. Give"
    " whatever fetches ahead as fp.batches(loader, through=...), and loop over that in the training thread"
)
_AHEAD_WITHIN = (
    "its class has an __iter__ that takes batches ahead, and a state_dict() that counts those, too: a restart leaves"
    " out what was not trained on"
)
_AHEAD = (
    "more batches were taken before the first step than before each of the next. If something fetches ahead, a restart"
    " leaves out what was not trained on: give it as fp.batches(loader, through=...), and loop over that"
)
