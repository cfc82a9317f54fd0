"""Jobs of the façade whose program has set other defaults or modes of torch. For `tests.support.forked`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ml_flashpoint import Flashpoint
from tests.support.settings import SETTINGS
from tests.workers.distributed_training import base
from tests.workers.training import Job


def round_trips(report: Callable[..., None], rank: int, kind: str) -> None:
    """Save a job under each setting, and resume a new one, which must go on the same without the setting."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"strict": True, "handle_sigterm": False, "deadline_s": 30}
    for number, (name, setting) in enumerate(SETTINGS.items()):
        folder = base().parent / f"job-{number}"
        job, other = Job(kind), Job(kind)
        job.step(), job.step()
        with setting(), Flashpoint(folder, **options) as fp:
            fp.track(**job.tracked).save(2)
        job.step()
        trained = job.digests()
        with setting(), Flashpoint(folder, **options) as fp:
            assert fp.track(**other.tracked).resume() == 2, name
        other.step()
        found = other.digests()
        differ = [key for key in {**found, **trained} if found.get(key) != trained.get(key)]
        assert not differ, f"{name}: {differ}"
