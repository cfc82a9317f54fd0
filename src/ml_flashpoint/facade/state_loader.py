"""Brings the newest loadable version into the tracked objects, on all ranks or on none.

Owns the tries: newest version first, a vote after each, older ones next. Finding, fetching and verifying versions is
the engine's loader's; what to do when none is left is the façade's.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.facade.failures import causes_of, is_misfit, text_of
from ml_flashpoint.facade.planners import PACKED, FacadeLoadPlanner
from ml_flashpoint.facade.resharding import Resharding
from ml_flashpoint.facade.tracked_state import LoadTarget, TrackedState, rank_key
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DeadlineError, LoadError, NothingLoadableError, ReshardError, TopologyError
from ml_flashpoint.ranks.lasting_group import LastingGroup
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.unpickling.safe_archive import SafeGlobal

_log = logging.getLogger(__name__)


# How often loading begins anew, of whatever versions, because ranks lost each other.
_TRIES_IF_LOST = 2


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a version could not be loaded, the same on every rank.

    Attributes:
        version: its name.
        text: the lowest failing rank's reason.
        misfit: whether, on some rank, the program differs from the one that was saved.
        touched: whether tensors may have been written to, on some rank.
        lost: whether ranks lost each other meanwhile, which says nothing about the version.
        undecided: whether it is of another number of ranks, and nothing says what becomes of some of it.
    """

    version: str
    text: str
    misfit: bool
    touched: bool
    lost: bool
    undecided: bool


@dataclass(slots=True)
class LoadOutcome:
    """What was loaded, what was not, and how long it took; see `Recovery` for the times."""

    version: CheckpointContainerId | None = None
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

    def refuse_to_decide(self, rank: int) -> None:
        """Called when nothing was loaded, before anything else is: the user has to decide first.

        Raises:
            ReshardError: ranks have saved state of their own, and nothing says what becomes of it.
        """
        for failure in self.failures:
            if failure.undecided:
                raise ReshardError(f"version {failure.version} cannot be loaded yet: {failure.text}", rank=rank)

    def refuse_to_start_anew(self, rank: int) -> None:
        """Called when nothing was loaded and training would start from nothing.

        Raises:
            LoadError: there are versions that this would bury, or the tracked objects are half loaded.
        """
        hint = "to start anew, use another base container, pass fallback=, or discard_existing=True to the constructor"
        misfit = next((failure for failure in self.failures if failure.misfit), None)
        if misfit is not None:
            raise LoadError(
                f"version {misfit.version} does not fit what is tracked: {misfit.text}", rank=rank, hint=hint
            )
        touched = next((failure for failure in self.failures if failure.touched), None)
        if touched is not None:
            raise LoadError(
                f"no version could be loaded, and {touched.version} was loaded in part: {touched.text}",
                rank=rank,
                hint=hint,
            )
        if self.failures:
            raise NothingLoadableError(
                f"there are versions and none can be loaded: {self.why()}", rank=rank, hint=hint
            ) from self.unloadable
        if self.unloadable is not None:
            raise self.unloadable

    def why(self) -> str | None:
        """Why versions were passed over, if there are any."""
        reasons = [f"{failure.version}: {failure.text}" for failure in self.failures]
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
        loader: DefaultMLFlashpointCheckpointLoader,
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

    def load_newest(self, base: CheckpointContainerId) -> LoadOutcome:
        """Load the newest version of a base container that all ranks can load. Collective.

        What failed in an earlier call is tried again.

        Raises:
            TopologyError: ranks lost each other again and again, which says nothing about the version. On all ranks.
        """
        self._loader.reconsider()
        outcome, lost = LoadOutcome(), 0
        while (version := self._next_version(base, outcome)) is not None:
            began = time.perf_counter()
            failure = self._load(version)
            outcome.load_s += time.perf_counter() - began
            if failure is None:
                outcome.version = version
                break
            if failure.undecided:  # an older one may be of this number of ranks, and is not what is asked for
                outcome.failures.append(failure)
                break
            if failure.lost:
                lost += 1
                if lost > _TRIES_IF_LOST:
                    raise TopologyError(
                        f"version {version.name} cannot be loaded, as ranks lose each other: {failure.text}",
                        rank=self._ranks.rank,
                        hint="resume() may be called again; older versions would fare no better",
                    )
                _log.warning("loading version %s is tried again: %s", version.name, failure.text)
                continue
            _log.error("version %s cannot be loaded, trying an older one: %s", version.name, failure.text)
            outcome.failures.append(failure)
            self._loader.discard(version)
        return outcome

    def _next_version(self, base: CheckpointContainerId, outcome: LoadOutcome) -> CheckpointContainerId | None:
        version = None
        try:
            version = self._loader.get_latest_complete_checkpoint(base)
        except NothingLoadableError as error:
            outcome.unloadable = error
        if (report := self._loader.last_recovery) is not None:
            outcome.detect_s += report.detect_s
            outcome.plan_s += report.plan_s
            outcome.fetch_s += report.fetch_s
            outcome.fetched_bytes += report.fetched_bytes
        return version

    def _load(self, version: CheckpointContainerId) -> LoadFailure | None:
        """Load one version. Every rank gets the same answer."""
        # The planner loads items that are no tensors by itself, and trusts them no more than the reader would.
        reader = _Reader(
            path=version, checkpoint_loader=self._loader, safe_globals=self._safe_globals, trust_bytes=True
        )
        error: BaseException | None = None
        try:
            target = self._tracked.target(reader.read_metadata())
        except Exception as caught:
            error = caught
        if (failure := self._vote(version, error, touched=False)) is not None:
            return failure
        resharded: dict[str, Any] = {}
        if target.saved_by != self._ranks.world_size:
            resharded, failure = self._reshard(version, reader, target)
            if failure is not None:
                return failure
        group = None
        planner = FacadeLoadPlanner(
            target.structured,
            path=str(version),
            safe_globals=self._safe_globals,
            device_of=self._tracked.device_of(target),
        )
        try:
            group = None if self._group is None else self._group.await_group()
            load(target.state, storage_reader=reader, planner=planner, process_group=group)
            group = None
            own = {f"{PACKED}.{rank_key(target.source_rank)}.{name}": state for name, state in resharded.items()}
            self._tracked.apply(target, {**planner.packed, **own})
        except (Exception, CheckpointException) as caught:
            error = caught
            if self._group is not None and not isinstance(caught, CheckpointException):  # which tells all ranks
                lost = group is not None and isinstance(caught, RuntimeError)
                self._group.broke(group, caught)  # others may wait in it
                group = None
                error = self._group.failure("the load", caught) if lost else caught
        return self._vote(version, error, touched=planner.touched)

    def _reshard(
        self, version: CheckpointContainerId, reader: MemoryStorageReader, target: LoadTarget
    ) -> tuple[dict[str, Any], LoadFailure | None]:
        """On another number of ranks: what this rank gets, by name, other than the state of the source rank."""
        change = Resharding(self._tracked, target, version, safe_globals=self._safe_globals, keep=self._keep)
        failure = self._tried(version, lambda: change.read(reader))
        if failure is None:
            reports = self._ranks.gather(change.report)
            failure = self._tried(version, lambda: change.decide(reports))
        if failure is None and change.handed is not None:
            handed = self._ranks.gather(change.handed)
            failure = self._tried(version, lambda: change.take(handed))
        return change.states, failure

    def _tried(self, version: CheckpointContainerId, action: Callable[[], None]) -> LoadFailure | None:
        error = None
        try:
            action()
        except Exception as caught:
            error = caught
        return self._vote(version, error, touched=False)

    def _vote(
        self, version: CheckpointContainerId, error: BaseException | None, *, touched: bool
    ) -> LoadFailure | None:
        """What went wrong, if anything did on any rank."""
        mine = b""
        if error is not None:
            self._loader.release()
            causes = causes_of(error)
            lost = isinstance(error, (TopologyError, DeadlineError))
            undecided = isinstance(error, ReshardError)
            mine = json.dumps([text_of(causes), is_misfit(causes), touched, lost, undecided]).encode()
        gathered = [json.loads(blob) for blob in self._ranks.gather(mine) if blob]
        if not gathered:
            return None
        return LoadFailure(
            version.name, str(gathered[0][0]), *(any(each[i] for each in gathered) for i in (1, 2, 3, 4))
        )


class _Reader(MemoryStorageReader):
    """Reads one checkpoint, whose metadata is wanted twice: to prepare, and by DCP."""

    _metadata: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
