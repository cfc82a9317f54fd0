"""Brings the newest loadable version into the tracked objects, on all ranks or on none.

Owns the steps of a load, and what comes of it. Which version is tried when is `core.joint_load`'s; finding, fetching
and verifying them is the engine's loader's; what to do when none is left is the façade's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.core.joint_load import JointLoad, LoadFailure
from ml_flashpoint.core.loader import MLFlashpointCheckpointLoader
from ml_flashpoint.facade.failures import causes_of
from ml_flashpoint.facade.health import Recovery, Source
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import LoadError, NothingLoadableError, ReshardError
from ml_flashpoint.format.failure_kinds import Blame
from ml_flashpoint.ranks.lasting_group import LastingGroup
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.state.archive import SafeGlobal
from ml_flashpoint.state.packed_state import PACKED
from ml_flashpoint.state.plain_modes import plain_modes
from ml_flashpoint.state.planner import TrackedLoadPlanner
from ml_flashpoint.state.resharding import Resharding
from ml_flashpoint.state.tracked import LoadTarget, TrackedState, rank_key

_ANEW = "to start anew, use another base container"


@dataclass(slots=True)
class LoadOutcome:
    """What was loaded, from where, what was not, and how long it took; see `Recovery` for the times."""

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
        """What is told of it.

        Args:
            step, source, total_s: see `Recovery`.
        """
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
        """Called when nothing was loaded, before anything else is: the user has to decide first.

        Raises:
            ReshardError: ranks have saved state of their own, and nothing says what becomes of it.
        """
        for failure in self.failures:
            if failure.blame is Blame.CHOICE:
                raise ReshardError(f"version {failure.version} cannot be loaded yet: {failure.text}", rank=failure.rank)

    def refuse_to_miss(self, rank: int) -> None:
        """Called when one version was asked for.

        Raises:
            LoadError: it was not loaded.
        """
        if self.version is None:
            in_part = " (and was loaded in part)" if any(failure.touched for failure in self.failures) else ""
            failed = self.failures[0].rank if self.failures else rank
            raise LoadError(f"the version cannot be loaded{in_part}: {self.why()}", rank=failed)

    def refuse_to_bury(self) -> None:
        """Called when nothing was loaded, and training would go on from elsewhere.

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
        """Called when nothing was loaded and training would start from nothing.

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
        """Why versions were passed over, if there are any."""
        reasons = [f"{failure.version}: rank {failure.rank}: {failure.text}" for failure in self.failures]
        return "; ".join(reasons + ([self.unloadable.message] if self.unloadable else [])) or None


class StateLoader:
    """See the module.

    Args:
        tracked: where to load to.
        loader: the engine's loader.
        ranks: who votes.
        group: processes that load together; None without torch.distributed.
        safe_globals, on_world_size_change: see `Flashpoint`.
    """

    def __init__(
        self,
        tracked: TrackedState,
        loader: MLFlashpointCheckpointLoader,
        ranks: RankGroup,
        group: LastingGroup | None,
        *,
        safe_globals: tuple[SafeGlobal, ...],
        on_world_size_change: str,
    ) -> None:
        self._tracked = tracked
        self._loader = loader
        self._ranks = ranks
        self._group = group
        self._safe_globals = safe_globals
        self._keep = on_world_size_change == "keep"

    def load(self, base: CheckpointContainerId, wanted: int | None = None) -> LoadOutcome:
        """Load the newest version of a base container that all ranks can load. Collective.

        What failed in an earlier call is tried again.

        Args:
            wanted: the step of a version, to load that one or none.

        Raises:
            LoadError: there is no such version.
            RanksLostError: ranks lost each other again and again, which says nothing about the version. On all ranks.
        """
        joint = JointLoad(self._loader, self._ranks, causes_of, (Exception, CheckpointException))
        outcome = LoadOutcome(failures=joint.failures)

        def load_timed(version: CheckpointContainerId) -> None:
            began = time.perf_counter()
            try:
                self._load(version, joint)
            finally:
                outcome.load_s += time.perf_counter() - began

        loaded = joint.newest(lambda: self._next_version(base, wanted, outcome), load_timed)
        outcome.version = None if loaded is None else loaded[0]
        outcome.source = self._loader.tier
        return outcome

    def _next_version(
        self, base: CheckpointContainerId, wanted: int | None, outcome: LoadOutcome
    ) -> CheckpointContainerId | None:
        version = None
        try:
            if wanted is None:
                version = self._loader.get_latest_complete_checkpoint(base)
            elif not outcome.failures:
                version = self._loader.get_checkpoint(base, wanted)
        except NothingLoadableError as error:
            outcome.unloadable = error
        if (report := self._loader.last_recovery) is not None:
            outcome.detect_s += report.detect_s
            outcome.plan_s += report.plan_s
            outcome.fetch_s += report.fetch_s
            outcome.fetched_bytes += report.fetched_bytes
        return version

    def _load(self, version: CheckpointContainerId, joint: JointLoad) -> None:
        """Load one version, in steps that all ranks vote on."""
        # The planner loads items that are no tensors by itself, and trusts them no more than the reader would.
        reader = _Reader(
            path=version, checkpoint_loader=self._loader, safe_globals=self._safe_globals, trust_bytes=True
        )
        target = joint.step(version, lambda: self._tracked.target(reader.read_metadata()))
        resharded: dict[str, Any] = {}
        if target.saved_by != self._ranks.world_size:
            resharded = self._reshard(version, joint, reader, target)
        planner = TrackedLoadPlanner(
            target.structured,
            path=str(version),
            safe_globals=self._safe_globals,
            device_of=self._tracked.device_of(),
        )

        def load_and_apply() -> None:
            self._run_dcp(target, reader, planner)
            own = {f"{PACKED}.{rank_key(target.source_rank)}.{name}": state for name, state in resharded.items()}
            self._tracked.apply(target, {**planner.packed, **own})

        joint.step(version, load_and_apply, touched=lambda: planner.touched)

    def _run_dcp(self, target: LoadTarget, reader: MemoryStorageReader, planner: TrackedLoadPlanner) -> None:
        if self._group is None:
            with plain_modes():
                load(target.state, storage_reader=reader, planner=planner)
            return
        groups = [self._group.await_group()]
        try:
            with plain_modes():
                load(target.state, storage_reader=reader, planner=planner, process_group=groups[0])
        except Exception as error:  # other than a `CheckpointException`, which tells all ranks
            self._group.broke(groups.pop(), error)  # others may wait in it
            if isinstance(error, RuntimeError):
                raise self._group.failure("the load", error) from error
            raise

    def _reshard(
        self, version: CheckpointContainerId, joint: JointLoad, reader: MemoryStorageReader, target: LoadTarget
    ) -> dict[str, Any]:
        """On another number of ranks: what this rank gets, by name, other than the state of the source rank."""
        change = Resharding(self._tracked, target, version, safe_globals=self._safe_globals, keep=self._keep)
        joint.step(version, lambda: change.read(reader))
        reports = self._ranks.gather(change.report)
        joint.step(version, lambda: change.decide(reports))
        if change.handed is not None:
            handed = self._ranks.gather(change.handed)
            joint.step(version, lambda: change.take(handed))
        return change.states


class _Reader(MemoryStorageReader):
    """Reads one checkpoint, whose metadata is wanted twice: to prepare, and by DCP."""

    _metadata: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
