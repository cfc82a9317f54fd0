"""Ranks that save where there is little room, or none; for `tests.support.forked`. See `tests.faults.test_room`."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ml_flashpoint import Checkpointer, Config, Flashpoint, events
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.knobs import BLOCK_BYTES_VARIABLE
from tests.support.bare_trainer import bare_trainer
from tests.support.forked import Report
from tests.support.loops import Stored
from tests.support.state_digest import digest
from tests.support.worker import base_path
from tests.workers.fault_engine import SIZES, Rank


def used(folder: Path) -> int:
    """Bytes used on a filesystem."""
    stats = os.statvfs(folder)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


# ---- a full filesystem --------------------------------------------------------------------------------------


def fill(path: Path, leave: int) -> None:
    """Take all the room of a filesystem but ``leave`` bytes."""
    path.unlink(missing_ok=True)
    with open(path, "wb") as stream:
        stats = os.statvfs(path)
        take = stats.f_bavail * stats.f_frsize - leave
        with contextlib.suppress(OSError):  # the thread that writes the status was faster
            if take > 0:
                os.posix_fallocate(stream.fileno(), 0, take)


def save_while_full(report: Report, base: str, leaves: list[int], growing: bool) -> list[str]:
    """Save one step for each entry, with so many bytes free on the filesystem; ``ok`` or the error of each. After an
    error the room is back, and the newest save must load, bit for bit.

    Args:
        growing: the state gets larger with each save; else it stays the same.
    """
    rank, filler, newest, said = Rank(base), Path(base).parent / "filler", 0, []

    def size_of(step: int) -> str:
        SIZES["growing"] = (70_000 + (step * 40_000 if growing else 0), 30_000)
        return "growing"

    Path(base).mkdir(exist_ok=True)
    for step, leave in enumerate(leaves, 1):
        fill(filler, leave)
        try:
            rank.save(size_of(step), step, 0)
            said.append("ok")
            newest = step
        except FlashpointError as error:
            said.append(type(error).__name__)
            filler.unlink()
            if newest and rank.load(size_of(newest)) != (newest, 0):
                raise AssertionError(f"step {newest} is lost") from error
    rank.close()
    return said


def save_again_while_full(report: Report, base: str, door: str) -> tuple[list[bool], list[int]]:
    """Save a step again, which begins a new run, while no page is free; then save the next one with room.

    Returns:
        For each save, True if it worked; and the steps of the versions that are there then.
    """
    filler, weights, counter = Path(base).parent / "filler", torch.nn.Linear(8, 8), Stored(1)
    made: dict[str, Any] = {}
    if door == "dcp":
        jobs: Any = Checkpointer(base)
    elif door == "flashpoint":
        jobs = Flashpoint(base, deadline_s=60)
        jobs.track(weights=weights, counter=counter).resume()
    else:
        from ml_flashpoint.adapter.lightning.engine import TrainerFlashpoint

        jobs = TrainerFlashpoint(base, sharded=False, config=Config(deadline_s=60))
        jobs.attach(bare_trainer(lambda: made))
        jobs.find(None, may_fall_back=False)

    def save(step: int) -> bool:
        if door == "dcp":
            try:
                dcp.save(weights.state_dict(), checkpoint_id=jobs.id(step), storage_writer=jobs.writer())
            except CheckpointException:
                return False
            return True
        made.update({"state_dict": weights.state_dict(), "optimizer_states": [], "callbacks": counter.value})
        jobs.save(step)
        return bool(jobs.wait() and jobs.last_saved == step)

    results = [save(1)]
    counter.value = lambda: None  # which cannot be saved
    save(2)
    counter.value = 1
    jobs.wait()  # for what the board has to tell
    assert events.flush()  # the file that shows the status is written by then, and leaves no page later
    fill(filler, 0)
    results.append(save(2))
    filler.unlink()
    results.append(save(3))
    return results, [version.step for version in jobs.versions()]


# ---- a tmpfs of the size that the docs state -------------------------------------------------------------------


def save_back_to_back(report: Report, rank: int, sizes: list[int], lag: int) -> dict[str, Any]:
    """Load, then save a state of each of these sizes, without a pause; and what became of it.

    Args:
        lag: after so many saves, all are waited for.

    Returns:
        ``loaded``: the step; ``errors``: saves that raised; ``verified``: the last verified step seen after each save;
        ``at``: when that was, in seconds; ``used``: the most bytes used on the filesystem; and the counters of saves.
    """
    base = base_path()
    os.environ[BLOCK_BYTES_VARIABLE] = str(1 << 16)  # states of some MiB stand for large ones, as do their manifests
    engine = Rank(base, "pairwise")
    found = engine.checkpointer.latest()
    loaded = 0 if found is None else found.step or 0
    state = torch.arange(max(sizes) // 8, dtype=torch.int64) + rank
    verified, at, errors, most = list[int](), list[float](), list[str](), 0
    for step, size in enumerate(sizes, loaded + 1):
        dist.all_reduce(torch.zeros(1))  # what keeps ranks at the same step, as training does
        state[:: 64 << 10] = step
        try:
            save = engine.checkpointer.begin(step, explicit=True)
            save.fill([("state", state[: size // 8])], [("step", b"%d" % step)])
            save.commit()
        except FlashpointError as error:
            errors.append(f"{step}: {error}")
        if lag and step % lag == 0:
            engine.checkpointer.wait(30)
        verified.append(engine.checkpointer.status.verified or 0)
        at.append(time.monotonic())
        most = max(most, used(base.parent))
    settled = engine.checkpointer.wait(60)
    most = max(most, used(base.parent))
    dist.barrier()
    status = engine.checkpointer.status
    engine.close()
    result = {"loaded": loaded, "errors": errors, "verified": verified, "at": at, "used": most, "settled": settled}
    return result | {"last_verified": status.verified, "copy_error": status.replication_error}


# ---- a structure that changes ----------------------------------------------------------------------------------


def reshape(model: nn.Module, sizes: list[int]) -> None:
    """Give a model parameters of so many bytes each, and no others."""
    for name in [name for name, _ in model.named_parameters()]:
        delattr(model, name)
    for number, size in enumerate(sizes):
        setattr(model, f"p{number}", nn.Parameter(torch.zeros(size // 4), requires_grad=False))


def save_structures(
    report: Report, rank: int, phases: list[list[int]], saves: int, hurry: bool = False
) -> dict[str, Any]:
    """So many saves of each structure. Returns, of each save, the error if it failed; what of it was found again.

    Args:
        hurry: do not wait for copies after each save.
    """
    torch.set_num_threads(1)
    model, errors, behind, most, step, base = nn.Module(), [], [], 0, 0, base_path()
    reshape(model, phases[0])
    with Flashpoint(base, deadline_s=60) as fp:
        fp.track(model=model).resume()
        for sizes in phases:
            reshape(model, sizes)
            for _ in range(saves):
                step += 1
                for number, parameter in enumerate(model.parameters()):
                    parameter.fill_(step * 100 + number)
                failures = fp.health.failures
                dist.barrier()
                if hurry and step == saves * len(phases):
                    fp.save(step)  # a save of a loop in a hurry may be skipped
                else:
                    fp.step()
                if not hurry:
                    fp.wait()
                errors.append(fp.health.last_error if fp.health.failures > failures else None)
                behind.append(step - (fp.last_replicated or 0))
                most = max(most, used(base.parent))
        fp.wait()
    saved = digest([model.state_dict()])
    for parameter in model.parameters():
        parameter.zero_()
    dist.barrier()
    with Flashpoint(base, deadline_s=60) as fp:
        found = fp.track(model=model).resume()
    return {
        "errors": errors,
        "behind": behind,
        "used": most,
        "found": found,
        "same": digest([model.state_dict()]) == saved,
    }
