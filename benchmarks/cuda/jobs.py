"""Saves and loads as jobs have them: the first ones and those that follow, beside others' and a training step."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.cuda import floors
from benchmarks.cuda.copies import State, state_of
from benchmarks.cuda.report import Row, Run
from benchmarks.gpt import Block
from ml_flashpoint import Flashpoint

STEADY = 5


class Held(nn.Module):
    """A state as a module has it."""

    def __init__(self, state: State) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor))


def saves(run: Run, folder: Path) -> Iterator[Row]:
    """The façade: how long the first saves hold the loop, and those that follow, and when they are committed."""
    for kind in (run.size.large, run.size.small):
        name, base = f"{kind[0]:,} x {kind[1] >> 10:,} KiB", folder / "job"
        module = Held(state_of(run, kind))
        nbytes = kind[0] * kind[1]
        with Flashpoint(base, strict=True) as fp:
            fp.track(module=module).resume()
            held, committed = [], []
            for _ in range(3 + STEADY):
                run.sync()
                began = time.perf_counter()
                fp.step()
                held.append(time.perf_counter() - began)
                fp.wait()
                committed.append(time.perf_counter() - began)
                time.sleep(0.2)  # as a step does, it leaves time to prepare memory for the next save
        for number in range(3):
            yield run.row("saves", f"{name}: save {number + 1}, held", held[number : number + 1], nbytes)
            yield run.row("saves", f"{name}: save {number + 1}, committed", committed[number : number + 1], nbytes)
        yield run.row("saves", f"{name}: held", held[3:], nbytes, floor=floors.DOWN)
        yield run.row("saves", f"{name}: committed", committed[3:], nbytes, floor=floors.DOWN)
        yield from _loads(run, base, name, module, kind)
        shutil.rmtree(base)
        del module
        run.release()


def _loads(run: Run, base: Path, name: str, module: nn.Module, kind: tuple[int, int]) -> Iterator[Row]:
    times = []
    for _ in range(3):
        with torch.no_grad():
            next(module.parameters()).zero_()
        with Flashpoint(base, strict=True) as fp:
            fp.track(module=module)
            times.append(run.timed(fp.resume))
    nbytes = kind[0] * kind[1]
    yield run.row("loads", f"{name}: in the process that saved", times, nbytes, floor=floors.UP, note="verified first")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cuda.fresh", str(run.device), str(base)]
    out = subprocess.run([*command, *map(str, kind)], capture_output=True, text=True, check=False)
    if out.returncode:
        yield Row("loads", f"{name}: in a fresh process", note=f"failed: {out.stderr.strip()[-200:]}")
        return
    yield run.row("loads", f"{name}: in a fresh process", [float(out.stdout.split()[-1])], nbytes, floor=floors.UP)


def training(run: Run, folder: Path) -> Iterator[Row]:
    """A GPT's steps, without saves and with one at each of them, in turn; then with steps shorter than the copy."""
    size = run.size
    torch.manual_seed(1)
    blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers))).to(run.device)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4, fused=run.on_gpu)
    state_bytes = 3 * sum(p.nbytes for p in blocks.parameters())

    def stepper(tokens: int) -> Callable[[Callable[[], object]], None]:
        length = min(tokens, 1024)
        x = torch.rand(max(1, tokens // length), length, size.width, device=run.device)

        def steps(after: Callable[[], object]) -> None:
            for _ in range(size.steps):
                with torch.autocast(run.device.type, torch.bfloat16):
                    loss = blocks(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                after()

        return steps

    for what, tokens in (("long steps", size.tokens), ("short steps", max(1, size.tokens // 16))):
        steps = stepper(tokens)
        alone, saving, held = [], [], []
        with Flashpoint(folder / "training", strict=True, discard_existing=True) as fp:
            fp.track(blocks=blocks, optimizer=optimizer).resume()
            steps(lambda fp=fp: (fp.step(), fp.wait()))  # type: ignore[misc]
            for _ in range(3):
                alone.append(run.timed(partial(steps, lambda: None)) / size.steps)
                before = fp.health.blocked_total_s
                saving.append(run.timed(partial(steps, fp.step)) / size.steps)
                held.append((fp.health.blocked_total_s - before) / size.steps)
                fp.wait()
        inflation = statistics.median(saving) / statistics.median(alone)
        yield run.row("training", f"{what}: a step alone", alone)
        yield run.row("training", f"{what}: with a save each", saving, note=f"x {inflation:.3f}")
        yield run.row("training", f"{what}: held a save", held, state_bytes, floor=floors.DOWN)


def peers(run: Run, folder: Path) -> Iterator[Row]:
    """Others' saves of the large tensors: how long the caller waits, and until it is written, to the same tmpfs."""
    nbytes = run.size.large[0] * run.size.large[1]
    if run.left_s < nbytes / 200e6:
        yield Row("peers", "all", note="left out: too little time was left")
        return
    state, path = state_of(run, run.size.large), folder / "peer"

    def anew() -> Path:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def torch_save() -> float:
        target = anew() / "state.pt"
        return run.timed(lambda: torch.save(state, target))

    yield run.measure("peers", "torch.save", torch_save, nbytes, floor=floors.DOWN, runs=1, warmups=0)
    try:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    except ImportError:
        yield Row("peers", "dcp.async_save", note="left out: this torch has no DefaultStager")
        return
    options = StagingOptions(run.on_gpu, True, False, run.on_gpu)  # pinned, shared, not on a thread, copied at once
    stager: Any = DefaultStager(options)
    written: list[float] = []

    def async_save() -> float:
        writer = dcp.FileSystemWriter(anew(), sync_files=False)
        began = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=path, storage_writer=writer, async_stager=stager)
        waited = time.perf_counter() - began
        getattr(future, "upload_completion", future).result()
        written.append(time.perf_counter() - began)
        return waited

    yield run.measure("peers", "dcp.async_save, cached stager: held", async_save, nbytes, floor=floors.DOWN, runs=2)
    yield run.row("peers", "dcp.async_save, cached stager: written", written[1:], nbytes, floor=floors.DOWN)
    stager.close()
    shutil.rmtree(path, ignore_errors=True)
