"""The state that ranks have of their own, on another number of ranks: who takes whose, and what is made anew.

All ranks take two steps together, and vote after each (`checkpointer`). Each rank reads its share of what the ranks
that saved had of their own, and reports a digest of each state, and the states that ``reshard`` functions are given.
Then each decides alike: state that was the same on all ranks is everybody's, generators go on where their rank is
still there, and are seeded anew where it is new. Anything else is for a function, or for the user: a `ReshardError`.

No tensor of a model or an optimizer is touched before that is decided. On the same number of ranks none of it is run.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from ml_flashpoint.copy.dtypes import octets_of
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.format.errors import ReshardError
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.state.archive import SafeGlobal, load_archive, save_archive
from ml_flashpoint.state.packed_state import packed_items
from ml_flashpoint.state.plain_modes import plain_modes
from ml_flashpoint.state.planner import Reader
from ml_flashpoint.state.random_numbers import GeneratorState, new_seed, seed_of, seeded_rng_state
from ml_flashpoint.state.tracked import RNG, LoadTarget, TrackedState

_log = logging.getLogger(__name__)


class Resharding:
    """The decision about one version, on one rank. :meth:`read`, then :meth:`decide`.

    Args:
        tracked: what is loaded into.
        target: see `TrackedState.target`; of another number of ranks.
        version: what is loaded.
        safe_globals: see `Flashpoint`.
        keep: True if rank r takes what rank r modulo the old number had, whatever it is.

    Attributes:
        states: after :meth:`decide`, states that this rank gets instead of those of ``target.source_rank``, by name.
    """

    def __init__(
        self,
        tracked: TrackedState,
        target: LoadTarget,
        version: CheckpointContainerId,
        *,
        safe_globals: Sequence[SafeGlobal],
        keep: bool,
    ) -> None:
        self._tracked = tracked
        self._target = target
        self._version = version
        self._safe_globals = tuple(safe_globals)
        self._keep = keep
        self.states: dict[str, Any] = {}

    def read(self, reader: Reader, metadata: Metadata) -> bytes:
        """Read this rank's share, of ranks that saved: its own, and those that nobody has the number of any more.

        Returns:
            A report to the other ranks.
        """
        tracked, target = self._tracked, self._target
        share = range(tracked.rank, target.saved_by, tracked.world_size)
        if state := tracked.of_ranks(metadata, share):
            planner = DefaultLoadPlanner()
            planner.set_up_planner(state, metadata, False)
            with plain_modes():
                reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        digests: dict[str, dict[int, bytes]] = {}
        seeds: dict[str, int] = {}
        places = set()
        raw: dict[str, dict[int, bytes]] = {} if self._keep else {name: {} for name in tracked.reshards}
        for rank in share:
            wanted = [name for name in target.packed_by[rank] if self._is_wanted(name, rank)]
            for name, data in packed_items(reader.read_items, rank, wanted).items():
                value = load_archive(data, name, path=str(self._version), allowed=self._safe_globals)
                if rank == 0 and isinstance(generator := tracked.others.get(name), GeneratorState):
                    seeds[name] = generator.seed_of(value)
                if name == RNG:
                    seeds[name] = seed_of(value)
                    continue
                if name in raw:
                    raw[name][rank] = data
                if tracked.is_place(name, value):
                    places.add(name)
                digests.setdefault(name, {})[rank] = _digest(tracked.whole(value, state, rank))
        return save_archive([digests, seeds, places, raw], "report", allowed=None)

    def _is_wanted(self, name: str, rank: int) -> bool:
        if name == RNG:
            return rank == 0  # of which new ranks get their seeds; the others have theirs
        return name in self._tracked.names and name not in self._target.structured

    def decide(self, reports: Sequence[bytes]) -> None:
        """Decide, as every rank does, and call the functions.

        Raises:
            ReshardError: there is state of which nobody says what becomes of it, or a function failed.
        """
        digests: dict[str, dict[int, bytes]] = {}
        seeds: dict[str, int] = {}
        places: set[str] = set()
        raw: dict[str, dict[int, bytes]] = {name: {} for name in self._tracked.reshards}
        for blob in reports:
            some, more, there, handed = load_archive(blob, "report", path=str(self._version))
            for name, by_rank in some.items():
                digests.setdefault(name, {}).update(by_rank)
            seeds.update(more)
            places.update(there)
            raw = {name: by_rank | handed[name] for name, by_rank in raw.items() if name in handed}
        saved = range(self._target.saved_by)
        differ = sorted(name for name, by_rank in digests.items() if len({by_rank.get(rank) for rank in saved}) > 1)
        functions = sorted(raw.keys() & digests.keys())
        if self._keep:
            self._check_kept(digests)
        else:
            others = self._tracked.others
            alone = [name for name in differ if isinstance(others.get(name), GeneratorState)]
            generators = [name for name in alone if name not in functions and len(digests[name]) == len(saved)]
            self._check_decided(digests.keys() - {*functions, *generators}, places, differ)
            if self._target.source_rank != self._tracked.rank:
                self._seed_anew(seeds, generators)
        if self._tracked.rank == 0:
            self._tell(differ, functions, seeds[RNG])
        for name in functions:
            self.states[name] = self._resharded(name, raw[name])

    def _check_kept(self, digests: Mapping[str, Mapping[int, bytes]]) -> None:
        source = self._target.source_rank
        if lacking := sorted(name for name, by_rank in digests.items() if source not in by_rank):
            raise ReshardError(f"rank {source} had no state of {_listed(lacking)}", rank=self._tracked.rank)

    def _check_decided(self, names: Iterable[str], places: Collection[str], differ: Collection[str]) -> None:
        undecided = {}
        for name in sorted(names):
            if name in places:
                undecided[name] = "whose place in the data means something else now"
            elif name in differ:
                undecided[name] = "which differs between the ranks that saved it"
        if undecided:
            before, now = self._target.saved_by, self._tracked.world_size
            named = "; of ".join(f"{name!r}, {why}" for name, why in undecided.items())
            raise ReshardError(
                f"saved by {before} ranks, loaded by {now}, and nothing says what becomes of {named}",
                hint=f"{self._tracked.how_to_decide(undecided)}, to give rank r what rank r modulo {before} had",
            )

    def _seed_anew(self, seeds: Mapping[str, int], generators: Iterable[str]) -> None:
        rank, step = self._tracked.rank, self._version.step or 0
        self.states[RNG] = seeded_rng_state(seeds[RNG], rank, step)
        for name in generators:
            generator = self._tracked.others[name]
            assert isinstance(generator, GeneratorState)
            self.states[name] = generator.seeded(new_seed(seeds.get(name, seeds[RNG]), rank, step, name))

    def _tell(self, differ: Sequence[str], functions: Sequence[str], seed: int) -> None:
        before, now = self._target.saved_by, self._tracked.world_size
        changes = []
        if self._keep:
            changes.append(f"rank r takes the random numbers and the own state of rank r modulo {before}")
        elif now > before:
            changes.append(f"new ranks have their random numbers seeded anew from the seed {seed} of rank 0")
        if functions:
            changes.append(f"{_listed(functions)} as reshard functions make of what all ranks had")
        if now < before:
            rest = [name for name in differ if name not in functions]
            changes.append(f"not used any more of ranks that are gone: random numbers, {_listed(rest)}".rstrip(", "))
        _log.warning("saved by %d ranks, loaded by %d: %s", before, now, "; ".join(changes))

    def _resharded(self, name: str, by_rank: Mapping[int, bytes]) -> Any:
        """Call the function for an object's state, with the states of all ranks that saved."""
        tracked, states = self._tracked, list[Any]()
        read = partial(load_archive, path=str(self._version), allowed=self._safe_globals, device_of=tracked.device_of())
        for rank in range(self._target.saved_by):
            states.append(read(by_rank[rank], name) if rank in by_rank else None)
        try:
            return tracked.reshards[name](states, tracked.rank, tracked.world_size)
        except Exception as error:
            raise ReshardError(
                f"the reshard function of {name!r} failed: {type(error).__name__}: {error}", rank=tracked.rank
            ) from error


def _digest(value: Any) -> bytes:
    """Return a digest that is the same for equal states, whichever objects they consist of and wherever tensors are."""
    if isinstance(value, Mapping):
        parts = sorted(_digest(key) + _digest(item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        parts = [_digest(item) for item in value]
    elif isinstance(value, (set, frozenset)):
        parts = sorted(map(_digest, value))
    elif isinstance(value, torch.Tensor) and is_plain_strided(value):
        content = octets_of(value.detach().cpu().contiguous()).tobytes() if value.numel() else b""
        parts = [f"{value.dtype} {tuple(value.shape)}".encode(), content]
    elif isinstance(value, np.ndarray) and value.dtype != object:
        parts = [f"{value.dtype.str} {value.shape}".encode(), value.tobytes()]
    elif isinstance(value, (str, bytes, int, float, complex, type(None))):
        parts = [repr(value).encode()]
    else:
        stream = io.BytesIO()
        torch.save(value, stream)
        parts = [stream.getvalue()]
    whole = hashlib.sha256(f"{type(value).__qualname__} {len(parts)}".encode())
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.digest()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
