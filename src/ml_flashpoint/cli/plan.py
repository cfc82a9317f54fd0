"""`flashpoint plan`: the memory a job will need, the interval at which it should save, and what it gains by that.

The memory is by the rule that a job checks before training (`memory.pool`), and the copies are those of
`ranks.strategies`. Nothing is measured: what is not given is assumed, and said. For a job whose failures come at
random, on average one every M seconds, the interval that costs least is by J. W. Young, "A first order approximation to
the optimum checkpoint interval", Communications of the ACM 17 (1974), improved by J. T. Daly, "A higher order estimate
of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006). The share of time
that is training, at any interval, is by the complete model of Daly's paper.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from ml_flashpoint.cli import output
from ml_flashpoint.cli.output import bytes_text, plural, time_text
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.names import MAX_WORLD_SIZE
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
        main_copy: True if parameters of two bytes have a main copy of four that is saved as well, and the optimizer's
            numbers four bytes (mixed precision, as in Megatron-LM or DeepSpeed ZeRO); False if all are of the dtype.
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
        part_bytes: the part of it that a rank saves.
        copies_held: peers of which a rank holds copies.
        survives: nodes that may be lost at once, whichever they are.
        node_bytes: memory that a node must have, or the job does not begin.
        roomy_bytes: memory with which no save waits for copies that lag.
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


# ---- formulas -------------------------------------------------------------------------------------------------------


def best_interval_s(held_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two saves that cost least, by Daly.

    Args:
        held_s: seconds that a save keeps the training from going on.
        mtbf_s: mean seconds between failures of the whole job.
    """
    if held_s >= 2 * mtbf_s:
        return mtbf_s
    x = held_s / (2 * mtbf_s)
    return math.sqrt(2 * held_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - held_s


def goodput(interval_s: float, held_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of a long job's time that is training which is never done again, by Daly.

    Args:
        interval_s: seconds of training between two saves.
        held_s, mtbf_s: see `best_interval_s`.
        restart_s: seconds from a failure until training goes on, during which the next failure may come.
    """
    exponent = restart_s / mtbf_s + (interval_s + held_s) / mtbf_s
    if exponent > 500:  # never gets anywhere, and exp() would overflow
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + held_s) / mtbf_s))


# ---- the plot -------------------------------------------------------------------------------------------------------

Curve = list[tuple[float, float]]
"""Seconds of training between two saves, and the share of time that is training then."""

_POINTS: Final = 60
_ROWS: Final = 20  # of 5 % each


def curves_of(job: Job, ways: Sequence[Way]) -> list[Curve]:
    """Return the goodput of each way over its interval: from a step to the time between failures, in equal ratios."""
    mtbf_s, first_s = job.mtbf_hours * 3600, job.step_seconds
    last_s = max(mtbf_s, 2 * first_s, *(way.interval_s for way in ways))
    growth = (last_s / first_s) ** (1 / (_POINTS - 1))
    intervals = [first_s * growth**number for number in range(_POINTS)]
    return [
        [
            (each, goodput(each, way.held_s, way.back_after_s + way.safe_after_s, mtbf_s))
            for each in intervals
            if each >= way.safe_after_s * 0.999  # no version before the one before is safe
        ]
        for way in ways
    ]


def text_plot(curves: Sequence[Curve], best: Sequence[tuple[float, float]], show_x: Callable[[float], str]) -> str:
    """Draw curves in characters of 80 columns: a letter for each, its best point as a capital."""
    xs = [x for curve in curves for x, _ in curve]
    low, high = math.log(min(xs)), math.log(max(xs))
    rows = [[" "] * _POINTS for _ in range(_ROWS + 1)]
    for letter, curve, point in zip("abcdefgh", curves, best, strict=False):
        for (x, y), shown in [*((each, letter) for each in curve), (point, letter.upper())]:
            column = min(_POINTS - 1, max(0, round((math.log(x) - low) / (high - low) * (_POINTS - 1))))
            row = _ROWS - round(min(1.0, max(0.0, y)) * _ROWS)
            if shown.isupper() or not rows[row][column].isupper():
                rows[row][column] = shown
    lines = [
        f"{(f'{100 - 5 * number} %' if number % 4 == 0 else ''):>6} │{''.join(row).rstrip()}"
        for number, row in enumerate(rows)
    ]
    ticks = [show_x(math.exp(low + (high - low) * number / 3)) for number in range(4)]
    axis = "".join(f"{tick:<{_POINTS // 3 - 3}}" for tick in ticks[:3]) + ticks[3]
    return "\n".join([*lines, f"{'':>6} └{'─' * _POINTS}", f"{'':>8}{axis}"])


# ---- showing --------------------------------------------------------------------------------------------------------


def show_plan(job: Job, *, as_json: bool) -> None:
    """Show the plan of a job. Raise an `InvalidArgumentError` if a number cannot be."""
    memory = memory_of(job, _checked(job))
    ways = ways_of(job, memory)
    curves = curves_of(job, ways)
    notes = _notes(job, memory)
    document = {
        "job": {**dataclasses.asdict(job), "bytes_per_parameter": job.bytes_per_parameter},
        "memory": {**dataclasses.asdict(memory), "mount": memory.mount_line},
        "ways": [dataclasses.asdict(way) for way in ways],
        "curves": [
            {"name": way.name, "interval_s_and_goodput": curve} for way, curve in zip(ways, curves, strict=True)
        ],
        "notes": notes,
    }
    rows = [
        {
            "saved to": f"{letter} {way.name}",
            "held loop": time_text(way.held_s),
            "safe after": time_text(way.safe_after_s),
            "save every": f"{plural(way.interval_steps, 'step')}, {time_text(way.interval_s)}",
            "redone": time_text(way.redone_s),
            "back after": time_text(way.back_after_s),
            "goodput": f"{100 * way.goodput:.2f} %",
        }
        for letter, way in zip("abcdefgh", ways, strict=False)
    ]
    title = f"{job.nodes} nodes of {job.ranks} ranks, a failure every {job.mtbf_hours:g} hours"
    plot = text_plot(curves, [(way.interval_s, way.goodput) for way in ways], time_text)
    parts: list[str | Text] = [
        _needs(job, memory),
        f"\n{title}",
        output.table(rows, ("redone", "safe after", "back after", "held loop")),
    ]
    parts += ["\ngoodput over the interval between saves; capitals are the intervals above", plot]
    output.show(document, as_json, *parts, *(Text(note, style="dim") for note in notes))


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


def _needs(job: Job, memory: Memory) -> Text:
    state = "weights, main copy, optimizer" if job.main_copy and WEIGHT_BYTES[job.dtype] < 4 else "weights, optimizer"
    rows = {
        "a version": f"{bytes_text(memory.version_bytes)}: {job.bytes_per_parameter} bytes a parameter ({state})",
        "the part of a rank": bytes_text(memory.part_bytes),
        "a rank holds copies of": plural(memory.copies_held, "other rank"),
        "survives the loss of": f"any {plural(memory.survives, 'node')}" if memory.survives else "no node",
        "memory a node must have": bytes_text(memory.node_bytes),
        "so that no save waits": bytes_text(memory.roomy_bytes),
        "mount, on every node": memory.mount_line,
    }
    width = max(map(len, rows))
    return Text("\n").join(Text.assemble((f"{name:<{width}}", "bold"), f"  {text}") for name, text in rows.items())


def _notes(job: Job, memory: Memory) -> list[str]:
    notes = [
        f"Assumed: {job.step_seconds:g} s a step; {job.restart_seconds:g} s until ranks run again; {job.copy_gbs:g}"
        f" GB/s from a rank's device into memory; {job.network_gbs:g} GB/s a node between peers; {job.storage_gbs:g}"
        " GB/s of storage for the whole job. Pass your own numbers: see --help.",
        "Every failure counts as the loss of a node, and all copying into memory as time that blocks the loop.",
        "Intervals have the lowest cost (Young 1974, Daly 2006), in whole steps; goodput is by Daly's complete model.",
    ]
    if not memory.survives:
        notes.append(
            "Some part has no copy on another node: the loss of its node loses the newest state, so the line for memory"
            " is true only for failures that leave the memory of all nodes."
        )
    return notes
