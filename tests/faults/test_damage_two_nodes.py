"""Damage on two nodes that hold copies for each other: healed from the other copy, else the older version."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ml_flashpoint.format.manifest import read_manifest
from tests.faults.common import iterations, part_files
from tests.support.forked import Team, call_team
from tests.workers import fault_engine as engine
from tests.workers import fault_team

Damage = Callable[[Path], None]


@pytest.fixture
def job(tmpfs: Path) -> engine.Snapshot:
    """Two nodes that hold steps 1 and 2 of both ranks."""
    call_team(fault_team.team_save, tmpfs, 2, "tiny", [1, 2], 5)
    return engine.Snapshot(tmpfs)


def path_of(root: Path, node: int, step: int, rank: int, kind: str) -> Path:
    base = root / f"node-{node}" / "job"
    return base / part_files(base, step, rank)[kind == "manifest"]


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 0x10]))


def whole(root: Path, step: int) -> bool:
    """Whether both nodes hold the parts of both ranks, and every digest is right."""
    for node in (0, 1):
        base = root / f"node-{node}" / "job"
        manifests = [read_manifest(path) for path in base.glob(f"step-{step}_ckpt/*.manifest")]
        if {m.rank for m in manifests} != {0, 1}:
            return False
        for manifest in manifests:
            record, path = manifest.record, base / manifest.save.version / manifest.object_name
            if engine.digests(path.read_bytes()[: record.size], record.block_size) != record.digests:
                return False
    return True


def load(root: Path, expected: int | None) -> str:
    """Load on both ranks; what they logged."""
    with Team(fault_team.team_load, root, 2, "tiny") as team:
        found = team.results()
        log = "".join(child.log for child in team.ranks)
    wanted = (expected, 5) if expected is not None else None
    assert found == [wanted, wanted], f"{found}\n{log}"
    return log


def test_sound_nodes(tmpfs: Path, job: engine.Snapshot) -> None:
    assert whole(tmpfs, 1)
    assert whole(tmpfs, 2)
    load(tmpfs, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["object", "manifest"])
@pytest.mark.parametrize("how", ["flipped", "cut off", "empty", "gone"])
def test_a_damaged_part_is_healed_from_the_peer(tmpfs: Path, job: engine.Snapshot, kind: str, how: str) -> None:
    path = path_of(tmpfs, 0, 2, 0, kind)
    match how:
        case "flipped":
            flip(path, 100)
        case "cut off":
            os.truncate(path, 333)
        case "empty":
            os.truncate(path, 0)
        case "gone":
            path.unlink()
    log = load(tmpfs, 2)
    assert (how == "gone" and kind == "manifest") or str(path.with_suffix("")) in log, log
    assert whole(tmpfs, 2)
    # And it stays healed, also for one who has only that node.
    shutil.rmtree(tmpfs / "node-1")
    log = load(tmpfs, 2)
    assert whole(tmpfs, 2), log


@pytest.mark.damages_on_purpose
def test_a_damaged_part_and_a_damaged_copy_mean_the_older_version(tmpfs: Path, job: engine.Snapshot) -> None:
    damaged = [path_of(tmpfs, node, 2, 1, "object") for node in (0, 1)]
    for path in damaged:
        flip(path, 300)
    log = load(tmpfs, 1)
    assert str(damaged[1]) in log


@pytest.mark.slow
@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_goes_back_likewise(tmpfs: Path, job: engine.Snapshot, world_size: int) -> None:
    """A job whose door cannot step back by itself would start again and again on a version that it cannot read."""
    for node in (0, 1):
        flip(path_of(tmpfs, node, 2, 1, "object"), 300)
    assert call_team(fault_team.team_read_all, tmpfs, world_size) == [1] * world_size


@pytest.mark.damages_on_purpose
def test_another_number_of_ranks_reads_what_is_sound_elsewhere(tmpfs: Path, job: engine.Snapshot) -> None:
    flip(path_of(tmpfs, 0, 2, 1, "object"), 300)
    flip(path_of(tmpfs, 1, 2, 0, "object"), 300)
    assert call_team(fault_team.team_read_all, tmpfs, 3) == [2] * 3


@pytest.mark.slow
@pytest.mark.damages_on_purpose
def test_a_damaged_copy_is_noticed_when_it_is_needed(tmpfs: Path, job: engine.Snapshot) -> None:
    flip(path_of(tmpfs, 1, 2, 0, "object"), 300)
    load(tmpfs, 2)
    shutil.rmtree(tmpfs / "node-0")
    log = load(tmpfs, 1)
    assert "step-2_ckpt cannot be recovered here" in log
    assert whole(tmpfs, 1)


@pytest.mark.damages_on_purpose
@pytest.mark.slow
def test_any_damage_anywhere(tmpfs: Path, job: engine.Snapshot, rng: random.Random) -> None:
    """The newest version of which each part is sound somewhere is found, whatever else is damaged."""
    parts = [(node, step, rank) for node in (0, 1) for step in (1, 2) for rank in (0, 1)]
    for _ in iterations(16):
        job.restore()
        damaged = {part for part in parts if rng.random() < (0.45 if part[1] == 2 else 0.15)}
        hidden = set()
        for node, step, rank in sorted(damaged):
            path = path_of(tmpfs, node, step, rank, rng.choice(["object", "object", "manifest"]))
            used = 24 if path.suffix == ".manifest" else 20_000
            match rng.choice(["flip", "cut", "gone"]):
                case "flip":
                    flip(path, rng.randrange(used))
                    if path.suffix != ".manifest" and rank != node:
                        hidden.add((node, step, rank))
                case "cut":
                    os.truncate(path, rng.randrange(used))
                case "gone":
                    path.unlink()
        newest = newest_sound(damaged, {0, 1})
        load(tmpfs, newest)
        lost = rng.choice([None, None, 0, 1])
        if lost is not None and newest is not None:
            # What that recovery has mended, the next one finds; only bytes that nobody looked at are still bad.
            shutil.rmtree(tmpfs / f"node-{lost}")
            load(tmpfs, newest_sound({p for p in damaged if p[1] != newest or p in hidden}, {1 - lost}))


def newest_sound(damaged: set[tuple[int, int, int]], nodes: set[int]) -> int | None:
    """The newest step of which every part is sound on some node."""
    sound = [s for s in (1, 2) if all({(n, s, rank) for n in nodes} - damaged for rank in (0, 1))]
    return max(sound, default=None)
