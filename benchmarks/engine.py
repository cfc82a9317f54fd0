"""Our own cases: the engine by itself, and through DCP."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.timing import Memcpy, Result, State, measure
from ml_flashpoint import Checkpointer
from ml_flashpoint.copy.cpu import copy_all
from ml_flashpoint.copy.dtypes import described, torch_dtype
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.format.object_format import plan_layout
from ml_flashpoint.memory.slot import Slot


class Engine:
    """A base container of its own, with a writer."""

    def __init__(self, base: Path) -> None:
        self.checkpoints = Checkpointer(base)
        self.writer = self.checkpoints.writer()
        self.base = self.checkpoints.base
        self.step = 0

    def next(self) -> CheckpointContainerId:
        """Return the id of a version not used before."""
        self.step += 1
        return self.checkpoints.id(self.step)

    def save(self, items: list[tuple[str, torch.Tensor]]) -> None:
        """Save, and return when the part is committed."""
        self.step += 1
        save = self.checkpoints.begin(self.step, explicit=True)
        save.fill(items)
        save.commit()
        save.committed.result()

    def close(self) -> None:
        """Stop, and give the memory back."""
        self.checkpoints.close()
        shutil.rmtree(str(self.base), ignore_errors=True)


def copy_alone(name: str, state: State, memcpy: Memcpy, base: Path) -> Iterator[Result]:
    """The staging copy by itself, into the views of a slot."""
    base.mkdir(parents=True, exist_ok=True)
    layout = plan_layout(described(state.items()))
    slot = Slot.make(base / "slot", layout.size)
    views = [slot.view(e.begin, e.end, torch_dtype(e.dtype), e.shape) for e in layout.tensors]
    sources = [state[e.key] for e in layout.tensors]
    yield measure(name, "ours: copy into the slot alone", lambda _: copy_all(views, sources), memcpy)
    views.clear()
    slot.remove()
    shutil.rmtree(base)


def saves(name: str, state: State, memcpy: Memcpy, base: Path) -> Iterator[Result]:
    """Saving in steady state: layouts known, slots faulted in."""
    engine = Engine(base)
    items = list(state.items())
    yield measure(
        name, "ours: engine save, committed", lambda _: engine.save(items), memcpy,
        note="copy + digest + manifest",
    )  # fmt: skip
    planner = DefaultSavePlanner(enable_plan_caching=True)

    def sync_save(_: int) -> None:
        dcp.save(state, checkpoint_id=str(engine.next()), storage_writer=engine.writer, planner=planner)

    yield measure(name, "ours: dcp.save, committed", sync_save, memcpy, note="with torch's planning")
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        yield from async_saves(name, state, memcpy, engine, kind)
    resident = sum(path.stat().st_blocks * 512 for path in engine.checkpoints.container.slot_paths())
    held = f"{resident / memcpy.nbytes:.2f} x the state"
    yield Result(name, "ours: slots after all of these", 0.0, 0.0, 0.0, None, 1, note=held)
    yield from loads(name, state, memcpy, engine)
    engine.close()


def async_saves(
    name: str, state: State, memcpy: Memcpy, engine: Engine, kind: AsyncCheckpointerType
) -> Iterator[Result]:
    """Time that the caller is blocked, and time until the save is committed; blocked, also with all of the state under
    one key, as jobs have it under few: torch's own log takes some 30 us of the caller for each that is at the top."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    totals: list[float] = []

    def save(given: dict[str, Any]) -> float:
        began = time.perf_counter()
        future = dcp.async_save(
            given,
            checkpoint_id=str(engine.next()),
            storage_writer=engine.writer,
            planner=planner,
            async_checkpointer_type=kind,
        )
        blocked = time.perf_counter() - began
        future.result()
        totals.append(time.perf_counter() - began)
        return blocked

    def settle() -> bool:  # a training step lies between two saves, in which the one before is
        return engine.checkpoints.wait(5)

    yield measure(name, f"ours: async {kind.name}, caller blocked", lambda _: save(state), memcpy, after=settle)
    replay = iter(totals)
    yield measure(name, f"ours: async {kind.name}, to committed", lambda _: next(replay), memcpy)
    under_one = {"model": state}
    case = f"ours: async {kind.name}, caller blocked, state under one key"
    yield measure(name, case, lambda _: save(under_one), memcpy, after=settle)


def loads(name: str, state: State, memcpy: Memcpy, engine: Engine) -> Iterator[Result]:
    """Loading this node's own bytes into tensors that exist."""
    dcp.save(state, checkpoint_id=str(engine.next()), storage_writer=engine.writer)
    target = {key: torch.zeros_like(t) for key, t in state.items()}

    def load(_: int) -> None:
        found = engine.checkpoints.latest()
        assert found is not None
        dcp.load(target, checkpoint_id=str(found), storage_reader=engine.checkpoints.reader(found))

    yield measure(name, "ours: load, held mapping", load, memcpy, note="verified earlier in this process")
    assert all(torch.equal(target[key], state[key]) for key in state)
    target.clear()
    engine.checkpoints.close()  # the other process must find the base container unlocked
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fresh_load", str(engine.base), name]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        label, seconds, low, high, ratio = line.split("\t")
        yield Result(name, label, float(seconds), float(low), float(high), float(ratio), 5, "new process each run")


def void(_: object) -> None:
    """Drop a result, so that the wall time is what counts."""
