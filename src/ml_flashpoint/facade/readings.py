"""What a façade tells of its saves and its last recovery. Owns the words; the runner and the engine count."""

from __future__ import annotations

from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.facade.health import Health, Recovery, health_of
from ml_flashpoint.facade.save_runner import SaveRunner
from ml_flashpoint.ranks.rank_group import RankGroup


class Readings:
    """The part of `Flashpoint` that only tells. Nothing of it is collective."""

    _engine: CheckpointEngine
    _saves: SaveRunner
    _ranks: RankGroup
    _steps: int
    _part_bytes: int
    _resumed_from: int | None
    _last_recovery: Recovery | None

    @property
    def steps_done(self) -> int:
        """Steps counted so far, those before `resume` included."""
        return self._steps

    @property
    def last_saved(self) -> int | None:
        """Step of the newest version that is committed on all ranks: saved, or resumed from. None if there is none."""
        return self._resumed_from if self._saves.last_saved is None else self._saves.last_saved

    @property
    def last_replicated(self) -> int | None:
        """Step of the newest version saved by this object of which every copy that the replication strategy asks for
        was acknowledged, on all ranks. None if there is none, or nobody holds copies of this rank's parts."""
        has_copies = self._engine.replication.copies_of(self._ranks.rank)
        return self._engine.saver.stats.last_verified if has_copies else None

    @property
    def last_recovery(self) -> Recovery | None:
        """What the last `resume` did; None before."""
        return self._last_recovery

    @property
    def health(self) -> Health:
        """How saving goes, now."""
        own = [part.manifest for part in self._engine.store.held() if part.rank == self._ranks.rank]
        if own and own[-1] is not None:
            self._part_bytes = own[-1].total_size  # kept, for who asks after closing
        return health_of(self._saves, self._engine.saver.stats, self._engine.persist_health, self._part_bytes)

    def scalars(self, prefix: str = "flashpoint/") -> dict[str, float]:
        """What there is to plot, by name: the numbers of `health`, the newest steps, and how far copies lag behind, in
        steps. For TensorBoard, W&B and the like; what is not known yet is left out.

        Args:
            prefix: of the names.
        """
        saved, copied, recovery = self.last_saved, self.last_replicated, self._last_recovery
        found = self.health.scalars(prefix)
        if saved is not None:
            found[f"{prefix}last_saved"] = float(saved)
        if copied is not None:
            found[f"{prefix}last_replicated"] = float(copied)
            found[f"{prefix}copies_lag"] = float(max(0, (saved or 0) - copied))
        if recovery is not None:
            found[f"{prefix}recovery_s"] = recovery.total_s
        return found
