"""What happens in a round of the crucible, as plain data, and how it is drawn from a seed.

A round is a job on a few nodes: lives, one after the other, each of which recovers, saves a few times, is hurt, and
ends or is killed; between lives a node may be lost. `repr` of a scenario is what a failing round is kept as.
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass, replace

from tests.crucible.states import STORED, TRAINABLE, Leaf, Spec
from tests.support.injector import Fault

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
BLOCK = 4096
_SIZES = (0, 1, 8, 120, BLOCK - 8, BLOCK, BLOCK + 8, 2 * BLOCK - 16, 2 * BLOCK, 2 * BLOCK + 16, 20_000, 70_000)
_ITEM = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "bfloat16": 2, "float16": 2}
_SPARSE = ("float32", "float64", "bfloat16", "int64", "complex64")
_PLACEMENTS = ((0, 1), (0, 1), (0, 1), (0,), (0, 0), (0, 0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 1, 0, 1))
_DOORS = ("facade",) * 4 + ("dcp",) * 3 + ("local",) * 2 + (("megatron",) if HAS_MEGATRON else ())
_SHARDINGS = ("none", "ddp", "ddp", "fsdp2", "hsdp", "tp", "mixed")
_IN_PROCESSES = {"dcp": 0.05, "megatron": 0.3}  # how often a door saves in processes: each takes seconds to start
_MODES = {
    "facade": ("thread",),
    **dict.fromkeys(("dcp", "megatron", "local"), ("sync", "thread")),
    "processes": ("sync", "thread", "process", "process"),
}
POINTS_OF_SAVES = (
    "staging", "staged", "reusing", "committing", "linked", "committed", "copying", "copied", "receiving", "received",
    "answering", "answered", "deciding", "adopting",
)  # fmt: skip
POINTS_OF_RECOVERIES = ("loading", "voting", "open", "file", "beginning", "begun")
ERRORS = (
    ("open", "emfile"), ("open", "emfile"), ("file", "emfile"), ("link", "enospc"), ("rename", "enospc"),
    ("mkdir", "enospc"), ("allocate", "enospc"), ("file", "enospc"), ("connect", "refused"), ("connect", "refused"),
    ("copying", "reset"), ("receiving", "reset"), ("copied", "reset"), ("thread", "no-thread"),
)  # fmt: skip


@dataclass(frozen=True)
class Save:
    """One save of a life, the n-th after what it found: how it is made, and whether it is awaited before the next."""

    nth: int
    grows: bool  # whether the structure changes before it
    mode: str = "sync"
    awaited: bool = False
    step: int = 0  # known once it is known what was found


@dataclass(frozen=True)
class Life:
    """One life of the job.

    Attributes:
        saves: what is saved, in order.
        faults: what goes wrong; a ``kill`` ends the life, as the launcher ends the other ranks then.
        strike: the rank that is killed from outside, the saves it has begun by then, and seconds after that.
        loses: the node whose memory is lost after this life.
        clock_s: by how much the wall clock of rank 0 is off.
        interrupted: whether signals interrupt system calls all the time.
        placement: the node of each rank in this life.
        looks_back: whether it goes back to the oldest version that was kept.
    """

    saves: tuple[Save, ...]
    faults: tuple[Fault, ...] = ()
    strike: tuple[int, int, float] | None = None
    loses: int | None = None
    clock_s: float = 0.0
    interrupted: bool = False
    placement: tuple[int, ...] = (0, 1)
    looks_back: bool = False


@dataclass(frozen=True)
class Scenario:
    """A round: which door, what is saved, the lives, and how many versions are kept."""

    door: str
    spec: Spec
    lives: tuple[Life, ...]
    keep: int = 1


def draw(seed: int, doors: tuple[str, ...] = _DOORS) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    placement, door = rng.choice(_PLACEMENTS), rng.choice(doors)
    spec = _spec(rng, len(placement))
    modes = _MODES["processes" if rng.random() < _IN_PROCESSES.get(door, 0) else door]
    count, keep, lives = rng.choice((2, 2, 3, 4)), rng.choice((1, 1, 2, 3)) if door == "facade" else 1, []
    for number in range(count):
        life = _life(rng, modes, placement, last=number == count - 1)
        lives.append(replace(life, looks_back=keep > 1 and rng.random() < 0.4))
        if door != "local" and rng.random() < 0.15:
            placement = rng.choice([each for each in _PLACEMENTS if len(each) > 1 or spec.sharding in ("none", "ddp")])
    return Scenario(door, spec, tuple(lives), keep)


def _spec(rng: random.Random, world_size: int) -> Spec:
    sharding = rng.choice(_SHARDINGS) if world_size > 1 else "none"
    whole = sharding in ("none", "ddp")
    leaves: list[Leaf] = []
    for index in range(rng.randrange(1, 7)):
        role = rng.choice(("parameter", "parameter", "frozen", "buffer", "buffer", "tied" if whole else "parameter"))
        name = rng.choice(("", "a.", "b.", "a.c.")) + f"t{index}"
        targets = [leaf.name for leaf in leaves if leaf.role == "parameter"]
        if role == "tied":
            leaves.append(Leaf(name, role, of=rng.choice(targets)) if targets else _leaf(rng, name, "buffer", whole))
        else:
            leaves.append(_leaf(rng, name, role, whole))
    grown = tuple(_leaf(rng, f"grown{index}", "buffer", whole) for index in range(3))
    of_one = {"role": "own", "how": "plain", "of": str(rng.randrange(world_size))}
    grown = tuple(replace(leaf, **of_one) if rng.random() < 0.3 else leaf for leaf in grown)  # type: ignore[arg-type]
    payload = rng.choice((3, 500, BLOCK, 10_000, 100_000, 700_000))
    return Spec(tuple(leaves), grown, sharding, rng.choice(("adamw", "adamw", "sgd", "none")), payload)


def _leaf(rng: random.Random, name: str, role: str, whole: bool) -> Leaf:
    dtype = rng.choice(TRAINABLE if role == "parameter" or (role == "frozen" and not whole) else STORED)
    if role == "parameter" and rng.random() < 0.6:
        dtype = "float32"
    count = rng.choice(_SIZES) // _ITEM.get(dtype, 1)
    sharded = role != "buffer" and not whole
    if sharded:
        count = max(count, 1)
    if not sharded and rng.random() < 0.1:
        return Leaf(name, role, rng.choice(((), (0, 3), (2, 0), (1, 1, 1))), dtype)
    rows = rng.choice((1, 1, 2, 3, 7, 64))
    shape = (count,) if rows == 1 else (rows, -(-count // rows))
    if role != "buffer":
        return Leaf(name, role, shape, dtype)
    if len(shape) == 2 and dtype in _SPARSE and rng.random() < 0.3:
        return Leaf(name, role, shape, dtype, "sparse")
    return Leaf(name, role, shape, dtype, rng.choice(("plain", "plain", "plain", "column", "slice", "reversed")))


def _life(rng: random.Random, modes: tuple[str, ...], placement: tuple[int, ...], *, last: bool) -> Life:
    count = rng.randrange(0 if last else 1, 7)
    # A structure that changes on one rank alone is taken up with the next save: the last one must be verified.
    saves = tuple(
        Save(nth, rng.random() < 0.15 and nth < count, rng.choice(modes), rng.random() < 0.3)
        for nth in range(1, count + 1)
    )
    clock_s = rng.choice((0.0, 0.0, 0.0, -86_400.0, 3600.0))
    if last:
        return Life(saves, clock_s=clock_s, placement=placement)
    ranks = range(len(placement))
    faults: list[Fault] = []
    strike = None
    what = rng.random()
    if what < 0.3:
        point, step = rng.choice(POINTS_OF_SAVES), rng.randrange(1, count + 1)
        action = rng.choice(("kill", "kill", "kill-node"))
        faults.append(Fault(rng.choice(ranks), step, point, action, rng.randrange(1, 4)))
    elif what < 0.4:
        faults.append(Fault(rng.choice(ranks), 0, rng.choice(POINTS_OF_RECOVERIES), "kill"))
    elif what < 0.55:
        strike = (rng.choice(ranks), rng.randrange(1, count + 1), rng.choice((0.0, 0.002, 0.01, 0.03)))
    elif what < 0.85:
        for _ in range(rng.choice((1, 1, 2))):
            point, action = rng.choice(ERRORS)
            faults.append(Fault(rng.choice(ranks), rng.randrange(0, count + 1), point, action, rng.randrange(1, 4)))
    if rng.random() < 0.15:
        faults.append(Fault(rng.choice(ranks), rng.randrange(0, count + 1), rng.choice(POINTS_OF_SAVES), "slow"))
    nodes = sorted(set(placement))
    loses = rng.choice(nodes) if len(nodes) > 1 and rng.random() < 0.4 else None
    return Life(saves, tuple(faults), strike, loses, clock_s, rng.random() < 0.1, placement)
