"""Ranks that lose step: one begins a save more, comes late, does not come, or has another clock.

Owns what one rank does; functions are for `tests.support.forked.Team`. They return what the test compares.
"""

from __future__ import annotations

import concurrent.futures.thread as executor_threads
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import CapacityError, SaveError
from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from ml_flashpoint.ranks import rank_group as rank_groups
from tests.support.dcp import Door
from tests.support.forked import Report, wait_until
from tests.workers.fault_engine import Rank


def base(name: str = "job") -> Path:
    """A base container on this rank's node."""
    return Path(os.environ["FLASHPOINT_TEST_BASE"]).with_name(name)


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Within, no thread of an executor can be started."""
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) is executor_threads._worker:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refusing  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def cannot_start_a_thread(report: Report, rank: int) -> dict[str, Any]:
    """On rank 1, no thread can be started for the first save, nor for what is copied of it while training goes on."""
    model, blocked, saved = nn.Linear(8, 8), [], []
    with Flashpoint(base(), deadline_s=60) as fp:
        fp.track(model=model)
        fp.resume()
        for step in range(1, 5):
            nn.init.constant_(model.weight, step)
            dist.barrier()
            began = time.monotonic()
            if rank == 1 and step == 1:
                with no_more_threads():
                    fp.step()
            else:
                fp.step()
            blocked.append(time.monotonic() - began)
            fp.wait()
            saved.append(fp.last_saved)
        health, replicated = fp.health, fp.last_replicated
    dist.barrier()
    with Flashpoint(base(), deadline_s=60) as fp:
        found = fp.track(model=model).resume()
    return {
        "blocked": max(blocked),
        "failures": health.failures,
        "error": health.last_error,
        "degraded": health.degraded,
        "saved": saved,
        "replicated": replicated,
        "found": found,
        "value": float(model.weight[0, 0]),
    }


def cannot_start_a_thread_for_dcp(report: Report, rank: int) -> dict[str, Any]:
    """The same with ``dcp.async_save``, in a loop that goes on after a save that failed."""
    door, failed = Door(base()), {}
    for step in range(1, 6):
        state = {"weight": torch.full((4,), float(step)), f"own{rank}": torch.full((3,), float(step))}
        try:
            if rank == 1 and step == 2:
                with no_more_threads():
                    door.save_by("thread", state, step)
            else:
                door.save_by("thread", state, step)
        except (Exception, dcp.CheckpointException) as error:
            failed[step] = str(error)
    door.settle()
    dist.barrier()
    verified, loaded = door.saver.stats.last_verified, door.load({"weight": torch.zeros(4)}, 5)["weight"].tolist()
    door.close()
    return {"failed": failed, "verified": verified, "loaded": loaded}


def has_no_room(report: Report, rank: int) -> dict[str, Any]:
    """With ``dcp.save``, rank 1 fails to write step 2, and then nothing more is saved. How long the end takes."""
    door = Door(base())
    door.save({f"own{rank}": torch.ones(4)}, 1)
    if rank == 1:
        door.saver._acquire = _no_room  # type: ignore[method-assign]
    try:
        door.save({f"own{rank}": torch.ones(4)}, 2)
        raise AssertionError("must fail")
    except dcp.CheckpointException as error:
        failed = str(error)
    began = time.monotonic()
    settled = door.saver.wait()
    waited = time.monotonic() - began
    door.close()
    return {"failed": failed, "settled": settled, "waited": waited}


def _no_room(*args: Any) -> Any:
    raise CapacityError("no room")


def begins_one_more(report: Report, rank: int, how: str) -> list[int | None]:
    """Rank 1 begins a save that no other rank does, and gives it up. What is verified after each of some saves."""
    verified = []
    engine = Rank(base(), replicate=True) if how == "engine" else None
    door = Door(base()) if how == "dcp" else None
    manager = LocalCheckpointManager(base()) if how == "local" else None
    saver: Any = engine.saver if engine else door.saver if door else manager._saver if manager else None
    for step in range(1, 6):
        if rank == 1 and step == 2:
            saver.fail(saver.begin(exchanged=how != "engine"), SaveError("given up"))
        if engine is not None:
            engine.save("tiny", step, 0)
        elif door is not None:
            door.save({"weight": torch.full((4,), float(step))}, step)
        elif manager is not None:
            manager.save(BasicTensorAwareStateDict({"weight": torch.full((4,), float(step))}), step)
        dist.barrier()
        # The engine alone counts alone: a rank that is a save ahead waits for the others' next one.
        if how != "engine" or step not in (2, 3):
            assert saver.wait(60)
        elif step == 3:
            wait_until(lambda: saver.stats.agreement_error is not None, "ranks that notice")
        dist.barrier()
        verified.append(saver.stats.last_verified)
    if engine is not None:
        assert engine.load("tiny") == (5, 0)
        engine.close()
    elif door is not None:
        assert float(door.load({"weight": torch.zeros(4)}, 5)["weight"][0]) == 5
        door.close()
    elif manager is not None:
        manager.close()
    return verified


def comes_late(report: Report, rank: int) -> dict[str, Any]:
    """Rank 1 comes to the save of step 2 after rank 0 has given it up."""
    with Flashpoint(base(), deadline_s=2) as fp:
        fp.track(model=nn.Linear(8, 8)).resume()
        for step in range(1, 5):
            if rank == 1 and step == 2:
                report.listen()
            fp.step()
            fp.wait(60)
            if rank == 0 and step == 2:
                report("given up", fp.health.last_error)
            report("saved", step, fp.last_saved)
            dist.barrier()
        health, replicated = fp.health, fp.last_replicated
    return {"failures": health.failures, "degraded": health.degraded, "replicated": replicated}


def agrees_late(report: Report, rank: int) -> list[Any]:
    """Rank 1 saves step 2 after rank 0 has waited for its agreement in vain."""
    engine = Rank(base(), replicate=True)
    seen = []
    for step in range(1, 5):
        if rank == 1 and step == 2:
            report.listen()
        engine.save("tiny", step, 0)
        assert engine.saver.wait(60)
        if rank == 0 and step == 2:
            report("given up", engine.saver.stats.agreement_error)
        dist.barrier()
        seen.append(engine.saver.stats.last_verified)
    assert engine.saver.stats.agreement_error is None
    assert engine.load("tiny") == (4, 0)
    engine.close()
    return seen


def saves_alone(report: Report, rank: int) -> str | None:
    """Only rank 0 calls `step`."""
    fp = Flashpoint(base(), deadline_s=2)
    fp.track(model=nn.Linear(8, 8)).resume()
    if rank == 0:
        fp.step()
        fp.wait(60)
        report("failed")
    else:
        report.listen()
    error = fp.health.last_error
    fp._close(0.1)
    return error


def saves_in_two_jobs(report: Report, rank: int, steps: int) -> list[tuple[int, int, int | None]]:
    """Two façades in one process group; ranks call them in different orders."""
    both = [Flashpoint(base(name), deadline_s=60, handle_sigterm=False) for name in ("one", "two")]
    for fp in both:
        fp.track(model=nn.Linear(8, 8)).resume()
    for step in range(steps):
        # The first save of each is planned together before it returns.
        for fp in both if rank == 0 or step == 0 else reversed(both):
            fp.step()
    for fp in both:
        assert fp.wait(60)
    dist.barrier()
    result = [(fp.health.saves, fp.health.failures, fp.last_replicated) for fp in both]
    for fp in both:
        fp.close()
    return result


def saves_with_a_clock(report: Report, rank: int, step: int, ahead_s: int, how: str) -> tuple[int | None, int | None]:
    """Saves one step without looking for what there is, as if told to; what is verified, and what is newest then."""
    real = time.time_ns
    rank_groups.time.time_ns = lambda: real() + ahead_s * 10**9  # type: ignore[assignment]
    door = Door(base())
    door.objects.open(door.base, rank).asked = True
    state = {"weight": torch.full((4,), float(step))}
    if how == "engine":
        name = f"step-{step}_ckpt"
        for _ in range(2):  # of the engine alone, the first only tells ranks that their clock is behind
            door.saver.save(_version(door, name), [("weight", state["weight"])])
            assert door.saver.wait(60)
    else:
        door.save_by(how, state, step)
    assert door.saver.wait(60)
    dist.barrier()
    verified, latest = door.saver.stats.last_verified, door.latest()
    door.close()
    return verified, latest


def _version(door: Door, name: str) -> Any:
    from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId

    return CheckpointContainerId.create_child(door.base, name)


def names_of_many_savers(report: Report, rank: int) -> list[str]:
    """Save ids of savers made long after another."""
    from ml_flashpoint.core.save_identity import Numbering

    group = rank_groups.rank_group()
    return [Numbering(group, saver).begin().save_id for saver in (1, 999, 1000, 1001, 10**6)]
