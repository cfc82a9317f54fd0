"""Persisters for dictionaries of tests, in the processes of the managers."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ml_flashpoint.ddict import PosixCheckpointPersister

FLAG = "FLASHPOINT_TEST_KILL_FLAG"


class KilledWhileRestoring(PosixCheckpointPersister):
    """Kills its manager, if that is not the main one, when it has taken up a restored checkpoint and not said so: once,
    if there is a file where `FLAG` says."""

    def join_run(self, run_id: str) -> None:
        super().join_run(run_id)
        flag = Path(os.environ[FLAG])
        with contextlib.suppress(FileNotFoundError):
            if flag.read_text() != run_id:
                flag.rename(flag.with_name("killed"))  # one of them is the first
                os.kill(os.getpid(), signal.SIGKILL)
