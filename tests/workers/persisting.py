"""Jobs of the façade that persist. Functions here run in children of `tests.support.forked`."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any

from ml_flashpoint import Flashpoint
from tests.workers.distributed_training import base as base_of_rank
from tests.workers.training import Job

Report = Callable[..., None]


def train(
    report: Report, base: str, url: str, steps: int, every: int = 2, pace_s: float = 0.0, rate: float | None = None
) -> dict[str, str]:
    """Trains up to `steps`, from wherever it can, saving every step."""
    job = Job()
    with Flashpoint(
        base, deadline_s=30, persist=url, persist_every=every, persist_keep=2, persist_bytes_per_s=rate
    ) as fp:
        step = fp.track(**job.tracked).resume()
        assert fp.last_recovery is not None
        report("resumed", step, fp.last_recovery.source)
        while step < steps:
            job.step()
            step = fp.step()
            fp.wait()
            report("step", step, fp.health.persisted)
            time.sleep(pace_s)
    report("health", fp.health.persisted, fp.health.persist_error)
    return job.digests()


def exit_without_closing(report: Report, base: str, url: str, forgets: bool) -> None:
    """Saves, and ends. ``forgets`` what the parent registered, as children of multiprocessing do since Python 3.13."""
    if forgets:
        atexit._clear()
    fp = Flashpoint(base, persist=url)
    fp.track(**Job().tracked).resume()
    for _ in range(3):
        fp.step()
        fp.wait()
    atexit._run_exitfuncs()  # which a child of multiprocessing does not


def train_ranks(
    report: Report, rank: int, url: str, steps: int, kind: str = "fsdp2", options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The same as a rank of a job."""
    job = Job(kind, seed=7)
    with Flashpoint(
        base_of_rank(),
        deadline_s=60,
        persist=url,
        **{"persist_every": 3, "on_world_size_change": "keep", **(options or {})},
    ) as fp:
        step = began = fp.track(**job.tracked).resume()
        assert fp.last_recovery is not None
        source, digests = fp.last_recovery.source, job.digests(shared=True)
        report("resumed", step, source)
        while step < steps:
            job.step()
            step = fp.step()
            fp.wait()
            report("step", step, fp.health.persisted)
    return {
        "began": began,
        "source": source,
        "then": digests,
        "now": job.digests(shared=True),
        "health": fp.health,
        "all": job.digests(),
    }
