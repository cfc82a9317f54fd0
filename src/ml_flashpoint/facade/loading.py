"""Loads of a `Flashpoint`: the newest loadable version, into the tracked objects of all ranks or of none.

Which version is tried when is `engine.joint_load`'s; finding, fetching and checking versions is the engine's. All steps
of a load are voted on, so that one rank's trouble is an error on all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.joint_load import JointLoad, LoadFailure
from ml_flashpoint.facade.health import Recovery, Source
from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.checkpoint_id_types import MAX_STEP, CheckpointContainerId
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, NothingLoadableError, ReshardError
from ml_flashpoint.format.failure_kinds import Blame
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.state.archive import SafeGlobal
from ml_flashpoint.state.packed_state import PACKED
from ml_flashpoint.state.planner import TrackedLoadPlanner
from ml_flashpoint.state.random_numbers import capture_rng_state, restore_rng_state
from ml_flashpoint.state.resharding import Resharding
from ml_flashpoint.state.tracked import LoadTarget, TrackedState, rank_key

_ANEW = "to start anew, use another base container"


@dataclass(slots=True)
class LoadOutcome:
    """The end of a load: the version, the failures of newer ones, and the time that it took (see `Recovery`)."""

    version: CheckpointContainerId | None = None
    source: Source = "memory"
    failures: list[LoadFailure] = field(default_factory=list)
    unloadable: NothingLoadableError | None = None
    detect_s: float = 0.0
    plan_s: float = 0.0
    fetch_s: float = 0.0
    load_s: float = 0.0
    fetched_bytes: int = 0

    @property
    def discarded(self) -> tuple[str, ...]:
        """Names of the versions that could not be loaded, newest first."""
        return tuple(failure.version for failure in self.failures)

    def recovery(self, step: int, source: Source, total_s: float) -> Recovery:
        """Return what is told of it. For the arguments see `Recovery`."""
        return Recovery(
            step=step,
            source=source,
            version=None if self.version is None else self.version.name,
            detect_s=self.detect_s,
            plan_s=self.plan_s,
            fetch_s=self.fetch_s,
            load_s=self.load_s,
            total_s=total_s,
            fetched_bytes=self.fetched_bytes,
            discarded=self.discarded,
        )

    def refuse_to_decide(self) -> None:
        """Raise if the user has to decide first. Called when nothing was loaded.

        Raises:
            ReshardError: ranks have saved state of their own, and nothing says what becomes of it.
        """
        for failure in self.failures:
            if failure.blame is Blame.CHOICE:
                raise ReshardError(f"version {failure.version} cannot be loaded yet: {failure.text}", rank=failure.rank)

    def refuse_to_miss(self, rank: int) -> None:
        """Raise if the version that was asked for was not loaded.

        Raises:
            LoadError: says why.
        """
        if self.version is None:
            in_part = " (and was loaded in part)" if any(failure.touched for failure in self.failures) else ""
            failed = self.failures[0].rank if self.failures else rank
            raise LoadError(f"the version cannot be loaded{in_part}: {self.why()}", rank=failed)

    def refuse_to_bury(self) -> None:
        """Raise if going on from elsewhere would bury a sound version. Called when nothing was loaded.

        Raises:
            LoadError: there is a sound version, and the program has changed so that it cannot take it.
        """
        for failure in self.failures:
            if failure.is_misfit:
                raise LoadError(
                    f"version {failure.version} does not fit what is tracked: {failure.text}",
                    rank=failure.rank,
                    hint=f"{_ANEW}, or pass discard_existing=True to the constructor",
                )

    def refuse_to_start_anew(self) -> None:
        """Raise if training must not start from nothing. Called when nothing was loaded.

        Raises:
            LoadError: there are versions that this would bury, or the tracked objects are half loaded.
        """
        hint = f"{_ANEW}, pass fallback=, or discard_existing=True to the constructor"
        touched = next((failure for failure in self.failures if failure.touched), None)
        if touched is not None:
            raise LoadError(
                f"no version could be loaded, and {touched.version} was loaded in part: {touched.text}",
                rank=touched.rank,
                hint=hint,
            )
        if self.failures:
            raise NothingLoadableError(
                f"there are versions and none can be loaded: {self.why()}", rank=self.failures[0].rank, hint=hint
            ) from self.unloadable
        if self.unloadable is not None:
            raise self.unloadable

    def why(self) -> str | None:
        """Return why versions were passed over; None if there are none."""
        reasons = [f"{failure.version}: rank {failure.rank}: {failure.text}" for failure in self.failures]
        return "; ".join(reasons + ([self.unloadable.message] if self.unloadable else [])) or None


class Loads:
    """The loads of one rank. Collective.

    Args:
        tracked: where to load to.
        checkpointer: the engine.
        safe_globals, on_world_size_change: see `Flashpoint`.
    """

    def __init__(
        self,
        tracked: TrackedState,
        checkpointer: Checkpointer,
        *,
        safe_globals: tuple[SafeGlobal, ...],
        on_world_size_change: str,
    ) -> None:
        self._tracked, self._checkpointer, self._ranks = tracked, checkpointer, checkpointer.ranks
        self._safe_globals = safe_globals
        self._keep = on_world_size_change == "keep"

    def load(self, wanted: int | None = None) -> LoadOutcome:
        """Load the newest version that all ranks can load.

        What failed in an earlier call is tried again.

        Args:
            wanted: the step of a version, to load that one or none.

        Raises:
            LoadError: there is no such version, or one that does not fit what is tracked.
            ReshardError: see `LoadOutcome.refuse_to_decide`.
            RanksLostError: ranks lost each other again and again, which says nothing about the version. On all ranks.
        """
        fresh, generators, outcome = self._tracked.fresh(), capture_rng_state(), None
        try:
            outcome = self._newest(wanted)
        finally:
            if outcome is None or outcome.version is None:  # a training that starts anew shows nothing of the tries
                for each in fresh:
                    each.forget()
                restore_rng_state(generators)
        outcome.refuse_to_decide()
        if wanted is not None:
            outcome.refuse_to_miss(self._ranks.rank)
        elif outcome.version is None:
            outcome.refuse_to_bury()
        return outcome

    def _newest(self, wanted: int | None) -> LoadOutcome:
        joint = JointLoad(self._checkpointer)
        outcome = LoadOutcome(failures=joint.failures)

        def load_timed(version: CheckpointContainerId) -> None:
            began = time.perf_counter()
            try:
                self._load(version, joint)
            finally:
                outcome.load_s += time.perf_counter() - began

        loaded = joint.newest(lambda: self._next_version(wanted, outcome), load_timed)
        outcome.version = None if loaded is None else loaded[0]
        return outcome

    def _next_version(self, wanted: int | None, outcome: LoadOutcome) -> CheckpointContainerId | None:
        version = None
        try:
            if wanted is None:
                version = self._checkpointer.newest()
            elif not outcome.failures:
                version = self._checkpointer.bring(wanted)
        except NothingLoadableError as error:
            outcome.unloadable = error
        if (report := self._checkpointer.last_recovery) is not None:
            outcome.source = report.tier
            outcome.detect_s += report.detect_s
            outcome.plan_s += report.plan_s
            outcome.fetch_s += report.fetch_s
            outcome.fetched_bytes += report.fetched_bytes
        return version

    def _load(self, version: CheckpointContainerId, joint: JointLoad) -> None:
        """Load one version, in steps that all ranks vote on."""
        # The planner loads items that are no tensors by itself, and trusts them no more than the reader would.
        reader = MemoryStorageReader(version, self._checkpointer, safe_globals=self._safe_globals, trust_bytes=True)
        metadata: Metadata = joint.step(version, reader.read_metadata)
        target = joint.step(version, lambda: self._tracked.target(metadata))
        resharded: dict[str, Any] = {}
        if target.saved_by != self._ranks.world_size:
            resharded = self._reshard(version, joint, reader, metadata, target)
        planner = TrackedLoadPlanner(
            target.structured,
            path=str(version),
            safe_globals=self._safe_globals,
            device_of=self._tracked.device_of(),
        )
        left = joint.step(version, lambda: planner.plan(target.state, metadata))
        left_on_all = set.intersection(
            *(set(json.loads(blob)) for blob in self._ranks.gather(json.dumps(left).encode()))
        )
        joint.step(version, lambda: planner.check_left(left_on_all))

        def load_and_apply() -> None:
            reader.set_up_storage_reader(metadata, self._ranks.rank == 0)
            planner.load(reader)
            own = {f"{PACKED}.{rank_key(target.source_rank)}.{name}": state for name, state in resharded.items()}
            self._tracked.apply(target, {**planner.packed, **own})

        joint.step(version, load_and_apply, touched=lambda: planner.touched)

    def _reshard(
        self,
        version: CheckpointContainerId,
        joint: JointLoad,
        reader: MemoryStorageReader,
        metadata: Metadata,
        target: LoadTarget,
    ) -> dict[str, Any]:
        """Return what this rank gets on another number of ranks, by name, in place of the source rank's state."""
        change = Resharding(self._tracked, target, version, safe_globals=self._safe_globals, keep=self._keep)
        joint.step(version, lambda: change.read(reader, metadata))
        reports = self._ranks.gather(change.report)
        joint.step(version, lambda: change.decide(reports))
        if change.handed is not None:
            handed = self._ranks.gather(change.handed)
            joint.step(version, lambda: change.take(handed))
        return change.states


def fall_back(ranks: RankGroup, fallback: Callable[[], int | None]) -> int:
    """Call a program's fallback, and return the step that it has loaded. Collective.

    Raises:
        LoadError: it failed on another rank, or ranks loaded different steps.
        Exception: what it raised.
    """

    def call() -> int:
        returned = fallback()
        return checked_integer("fallback", 0 if returned is None else returned, 0, MAX_STEP)

    step = ranks.together(call, LoadError("the fallback failed on another rank; its log says why", rank=ranks.rank))
    steps = [int(blob) for blob in ranks.gather(str(step).encode())]
    if len(set(steps)) > 1:
        raise LoadError(f"the fallback returned different steps on different ranks: {steps}", rank=ranks.rank)
    return step


def checked_wanted(step: int | None, fallback: object) -> int | None:
    """Return the step that `resume` is to load, or None for the newest version."""
    if step is not None and fallback is not None:
        raise InvalidArgumentError("cannot go with a step: that is loaded, or nothing", argument="fallback", value=step)
    return None if step is None else checked_integer("step", step, 0, MAX_STEP)
