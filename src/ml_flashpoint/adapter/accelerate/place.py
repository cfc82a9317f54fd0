"""The place in the data of a loader that Accelerate has prepared, and the way back to it.

Such a loader begins each pass by its number, and fetches a batch before it gives the one before, which is how it knows
the last one. What samples and collators draw meanwhile comes from the global generators, in another order than the loop
draws. So their states are kept from before each fetch, and put back at the same fetches in a pass that goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader, IterableDataset

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.state.random_numbers import capture_rng_state, restore_rng_state
from ml_flashpoint.state.tracked import PlaceInData

_SEEDS = ("initial_seed", "seed")
_MOST_AHEAD = 2  # fetches that are of batches not given yet: one, and one more


class Draws:
    """Takes the place of a loader's batch sampler: gives the same indices, and keeps what there was before each.

    Args:
        batches: the batch sampler.
        in_workers: True if samples are fetched by other processes, so that nothing is drawn here meanwhile.
    """

    _batches: Any
    _in_workers: bool
    _start: dict[str, Any]  # generators, and epochs of samplers, at the begin of the pass
    _before: dict[int, dict[str, Any]]  # global generators before each of the latest fetches
    _start_to_come: dict[str, Any]  # the same, to be put back in the next pass
    _to_come: dict[int, dict[str, Any]]
    _left_out: int  # fetches that the next pass leaves out

    def __init__(self, batches: Any, *, in_workers: bool) -> None:
        vars(self).update(_batches=batches, _in_workers=in_workers, _start={}, _before={})
        vars(self).update(_start_to_come={}, _to_come={}, _left_out=0)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What Accelerate changes of a batch sampler, it changes of the one within.
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._batches, name, value)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        if start := self._start_to_come:
            self._start_to_come = {}
            restore_rng_state(start["rng"])  # a sampler without a generator of its own draws a seed from there
            self._set_generators(start["own"])
            for sampler, epoch in zip(self._samplers(), start["epochs"], strict=False):
                if epoch is not None:
                    sampler.epoch = epoch
        epochs = [_own(each, "epoch") for each in self._samplers()]
        self._start = {"rng": capture_rng_state(), "own": self._get_generators(), "epochs": epochs}
        self._before = {}
        left_out, self._left_out = self._left_out, 0
        for index, indices in enumerate(self._batches):
            if (state := self._to_come.pop(index, None)) is not None:
                restore_rng_state(state)
            if not self._in_workers and index >= left_out:
                self._before[index] = capture_rng_state()
                self._before.pop(index - _MOST_AHEAD, None)
            yield indices

    def state_after(self, given: int) -> dict[str, Any]:
        """Return what a pass that goes on after so many batches needs."""
        fetched = {index: state for index, state in self._before.items() if index >= given}
        seeds = {name: _own(each, name) for each in self._samplers() for name in _SEEDS if name in vars(each)}
        return {"start": self._start, "fetched": fetched, "seeds": seeds, "own": self._get_generators()}

    def go_on(self, given: int, state: dict[str, Any], generators: dict[str, Any]) -> None:
        """Have the next pass draw as the one did that had given so many batches.

        Args:
            state: as `state_after` has returned it.
            generators: the global ones, as they were then.
        """
        self.begin_anew(state)
        self._start_to_come, self._left_out = state["start"], given
        fetched = {} if self._in_workers else state["fetched"]
        self._to_come = {**fetched, given + len(fetched): generators}

    def begin_anew(self, state: dict[str, Any]) -> None:
        """Have the next pass begin as it would have after `state_after`. Samplers that are given no seed have another
        one in each process."""
        for sampler in self._samplers():
            for name, value in state["seeds"].items():
                if name in vars(sampler):
                    setattr(sampler, name, value)
        self._set_generators(state["own"])

    def end_going_on(self) -> None:
        """Put back the global generators of `go_on`, unless a fetch has: there was none left, say."""
        if self._to_come:
            restore_rng_state(self._to_come[max(self._to_come)])
            self._to_come = {}

    def _get_generators(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self._generators()]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        found = (_own(each, "generator") for each in self._samplers())
        return [each for each in found if isinstance(each, torch.Generator)]

    def _samplers(self) -> list[Any]:
        return samplers_within(self._batches)


def samplers_within(batches: Any) -> list[Any]:
    """Return a batch sampler and those within it, from the outside in."""
    found, each = [], batches
    while each is not None:
        found.append(each)
        each = _own(each, "batch_sampler") or _own(each, "sampler")
    return found


def _own(value: Any, name: str) -> Any:
    return getattr(value, "__dict__", {}).get(name)


def have_new_workers(loader: Any) -> Any:
    """Have a prepared loader start new workers in each pass, as a new process has to: those that stay draw no seed.
    Return the loader within."""
    inner = getattr(loader, "base_dataloader", loader)
    if isinstance(inner, DataLoader):
        object.__setattr__(inner, "persistent_workers", False)  # torch lets nobody change what iterators keep
    return inner


def watch_draws(loader: Any) -> Draws | None:
    """Put a `Draws` in the place of a prepared loader's batch sampler, once. None for iterable data, which has none.

    Raises:
        InvalidArgumentError: rank 0 fetches for all, and what is left out would be counted otherwise.
    """
    inner = have_new_workers(loader)
    if getattr(inner, "batch_sampler", None) is None or isinstance(inner.dataset, IterableDataset):
        return None
    if isinstance(loader, DataLoaderDispatcher):
        text, hint = "fetches on rank 0 for all ranks", "pass DataLoaderConfiguration(dispatch_batches=False)"
        raise InvalidArgumentError(text, argument="loader", value=loader, hint=hint)
    if not isinstance(inner.batch_sampler, Draws):
        object.__setattr__(inner, "batch_sampler", Draws(inner.batch_sampler, in_workers=inner.num_workers > 0))
    found: Any = inner.batch_sampler
    return cast(Draws, found)


class LoaderPlace(PlaceInData):
    """The place in a prepared loader, counted by the loop over `begin`.

    Args:
        loader: a `DataLoaderShard` or `DataLoaderDispatcher` without a state of its own.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._draws: Draws | None = None
        self._active: Any = None  # the loader of the pass, which may be one that leaves batches out
        self._number, self._given, self._ended = -1, 0, True
        self._pending: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        if self._pending is not None:
            return self._pending
        ended = self._ended or bool(self._active.end_of_dataloader)  # though the loop may not have asked for more yet
        draws = None if self._draws is None else self._draws.state_after(self._given)
        return {"number": self._number, "given": self._given, "ended": ended, "draws": draws}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a place with the next pass."""
        self._pending = state_dict

    def forget(self) -> None:
        """Undo a `load_state_dict` that was part of a load that failed elsewhere."""
        self._pending, self.restored = None, None

    @property
    def is_looped_over(self) -> bool:
        """True once a pass was begun."""
        return self._active is not None

    def begin(self, through: None = None) -> Iterator[Any]:
        """Return the iterator of a pass: the rest of the one that was loaded, or the next one."""
        pending, self._pending = self._pending, None
        if self._draws is None:
            self._draws = watch_draws(self.loader)
        goes_on, generators = pending is not None and not pending["ended"], None
        if pending is not None and self.restored is not None:
            self.restored.put_back(self)
            generators = capture_rng_state() if goes_on else None
            self.loader.iteration = pending["number"] + (0 if goes_on else 1)
            if self._draws is not None and pending["draws"] is not None:
                if generators is not None:
                    self._draws.go_on(pending["given"], pending["draws"], generators)
                else:
                    self._draws.begin_anew(pending["draws"])
        self._number, self._given, self._ended = self.loader.iteration, 0, False
        self._active = self.loader
        if pending is not None and goes_on:
            self._given = pending["given"]
            self._active = skip_first_batches(self.loader, self._given)
        return self._counted(self._active, generators)

    def _counted(self, loader: Any, generators: dict[str, Any] | None) -> Iterator[Any]:
        for batch in loader:
            if self._draws is not None:
                self._draws.end_going_on()
            elif generators is not None:
                restore_rng_state(generators)
                generators = None
            self._given += 1
            yield batch
        self._ended = True
        self.loader.iteration = loader.iteration
