"""What runs in the worker processes of a tracked `DataLoader`: their random numbers, told and taken up again.

Owns the state of a worker's generators. Augmentations draw from them, so that a worker that begins in the midst of an
epoch has to begin with those of the one whose place it takes.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import _generate_state


class Tagged(NamedTuple):
    """A batch, and its worker's generators after it, empty if they are as they were after the one before.

    A named tuple of what torch's pinning of memory passes through.
    """

    batch: Any
    generators: bytes


class Reporting:
    """In place of a ``collate_fn`` in workers: the same, and tells of the generators.

    Args:
        collate: the function in whose place it is.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._told = b""

    def __call__(self, samples: Any) -> Tagged:
        """Makes a batch."""
        batch = self._collate(samples)
        now = _captured()
        if now == self._told:
            return Tagged(batch, b"")
        self._told = now
        return Tagged(batch, now)


class GoingOn:
    """In place of a ``worker_init_fn``: the same, in workers that take others' places.

    The next batch is always that of torch's worker 0, in the midst of an epoch too.

    Args:
        init: the function in whose place it is, if any.
        generators: of each worker so far; a worker whose own are unknown or empty has given nothing yet.
        given: batches given in this epoch.
    """

    def __init__(self, init: Callable[[int], Any] | None, generators: Sequence[bytes], given: int) -> None:
        self._init = init
        self._generators = tuple(generators)
        self._given = given

    def __call__(self, worker: int) -> None:
        """Prepares this worker."""
        info: Any = get_worker_info()
        place = (worker + self._given) % info.num_workers
        if place != worker:
            _take_place(info, place)
        if self._init is not None:
            self._init(place)
        if place < len(self._generators) and self._generators[place]:
            _restore(self._generators[place])


def _take_place(info: Any, place: int) -> None:
    base = info.seed - info.id
    for name, value in (("id", place), ("seed", base + place)):
        object.__setattr__(info, name, value)
    random.seed(info.seed)
    torch.manual_seed(info.seed)
    np.random.seed(_generate_state(base, place))  # type: ignore[no-untyped-call]


def _captured() -> bytes:
    kind, key, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(key).astype(np.int64)), *rest),
    }
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def _restore(state: bytes) -> None:
    loaded = torch.load(io.BytesIO(state), weights_only=True)
    torch.set_rng_state(loaded["torch"])
    version, numbers, gauss = loaded["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, key, *rest = loaded["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))
