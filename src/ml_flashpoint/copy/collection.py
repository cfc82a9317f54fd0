"""Python's garbage collector while a save is planned and staged. Owns nothing else."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the garbage collector from looking through all of torch in the middle of a save.

    Planning and staging make tens of thousands of objects that are gone soon after. Collections meanwhile would take
    them for old ones, and each few thousand of those make Python collect everything: at 2,000 tensors that was 80% of
    the time that a save blocks.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
