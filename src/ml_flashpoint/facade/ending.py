"""What a job does that is told to end. Owns the order of it."""

from __future__ import annotations

import logging
import time

from ml_flashpoint.core.persisting import Persisting
from ml_flashpoint.facade.save_runner import SaveRunner

_log = logging.getLogger(__name__)


def end_within(deadline_s: float, saves: SaveRunner, persisting: Persisting | None) -> None:
    """On SIGTERM: have the save under way committed and copied, and the newest version persisted."""
    give_up = time.monotonic() + deadline_s
    if persisting is not None:
        persisting.hurry()  # at once: a save that the other ranks have not begun may take all the time there is
    if not saves.settle(deadline_s):
        _log.warning("SIGTERM: the save under way was not committed and copied within %.0f s", deadline_s)
    if persisting is not None and not persisting.finish(max(give_up - time.monotonic(), 0.0)):
        _log.warning("SIGTERM: the newest version was not persisted within %.0f s", deadline_s)
