"""The state that ranks have of their own, on another number of ranks: who takes whose, and what is made anew.

All ranks take three steps together, and vote after each (`checkpointer`):

1. Each rank reads its share of what the ranks that saved had of their own, and tells a digest of each state.
2. State that was the same on all of them is everybody's. Generators go on where their rank is still there, and are
   seeded anew where it is new. Anything else is for a ``reshard`` function, or for the user: a `ReshardError`.
3. Ranks hand each other the states that the functions are to be given.

No tensor of a model or an optimizer is touched before that is decided. On the same number of ranks none of it is run.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from ml_flashpoint.copy.dtypes import octets_of
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import ReshardError
from ml_flashpoint.state.archive import SafeGlobal, load_archive, save_archive
from ml_flashpoint.state.packed_state import packed_items, rank_key
from ml_flashpoint.state.plain_modes import plain_modes
from ml_flashpoint.state.planner import Reader
from ml_flashpoint.state.random_numbers import GeneratorState, new_seed, seed_of, seeded_rng_state
from ml_flashpoint.state.tracked import RNG, LoadTarget, TrackedState

_log = logging.getLogger(__name__)


class Resharding:
    """The decision about one version, on one rank. Its methods are called in order, each once.

    Args:
        tracked: what is loaded into.
        target: see `TrackedState.target`; of another number of ranks.
        version: what is loaded.
        safe_globals: see `Flashpoint`.
        keep: whether rank r takes what rank r modulo the old number had, whatever it is.

    Attributes:
        report: after :meth:`read`, a message to the other ranks.
        handed: after :meth:`decide`, archives for the other ranks; None if no rank wants any.
        states: after :meth:`take`, the states that this rank gets instead of those of ``target.source_rank``, by name.
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
        self._raw: dict[str, dict[int, bytes]] = {}
        self._for_functions: list[str] = []
        self.report = b""
        self.handed: bytes | None = None
        self.states: dict[str, Any] = {}

    # ---- each rank by itself ------------------------------------------------------------------------------

    def read(self, reader: Reader, metadata: Metadata) -> None:
        """Read this rank's share, of ranks that saved: its own, and those that nobody has the number of any more."""
        tracked, target = self._tracked, self._target
        share = range(tracked.rank, target.saved_by, tracked.world_size)
        if state := tracked.of_ranks(metadata, share):
            planner = DefaultLoadPlanner()
            planner.set_up_planner(state, metadata, False)
            with plain_modes():
                reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        digests: dict[str, dict[int, str]] = {}
        seeds: dict[str, int] = {}
        places = set()
        for rank in share:
            wanted = [name for name in target.packed_by[rank] if self._is_wanted(name, rank)]
            for name, raw in packed_items(reader.read_items, rank_key(rank), wanted).items():
                value = self._load(name, raw)
                if rank == 0 and isinstance(generator := tracked.others.get(name), GeneratorState):
                    seeds[name] = generator.seed_of(value)
                if name == RNG:
                    seeds[name] = seed_of(value)
                    continue
                self._raw.setdefault(name, {})[rank] = raw
                if tracked.is_place(name, value):
                    places.add(name)
                digests.setdefault(name, {})[rank] = _digest(tracked.whole(value, state, rank)).hex()
        self.report = json.dumps([digests, seeds, sorted(places), list(tracked.reshards)]).encode()

    def _is_wanted(self, name: str, rank: int) -> bool:
        if name == RNG:
            return rank == 0  # of which new ranks get their seeds; the others have theirs
        return name in self._tracked.names and name not in self._target.structured

    def _load(self, name: str, raw: bytes, device_of: Callable[[str], torch.device] | None = None) -> Any:
        return load_archive(raw, name, path=str(self._version), allowed=self._safe_globals, device_of=device_of)

    # ---- with the reports of all ranks ----------------------------------------------------------------------

    def decide(self, reports: Sequence[bytes]) -> None:
        """Decide, as every rank does.

        Raises:
            ReshardError: there is state of which nobody says what becomes of it.
        """
        digests: dict[str, dict[int, str]] = {}
        seeds: dict[str, int] = {}
        places: set[str] = set()
        functions: set[str] | None = None
        for blob in reports:
            some, more, there, known = json.loads(blob)
            for name, by_rank in some.items():
                digests.setdefault(name, {}).update({int(rank): digest for rank, digest in by_rank.items()})
            seeds.update(more)
            places.update(there)
            functions = set(known) if functions is None else functions & set(known)
        saved = range(self._target.saved_by)
        differ = [name for name, by_rank in digests.items() if len({by_rank.get(rank) for rank in saved}) > 1]
        others = self._tracked.others
        generators = [n for n in differ if isinstance(others.get(n), GeneratorState) and len(digests[n]) == len(saved)]
        if self._keep:
            self._check_kept(digests)
        else:
            self._for_functions = sorted((functions or set()) & digests.keys())
            self._check_decided(digests.keys() - {*self._for_functions, *generators}, places, differ)
            if self._target.source_rank != self._tracked.rank:
                self._seed_anew(seeds, [name for name in generators if name not in self._for_functions])
        if self._tracked.rank == 0:
            self._tell(sorted(differ), seeds[RNG])
        if self._for_functions:
            states = {name: self._raw.get(name, {}) for name in self._for_functions}
            self.handed = save_archive(states, "states", allowed=None)

    def _check_kept(self, digests: Mapping[str, Mapping[int, str]]) -> None:
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

    def _tell(self, differ: Sequence[str], seed: int) -> None:
        before, now = self._target.saved_by, self._tracked.world_size
        changes = []
        if self._keep:
            changes.append(f"rank r takes the random numbers and the own state of rank r modulo {before}")
        elif now > before:
            changes.append(f"new ranks have their random numbers seeded anew from the seed {seed} of rank 0")
        if self._for_functions:
            changes.append(f"{_listed(self._for_functions)} as reshard functions make of what all ranks had")
        if now < before:
            rest = [name for name in differ if name not in self._for_functions]
            changes.append(f"not used any more of ranks that are gone: random numbers, {_listed(rest)}".rstrip(", "))
        _log.warning("saved by %d ranks, loaded by %d: %s", before, now, "; ".join(changes))

    # ---- with what they have handed over ------------------------------------------------------------------

    def take(self, handed: Sequence[bytes]) -> None:
        """Call the functions.

        Raises:
            ReshardError: one failed.
        """
        raw: dict[str, dict[int, bytes]] = {}
        for blob in handed:
            for name, by_rank in load_archive(blob, "states", path=str(self._version)).items():
                raw.setdefault(name, {}).update(by_rank)
        for name in self._for_functions:
            function, by_rank = self._tracked.reshards[name], raw.get(name, {})
            states = [
                self._load(name, by_rank[rank], self._tracked.device_of()) if rank in by_rank else None
                for rank in range(self._target.saved_by)
            ]
            try:
                self.states[name] = function(states, self._tracked.rank, self._tracked.world_size)
            except Exception as error:
                raise ReshardError(
                    f"the reshard function of {name!r} failed: {type(error).__name__}: {error}", rank=self._tracked.rank
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
