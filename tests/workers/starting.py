"""A job that starts; for `tests.support.forked.Child`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ml_flashpoint import Flashpoint
from tests.support.loops import Stored


def start(report: Callable[..., None], base: str) -> int:
    """Start from nothing, save a step and end; or from what there is, and run on."""
    report("starting")
    with Flashpoint(base) as fp:
        step = fp.track(value=Stored(1)).resume()
        report("resumed", step)
        if step:
            threading.Event().wait()
        fp.save(1)
    return step
