"""``python -m benchmarks``: prints one table. See ``--help``."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Optional

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import (
    board,
    ddict,
    engine,
    hugging_face,
    lightning,
    local,
    loop,
    machine,
    megatron,
    peers,
    persist,
    supervised,
    transfers,
)
from benchmarks.rivals import running as rivals
from benchmarks.states import STATES, tiny
from benchmarks.timing import Memcpy, Result, measure, of_peer


def fixed_cost(base: Path) -> Iterator[Result]:
    """What a save costs beyond its bytes."""
    state = tiny()
    yield peers.planning_alone(state)
    ours = engine.Engine(base)
    planner = peers.DefaultSavePlanner(enable_plan_caching=True)
    yield measure(
        "2,000 tiny tensors",
        "ours: dcp.save",
        lambda _: engine.void(
            dcp.save(state, checkpoint_id=str(ours.next()), storage_writer=ours.writer, planner=planner)
        ),
        None,
    )
    ours.close()


def results_of(framework: str, module: str, folder: Path, scale: float) -> Iterator[Result]:
    """Rows of a framework that lies in an environment of its own, by a module beside this one."""
    if importlib.util.find_spec(framework) is None:
        note = f"skipped: not installed; .venv-trainers/bin/python -m benchmarks --only {framework}"
        yield Result(framework, "all", 0.0, 0.0, 0.0, None, 0, note=note)
        return
    yield from importlib.import_module(f"benchmarks.{module}").results(folder, scale)


def all_results(folder: Path, scale: float, only: str) -> Iterator[Result]:
    """Every case whose name contains ``only``."""
    if not only or only in "tiny":
        yield from fixed_cost(folder / "fixed")
    for name, make in STATES.items():
        if only and only not in name:
            continue
        state = make(scale)
        memcpy = Memcpy(state)
        yield from engine.copy_alone(name, state, memcpy, folder / "copy")
        yield from engine.saves(name, state, memcpy, folder / "ours")
        yield from peers.saves_and_loads(name, state, memcpy, folder / "peers")
        yield from local.saves(name, state, memcpy, folder / "local")
        yield from of_peer(name, f"{local.PEER}: local save", local.peer_saves(name, state, memcpy, folder / "peer"))
        yield from megatron.saves(name, state, memcpy, folder)
        del state, memcpy
        gc.collect()
    if not only or only in "replication":
        yield from local.replication(folder / "replication")
    if not only or only in "transfer":
        yield from transfers.results()
    if not only or only in "loop":
        yield from loop.results(folder / "loop", scale)
    if not only or only in "rivals":
        yield from rivals.results(scale)
    if not only or only in "persist":
        yield from persist.results(folder / "persist", scale)
    if not only or only in "trainer":
        yield from hugging_face.results(folder / "trainer", scale)
    for framework, module in (("torchtitan", "titan"), ("deepspeed", "zero")):
        if not only or only in framework:
            yield from results_of(framework, module, folder / module, scale)
    if not only or only in "lightning":
        yield from lightning.results(folder / "lightning", scale)
    if not only or only in "board":
        yield from board.results()
    if not only or only in "ddict":
        yield from ddict.results(scale)


def _milliseconds(seconds: float) -> str:
    """With as many digits as mean something."""
    return f"{seconds * 1e3:.1f}" if seconds >= 0.001 else f"{seconds * 1e3:.3f}"


def _cells(row: Result) -> tuple[str, str, str]:
    """The median, the extremes and the ratio of a row; of one that was not measured, nothing."""
    if not row.runs:
        return "", "", ""
    spread = f"{_milliseconds(row.low_s)}–{_milliseconds(row.high_s)}"
    return _milliseconds(row.seconds), spread, "" if row.ratio is None else f"{row.ratio:.2f}"


def _command(scale: float, only: str) -> str:
    """What somebody would call to have these rows."""
    given = [*([f"--scale {scale:g}"] if scale != 1.0 else []), *([f"--only {only}"] if only else [])]
    return "make bench" + (f' BENCH_ARGS="{" ".join(given)}"' if given else "")


def main(
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Also write the rows to this file.")] = None,  # noqa: UP045
    scale: Annotated[float, typer.Option(help="Size of the states; 1.0 needs about 16 GiB of memory.")] = 1.0,
    only: Annotated[
        str,
        typer.Option(
            help="Only states whose name contains this"
            " ('128', '20,000', 'tiny', 'replication', 'transfer', 'loop', 'rivals', 'persist',"
            " 'lightning', 'trainer', 'torchtitan', 'deepspeed', 'board', 'ddict')."
        ),
    ] = "",
) -> None:
    """Measure our saves, loads and transfers beside others', as ratios to a memcpy in the same run."""
    folder = supervised.folder()
    if folder is None:
        raise typer.Exit(supervised.run("benchmarks", sys.argv[1:]))
    warnings.filterwarnings("ignore")
    os.environ["BENCH_SCALE"] = str(scale)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # DCP's saving process wants a process group; with one rank, a file serves as its store.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    console = Console()
    table = Table("state", "case", "median ms", "min–max", "× memcpy", "note", title=f"torch {torch.__version__}")
    rows: list[Result] = []
    described = machine.described()
    try:
        for row in all_results(folder, scale, only):
            rows.append(row)
            cells = _cells(row)
            table.add_row(row.state, row.case, *cells, escape(row.note))
            shown = f"{cells[0]} ms, {cells[2]}" if row.runs else row.note
            console.print(escape(f"{row.state}: {row.case}: {shown}"), style="dim")
        console.print(table)
        if json_file is not None:
            described["load_at_the_end"] = machine.load()
            taken = {"command": _command(scale, only), "machine": described, "rows": [*map(dataclasses.asdict, rows)]}
            json_file.write_text(json.dumps(taken, indent=1))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
