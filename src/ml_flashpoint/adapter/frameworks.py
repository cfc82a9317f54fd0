"""`FrameworkFlashpoint`: a `Flashpoint` for a framework that counts the steps, and has checkpoints of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ml_flashpoint.flashpoint import Flashpoint
from ml_flashpoint.format.errors import NothingLoadableError

_log = logging.getLogger(__name__)


class FrameworkFlashpoint(Flashpoint):
    """A `Flashpoint` beside a framework's own checkpoints."""

    def newest_step(self, *, may_fall_back: bool) -> int | None:
        """Bring the newest version that all ranks can load here, and return its step. Collective.

        Args:
            may_fall_back: where there are versions, and none can be loaded, return None instead of raising.

        Returns:
            None if there is none.

        Raises:
            NothingLoadableError: there are versions, and none can be loaded. On all ranks.
        """
        try:
            version = self._checkpointer.newest()
        except NothingLoadableError as error:
            if not may_fall_back:
                raise
            _log.error("calling the fallback; later saves will overwrite the versions in memory: %s", error)
            return None
        return None if version is None else version.step

    def agreed(self, step: int) -> int:
        """Return the step that rank 0 passes: ranks may see a folder change at different times. Collective."""
        return int(self._ranks.broadcast(str(step).encode()))

    def begin_anew(self) -> None:
        """Begin to save, after the framework has loaded a checkpoint of its own, or none. Versions in memory do not
        count any more. Collective. Raises as `resume` does."""
        self._check()
        self._checkpointer.go_on_from(None)
        self._checkpointer.check_room(self._tracked.expected_bytes())

    def step_to(self, step: int) -> None:
        """Count so many steps as done, and save if a save is due."""
        self._loop.steps = step - 1
        self.step()


def numbered(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return values by names to track them under: ``name``, ``name_1``, and so on."""
    return {name if index == 0 else f"{name}_{index}": each for index, each in enumerate(values)}
