"""What others do with the same state on the same filesystem."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from benchmarks.timing import Memcpy, Result, State, measure, of_peer


def saves_and_loads(name: str, state: State, memcpy: Memcpy, folder: Path) -> Iterator[Result]:
    """torch.save, safetensors and DCP's FileSystemWriter, each into a new file a run, as they are used."""
    folder.mkdir(parents=True, exist_ok=True)
    for case, rows in (
        ("torch.save", _torch),
        ("safetensors save_file", _safetensors),
        ("dcp.save, FileSystemWriter", _dcp),
        ("dcp.async_save, cached stager, blocked", _async_save),
    ):
        yield from of_peer(name, case, rows(name, state, memcpy, folder))
    _new_path(folder, 0)


def _new_path(folder: Path, run: int) -> Path:
    """A path for a run. What is there is removed: outside the timing, and only the newest is kept."""
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    return folder / f"run-{run}"


def _timed(folder: Path, run: int, write: Callable[[Path], object]) -> float:
    target = _new_path(folder, run)
    began = time.perf_counter()
    write(target)
    return time.perf_counter() - began


def _torch(name: str, state: State, memcpy: Memcpy, folder: Path) -> Iterator[Result]:
    yield measure(name, "torch.save", lambda i: _timed(folder, i, lambda p: torch.save(state, p)), memcpy)
    last = next(folder.iterdir())
    yield measure(name, "torch.load(mmap=False)", lambda _: _drop(torch.load(last)), memcpy)


def _safetensors(name: str, state: State, memcpy: Memcpy, folder: Path) -> Iterator[Result]:
    def save(run: int) -> float:
        return _timed(folder, run, lambda path: safetensors.torch.save_file(state, path))

    yield measure(name, "safetensors save_file", save, memcpy)


def _dcp(name: str, state: State, memcpy: Memcpy, folder: Path) -> Iterator[Result]:
    def save(target: Path) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(target, sync_files=False), checkpoint_id=target)

    yield measure(name, "dcp.save, FileSystemWriter", lambda i: _timed(folder, i, save), memcpy)
    saved = next(folder.iterdir())
    target = {key: torch.zeros_like(t) for key, t in state.items()}
    yield measure(
        name,
        "dcp.load, FileSystemReader",
        lambda _: dcp.load(target, storage_reader=dcp.FileSystemReader(saved)),
        memcpy,
    )


def _async_save(name: str, state: State, memcpy: Memcpy, folder: Path) -> Iterator[Result]:
    """dcp.async_save with torch's own stager that keeps a shared copy between saves, which is a descriptor a tensor."""
    stager = DefaultStager(StagingOptions(False, True, False, False))
    totals: list[float] = []

    def save(i: int) -> float:
        target = _new_path(folder, i)
        writer = dcp.FileSystemWriter(target, sync_files=False)
        began = time.perf_counter()
        future = dcp.async_save(state, storage_writer=writer, checkpoint_id=target, async_stager=stager)
        blocked = time.perf_counter() - began
        getattr(future, "upload_completion", future).result()
        totals.append(time.perf_counter() - began)
        return blocked

    try:
        yield measure(name, "dcp.async_save, cached stager, blocked", save, memcpy)
        replay = iter(totals)
        yield measure(name, "dcp.async_save, cached stager, written", lambda _: next(replay), memcpy)
    finally:
        stager.close()


class NullWriter(StorageWriter):
    """Writes nothing, so that a save costs what torch's own planning does."""

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


class _NullPlanner(DefaultSavePlanner):
    """A type of its own: torch keeps cached plans by the planner's class."""


def planning_alone(state: State) -> Result:
    """A save that writes nothing."""
    planner = _NullPlanner(enable_plan_caching=True)
    return measure(
        "2,000 tiny tensors",
        "dcp.save, planning alone",
        lambda _: _drop(dcp.save(state, storage_writer=NullWriter(), checkpoint_id="x", planner=planner)),
        None,
    )


def _drop(_: object) -> None: ...
