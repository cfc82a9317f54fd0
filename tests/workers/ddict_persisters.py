"""Persisters for dictionaries of tests, in the processes of the managers."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict import PosixCheckpointPersister
from ml_flashpoint.ddict.manager.manager import Manager

FLAG = "FLASHPOINT_TEST_KILL_FLAG"


class KilledWhileRestoring(PosixCheckpointPersister):
    """Kills its manager when it has taken up a restored checkpoint and not said so: once, if there is a file where
    `FLAG` says."""


def _killed_after(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_and_die(manager: Manager, *told: Any) -> None:
        begin(manager, *told)
        flag = Path(os.environ.get(FLAG, "/nowhere"))
        with contextlib.suppress(FileNotFoundError):
            flag.rename(flag.with_name("killed"))  # one of them is the first
            os.kill(os.getpid(), signal.SIGKILL)

    return begin_and_die


Manager.begin = _killed_after(Manager.begin)  # type: ignore[method-assign]  # of the process that imports this
