"""The rest of an epoch, dealt to another number of ranks than began it.

Owns `rest_of_epoch`, a ``reshard`` function for loaders whose sampler is a plain `DistributedSampler`, and the sampler
that deals. Ranks that take turns in one order of the samples have had, together, so many from its begin: the others
take turns in what is left of it. How far each rank is, and going on there, is `loader_state`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler

from ml_flashpoint.format.errors import LoadError

_ALIKE = ("number", "ended", "position", "set_epoch", "dealing")


def rest_of_epoch(states: list[Any], rank: int, world_size: int) -> dict[str, Any]:
    """Deal what is left of an epoch, for ``track(loader=loader, reshard={"loader": rest_of_epoch})``.

    For a `DataLoader`, or torchdata's `StatefulDataLoader`, whose sampler is a `DistributedSampler` (of that class
    itself) for the ranks that there are. Every sample of the epoch is given once, over all numbers of ranks; at the
    end, a few come twice or not at all (``drop_last``), so that all ranks have as many, as ever with that sampler.

    Args:
        states: of the loader on all ranks that saved. rank, world_size: of this process.

    Raises:
        LoadError: the loader was another one, or ranks were at different places.
    """
    reported = [state if isinstance(state, Mapping) else {} for state in states]
    first = reported[0]
    if not all(isinstance(state.get("dealing"), Mapping) for state in reported):
        raise LoadError(
            "the loader that was saved had no DistributedSampler, so nothing tells which samples other ranks had",
            hint="write a function of your own, or make the loader with torch's DistributedSampler",
        )
    if differing := [name for name in _ALIKE if any(state[name] != first[name] for state in reported)]:
        raise LoadError(f"ranks were at different places in the data: {differing[0]} differs")
    if "own" in first and not first["number"]:
        raise LoadError(
            "nobody has looped over fp.batches(loader), so nothing tells how many batches ranks had",
            hint="loop over fp.batches(loader) from the first step on",
        )
    dealing = dict(first["dealing"])
    given = dealing["given"] + first["position"] * dealing["batch_size"] * dealing["replicas"]
    dealing["given"] = min(given, dealing["samples"])
    own = reported[rank] if rank < len(reported) else {}
    return {
        **{name: first[name] for name in _ALIKE},
        "position": 0,
        "dealing": dealing,
        "own": {},  # which StatefulDataLoader takes for a loader that nobody has iterated over
        "start": {},
        "checksum": 0,
        "generators": own.get("generators", []),
        "workers": [],
        "replicas": None,
    }


class _Dealing(DistributedSampler[Any]):
    """What a sampler becomes that deals the rest of an epoch: each rank takes turns in what is left of its order."""

    given = 0

    def __iter__(self) -> Iterator[Any]:
        if not self.given:
            return super().__iter__()
        order = self._order()
        rest, missing = order[self.given :], -(len(order) - self.given) % self.num_replicas
        if self.drop_last and missing:
            rest = rest[: missing - self.num_replicas]
        elif missing:
            rest += (order * missing)[:missing]
        return iter(rest[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        if not self.given:
            return super().__len__()
        left = len(self._data) - self.given
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def _order(self) -> list[Any]:
        """That of the whole epoch, which one rank alone would get."""
        alone = copy.copy(self)
        alone.given, alone.num_replicas, alone.rank = 0, 1, 0
        alone.num_samples = alone.total_size = len(self._data)
        return list(alone)

    @property
    def _data(self) -> Sized:
        return cast(Sized, self.dataset)


def dealing_of(loader: DataLoader[Any]) -> dict[str, int] | None:
    """How a loader's sampler deals out the samples, for :func:`rest_of_epoch`; None if it is another sampler."""
    sampler: Any = loader.sampler
    if type(sampler) not in (DistributedSampler, _Dealing):
        return None
    return {
        "given": getattr(sampler, "given", 0),
        "replicas": sampler.num_replicas,
        "batch_size": loader.batch_size or 1,
        "samples": len(sampler.dataset),
    }


def deal(loader: DataLoader[Any], dealing: Mapping[str, int] | None = None) -> None:
    """Have a loader deal what an epoch has left, as :func:`dealing_of` has it; a whole epoch by default.

    Raises:
        LoadError: its sampler cannot do that, or its samples are others.
    """
    sampler: Any = loader.sampler
    given = dealing["given"] if dealing else 0
    if given and type(sampler) is DistributedSampler:
        sampler.__class__ = _Dealing  # which the loader's batch sampler need not know of
    if type(sampler) is _Dealing:
        sampler.given = given
        now = dealing_of(loader)
        if dealing and now and now["samples"] != dealing["samples"]:
            raise LoadError(f"the epoch that was begun has {dealing['samples']} samples, not {now['samples']}")
    elif given:
        raise LoadError(
            f"the rest of an epoch was to be dealt, and the sampler is a {type(sampler).__name__}",
            hint="make the loader with torch's DistributedSampler, on one rank too",
        )
