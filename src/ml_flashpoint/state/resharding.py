"""The state that ranks have of their own, on another number of ranks: who takes whose, and what is made anew.

Each rank reads its share of what the ranks that saved had of their own, and reports a digest of each state, and the
states that ``reshard`` functions are given. Then each decides alike: state that was the same on all ranks is
everybody's, generators go on where their rank is still there, and are seeded anew where it is new. Anything else is for
a function, or for the user: a `ReshardError`. No tensor of a model or an optimizer is touched before that is decided.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from ml_flashpoint.copy.dtypes import octets_of
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.format.errors import ReshardError, text_of
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.state.archive import load_archive, plain_modes, save_archive
from ml_flashpoint.state.random_numbers import GeneratorState, new_seed, seed_of, seeded_rng_state
from ml_flashpoint.state.tracked import RNG, Reader, TrackedLoad, TrackedState, packed_items

_log = logging.getLogger(__name__)


class _Had(NamedTuple):
    """A state that a rank has saved."""

    name: str
    rank: int
    digest: bytes
    seed: int | None  # of a generator of rank 0
    is_place: bool  # in the data
    archive: bytes  # for a function


class Resharding:
    """The decision about one version, on one rank. :meth:`read`, then :meth:`decide`.

    Args:
        keep: True if rank r takes what rank r modulo the old number had, whatever it is.

    Attributes:
        states: after :meth:`decide`, states that this rank gets instead of those of ``target.source_rank``, by name.
    """

    def __init__(
        self, tracked: TrackedState, target: TrackedLoad, version: CheckpointContainerId, *, keep: bool
    ) -> None:
        self._tracked, self._target, self._version, self._keep = tracked, target, version, keep
        self._functions = {} if keep else tracked.reshards
        self.states: dict[str, Any] = {}

    def read(self, reader: Reader, metadata: Metadata) -> bytes:
        """Read this rank's share, of ranks that saved: its own, and those that nobody has the number of any more.
        Return a report to the other ranks."""
        tracked, target = self._tracked, self._target
        share = range(tracked.rank, target.saved_by, tracked.world_size)
        if state := tracked.of_ranks(metadata, share):
            planner = DefaultLoadPlanner()
            planner.set_up_planner(state, metadata, False)
            with plain_modes():
                reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        report: list[_Had] = []
        for rank in share:
            wanted = set(target.packed_by[rank]).intersection(tracked.names) - target.structured
            if rank == 0:  # of which new ranks get their seeds; the others have theirs
                wanted.add(RNG)
            for name, data in packed_items(reader, rank, wanted).items():
                value = target.read(data, name)
                if name == RNG:
                    report.append(_Had(name, rank, b"", seed_of(value), False, b""))
                    continue
                generator, digest = tracked.others.get(name), _digest(tracked.whole(value, state, rank))
                seed = generator.seed_of(value) if isinstance(generator, GeneratorState) and rank == 0 else None
                archive = data if name in self._functions else b""
                report.append(_Had(name, rank, digest, seed, tracked.is_place(name, value), archive))
        return save_archive([tuple(each) for each in report], "report")

    def decide(self, reports: Sequence[bytes]) -> None:
        """Decide, as every rank does, and call the functions. Raises a `ReshardError` if there is state of which nobody
        says what becomes of it, or a function failed."""
        tracked, target, count = self._tracked, self._target, self._target.saved_by
        had: dict[str, dict[int, _Had]] = {}
        for blob in reports:
            for fields in load_archive(blob, "report", path=str(self._version)):
                had.setdefault(fields[0], {})[fields[1]] = _Had(*fields)
        seed = had.pop(RNG)[0].seed or 0
        digests = {name: [each.digest for each in by_rank.values()] for name, by_rank in sorted(had.items())}
        differ = [name for name, each in digests.items() if len(each) < count or len(set(each)) > 1]
        functions = sorted(self._functions.keys() & had.keys())
        if self._keep:
            if lacking := sorted(name for name, by_rank in had.items() if target.source_rank not in by_rank):
                raise ReshardError(f"rank {target.source_rank} had no state of {_listed(lacking)}", rank=tracked.rank)
        else:
            alone = [name for name in differ if name not in functions and len(had[name]) == count]
            generators = {name: each for name in alone if isinstance(each := tracked.others.get(name), GeneratorState)}
            self._check_decided(had, differ, decided={*functions, *generators})
            if target.source_rank != tracked.rank:
                rank, step = tracked.rank, self._version.step or 0
                self.states[RNG] = seeded_rng_state(seed, rank, step)
                for name, generator in generators.items():
                    its = had[name][0].seed
                    self.states[name] = generator.seeded(new_seed(seed if its is None else its, rank, step, name))
        if tracked.rank == 0:
            self._tell(differ, functions, seed)
        for name in functions:
            self.states[name] = self._resharded(name, had[name])

    def _check_decided(
        self, had: Mapping[str, Mapping[int, _Had]], differ: Sequence[str], *, decided: Collection[str]
    ) -> None:
        """Raise if any other state is a place in the data, or differs between the ranks that saved it."""
        undecided = {}
        for name in sorted(had.keys() - decided):
            if any(each.is_place for each in had[name].values()):
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

    def _resharded(self, name: str, by_rank: Mapping[int, _Had]) -> Any:
        """Call the function for an object's state, with the states of all ranks that saved."""
        tracked, target = self._tracked, self._target
        archives = [by_rank[rank].archive if rank in by_rank else None for rank in range(target.saved_by)]
        states = [None if archive is None else target.read(archive, name) for archive in archives]
        try:
            return tracked.reshards[name](states, tracked.rank, tracked.world_size)
        except Exception as error:
            raise ReshardError(
                f"the reshard function of {name!r} failed: {text_of(error)}", rank=tracked.rank
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
