"""Bytes of committed parts that are flipped, cut off or gone: noticed, named, healed from the other copy; else the
older version loads bit-equal."""

from __future__ import annotations

import os
import random
import shutil
import struct
from pathlib import Path

import pytest

from ml_flashpoint.format.manifest import read_manifest
from tests.faults.common import SCALE, iterations, part_files
from tests.support.forked import call, call_team
from tests.workers import fault_engine as engine
from tests.workers import fault_team

Damages = list[tuple[str, int, int]]


@pytest.fixture
def base(tmpfs: Path) -> Path:
    """A base container with whole versions of steps 1 and 2."""
    call(engine.save_steps, str(tmpfs / "job"), "tiny", [1, 2], 5)
    return tmpfs / "job"


def used_bytes(path: Path) -> int:
    """Bytes of an object that its manifest counts."""
    return read_manifest(path.with_suffix(".manifest")).record.size


def places(path: Path, stride: int) -> list[int]:
    """Every so many bytes of an object: those of the header's text and of the data, and some of the blanks between."""
    header = path.read_bytes()[: used_bytes(path)]
    (data_start,) = struct.unpack("<Q", header[:8])
    blanks = range(header.rindex(b"}", 8, 8 + data_start) + 2, data_start)
    return sampled([at for at in range(len(header)) if at not in blanks or at % 25 == 0], stride)


def sampled(places: list[int], stride: int) -> list[int]:
    return places[:: max(1, round(stride / SCALE))]


def load_each(base: Path, file: str, damages: Damages) -> None:
    # Not all in one process, which has a deadline: a load takes ten milliseconds, and far more on a busy machine.
    results = []
    for at in range(0, len(damages), 100):
        results += call(engine.load_damaged, str(base), "tiny", file, damages[at : at + 100])
    assert len(results) == len(damages) > 0
    wrong = [result for result in results if result[2:] != ((1, 5), True)]
    assert not wrong, f"{len(wrong)} of {len(results)}: {wrong[:5]}"
    assert call(engine.load, str(base), "tiny") == (2, 5)


@pytest.mark.slow
@pytest.mark.timeout(600 * max(1, SCALE))
def test_an_object_flipped_or_cut_off_at_any_byte(base: Path, rng: random.Random) -> None:
    file, _ = part_files(base, 2)
    flips = [("flip", at, rng.randrange(1, 256)) for at in places(base / file, 5)]
    cuts = [("cut", at, 0) for at in (*places(base / file, 10), 4096, used_bytes(base / file) - 1)]
    load_each(base, file, flips + cuts)


@pytest.mark.slow
@pytest.mark.timeout(600 * max(1, SCALE))
def test_a_manifest_flipped_or_cut_off_at_any_byte(base: Path, rng: random.Random) -> None:
    _, file = part_files(base, 2)
    everywhere = list(range((base / file).stat().st_size))
    flips = [("flip", at, rng.randrange(1, 256)) for at in sampled(everywhere, 3)]
    load_each(base, file, flips + [("cut", at, 0) for at in sampled(everywhere, 8)])


def test_bytes_that_no_object_uses_do_not_matter(base: Path, rng: random.Random) -> None:
    file, _ = part_files(base, 2)
    used, length = used_bytes(base / file), (base / file).stat().st_size
    damages = [("flip", rng.randrange(used, length), 1) for _ in range(20)] + [("flip", used, 255)]
    results = call(engine.load_damaged, str(base), "tiny", file, damages)
    assert {result[2:] for result in results} == {((2, 5), False)}


# ---- two nodes that hold copies for each other ------------------------------------------------------------------

Part = tuple[int, int, int]
"""Node, step and rank."""


def newest_sound(damaged: set[Part], nodes: set[int]) -> int | None:
    """The newest step of which every part is sound on some node."""
    sound = [s for s in (1, 2) if all({(n, s, rank) for n in nodes} - damaged for rank in (0, 1))]
    return max(sound, default=None)


def damage(root: Path, part: Part, rng: random.Random) -> bool:
    """Damage a part in some way. Return True if only a look at all of its bytes shows that."""
    node, step, rank = part
    base = root / f"node-{node}" / "job"
    path = base / part_files(base, step, rank)[rng.random() < 0.3]
    used = 24 if path.suffix == ".manifest" else 20_000
    match rng.choice(["flip", "cut", "gone"]):
        case "flip":
            engine.flip(path, rng.randrange(used), 0x10)
            return path.suffix != ".manifest"
        case "cut":
            os.truncate(path, rng.randrange(used))
        case "gone":
            path.unlink()
    return False


@pytest.mark.damages_on_purpose
@pytest.mark.slow
@pytest.mark.timeout(300 * max(1, SCALE))
def test_any_damage_anywhere(tmpfs: Path, rng: random.Random) -> None:
    """The newest version of which each part is sound somewhere is found, whatever else is damaged, by the same number
    of ranks or another; and by the ranks of one node alone after the recovery has mended what it could."""
    call_team(fault_team.team_save, tmpfs, 2, "tiny", [1, 2], 5)
    job = engine.Snapshot(tmpfs)
    parts = [(node, step, rank) for node in (0, 1) for step in (1, 2) for rank in (0, 1)]
    for number in iterations(9):
        job.restore()
        damaged = {part for part in parts if rng.random() < (0.45 if part[1] == 2 else 0.15)}
        hidden = {part for part in sorted(damaged) if damage(tmpfs, part, rng) and part[0] != part[2]}
        if number % 3 == 2:
            world_size = rng.choice([1, 3])
            found = newest_sound(damaged, {0, 1} if world_size == 3 else {0})
            assert call_team(fault_team.team_read_all, tmpfs, world_size) == [found] * world_size, damaged
            continue
        newest = newest_sound(damaged, {0, 1})
        expect(tmpfs, newest, damaged)
        lost = rng.choice([None, 0, 1])
        if lost is not None and newest is not None:
            # What that recovery has mended, the next one finds; only bytes that nobody looked at are still bad.
            shutil.rmtree(tmpfs / f"node-{lost}")
            expect(tmpfs, newest_sound({p for p in damaged if p[1] != newest or p in hidden}, {1 - lost}), damaged)


def expect(root: Path, step: int | None, damaged: set[Part]) -> None:
    wanted = None if step is None else (step, 5)
    assert call_team(fault_team.team_load, root, 2, "tiny") == [wanted, wanted], damaged
