"""`flashpoint plan`: what a job will need of its nodes, how often it should save, and what it gains by that.

Owns the model of a job in a few numbers, and how the result is shown. The memory is what the job checks before training
(`memory.pool`), the copies are `ranks.strategies`', the formulas
`cli.goodput`'s. Nothing is measured here: what is not given is assumed, and said.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import format_bytes
from ml_flashpoint.cli.goodput import best_interval_s, goodput
from ml_flashpoint.cli.plan_plot import Curve, curve, text_plot
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.manifest import MAX_WORLD_SIZE
from ml_flashpoint.memory.pool import slot_limit, slot_size
from ml_flashpoint.ranks.strategies import STRATEGIES, ReplicationStrategy, Topology, checked_strategy

WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a parameter, by its dtype."""

OPTIMIZER_VALUES = {"adam": 2, "adamw": 2, "lion": 1, "momentum": 1, "muon": 1, "sgd": 0}
"""Numbers that an optimizer keeps for each parameter."""

_SPARE = 2  # slots that a rank may have beyond those that it needs
_GB = 1e9
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Job:
    """The job that is planned for. Speeds are in GB/s, of 1e9 bytes.

    Attributes:
        params: parameters of the model.
        optimizer, dtype: keys of the tables above.
        main_copy: whether parameters of two bytes have a main copy of four that is saved as well, and the optimizer's
            numbers four bytes (mixed precision, as in Megatron-LM or DeepSpeed ZeRO), or are all of the dtype.
        nodes, ranks: nodes of the job, and ranks on each.
        mtbf_hours: mean hours between failures of the whole job.
        replication: a strategy, by its name.
        keep: newest versions that stay in memory.
        step_seconds: of a step of training.
        restart_seconds: from a failure until ranks run again, before anything is loaded.
        copy_gbs: at which a rank copies its state into memory.
        network_gbs: at which a node sends, or receives, copies.
        storage_gbs: of durable storage, for the whole job, both ways.
    """

    params: float
    optimizer: str
    dtype: str
    main_copy: bool
    nodes: int
    ranks: int
    mtbf_hours: float
    replication: str
    keep: int
    step_seconds: float
    restart_seconds: float
    copy_gbs: float
    network_gbs: float
    storage_gbs: float

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of a version for each parameter: its weight, the optimizer's numbers, perhaps the main copy."""
        weight = WEIGHT_BYTES[self.dtype]
        other = 4 if self.main_copy else weight
        return weight + OPTIMIZER_VALUES[self.optimizer] * other + (4 if self.main_copy and weight < 4 else 0)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that checkpoints take.

    Attributes:
        version_bytes: a version, of all ranks.
        part_bytes: of it, what a rank saves.
        copies_held: peers of which a rank holds copies.
        survives: nodes that may be lost at once, whichever they are.
        node_bytes: what a node must have, or the job does not begin.
        roomy_bytes: what it takes where there is room, so that no save waits for copies that lag.
    """

    version_bytes: int
    part_bytes: int
    copies_held: int
    survives: int
    node_bytes: int
    roomy_bytes: int

    @property
    def mount_line(self) -> str:
        """The command that makes a filesystem with that room."""
        return f"mount -t tmpfs -o size={-(-self.roomy_bytes // _GIB)}g tmpfs /mnt/mlf-jobs"


@dataclass(frozen=True, slots=True)
class Way:
    """A way of checkpointing, at the interval that is best for it.

    Attributes:
        name: in a few words.
        held_s: seconds that a save keeps the loop.
        safe_after_s: seconds from then until the version can be gone back to.
        back_after_s: seconds from a failure until training goes on.
        interval_steps: steps from one save to the next.
        interval_s: the same in seconds of training.
        redone_s: seconds of training that a failure costs on average, to be done again.
        goodput: share of time that is training which is not done again.
    """

    name: str
    held_s: float
    safe_after_s: float
    back_after_s: float
    interval_steps: int
    interval_s: float
    redone_s: float
    goodput: float


def memory_of(job: Job, strategy: ReplicationStrategy) -> Memory:
    """Return the memory that a job takes, by the rule that it checks itself before it trains."""
    topology = Topology(tuple(f"node-{node}" for node in range(job.nodes) for _ in range(job.ranks)))
    holders = [strategy.copies_of(rank, topology) for rank in range(topology.world_size)]
    held = Counter(holder for each in holders for holder in each)
    copies = max(held.values(), default=0)
    version_bytes = math.ceil(job.params * job.bytes_per_parameter)
    part_bytes = -(-version_bytes // topology.world_size)
    slot_bytes = slot_size(part_bytes)
    needed = slot_limit(job.keep, may_grow=False, extra=0) * slot_bytes * (1 + copies)
    return Memory(
        version_bytes=version_bytes,
        part_bytes=part_bytes,
        copies_held=copies,
        survives=min(map(len, holders)),
        node_bytes=needed * job.ranks,
        roomy_bytes=(needed + _SPARE * slot_bytes) * job.ranks,
    )


def ways_of(job: Job, memory: Memory) -> list[Way]:
    """Ways of checkpointing, without copies in memory and with them. Every failure is taken for the loss of a node."""
    stored = memory.version_bytes / (job.storage_gbs * _GB)
    copied = memory.part_bytes / (job.copy_gbs * _GB)
    sent = memory.copies_held * memory.part_bytes * job.ranks / (job.network_gbs * _GB)
    # A new node gets the parts of its ranks and the copies that they hold: nothing, where nobody has copies.
    fetched = sent + (memory.part_bytes * job.ranks / (job.network_gbs * _GB) if memory.copies_held else 0.0)
    return [
        _way("storage, the loop waits", job, held_s=stored, safe_after_s=0.0, load_s=stored),
        _way("storage, in the background", job, held_s=copied, safe_after_s=stored, load_s=stored),
        _way("memory and peers", job, held_s=copied, safe_after_s=sent, load_s=fetched + copied),
    ]


def _way(name: str, job: Job, *, held_s: float, safe_after_s: float, load_s: float) -> Way:
    mtbf_s = job.mtbf_hours * 3600
    # One save is under way at a time, so the next begins no sooner than the one before is safe.
    wanted = max(best_interval_s(held_s, mtbf_s), safe_after_s)
    steps = max(1, math.ceil(wanted / job.step_seconds))
    interval_s = steps * job.step_seconds
    back_after_s = job.restart_seconds + load_s
    return Way(
        name=name,
        held_s=held_s,
        safe_after_s=safe_after_s,
        back_after_s=back_after_s,
        interval_steps=steps,
        interval_s=interval_s,
        redone_s=safe_after_s + interval_s / 2,
        # What a version is behind when it becomes safe is lost in every failure, as the time to come back is.
        goodput=goodput(interval_s, held_s, back_after_s + safe_after_s, mtbf_s),
    )


def curves_of(job: Job, ways: Sequence[Way]) -> list[Curve]:
    """Goodput of each way over its interval: from a step to the time between failures."""
    mtbf_s = job.mtbf_hours * 3600
    return [
        curve(
            way.name,
            (way.interval_s, way.goodput),
            lambda interval_s, way=way: goodput(  # type: ignore[misc]
                interval_s, way.held_s, way.back_after_s + way.safe_after_s, mtbf_s
            ),
            from_s=job.step_seconds,
            shortest_s=way.safe_after_s,
            longest_s=max(mtbf_s, *(each.interval_s for each in ways)),
        )
        for way in ways
    ]


def plan(job: Job, *, as_json: bool = False) -> int:
    """Show the plan of a job. Return the exit code of the command."""
    try:
        memory = memory_of(job, _checked(job))
        ways = ways_of(job, memory)
        curves = curves_of(job, ways)
    except InvalidArgumentError as error:
        return output.fail(error, as_json=as_json)
    if as_json:
        told = {**dataclasses.asdict(memory), "mount": memory.mount_line}
        document = {
            "job": {**dataclasses.asdict(job), "bytes_per_parameter": job.bytes_per_parameter},
            "memory": told,
            "ways": [dataclasses.asdict(way) for way in ways],
            "curves": [{"name": each.name, "interval_s_and_goodput": each.points} for each in curves],
            "notes": _notes(job, memory),
        }
        print(json.dumps(document, indent=2))
    elif output.is_terminal():
        _print_tables(job, memory, ways, curves)
    else:
        _print_lines(job, memory, ways)
    return output.OK


def _checked(job: Job) -> ReplicationStrategy:
    for argument, table in (("optimizer", OPTIMIZER_VALUES), ("dtype", WEIGHT_BYTES), ("replication", STRATEGIES)):
        if (value := getattr(job, argument)) not in table:
            raise InvalidArgumentError(f"must be one of {', '.join(table)}", argument=f"--{argument}", value=value)
    for field in dataclasses.fields(job):
        if field.type == "float" and not 0 < getattr(job, field.name) < 1e18:
            name = "--" + field.name.replace("_", "-")
            raise InvalidArgumentError("must be a positive number", argument=name, value=getattr(job, field.name))
    if job.nodes * job.ranks > MAX_WORLD_SIZE:
        raise InvalidArgumentError(f"more than {MAX_WORLD_SIZE} ranks", argument="--ranks", value=job.ranks)
    strategy = checked_strategy(job.replication)
    assert strategy is not None
    return strategy


def _rows(job: Job, memory: Memory) -> list[tuple[str, str]]:
    state = "weights, main copy, optimizer" if job.main_copy and WEIGHT_BYTES[job.dtype] < 4 else "weights, optimizer"
    losses = f"any {memory.survives} node{'s' if memory.survives > 1 else ''}" if memory.survives else "no node"
    return [
        ("a version", f"{format_bytes(memory.version_bytes)}: {job.bytes_per_parameter} bytes a parameter ({state})"),
        ("of it, a rank's part", format_bytes(memory.part_bytes)),
        ("copies that a rank holds", f"of {memory.copies_held} other rank{'s' * (memory.copies_held != 1)}"),
        ("the loss is survived of", losses),
        ("memory a node must have", format_bytes(memory.node_bytes)),
        ("so that no save waits", format_bytes(memory.roomy_bytes)),
        ("mount, on every node", memory.mount_line),
    ]


def _notes(job: Job, memory: Memory) -> list[str]:
    notes = [
        f"Assumed: {job.step_seconds:g} s a step; {job.restart_seconds:g} s until ranks run again; {job.copy_gbs:g}"
        f" GB/s from a rank's device into memory; {job.network_gbs:g} GB/s a node between peers; {job.storage_gbs:g}"
        " GB/s of storage for the whole job. Give what you measure: see --help.",
        "All failures are taken for the loss of a node, and all copying into memory for time that the loop is held.",
        "Intervals cost least (Young 1974, Daly 2006), in whole steps; goodput is by Daly's complete model.",
    ]
    if not memory.survives:
        notes.append(
            "Some part has no copy on another node: with a node its newest state is lost, and the line for memory holds"
            " only for failures that leave all nodes' memory."
        )
    return notes


def _print_lines(job: Job, memory: Memory, ways: list[Way]) -> None:
    for name, text in _rows(job, memory):
        print(f"{name}: {text}")
    for way in ways:
        told = {field.name: getattr(way, field.name) for field in dataclasses.fields(way)[1:]}
        print(f"{way.name}: " + " ".join(f"{name}={value:.6g}" for name, value in told.items()))
    for note in _notes(job, memory):
        print(note)


def _title(job: Job) -> str:
    return f"{job.nodes} nodes of {job.ranks} ranks, a failure every {job.mtbf_hours:g} hours"


def _print_tables(job: Job, memory: Memory, ways: list[Way], curves: list[Curve]) -> None:
    console = output.console()
    grid = Table.grid(padding=(0, 2))
    for name, text in _rows(job, memory):
        grid.add_row(f"[bold]{name}[/]", text)
    console.print(grid, highlight=False)
    columns: list[Any] = ["saved to", "held loop", "safe after", "save every", "redone", "back after"]
    table = Table(*columns, title=_title(job), title_justify="left", title_style="")
    table.add_column("goodput", justify="right", style="bold")
    for way in ways:
        every = f"{way.interval_steps} step{'s' * (way.interval_steps > 1)}, {_time(way.interval_s)}"
        times = (way.held_s, way.safe_after_s), (way.redone_s, way.back_after_s)
        table.add_row(way.name, *map(_time, times[0]), every, *map(_time, times[1]), f"{100 * way.goodput:.2f} %")
    console.print(table)
    console.print("\ngoodput over the interval between saves; capitals are the intervals above", highlight=False)
    console.print(Text(text_plot(curves, _time)), no_wrap=True)
    for note in _notes(job, memory):
        console.print(note, style="dim", highlight=False)


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
