"""What a façade's user does with older versions: list them, load one of them.

Owns these calls, in the words of a training loop. What they do on all ranks is `core.retention`'s; which versions stay
by themselves is `ranks.retention`'s rule.
"""

from __future__ import annotations

from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.core.retention import KeptVersion
from ml_flashpoint.facade.save_runner import SaveRunner
from ml_flashpoint.facade.state_loader import LoadOutcome, StateLoader
from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.checkpoint_id_types import MAX_STEP
from ml_flashpoint.format.errors import DeadlineError, InvalidArgumentError
from ml_flashpoint.state.random_numbers import capture_rng_state, restore_rng_state
from ml_flashpoint.state.tracked import TrackedState


class KeptVersions:
    """The part of `Flashpoint` that is about versions other than the newest."""

    _engine: CheckpointEngine
    _saves: SaveRunner
    _states: StateLoader
    _tracked: TrackedState
    _deadline_s: float

    def _check_open(self) -> None:
        raise NotImplementedError

    def versions(self) -> list[KeptVersion]:
        """What this job holds in memory and `resume` can load, newest save first. Collective.

        A version of which a part is on no node any more is not among them.
        """
        self._check_open()
        return self._engine.versions()

    def _settle(self) -> None:
        """Wait until the save under way has ended on all ranks.

        Raises:
            DeadlineError: it took too long on some rank; on all of them.
        """
        ranks = self._engine.ranks
        late = DeadlineError("a save is still under way", rank=ranks.rank)

        def settle() -> None:
            if not self._saves.help_and_await(self._deadline_s):
                raise late

        ranks.together(settle, DeadlineError("a save of another rank is still under way", rank=ranks.rank))

    def _load(self, wanted: int | None) -> LoadOutcome:
        """Load the newest version, or the one of a step, which is then the newest."""
        rank = self._engine.ranks.rank
        if wanted is not None:
            self._settle()
            self._engine.retention.settle()
            self._engine.store.drop_before_next_save([])  # it may be one of those
        fresh, generators, loaded = self._tracked.fresh(), capture_rng_state(), False
        try:
            outcome = self._states.load(self._engine.base, wanted)
            loaded = outcome.version is not None
        finally:
            if not loaded:  # what the tries left behind must not show in a training that starts anew
                for each in fresh:
                    each.forget()
                restore_rng_state(generators)
        outcome.refuse_to_decide()
        if wanted is not None:
            outcome.refuse_to_miss(rank)
            # Where it cannot be recorded, the state is another one than that of the steps counted: not to be saved.
            self._engine.unasked = True
            self._engine.leave_newer()
            self._saves.last_saved = None
        if outcome.version is None:
            outcome.refuse_to_bury()
        return outcome


def checked_wanted(step: int | None, fallback: object) -> int | None:
    """Return the step that `resume` is to load, or None for the newest version."""
    if step is not None and fallback is not None:
        raise InvalidArgumentError("cannot go with a step: that is loaded, or nothing", argument="fallback", value=step)
    return None if step is None else checked_integer("step", step, 0, MAX_STEP)
