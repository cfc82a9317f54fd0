"""Ranks that save with a bare `Checkpointer`, and stores that they share, in processes of their own."""

from __future__ import annotations

import contextlib
import mmap
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from ml_flashpoint.config import Config
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.save import Save
from ml_flashpoint.engine.store import open_store
from ml_flashpoint.format.errors import FlashpointError, JobInUseError, SaveError, SupersededError
from ml_flashpoint.ranks.rank_group import rank_group
from tests.support.forked import Report
from tests.support.worker import base_path

SIZE = 20_000


def state_of(rank: int, step: int) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((SIZE,), 100.0 * step + rank)), ("b", torch.arange(float(step + 1)))]


def begin_and_commit(checkpointer: Checkpointer, step: int, *, explicit: bool = True, table: str = "") -> Save:
    """Save a step in all its calls but `begin`'s wait."""
    save = checkpointer.begin(step, explicit=explicit, table=table)
    copies = save.stage(state_of(checkpointer.ranks.rank, step))
    save.fill([("model.w", copies[0]), ("model.b", copies[1])], [("note", b"n" * step)])
    save.commit(labels={"door": "test"})
    return save


def save_steps(report: Report, rank: int, steps: int) -> tuple[dict[int, list[int]], list[float]]:
    """Save and wait for each version; return the parts on this node by step, and values of the copies."""
    with Checkpointer(base_path(), Config(replication="pairwise", keep=2)) as checkpointer:
        for step in range(1, steps + 1):
            begin_and_commit(checkpointer, step).verified.result(30)
        parts = {save.step: sorted(ranks) for save, ranks in checkpointer.container.list_versions().items()}
        newest = max(checkpointer.container.list_versions())
        values = []
        for each in sorted(parts[newest.step]):
            name = checkpointer.container.read_manifest(newest, each).object_name
            found = safetensors.torch.load_file(base_path() / newest.version / name)
            values.append(float(found["model.w"].max()))
        return parts, values


def lose_a_save(report: Report, rank: int, has_step: bool) -> list[str]:
    """Rank 1 has no part of step 2, or fails before it has the step. Return the outcomes of steps 1 to 3: both ranks
    know that of one before they go on."""
    outcomes = []
    with Checkpointer(base_path(), Config(replication="none")) as checkpointer:
        for step in (1, 2, 3):
            if step == 2 and rank == 1:
                save = checkpointer.begin(step if has_step else None, explicit=True)
                save.fail(SaveError("out of luck"))
                if not has_step:
                    with contextlib.suppress(SaveError):
                        save.name(step)
            else:
                save = begin_and_commit(checkpointer, step)
            outcomes.append(type(save.verified.exception(30)).__name__)
            dist.barrier()
        return outcomes


def save_by_two_tables(report: Report, rank: int) -> list[str]:
    """Save by tables that differ, then by one; return the outcomes."""
    with Checkpointer(base_path(), Config(replication="none")) as checkpointer:
        first = begin_and_commit(checkpointer, 1, table=f"table-{rank}")
        first.committed.result(30)
        dist.barrier()
        begin_and_commit(checkpointer, 2, table="both").verified.result(30)
        return [type(first.verified.exception(30)).__name__]


def save_in_a_loop(report: Report, rank: int, steps: int) -> tuple[int, int, bool]:
    """Save each step without waiting; return the newest verified step, saves skipped, and True at the end."""
    with Checkpointer(base_path(), Config(replication="pairwise")) as checkpointer:
        saves = []
        for step in range(1, steps + 1):
            save = checkpointer.begin(step, explicit=step == steps)
            saves.append(save)
            try:
                copies = save.stage(state_of(rank, step))
            except SaveError:
                continue
            names = [("w", copies[0]), ("b", copies[1])]
            save.commit(items=lambda names=names: (names, []))  # type: ignore[misc]
        saves[-1].verified.result(60)
        ended = checkpointer.wait(60)
        errors = {type(save.verified.exception()) for save in saves if save.committed.exception() is None}
        assert errors <= {type(None), SupersededError}, errors
        return checkpointer.status.verified or 0, checkpointer.status.skipped, ended


def open_elsewhere(report: Report, folder: str) -> str:
    """Return the error of a second job that opens a base container."""
    try:
        Checkpointer(folder)
    except JobInUseError as error:
        return type(error).__name__
    return "opened"


def fork_beside_a_save(report: Report, folder: str) -> list[Any]:
    """Fork while a save is staged; return what the child meets, and whether the parent's save is verified."""
    with Checkpointer(folder) as checkpointer:
        save = checkpointer.begin(1, explicit=True)
        copies = save.stage(state_of(0, 1))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                checkpointer.begin(2)
            except Exception as error:
                os.write(write, type(error).__name__.encode())
            checkpointer.close()
            os._exit(0)
        os.waitpid(child, 0)
        save.fill([("w", copies[0])])
        save.commit()
        save.verified.result(30)
        return [os.read(read, 100).decode(), sorted(checkpointer.container.list_versions())]


def read_at(report: Report, path: str, offset: int, count: int) -> float:
    """Return the sum of numbers in a slot's file, as another process finds them."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        data = bytearray(mapping[offset : offset + 4 * count])
    return float(torch.frombuffer(data, dtype=torch.float32).sum())


def versions_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


# ---- stores of a job --------------------------------------------------------------------------------------------


def serve(report: Report, port: int) -> None:
    """Host a store on a port, report the port, and end when the test says so."""
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=30), wait_for_workers=False)
    report("port", store.port)
    report.listen()


def share(report: Report, rank: int) -> tuple[list[bytes], int, bool]:
    """Have each rank write a value, and read those of all; return them, a count, and whether a stranger is heard."""
    ranks = rank_group()
    store = open_store(ranks)
    client, other = store.connect("run-1"), store.connect("run-2")
    client.set(f"value/{rank}", f"of {rank}")
    count = client.plain.add("count", 1)
    other.set("value/0", "of another run")
    assert store.address is not None
    TCPStore(*store.address, None, False, timedelta(seconds=5)).set(f"run-1/strange/{rank}", "planted")
    ranks.all_ok(True)
    found = client.multi_get([f"value/{each}" for each in range(ranks.world_size)])
    planted = client.get(f"strange/{rank}") != b""
    ranks.all_ok(True)
    store.close()
    return found, count, planted


def cannot_reach(report: Report, rank: int) -> str:
    """Open the store where rank 0 names an address that nobody reaches; return the error."""
    if rank == 0:
        os.environ["FLASHPOINT_HOST"] = "192.0.2.1"
    try:
        open_store(rank_group())
    except FlashpointError as error:
        return str(error)
    return ""
