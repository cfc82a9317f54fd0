"""The place in the data of a loader that Accelerate has prepared, and the way back to it.

Such a loader begins each pass by its number, and fetches a batch before it gives the one before, which is how it knows
the last one. What samples and collators draw meanwhile comes from the global generators, in another order than the loop
draws. So their states are kept from before each fetch, and put back at the same fetches in a pass that goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import skip_first_batches

from ml_flashpoint.state.random_numbers import capture_rng_state, restore_rng_state
from ml_flashpoint.state.tracked import PlaceInData

_SEEDS = ("initial_seed", "seed")


class Draws:
    """Takes the place of a loader's batch sampler: gives the same indices, and keeps what there was before each.

    Args:
        batches: the batch sampler.
        in_workers: True if samples are fetched by other processes, so that nothing is drawn here meanwhile.
    """

    _batches: Any
    _in_workers: bool
    _start: dict[str, Any]  # generators at the begin of the pass
    _before: dict[int, dict[str, Any]]  # and before each fetch
    _start_to_come: dict[str, Any]  # the same, to be put back in the next pass
    _to_come: dict[int, dict[str, Any]]

    def __init__(self, batches: Any, *, in_workers: bool) -> None:
        vars(self).update(
            _batches=batches, _in_workers=in_workers, _start={}, _before={}, _start_to_come={}, _to_come={}
        )

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
        self._start = {"rng": capture_rng_state(), "own": self._get_generators()}
        self._before = {}
        for index, indices in enumerate(self._batches):
            if (state := self._to_come.pop(index, None)) is not None:
                restore_rng_state(state)
            if not self._in_workers:
                self._before[index] = capture_rng_state()
            yield indices

    def state_after(self, given: int) -> dict[str, Any]:
        """Return what a pass that goes on after so many batches needs. What is older is let go."""
        self._before = {index: state for index, state in self._before.items() if index >= given}
        seeds = {name: _own(each, name) for each in self._samplers() for name in _SEEDS if name in vars(each)}
        return {"start": self._start, "fetched": self._before, "seeds": seeds, "own": self._get_generators()}

    def go_on(self, given: int, state: dict[str, Any], generators: dict[str, Any]) -> None:
        """Have the next pass draw as the one did that had given so many batches.

        Args:
            state: as `state_after` has returned it.
            generators: the global ones, as they were then.
        """
        self.begin_anew(state)
        self._start_to_come = state["start"]
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
        """Return the samplers within the batch sampler, from the outside in."""
        found, each = [], self._batches
        while each is not None:
            found.append(each)
            each = _own(each, "batch_sampler") or _own(each, "sampler")
        return found


def _own(value: Any, name: str) -> Any:
    return vars(value).get(name)


def watch_draws(loader: Any) -> Draws | None:
    """Put a `Draws` in the place of a prepared loader's batch sampler, once. None if it has none: iterable data."""
    inner = getattr(loader, "base_dataloader", loader)
    if inner.batch_sampler is not None and not isinstance(inner.batch_sampler, Draws):
        draws = Draws(inner.batch_sampler, in_workers=inner.num_workers > 0)
        object.__setattr__(
            inner, "batch_sampler", draws
        )  # torch lets nobody change it, since iterators keep the old one
    found: Draws | None = inner.batch_sampler
    return found


class LoaderPlace(PlaceInData):
    """The place in a prepared loader, counted by the loop over `begin`.

    Args:
        loader: a `DataLoaderShard` or `DataLoaderDispatcher` without a state of its own.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._draws: Draws | None = None
        self._active: Any = None  # the loader of the pass, which may be one that leaves batches out
        self._number, self._given, self._ended = 0, 0, True
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

    def begin(self) -> Iterator[Any]:
        """Return the iterator of a pass: the rest of the one that was loaded, or the next one."""
        pending, self._pending = self._pending, None
        if self._draws is None:
            self._draws = watch_draws(self.loader)
        goes_on = pending is not None and not pending["ended"]
        if pending is not None and self.restored is not None:
            self.restored.put_back(self)
            self.loader.iteration = pending["number"] + (0 if goes_on else 1)
            if self._draws is not None and pending["draws"] is not None:
                if goes_on:
                    self._draws.go_on(pending["given"], pending["draws"], capture_rng_state())
                else:
                    self._draws.begin_anew(pending["draws"])
        self._number, self._given, self._ended = self.loader.iteration, 0, False
        self._active = self.loader
        if pending is not None and goes_on:
            self._given = pending["given"]
            self._active = skip_first_batches(self.loader, self._given)
        return self._counted(self._active)

    def _counted(self, loader: Any) -> Iterator[Any]:
        for batch in loader:
            if self._draws is not None:
                self._draws.end_going_on()
            self._given += 1
            yield batch
        self._ended = True
        self.loader.iteration = loader.iteration
